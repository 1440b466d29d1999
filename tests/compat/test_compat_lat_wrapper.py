"""linear-attention-transformer's wrapper: the loss, and generation from a state in place of the whole prefix."""

import lat_cases
import older
import pytest
import torch
import torch.nn.functional as F

from longspan.compat import import_hook
from longspan.compat import linear_attention_transformer as ours
from longspan.compat.linear_attention_transformer.autoregressive_wrapper import top_k, top_p

KINDS = {
    "linear": {"causal": True},
    "blind spot": {"causal": True, "n_local_attn_heads": 2, "blindspot_size": 8},
    "rotary": {"causal": True, "use_rotary_emb": True, "n_local_attn_heads": (1, 4)},
    "shift, reversible": {"causal": True, "shift_tokens": True, "reversible": True, "n_local_attn_heads": 2},
    "axial": {"causal": True, "attend_axially": True, "emb_dim": 16},
    "pkm": {"causal": True, "pkm_layers": (2,), "pkm_num_keys": 5},
}


def wrapper(kind="blind spot", **more):
    torch.manual_seed(1)
    model = lat_cases.build(ours, "LinearAttentionTransformerLM", **{**KINDS.get(kind, {}), **more})
    # Our first weights are small and say one token for ever; these tell tokens apart.
    torch.nn.init.normal_(model.token_emb.weight, std=3)
    for parameter in model.inner.parameters():
        parameter.data += torch.randn_like(parameter) * 0.3
    return ours.AutoregressiveWrapper(model)


def pair(given=None, **options):
    """The original's wrapper and ours, given the same, of models with the same options and weights."""
    theirs, mine = (
        package.AutoregressiveWrapper(
            lat_cases.build(package, "LinearAttentionTransformerLM", **options), **(given or {})
        )
        for package in (older.original("linear_attention_transformer"), ours)
    )
    mine.load_state_dict(theirs.state_dict())
    return theirs, mine


def greedy(net, start, number, **given):
    """The likeliest token after everything so far, the whole of it read anew each time."""
    tokens = start
    for _ in range(number):
        with torch.no_grad():
            tokens = torch.cat([tokens, net(tokens, **given)[:, -1].argmax(-1, keepdim=True)], 1)
    said = tokens[:, start.shape[1] :]
    assert len(said.unique()) > 2, "too easy"
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_generation_equals_reading_everything_anew(kind):
    wrapped, start = wrapper(kind), torch.randint(0, 20, (2, 7))
    wrapped.eval()
    assert torch.equal(wrapped.generate(start, 23, temperature=0), greedy(wrapped.net.net, start, 23))
    assert not wrapped.net.training
    wrapped.train().generate(start, 1)
    assert wrapped.net.net.out.training


def test_generation_draws_what_the_original_draws():
    theirs, mine = pair(causal=True, n_local_attn_heads=2, blindspot_size=8)
    start = torch.randint(0, 20, (2, 7))
    for given in ({}, {"temperature": 0.7, "filter_thres": 0.5}, {"filter_logits_fn": "top_p", "filter_thres": 0.3}):
        said = []
        for package, module in (("linear_attention_transformer", theirs), (ours.__name__, mine)):
            options = dict(given)
            if "filter_logits_fn" in given:
                module_ = older.original(f"{package}.autoregressive_wrapper")
                options["filter_logits_fn"] = getattr(module_, given["filter_logits_fn"])
            torch.manual_seed(5)
            said.append(module.generate(start, 19, **options))
        assert torch.equal(*said)


def test_a_token_costs_the_same_however_long_the_prompt():
    wrapped, fed = wrapper(max_seq_len=256), []
    converted = wrapped.net.net.to_longspan()
    converted.embedding.register_forward_pre_hook(lambda _, given: fed.append(given[0].numel()))
    wrapped.net.net.to_longspan = lambda: converted
    for length in (3, 101):
        fed.clear()
        wrapped.generate(torch.randint(0, 20, (1, length)), 11)
        assert fed == [length] + [1] * 10


