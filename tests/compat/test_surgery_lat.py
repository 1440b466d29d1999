"""linear-attention-transformer: the original's tree of modules, and what fine-tuning scripts do with it."""

import copy
import io
import pickle
import warnings

import older
import pytest
import torch
from torch import nn

from longspan.compat import linear_attention_transformer as ours
from longspan.compat.linear_attention_transformer import linear_attention_transformer as inner
from longspan.compat.linear_attention_transformer import reversible

B, T, S, DIM, V = 2, 13, 7, 12, 17
SMALL = {"num_tokens": V, "dim": DIM, "depth": 2, "max_seq_len": 30, "heads": 3, "dim_head": 4}
SMALL |= {"local_attn_window_size": 5}
CAUSAL = {"causal": True, "blindspot_size": 3, "n_local_attn_heads": 1}
TREES = {
    "plain": {},
    "causal": CAUSAL,
    "local only": {"n_local_attn_heads": (0, 3)},
    "reversible": {"reversible": True, **CAUSAL},
    "axial": {"attend_axially": True, "ff_chunks": 2},
    "context": {"receives_context": True, **CAUSAL},
    "linformer": {"linformer_settings": {"k": 5}, "attn_dropout": 0.1},
    "context linformer": {"receives_context": True, "context_linformer_settings": {"seq_len": 11, "k": 4}, **CAUSAL},
    "shift": {"shift_tokens": True, "reversible": True},
    "pkm": {"pkm_layers": (2,), "shift_tokens": True},
    "emb_dim": {"emb_dim": 6},
    "rotary": {"use_rotary_emb": True},
    "learned positions": {"use_axial_pos_emb": False},
    "embeddings": {"return_embeddings": True},
    "all": {"receives_context": True, "attend_axially": True, "pkm_layers": (1,), "emb_dim": 6, **CAUSAL},
}


def build(package=ours, **options):
    given = {**SMALL, **options}
    for option, settings in (
        ("linformer_settings", package.LinformerSettings),
        ("context_linformer_settings", package.LinformerContextSettings),
    ):
        if option in given:
            given[option] = settings(**given[option])
    return package.LinearAttentionTransformerLM(**given)


def tokens():
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(4))


def calls(options):
    return {"context": torch.ones(B, S, DIM)} if options.get("receives_context") else {}


@pytest.mark.parametrize("name", TREES)
def test_the_tree_is_the_originals(name):
    theirs, mine = build(older.original("linear_attention_transformer"), **TREES[name]), build(**TREES[name])
    assert [n for n, _ in mine.named_modules()] == [n for n, _ in theirs.named_modules()]
    assert [type(m).__name__ for m in mine.modules()] == [type(m).__name__ for m in theirs.modules()]
    for parts in ("named_parameters", "named_buffers"):
        wanted, found = ([(n, x.shape) for n, x in getattr(m, parts)()] for m in (theirs, mine))
        assert found == wanted
    assert list(mine.state_dict()) == list(theirs.state_dict())


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("length", [0, 1])
def test_short_sequences(name, length):
    model, x = build(**TREES[name]), tokens()[:, :length]
    for mask in (None, torch.ones(B, length).bool(), torch.zeros(B, length).bool()):
        out = model(x, input_mask=mask, **calls(TREES[name]))
        assert out.shape[:2] == (B, length)
        out.sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", TREES)
def test_every_module_is_called(name):
    """A hook fires on every module that the original calls."""
    options, called = TREES[name], {}
    for package in (older.original("linear_attention_transformer"), ours):
        model, found = build(package, **options).eval(), set()
        for path, module in model.named_modules():
            module.register_forward_hook(lambda *_, path=path, found=found: found.add(path))
        with torch.no_grad():
            model(torch.randint(0, V, (B, 15)), **calls(options))
        called[package] = found
    theirs, mine = called.values()
    # Dropout inside local and Linformer attention belongs to an operation on all windows.
    missing = {path for path in theirs - mine if not path.endswith(".dropout")}
    assert missing == set()


