"""longspan.compat.linformer beside linformer 0.2.3."""

from __future__ import annotations

import older
import pytest
import torch

import longspan
from longspan.compat import import_hook
from longspan.compat import linformer as ours
from longspan.compat.convert import convert_weights

# The recorded variants: the class, and the arguments that differ from these.
ARGUMENTS = {
    "LinformerSelfAttention": {"dim": 32, "seq_len": 16, "k": 4, "heads": 4},
    "Linformer": {"dim": 32, "seq_len": 16, "depth": 2, "k": 4, "heads": 4},
    "LinformerLM": {"num_tokens": 20, "dim": 32, "seq_len": 16, "depth": 2, "k": 4, "heads": 4},
}
VARIANTS = {
    "linformer.LinformerSelfAttention": {},
    "linformer.LinformerSelfAttention[one_kv_head]": {"one_kv_head": True},
    "linformer.LinformerSelfAttention[share_kv]": {"share_kv": True},
    "linformer.Linformer": {},
    "linformer.Linformer[reversible]": {"reversible": True},
    "linformer.LinformerLM": {},
    "linformer.LinformerLM[reversible]": {"reversible": True},
}
OPTIONS = {
    "plain": {},
    "one_kv_head": {"one_kv_head": True},
    "share_kv": {"share_kv": True},
    "both": {"one_kv_head": True, "share_kv": True},
    "dim_head": {"dim_head": 5},
    "reversible": {"reversible": True},
}
SMALL = {"dim": 12, "seq_len": 11, "k": 5, "heads": 3}


def build(variant: str, **more):
    name = variant.removeprefix("linformer.").partition("[")[0]
    return getattr(ours, name)(**ARGUMENTS[name], **VARIANTS.get(variant, {}), **more)


def test_every_recorded_variant_is_here() -> None:
    assert set(VARIANTS) == {name for name in older.recorded() if name.startswith("linformer.")}


@pytest.mark.parametrize("variant", VARIANTS)
def test_names(variant: str) -> None:
    older.assert_names(build(variant), variant)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("length", [11, 7], ids=["full", "shorter"])
@pytest.mark.parametrize("options", [o for o in OPTIONS.values() if "reversible" not in o], ids=str)
def test_self_attention_agrees(options: dict, length: int, training: bool) -> None:
    arguments = SMALL | options
    pair = older.original("linformer").LinformerSelfAttention(**arguments), ours.LinformerSelfAttention(**arguments)
    x, context = torch.randn(2, length, 12), torch.randn(2, 9, 12)
    for inputs in ({"x": x}, {"x": x, "context": context}):

        def call(module, inputs=inputs):
            given = {name: value.clone().requires_grad_() for name, value in inputs.items()}
            return module.train(training)(**given), given

        older.assert_parity(*pair, call)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("length", [11, 7], ids=["full", "shorter"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=str)
def test_models_agree(options: dict, length: int, training: bool) -> None:
    theirs, arguments = older.original("linformer"), {**SMALL, "depth": 2, **options}
    x, tokens = torch.randn(2, length, 12), torch.randint(13, (2, length))

    def vectors(module):
        given = x.clone().requires_grad_()
        return module.train(training)(given), {"x": given}

    bodies = theirs.Linformer(**arguments), ours.Linformer(**arguments)
    pair = theirs.LinformerLM(num_tokens=13, **arguments), ours.LinformerLM(num_tokens=13, **arguments)
    if options.get("reversible") and not training:
        # Its reversible blocks remember random states in training only: no gradients in eval mode.
        for (their, mine), given in ((bodies, x), (pair, tokens)):
            older.copy_weights(their, mine)
            older.assert_close(mine.eval()(given), their.eval()(given))
        return
    older.assert_parity(*bodies, vectors)
    older.assert_parity(*pair, lambda module: (module.train(training)(tokens), {}))


@pytest.mark.parametrize("glu", [False, True])
@pytest.mark.parametrize("activation", [None, torch.nn.ReLU, torch.nn.SiLU, torch.nn.Softplus])
def test_feed_forward_agrees(activation, glu: bool) -> None:
    theirs = older.original("linformer.linformer").FeedForward(6, 3, activation=activation, glu=glu)
    mine = ours.linformer.FeedForward(6, 3, activation=activation, glu=glu)
    x = torch.randn(2, 5, 6)
    older.assert_parity(theirs, mine, lambda module: (module(x), {}))
    for wrong in ("relu", torch.nn.ReLU(), dict):
        with pytest.raises(ValueError, match=r"activation must be a class of modules, such as torch\.nn\.ReLU, got"):
            ours.linformer.FeedForward(6, activation=wrong)


@pytest.mark.parametrize("name", ["LinformerSelfAttention", "Linformer", "LinformerLM"])
def test_dropout_drops_weights_and_features(name: str) -> None:
    arguments = ARGUMENTS[name] | {"dropout": 0.5}
    model = getattr(ours, name)(**arguments)
    x = torch.randint(20, (1, 16)) if name == "LinformerLM" else torch.randn(1, 16, 32)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))
    kinds = ours.LinformerSelfAttention, ours.linformer.FeedForward
    layers = [m for m in model.modules() if isinstance(m, kinds)]
    assert len(layers) == (1 if name == "LinformerSelfAttention" else 4)
    assert all(layer.dropout.p == 0.5 for layer in layers)
    for layer in layers:
        layer.dropout.p = 0.0
    assert torch.equal(model.train()(x), model.eval()(x))


