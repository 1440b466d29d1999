"""performer-pytorch's wrappers: the same losses and tokens, from a state in place of the whole prefix."""

import pytest
import torch
from older import assert_close, copy_weights, original
from torch import nn

from longspan.compat import performer_pytorch as ours
from longspan.compat.performer_pytorch.autoregressive_wrapper import repetition_penalty_fn, top_k, top_p

B, H, D = 2, 3, 10
# Without random features nothing leaks in the original, and tokens can be compared with it.
PLAIN = {"num_tokens": 29, "max_seq_len": 31, "dim": 18, "depth": 2, "heads": H, "dim_head": D, "causal": True}
EXACT = {**PLAIN, "no_projection": True}
LOCAL = {"local_attn_heads": 1, "local_window_size": 5, "shift_tokens": True}


@pytest.fixture
def theirs():
    return original("performer_pytorch")


def prompt(length=7, rows=B):
    return torch.randint(1, 29, (rows, length), generator=torch.Generator().manual_seed(length))


def pair(theirs, **options):
    model = theirs.AutoregressiveWrapper(theirs.PerformerLM(**options))
    mine = ours.AutoregressiveWrapper(ours.PerformerLM(**options))
    copy_weights(model, mine)
    return model, mine


class Whole(nn.Module):
    """A net of a user's own: it streams nothing, every token reads the whole prefix."""

    def __init__(self, net):
        super().__init__()
        self.net, self.max_seq_len = net, net.max_seq_len

    def forward(self, x, mask=None, **about):
        return self.net(x, mask=mask, **about)


class Louder(ours.PerformerLM):
    """A net of a user's own that changes ours: what it says counts, also in the loss."""

    def forward(self, x, *args, **how):
        return 2 * super().forward(x, *args, **how)


def test_a_changed_model_is_asked_itself():
    louder = ours.AutoregressiveWrapper(Louder(**PLAIN))
    plain = ours.AutoregressiveWrapper(ours.PerformerLM(**PLAIN))
    plain.load_state_dict(louder.state_dict())
    logits = 2 * plain.net(prompt()[:, :-1])
    assert_close(louder(prompt()), nn.functional.cross_entropy(logits.transpose(1, 2), prompt()[:, 1:]))
    seen = []
    louder.generate(prompt(), 1, filter_logits_fn=lambda logits, thres: seen.append(logits) or logits)
    assert_close(seen[0], 2 * plain.net.eval()(prompt())[:, -1])


def sampled(wrapper, *arguments, seed=5, **options):
    torch.manual_seed(seed)
    return wrapper.generate(*arguments, **options)


@pytest.mark.parametrize("more", [{}, LOCAL, {"reversible": True}, {"rotary_position_emb": False, "tie_embed": True}])
def test_tokens_are_the_original_ones(theirs, more):
    model, mine = pair(theirs, **EXACT, **more)
    for options in ({}, {"temperature": 0.7, "filter_thres": 0.5}, {"filter_logits_fn": top_p, "filter_thres": 0.2}):
        assert torch.equal(sampled(mine, prompt(), 17, **options), sampled(model, prompt(), 17, **options))
    assert model.training is mine.training is mine.net.training is mine.net.performer.training is True