def test_the_optimizer_of_the_original_continues():
    theirs, mine = build(older.original("linear_attention_transformer"), **CAUSAL), build(**CAUSAL)
    x = torch.randint(0, V, (B, 15))

    def losses(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(x).logsumexp(-1).mean()
            loss.backward()
            optimizer.step()
            yield loss.item()

    first, second = (torch.optim.Adam(model.parameters(), lr=1e-2) for model in (theirs, mine))
    list(losses(theirs, first, 2))
    mine.load_state_dict(theirs.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert list(losses(mine, second, 3)) == pytest.approx(list(losses(theirs, first, 3)), rel=1e-5)


def test_weights_are_read_and_written():
    model, x = build(**CAUSAL).eval(), tokens()
    before = model(x)
    attention = model.transformer.layers.layers[0][0].fn
    assert isinstance(attention, inner.SelfAttention)
    assert attention.to_q.weight.shape == (12, DIM)
    with torch.no_grad():
        attention.to_out.weight.zero_()
        attention.to_out.bias.zero_()
    assert not torch.equal(model(x), before)
    model.transformer.layers.layers[0][0] = inner.PreNorm(DIM, _Zero())
    older.assert_close(model(x), model(x))
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.zero_()
    torch.testing.assert_close(model(x), model.out.bias.expand(B, T, V))


class _Zero(nn.Module):
    def forward(self, x, **kwargs):
        return torch.zeros_like(x)


def test_a_replaced_head():
    model, x = build(**CAUSAL), tokens()
    model.out = nn.Linear(DIM, 3)
    out = model(x)
    assert out.shape == (B, T, 3)
    out.sum().backward()
    assert model.out.weight.grad.any()
    assert model.token_emb.weight.grad.any()
    weights = build(**CAUSAL).state_dict()
    with pytest.raises(RuntimeError, match=r"size mismatch for out.weight"):
        model.load_state_dict(weights, strict=False)
    del weights["out.weight"], weights["out.bias"]
    result = model.load_state_dict(weights, strict=False)
    assert result.missing_keys == ["out.weight", "out.bias"]
    assert torch.equal(model.norm.weight, weights["norm.weight"])


def test_a_replaced_layer_keeps_its_arguments():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.masks = nn.Linear(DIM, DIM), []

        def forward(self, x, input_mask=None):
            self.masks.append(input_mask)
            return self.linear(x)

    model, x = build(), tokens()
    model.transformer.layers.layers[1][0] = Attention()
    model.transformer.layers.layers[0][1] = nn.Sequential(nn.Linear(DIM, 5), nn.ReLU(), nn.Linear(5, DIM))
    model(x).sum().backward()
    mask = torch.ones_like(x, dtype=torch.bool)
    model(x, input_mask=mask)
    assert [found is None for found in model.transformer.layers.layers[1][0].masks] == [True, False]
    assert all(p.grad is not None for p in model.transformer.layers.layers[0][1].parameters())
    reversed_model = build(reversible=True)
    reversed_model.transformer.layers.blocks[0].g.net = nn.Linear(DIM, DIM)
    reversed_model(x).square().sum().backward()
    assert reversed_model.transformer.layers.blocks[0].g.net.weight.grad.any()


def test_all_but_the_last_layer_frozen():
    model, x = build(**CAUSAL), tokens()
    for p in model.parameters():
        p.requires_grad = False
    for p in model.transformer.layers.layers[-1].parameters():
        p.requires_grad = True
    before = {n: p.clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model(x).square().mean().backward()
    optimizer.step()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed
    assert all(n.startswith("transformer.layers.layers.1.") for n in changed)


def test_hooks_read_and_change_activations():
    model, x, seen = build(**CAUSAL).eval(), tokens(), []
    before = model(x)
    layer = model.transformer.layers.layers[0][0].fn.local_attn
    handle = layer.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    model(x)
    assert seen == [(B, 1, T, 4)]
    handle.remove()
    handle = model.transformer.layers.layers[1][1].register_forward_hook(lambda module, args, out: out * 0)
    assert not torch.equal(model(x), before)
    handle.remove()
    pre = model.norm.register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    torch.testing.assert_close(model(x), model.out(model.norm.bias.expand(B, T, DIM)))
    pre.remove()
    assert torch.equal(model(x), before)


def test_modules_by_type():
    model = build(attend_axially=True, pkm_layers=(2,), use_rotary_emb=True)
    counts = {
        kind: sum(isinstance(m, kind) for m in model.modules())
        for kind in (inner.SelfAttention, inner.FoldAxially, inner.PKM, inner.FixedPositionalEmbedding, nn.LayerNorm)
    }
    assert list(counts.values()) == [4, 2, 1, 2, 10]
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    assert not model(tokens()).any()
    assert isinstance(build(reversible=True).transformer.layers, reversible.ReversibleSequence)


def test_groups_of_parameters_by_name():
    model = build(**CAUSAL)
    decay = [p for n, p in model.named_parameters() if not n.endswith("bias") and "norm" not in n and "emb" not in n]
    rest = [p for n, p in model.named_parameters() if n.endswith("bias") or "norm" in n or "emb" in n]
    assert len(decay) == 2 * (4 + 2) + 1
    optimizer = torch.optim.SGD([{"params": decay, "lr": 0.0}, {"params": rest, "lr": 1.0}])
    model(tokens()).square().mean().backward()
    before = {n: p.clone() for n, p in model.named_parameters()}
    optimizer.step()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert "token_emb.weight" in changed
    assert not any(n.endswith("to_q.weight") for n in changed)


@pytest.mark.parametrize("name", ["causal", "reversible", "rotary", "context linformer"])
def test_copies(name):
    options = TREES[name]
    model, x = build(**options).eval(), tokens()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    for other in copies:
        assert torch.equal(other(x, **calls(options)), model(x, **calls(options)))
        with torch.no_grad():
            other.token_emb.weight.add_(1)
    assert not torch.equal(copies[0](x, **calls(options)), model(x, **calls(options)))
    assert not copies[0].altered()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    model, x = build(**CAUSAL).eval(), tokens()
    expected = model(x)
    found = model.to(dtype)(x)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float64 else 0.05
    older.assert_close(found.float(), expected, tolerance=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "axial", "rotary", "linformer"])
def test_compiled(name):
    model, x = build(**TREES[name]).eval(), tokens()
    mask = torch.arange(T) < torch.tensor([[T], [9]])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for given in ({}, {"input_mask": mask}):
        older.assert_close(compiled(x, **given), model(x, **given))


def test_generation_of_an_altered_model_recomputes():
    torch.manual_seed(2)
    model = build(**CAUSAL)
    nn.init.normal_(model.token_emb.weight)
    wrapper = ours.AutoregressiveWrapper(model)
    start = tokens()[:, :5]
    expected = wrapper.generate(start, 7, temperature=0)
    handle = model.norm.register_forward_hook(lambda *_: None)
    with pytest.warns(UserWarning, match=r"norm has a hook: each token recomputes all tokens before it"):
        assert torch.equal(wrapper.generate(start, 7, temperature=0), expected)
    handle.remove()
    model.out = nn.Sequential(nn.Linear(DIM, V))
    nn.init.zeros_(model.out[0].weight)
    model.out[0].bias.data = torch.eye(V)[3] * 9
    with pytest.warns(UserWarning, match="cannot be converted, because out was replaced"):
        assert (wrapper.generate(start, 3, temperature=0) == 3).all()
    model.transformer.layers.layers[0][1] = nn.Identity()
    assert model.transformer.altered() == "layers.layers.0.1 was replaced"
    model.out = nn.Linear(DIM, V)
    assert model.altered() == "transformer.layers.layers.0.1 was replaced"


@pytest.mark.parametrize("name", [name for name in TREES if name != "embeddings"])
def test_the_equivalent_longspan_model(name):
    options = TREES[name]
    model, x = build(**options).eval(), tokens()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        older.assert_close(model.to_longspan()(x, **calls(options)), model(x, **calls(options)))


def test_tables_that_are_no_sinusoids_do_not_convert():
    model = build(use_rotary_emb=True)
    model.layer_pos_emb.emb.mul_(0.5)
    with pytest.raises(ValueError, match=r"layer_pos_emb\.emb holds other values than the sines and cosines"):
        model.to_longspan()


def test_image_attention():
    layer, x = (
        ours.ImageLinearAttention(5, heads=2, key_dim=3, value_dim=4, kernel_size=3, padding=1),
        torch.randn(B, 5, 7, 6),
    )
    theirs = older.original("linear_attention_transformer").ImageLinearAttention(5, heads=2, key_dim=3, value_dim=4)
    assert [n for n, _ in layer.named_modules()] == [n for n, _ in theirs.named_modules()]
    assert {n for n, _ in layer.named_parameters()} == {n for n, _ in theirs.named_parameters()}
    seen = []
    layer.to_k.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape[2:])))
    layer(x, torch.randn(B, 5, 11))
    assert seen == [(7, 6), (1, 11)]
    layer.to_out = nn.Conv2d(8, 3, 1)
    assert layer(x).shape == (B, 3, 7, 6)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