def test_reversible_trains_where_the_original_gives_no_gradients() -> None:
    theirs = older.original("linformer").Linformer(**SMALL, depth=1, reversible=True)
    mine = ours.Linformer(**SMALL, depth=1, reversible=True)
    x = torch.randn(1, 11, 12)
    out = theirs(x)
    assert not out.requires_grad
    mine(x).sum().backward()
    assert all(p.grad is not None for p in mine.parameters())


def test_masks_count_where_the_original_swallows_them() -> None:
    arguments = SMALL
    theirs, mine = older.original("linformer").LinformerSelfAttention(**arguments), ours.LinformerSelfAttention(**SMALL)
    older.copy_weights(theirs, mine)
    x, context = torch.randn(2, 11, 12), torch.randn(2, 9, 12)
    mask = torch.arange(11).expand(2, -1) < 6
    assert torch.equal(theirs(x, mask=mask), theirs(x)), "the original swallows it"
    torch.testing.assert_close(mine(x, mask=mask)[:, :6], mine(x[:, :6]))
    assert not torch.allclose(mine(x, mask=mask)[:, :6], mine(x)[:, :6])
    seen = torch.arange(9).expand(2, -1) < 4
    assert torch.equal(theirs(x, context, context_mask=seen), theirs(x, context))
    torch.testing.assert_close(mine(x, context, context_mask=seen), mine(x, context[:, :4]))
    x[~mask] = float("nan")
    for model in (ours.Linformer(**SMALL, depth=2), ours.Linformer(**SMALL, depth=2, reversible=True)):
        torch.testing.assert_close(model(x, mask=mask)[:, :6], model(x[:, :6]))
    lm, tokens = ours.LinformerLM(num_tokens=13, **SMALL, depth=2), torch.randint(13, (2, 11))
    torch.testing.assert_close(lm(tokens, mask=mask)[:, :6], lm(tokens[:, :6]))


def test_what_is_refused() -> None:
    attention = ours.LinformerSelfAttention(**SMALL)
    x = torch.randn(1, 11, 12)
    with pytest.raises(TypeError, match="input_mask"):
        attention(x, input_mask=None)
    with pytest.raises(ValueError, match="context_mask was given without a context"):
        attention(x, context_mask=torch.ones(1, 11, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"12 tokens are more than seq_len \(11\); build the layer with"):
        attention(torch.randn(1, 12, 12))
    with pytest.raises(ValueError, match="12 tokens are more than the 11 positions"):
        ours.LinformerLM(num_tokens=13, **SMALL, depth=1)(torch.zeros(1, 12, dtype=torch.int64))
    with pytest.raises(TypeError, match="causal"):
        ours.LinformerLM(num_tokens=13, **SMALL, depth=1, causal=True)
    model = ours.Linformer(**SMALL, depth=1)
    held = model.state_dict()
    del held["net.layers.0.0.norm.bias"]
    held["strange"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*net\.layers\.0\.0\.norm\.bias.*Unexpected key.*strange"):
        model.load_state_dict(held)


@pytest.mark.parametrize("variant", [name for name in VARIANTS if "Attention" not in name])
def test_models_convert(variant: str, tmp_path) -> None:
    name = variant.removeprefix("linformer.").partition("[")[0]
    model = build(variant).eval()
    arguments = {"class": name, **ARGUMENTS[name], **VARIANTS[variant]}
    longspan.save(convert_weights(model.state_dict(), "linformer", arguments), tmp_path / "model")
    loaded = longspan.load(tmp_path / "model").eval()
    x = torch.randint(20, (2, 13)) if name == "LinformerLM" else torch.randn(2, 13, 32)
    torch.testing.assert_close(loaded(x), model(x), rtol=0, atol=0)


README_SHAPES = [(1, 4096, 20000), (1, 4096, 512), (1, 4096, 512), (1, 2048, 512)]


@pytest.mark.parametrize(
    "block", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2, 3]
)
def test_readme(block: int) -> None:
    blocks = older.blocks("linformer.md")
    assert len(blocks) == len(README_SHAPES)
    text = blocks[block].rstrip()
    *_, last = text.splitlines()
    code = text.removesuffix(last) + f"out = {last}"
    assert f"# {README_SHAPES[block]}".replace(" ", "") in last.replace(" ", "")
    with older.older_names() as names:
        exec(code, names)
    assert names["out"].shape == README_SHAPES[block]


SCRIPT = """
import torch
import torch.nn.functional as F
from linformer import LinformerLM

torch.manual_seed(0)
model = LinformerLM(num_tokens=16, dim=32, seq_len=64, depth=2, heads=4, k=16, one_kv_head=True, reversible=REVERSIBLE)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
losses = []
for step in range(STEPS):
    # Each token is seen twice, and half are hidden behind token 0: the other copy tells.
    whole = torch.randint(1, 16, (8, 32)).repeat(1, 2)
    given = whole.masked_fill(torch.arange(64) % 2 == torch.arange(64) // 32, 0)
    loss = F.cross_entropy(model(given).transpose(1, 2), whole)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
model.eval()
with torch.no_grad():
    print(losses[0], losses[-1], model(given).argmax(-1).shape)
"""


def test_a_training_script_runs(tmp_path, capsys) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("STEPS", "6").replace("REVERSIBLE", "False"))
    import_hook.run(path, [])
    first, last, shape = capsys.readouterr().out.split(maxsplit=2)
    assert float(last) < float(first)
    assert shape.strip() == "torch.Size([8, 64])"