def test_generation_past_the_last_position():
    wrapped, start = wrapper(max_seq_len=32), torch.randint(0, 20, (2, 27))
    with pytest.warns(UserWarning, match=r"passed max_seq_len \(32\)") as caught:
        said = wrapped.generate(start, 13, temperature=0)
    assert len(caught) == 1
    tokens, net = start, wrapped.net.net.eval()
    for _ in range(13):
        tokens = torch.cat([tokens, net(tokens[:, -32:])[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(said, tokens[:, 27:])


def test_prompts_of_different_lengths():
    wrapped = wrapper(max_seq_len=64)
    rows = [torch.randint(0, 20, (n,)) for n in (11, 5)]
    alone = [wrapped.generate(row, 7, temperature=0) for row in rows]
    right = torch.zeros(2, 11, dtype=torch.int64)
    left = right.clone()
    for i, row in enumerate(rows):
        right[i, : len(row)], left[i, 11 - len(row) :] = row, row
    mask = torch.arange(11) < torch.tensor([[11], [5]])
    library = older.original("linear_attention_transformer")
    theirs = library.AutoregressiveWrapper(
        lat_cases.build(library, "LinearAttentionTransformerLM", **KINDS["blind spot"])
    )
    theirs.load_state_dict(wrapped.state_dict())
    said = theirs.generate(right, 7, filter_thres=0.95, input_mask=mask)  # one token of 20: the likeliest
    assert torch.equal(said[0], alone[0])
    assert not torch.equal(said[1], alone[1]), "it goes on from the padding"
    assert torch.equal(wrapped.generate(right, 7, temperature=0, input_mask=mask), torch.stack(alone))
    assert torch.equal(wrapped.generate(left, 7, temperature=0, input_mask=mask.flip(1)), torch.stack(alone))


def test_prompts_of_different_lengths_past_the_last_position():
    wrapped = wrapper(kind="linear", max_seq_len=16, local_attn_window_size=4)
    tokens = torch.randint(0, 20, (2, 11))
    mask = torch.arange(11) < torch.tensor([[11], [5]])
    with pytest.warns(UserWarning, match="passed max_seq_len"):
        said = wrapped.generate(tokens, 9, temperature=0, input_mask=mask)
    row, real, net = tokens[1], mask[1], wrapped.net.net.eval()
    for _ in range(9):
        # As many slots as the model has positions, padding among them.
        window = row[real] if len(row) <= 16 else row[-16:][real[-16:]]
        row, real = torch.cat([row, net(window[None])[0, -1:].argmax(-1)]), torch.cat([real, torch.ones(1).bool()])
    assert torch.equal(said[1], row[11:])


def test_one_row_and_an_end():
    wrapped, start = wrapper(), torch.randint(0, 20, (7,))
    said = wrapped.generate(start, 11, temperature=0)
    assert said.shape == (11,)
    eos = int(said[3])
    first = said.tolist().index(eos)
    assert torch.equal(wrapped.generate(start, 11, temperature=0, eos_token=eos), said[: first + 1])
    twice = wrapped.generate(torch.stack([start, start.flip(0)]), 11, temperature=0, eos_token=eos)
    ended = (twice == eos).all(0)
    assert twice.shape[1] == 11 or bool(ended[-1])


def test_embeddings_are_no_logits():
    wrapped = wrapper(return_embeddings=True)
    assert wrapped(torch.randint(0, 20, (2, 7))).shape == (2, 7, 32)
    with pytest.raises(ValueError, match="has no logits: build it without return_embeddings"):
        wrapped.generate(torch.randint(0, 20, (2, 7)), 3)


def test_generation_with_a_context():
    wrapped = wrapper(kind="", causal=True, receives_context=True)
    start, context = torch.randint(0, 20, (2, 7)), torch.randn(2, 11, 32)
    mask = torch.arange(11) < torch.tensor([[11], [4]])
    given = {"context": context, "context_mask": mask}
    expected = greedy(wrapped.net.net.eval(), start, 9, **given)
    assert torch.equal(wrapped.generate(start, 9, temperature=0, **given), expected)
    changed = {"context": context.masked_fill(~mask[..., None], 7.0), "context_mask": mask}
    assert torch.equal(wrapped.generate(start, 9, temperature=0, **changed), expected)
    assert not torch.equal(wrapped.generate(start, 9, temperature=0, context=context + 1), expected)


def test_a_model_that_looks_both_ways_reads_everything_anew():
    wrapped, start = wrapper(kind="", n_local_attn_heads=2), torch.randint(0, 20, (2, 7))
    assert torch.equal(wrapped.generate(start, 9, temperature=0), greedy(wrapped.net.net.eval(), start, 9))


@pytest.mark.parametrize("given", [{}, {"ignore_index": 0}, {"ignore_index": 3, "pad_value": 3}, {"pad_value": 3}])
def test_losses(given):
    theirs, mine = pair(given, causal=True, n_local_attn_heads=2, blindspot_size=8)
    x = torch.randint(0, 20, (2, 33))
    rows = [torch.randint(1, 20, (n,)) for n in (17, 30, 9)]
    for batch in (x, rows):
        losses = [module(batch, return_loss=True) for module in (theirs, mine)]
        older.assert_close(*reversed(losses))
        losses[1].backward()
        older.assert_close(mine(batch), theirs(batch))
    assert mine.net.net.out.weight.grad.any()


def test_masked_tokens_leave_the_loss():
    """Where labels are ignored as well, as in the original; where they are not, the original asks for padding."""
    theirs, mine = pair(causal=True, n_local_attn_heads=2, blindspot_size=8)
    x, mask = torch.randint(1, 20, (2, 33)), torch.arange(33) < torch.tensor([[33], [14]])
    x = x.masked_fill(~mask, 0)
    rows = list(zip(x, (33, 14), strict=True))
    for wide in (mask, mask[:, :-1]):
        right = mine(x, return_loss=True, input_mask=wide)
        each = [F.cross_entropy(mine(row[None, :n])[0, :-1], row[1:n], reduction="sum") for row, n in rows]
        extra = 0 if wide is mask else -F.log_softmax(mine(x[1:, :14])[0, 13], -1)[0]
        older.assert_close(right, (sum(each) + extra) / (45 if wide is mask else 46))
    assert abs(theirs(x, return_loss=True, input_mask=mask) - mine(x, return_loss=True, input_mask=mask)) > 0.01
    theirs.ignore_index = mine.ignore_index = 0
    older.assert_close(mine(x, return_loss=True, input_mask=mask), theirs(x, return_loss=True, input_mask=mask))


def test_filters():
    library = older.original("linear_attention_transformer.autoregressive_wrapper")
    logits = torch.randn(3, 20)
    for thres in (0.5, 0.9):
        torch.testing.assert_close(top_k(logits, thres=thres), library.top_k(logits, thres=thres))
        kept = top_p(logits, thres=thres).softmax(-1)
        torch.testing.assert_close(kept, library.top_p(logits.clone(), thres=thres).softmax(-1))
    assert top_k(logits[:, :5], thres=0.9).isfinite().sum() == 3  # one a row
    assert not library.top_k(logits[:, :5], thres=0.9).isfinite().any()


SCRIPT = """
import torch
from linear_attention_transformer import LinearAttentionTransformerLM
from linear_attention_transformer.autoregressive_wrapper import AutoregressiveWrapper

torch.manual_seed(0)
text = torch.tensor([i * i % 11 for i in range(4096)])
model = LinearAttentionTransformerLM(
    num_tokens=256, dim=32, depth=2, heads=4, max_seq_len=64, causal=True, reversible=True, blindspot_size=2,
    n_local_attn_heads=(2, 2), local_attn_window_size=16, dim_head=8,
)
model = AutoregressiveWrapper(model)
model.cuda()
optim = torch.optim.Adam(model.parameters(), lr=3e-3)
losses = []
for step in range(30):
    model.train()
    starts = torch.randint(0, len(text) - 66, (4,))
    batch = torch.stack([text[s : s + 65] for s in starts]).long().cuda()
    loss = model(batch, return_loss=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optim.step()
    optim.zero_grad()
    losses.append(loss.item())
model.eval()
sample = model.generate(text[:11].cuda(), 40)
assert sample.shape == (40,), sample.shape
print(losses[0], losses[-1])
"""


def test_a_training_script_runs_as_it_is(tmp_path, capsys):
    (tmp_path / "train.py").write_text(SCRIPT)
    import_hook.run(tmp_path / "train.py", [], device="cpu")
    first, last = map(float, capsys.readouterr().out.split())
    assert last < first - 2