@pytest.fixture
def read(monkeypatch):
    """The number of tokens in each call of a converted model, which decodes from a state."""
    numbers, convert = [], ours.PerformerLM.to_longspan

    def watched(self):
        model = convert(self)
        model.embedding.register_forward_pre_hook(lambda _, given: numbers.append(given[0].numel() // B))
        return model

    monkeypatch.setattr(ours.PerformerLM, "to_longspan", watched)
    return numbers


@pytest.mark.parametrize("more", [{}, LOCAL, {"generalized_attention": True}, {"no_projection": True}])
def test_tokens_equal_those_of_recomputing_at_a_constant_cost(more, read):
    mine = ours.AutoregressiveWrapper(ours.PerformerLM(**PLAIN, **more))
    whole = ours.AutoregressiveWrapper(Whole(mine.net))
    wanted = sampled(whole, prompt(), 20)
    assert read == []
    assert torch.equal(sampled(mine, prompt(), 20), wanted)
    assert read == [7] + [1] * 19


def test_beyond_the_longest_sequence(theirs):
    model, mine = pair(theirs, **EXACT)
    with pytest.warns(UserWarning, match=r"passed max_seq_len \(31\)") as caught:
        tokens = sampled(mine, prompt(), 40)
    assert len(caught) == 1
    assert tokens.shape == (B, 40)
    assert torch.equal(tokens, sampled(model, prompt(), 40))
    with pytest.warns(UserWarning, match="passed max_seq_len"):
        long = sampled(mine, prompt(33), 3)
    assert torch.equal(long, sampled(model, prompt(33), 3))


def test_one_row_and_the_end(theirs):
    model, mine = pair(theirs, **EXACT)
    tokens = sampled(mine, prompt(rows=1)[0], 9)
    assert tokens.shape == (9,)
    assert torch.equal(tokens, sampled(model, prompt(rows=1)[0], 9))
    stop = int(tokens[4])
    first = tokens.tolist().index(stop) + 1
    assert torch.equal(sampled(mine, prompt(rows=1)[0], 9, eos_token=stop), tokens[:first])
    assert sampled(mine, prompt(), 4, temperature=0).shape == (B, 4)


def test_padded_prompts_are_as_good_as_short_ones():
    mine = ours.AutoregressiveWrapper(ours.PerformerLM(**PLAIN, **LOCAL))
    wanted = sampled(mine, prompt(rows=1), 6)
    padded = torch.cat([torch.full((1, 4), 3), prompt(rows=1)], 1)
    mask = torch.arange(11)[None] >= 4
    assert torch.equal(sampled(mine, padded, 6, mask=mask), wanted)
    assert torch.equal(sampled(mine, padded.roll(-4, 1), 6, mask=mask.flip(1)), wanted)


def test_contexts_and_their_masks(theirs):
    model, mine = pair(theirs, **EXACT, cross_attend=True)
    context = torch.randn(B, 7, 18)
    assert torch.equal(sampled(mine, prompt(), 9, context=context), sampled(model, prompt(), 9, context=context))
    mask = torch.arange(7)[None].expand(B, 7) < 4
    short = sampled(mine, prompt(), 9, context=context[:, :4])
    assert torch.equal(sampled(mine, prompt(), 9, context=context, context_mask=mask), short)


def test_loss(theirs):
    model, mine = pair(theirs, **EXACT)
    tokens = prompt(17)
    tokens[0, 3] = tokens[1, -4:] = 0
    mask = tokens.ne(0)
    mask[0, 3] = True  # A causal mask is one run.
    assert_close(mine(tokens), model(tokens))
    for given in (mask, mask[:, :-1]):
        loss = mine(tokens, mask=given)
        assert_close(loss, model(tokens, mask=given))
        loss.backward()
    assert_close(mine(tokens, return_loss=False), model.net(tokens))
    rows = [tokens[0], tokens[1, :13]]
    assert_close(mine(rows), mine(tokens, mask=mask))
    # Token 0 is left out by default, as it was; what a hidden token predicts is left out too.
    apart = ours.AutoregressiveWrapper(mine.net, ignore_index=-100, pad_value=5)
    assert not torch.allclose(apart(tokens), mine(tokens))
    tokens[1, -4:] = 5
    lengths = [16, 12]
    logits = mine.net(tokens[:, :-1], mask=mask[:, :-1]).log_softmax(-1)
    picked = logits.gather(2, tokens[:, 1:, None])[..., 0]
    wanted = torch.cat([picked[0], picked[1, :12]])
    assert_close(apart(rows), -wanted.mean())
    assert sum(lengths) == len(wanted)


@pytest.mark.parametrize("left", [False, True])
def test_the_last_real_token_is_not_asked_for_padding(left):
    wrapper = ours.AutoregressiveWrapper(ours.PerformerLM(**PLAIN)).eval()
    tokens, mask = prompt(17, rows=1), torch.arange(17)[None] < 11
    if left:
        tokens, mask = tokens.roll(6, 1), mask.flip(1)
    alone = tokens[:, mask[0]]
    assert_close(wrapper(tokens, mask=mask), wrapper(alone))
    whole = ours.AutoregressiveWrapper(Whole(wrapper.net)).eval()
    assert_close(whole(tokens, mask=mask), wrapper(alone))
    assert_close(wrapper([alone[0], prompt(5, rows=1)[0]]), whole([alone[0], prompt(5, rows=1)[0]]))


def test_small_vocabularies_and_penalties(theirs):
    wrapper = original("performer_pytorch.autoregressive_wrapper")
    logits = torch.tensor([[2.0, -1.0, 0.5], [1.0, 3.0, -2.0]])
    assert wrapper.top_k(logits, 0.9).softmax(-1).isnan().all()
    assert top_k(logits, 0.9).softmax(-1).argmax(-1).tolist() == [0, 1]
    wide = torch.randn(B, 40)
    for thres in (0.9, 0.5, 0.25):
        assert torch.equal(top_k(wide, thres), wrapper.top_k(wide, thres))
        assert torch.equal(top_p(wide, thres), wrapper.top_p(wide.clone(), thres))
    context = torch.tensor([[1, 1], [0, 0]])
    raised = wrapper.repetition_penalty_fn(logits, context, theta=2.0)
    assert raised[0, 1] > logits[0, 1]  # made likelier
    assert raised[0, 0] != logits[0, 0]  # by another row's tokens
    wanted = torch.tensor([[2.0, -2.0, 0.5], [0.5, 3.0, -2.0]])
    assert torch.equal(repetition_penalty_fn(logits, context, theta=2.0), wanted)


def test_the_penalty_is_for_the_last_tokens_of_each_row():
    mine = ours.AutoregressiveWrapper(ours.PerformerLM(**PLAIN))
    seen = []

    def first(logits, thres):
        seen.append(logits)
        return logits

    plain = sampled(mine, prompt(), 1, filter_logits_fn=first)
    sampled(mine, prompt(), 1, filter_logits_fn=first, repetition_penalty=3.0, repetition_penalty_ctx=2)
    changed = seen[1] != seen[0]
    wanted = torch.zeros_like(changed).scatter(1, prompt()[:, -2:], True)
    assert torch.equal(changed, wanted & (seen[0] != 0))
    assert plain.shape == (B, 1)


SIDE = {"num_tokens": 29, "max_seq_len": 31, "depth": 2, "heads": H, "dim_head": D}
SIDES = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in SIDE.items()}


def seq2seq(library, **options):
    return library.PerformerEncDec(**{"dim": 18, **SIDES, **options})


def test_encoder_and_decoder_generate_what_they_did(theirs):
    model, mine = (seq2seq(library, no_projection=True) for library in (theirs, ours))
    copy_weights(model, mine)
    arguments = prompt(11), prompt(3), 9
    assert torch.equal(sampled(mine, *arguments), sampled(model, *arguments))
    assert mine.training
    assert mine.dec.net.performer.training
    mask = torch.arange(11)[None].expand(B, 11) < 8
    short = sampled(mine, prompt(11)[:, :8], prompt(3), 9, temperature=0.5)
    assert torch.equal(sampled(mine, *arguments, enc_mask=mask, temperature=0.5), short)
    masked = mine(prompt(11), prompt(7), enc_mask=mask, dec_mask=torch.ones(B, 7, dtype=torch.bool))
    assert_close(masked, mine(prompt(11)[:, :8], prompt(7)))
    assert (model(prompt(11), prompt(7), enc_mask=mask) - masked).abs() > 1e-4  # Padding moves it there.
    logits = mine(prompt(11), prompt(7), return_loss=False)
    assert logits.shape == (B, 7, 29)
    assert_close(mine.dec.net(prompt(7), context=mine.enc(prompt(11), return_encodings=True)), logits)


def test_the_encoder_is_read_once_and_the_decoder_streams(read):
    mine = seq2seq(ours)
    mine.enc.register_forward_pre_hook(lambda _, given: read.append(-given[0].numel() // B))
    assert mine.generate(prompt(11), prompt(3), 5).shape == (B, 5)
    assert read == [-11, 3, 1, 1, 1, 1]


def test_arguments_of_both_sides(theirs):
    for unknown in ({"enc_hedas": 3}, {"heads": 3}, {"dec_dim": 18}, {"enc_no_projection": True}):
        with pytest.raises(TypeError, match=next(iter(unknown))):
            seq2seq(ours, **unknown)
    seq2seq(theirs, heads=3)  # swallowed there
    with pytest.raises(ValueError, match="enc_causal must be False"):
        seq2seq(ours, enc_causal=True)
    with pytest.raises(TypeError, match="missing a required argument: 'enc_heads'"):
        ours.PerformerEncDec(18, **{name: value for name, value in SIDES.items() if name != "enc_heads"})
    with pytest.raises(TypeError, match="dec_msk"):
        seq2seq(ours)(prompt(), prompt(), dec_msk=None)
    with pytest.raises(TypeError, match="temprature"):
        seq2seq(ours).generate(prompt(), prompt(), 2, temprature=1)
    for name in ("tie_token_embeds", "tie_token_embed"):
        tied = seq2seq(ours, **{name: True})
        assert tied.enc.token_emb is tied.dec.net.token_emb
    assert seq2seq(theirs, tie_token_embed=True).enc.token_emb is not seq2seq(theirs).dec.net.token_emb
    held = seq2seq(ours, enc_tie_embed=True, enc_use_scalenorm=True).state_dict()
    assert "enc.to_out.weight" not in held
    assert "enc.performer.net.layers.0.0.g" in held
