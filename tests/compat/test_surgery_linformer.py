"""What fine-tuning scripts do to the modules of a linformer, each by its effect."""

from __future__ import annotations

import copy
import io

import older
import pytest
import torch
from torch import nn

from longspan.compat import faithful
from longspan.compat import linformer as ours
from longspan.compat.linformer import linformer as inner

SIZES = {"dim": 12, "seq_len": 11, "k": 5, "heads": 3, "depth": 2}
OPTIONS = [
    {},
    {"one_kv_head": True},
    {"share_kv": True},
    {"reversible": True},
    {"dim_head": 5, "one_kv_head": True, "share_kv": True, "reversible": True},
]


def model(**options) -> ours.LinformerLM:
    torch.manual_seed(0)
    return ours.LinformerLM(num_tokens=13, **SIZES, **options)


def tokens(length: int = 11) -> torch.Tensor:
    return torch.randint(13, (2, length), generator=torch.Generator().manual_seed(1))


def layers(net: ours.LinformerLM) -> list[inner.PreNorm]:
    return [m for m in net.modules() if isinstance(m, inner.PreNorm)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_tree_is_the_originals(options: dict) -> None:
    theirs = older.original("linformer")
    older.assert_same_tree(theirs.LinformerLM(num_tokens=13, **SIZES, **options), model(**options))
    older.assert_same_tree(theirs.Linformer(**SIZES, **options), ours.Linformer(**SIZES, **options))


def test_every_name_is_here() -> None:
    names = older.defined_names("linformer")
    assert len(names) == 16
    for name in names:
        submodule, _, attribute = name.partition(".")
        module = __import__(f"longspan.compat.linformer.{submodule}", fromlist=[attribute])
        assert callable(getattr(module, attribute)), name


def test_helpers_agree() -> None:
    theirs, x = older.original("linformer.linformer"), torch.randn(2, 7, 12)
    assert inner.default(None, 3) == theirs.default(None, 3) == 3
    assert inner.default(0, default_val=3) == theirs.default(0, 3) == 0
    filled = []
    for module in (theirs, inner):
        torch.manual_seed(4)
        filled.append(module.init_(torch.zeros(5, 7)))
    assert torch.equal(*filled)
    older.assert_close(inner.GELU_()(x), theirs.GELU_()(x))
    assert inner.GELU is theirs.GELU
    for build in (lambda m: m.Residual(nn.Linear(12, 12)), lambda m: m.PreNorm(12, nn.Linear(12, 12))):
        older.assert_parity(build(theirs), build(inner), lambda module: (module(x), {}))


def test_the_originals_optimizer_goes_on() -> None:
    theirs, mine, x = older.original("linformer").LinformerLM(num_tokens=13, **SIZES), model(), tokens()
    older.assert_optimizer_continues(theirs, mine, x)


def test_a_replaced_head_is_used_and_trains() -> None:
    net, x = model(), tokens()
    hidden: list[torch.Tensor] = []
    net.linformer.register_forward_hook(lambda module, args, out: hidden.append(out))
    net.to_logits = nn.Linear(12, 5)
    out = net(x)
    torch.testing.assert_close(out, net.to_logits(hidden[0]))
    for parameter in net.parameters():
        parameter.requires_grad = False
    for parameter in layers(net)[-1].parameters():
        parameter.requires_grad = True
    for parameter in net.to_logits.parameters():
        parameter.requires_grad = True
    net(x).sum().backward()
    trained = {name for name, p in net.named_parameters() if p.grad is not None}
    prefix = "linformer.net.layers.1.1."
    assert trained == {name for name, _ in net.named_parameters() if name.startswith((prefix, "to_logits."))}, (
        "only what is not frozen"
    )
    with pytest.raises(ValueError, match=r"cannot be converted, because to_logits\.weight has another shape"):
        net.to_longspan()
    net = model()
    net.linformer.register_forward_hook(lambda module, args, out: out)
    with pytest.raises(ValueError, match="LinformerLM cannot be converted, because linformer has a hook"):
        net.to_longspan()


@pytest.mark.parametrize("reversible", [False, True])
def test_layers_are_read_and_replaced(reversible: bool) -> None:
    net, x = model(reversible=reversible).eval(), tokens(7)
    attention = layers(net)[0].fn
    assert isinstance(attention, ours.LinformerSelfAttention)
    assert attention.to_q.weight.shape == (12, 12)
    before = net(x)
    with torch.no_grad():
        attention.to_q.weight.mul_(2)
        attention.proj_k.add_(1)
    changed = net(x)
    assert not torch.allclose(before, changed)

    class Zero(nn.Module):
        def forward(self, x, **kwargs):
            return 0 * x

    for layer in layers(net):
        layer.fn = Zero()
    embedded = net.token_emb(x) + net.pos_emb.weight[:7]
    torch.testing.assert_close(net(x), net.to_logits(embedded * (2 if reversible else 1)))


@pytest.mark.parametrize("reversible", [False, True])
def test_hooks_fire_on_every_module(reversible: bool) -> None:
    net, x = model(reversible=reversible), tokens()
    plain, called = net(x), set()
    handles = []
    for name, module in net.named_modules():
        handles.append(module.register_forward_hook(lambda *_, name=name: called.add(name)))
        handles.append(module.register_forward_pre_hook(lambda *_, name=name: called.add(name)))
    torch.testing.assert_close(net(x), plain)
    assert called == {name for name, m in net.named_modules() if not isinstance(m, nn.ModuleList)}
    for handle in handles:
        handle.remove()
    attention = layers(net)[0].fn
    handle = attention.to_v.register_forward_hook(lambda module, args, out: out * 0)
    attention.to_out.register_forward_hook(lambda module, args, out: called.add(float(out.detach().std(1).max())))
    net(x)
    assert min(value for value in called if isinstance(value, float)) == 0, "values of zero leave the bias"


def test_attention_takes_other_projections_and_dropout() -> None:
    torch.manual_seed(0)
    attention, x = ours.LinformerSelfAttention(dim=12, seq_len=11, k=5, heads=3), torch.randn(2, 7, 12)
    theirs = older.original("linformer").LinformerSelfAttention(dim=12, seq_len=11, k=5, heads=3)
    theirs.load_state_dict(attention.state_dict())
    for net in (theirs, attention):
        net.to_k = nn.Sequential(nn.Linear(12, 4, bias=False), nn.Linear(4, 12))
        net.proj_v = nn.Parameter(torch.linspace(-1, 2, 55).view(11, 5))
        net.dropout = nn.Hardtanh(0.1, 0.3)  # of the attention weights
        net.to_out = nn.Identity()
    attention.to_k.load_state_dict(theirs.to_k.state_dict())
    older.assert_parity(theirs, attention, lambda net: (net(x), {}))
    attention.dropout = nn.Dropout(0.0)
    theirs.dropout = nn.Identity()
    older.assert_parity(theirs, attention, lambda net: (net(x), {}))


def test_copies_files_and_dtypes() -> None:
    net, x = model().eval(), tokens()
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(net), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), net(x))
        with torch.no_grad():
            other.to_logits.bias.add_(1)
        assert not torch.equal(other(x), net(x))
    assert torch.equal(copy.deepcopy(net).to_longspan().eval()(x), net(x))
    older.assert_close(copy.deepcopy(net).double()(x).float(), net(x))
    half = copy.deepcopy(net).bfloat16()(x)
    assert half.dtype == torch.bfloat16
    older.assert_close(half.float(), net(x), tolerance=0.05)


def test_a_checkpoint_with_another_head() -> None:
    net, other = model(), model()
    held = {name: x + 1 for name, x in net.state_dict().items()}
    del held["to_logits.weight"], held["to_logits.bias"]
    other.to_logits = nn.Linear(12, 5)
    missing = other.load_state_dict(held, strict=False)
    assert missing.missing_keys == ["to_logits.weight", "to_logits.bias"]
    assert torch.equal(other.token_emb.weight, net.token_emb.weight + 1)
    with pytest.raises(RuntimeError, match=r"size mismatch for to_logits\.weight"):
        other.load_state_dict(net.state_dict())


def test_groups_of_parameters_by_name() -> None:
    net = model()
    decay = [p for name, p in net.named_parameters() if p.ndim > 1 and "norm" not in name]
    others = [p for name, p in net.named_parameters() if p.ndim <= 1 or "norm" in name]
    optimizer = torch.optim.SGD([{"params": decay, "lr": 0.1}, {"params": others, "lr": 0.0}])
    before = copy.deepcopy(net.state_dict())
    net(tokens()).square().mean().backward()
    optimizer.step()
    for name, x in net.state_dict().items():
        assert torch.equal(x, before[name]) == ("norm" in name or x.ndim <= 1), name


def test_longer_tables_put_in_place() -> None:
    net = model().eval()
    net.pos_emb = nn.Embedding(17, 12)
    for layer in layers(net)[::2]:
        for name in ("proj_k", "proj_v"):
            setattr(layer.fn, name, nn.Parameter(torch.randn(17, 5)))
    assert net(tokens(17)).shape == (2, 17, 13)
    with pytest.raises(ValueError, match=r"18 tokens are more than the 17 positions"):
        net(tokens(18))
    with pytest.raises(ValueError, match=r"LinformerLM cannot be converted.*pos_emb\.weight"):
        net.to_longspan()


@pytest.mark.parametrize(
    "options", [{"reversible": True}, pytest.param({"share_kv": True}, marks=pytest.mark.slow)], ids=str
)
def test_it_compiles(options: dict) -> None:
    net, x = model(**options), tokens(7)
    compiled = torch.compile(copy.deepcopy(net), backend="aot_eager", fullgraph=True)
    older.assert_close(compiled(x), net(x))
    results = [torch.autograd.grad(each(x).square().mean(), list(each.parameters())) for each in (net, compiled)]
    for mine, wanted in zip(results[1], results[0], strict=True):
        older.assert_close(mine, wanted)


def test_faithful_ignores_masks_as_the_original_does() -> None:
    arguments = {name: SIZES[name] for name in ("dim", "seq_len", "k", "heads")}
    theirs = older.original("linformer").LinformerSelfAttention(**arguments)
    x, context = torch.randn(2, 11, 12), torch.randn(2, 9, 12)
    mask, seen = torch.rand(2, 11) > 0.4, torch.rand(2, 9) > 0.4
    with faithful():
        within, corrected = (
            ours.LinformerSelfAttention(**arguments),
            ours.LinformerSelfAttention(**arguments, faithful=False),
        )
    for layer in (within, ours.LinformerSelfAttention(**arguments, faithful=True), corrected):
        layer.load_state_dict(theirs.state_dict())
        same = layer is not corrected
        assert (theirs(x, mask=mask) - layer(x, mask=mask)).abs().max().lt(1e-6) == same
        wanted, got = (net(x, context, context_mask=seen) for net in (theirs, layer))
        assert (wanted - got).abs().max().lt(1e-6) == same
    with pytest.raises(ValueError, match="the original takes no mask: build the model without faithful=True"):
        ours.Linformer(**SIZES, faithful=True)(x, mask=mask)
    plain, kept = ours.LinformerLM(num_tokens=13, **SIZES), ours.LinformerLM(num_tokens=13, **SIZES, faithful=True)
    kept.load_state_dict(plain.state_dict())
    assert torch.equal(kept(tokens()), plain(tokens()))


def test_hidden_tokens_keep_their_slots() -> None:
    """Where the original is given zeros, ours is given a mask: left padding and holes use the same rows of proj_k."""
    arguments = {name: SIZES[name] for name in ("dim", "seq_len", "k", "heads")}
    theirs = older.original("linformer").LinformerSelfAttention(**arguments)
    mine = ours.LinformerSelfAttention(**arguments)
    mine.load_state_dict(theirs.state_dict())
    x, source = torch.randn(2, 7, 12), torch.randn(2, 11, 12)
    for mask in (torch.arange(11).expand(2, -1) >= 4, torch.arange(11).expand(2, -1) % 3 > 0):
        zeros = source.masked_fill(~mask[..., None], 0)
        filled = source.masked_fill(~mask[..., None], float("nan"))
        older.assert_close(mine(x, filled, context_mask=mask), theirs(x, zeros))
        older.assert_close(mine(filled, mask=mask), theirs(zeros))


def test_new_models_have_the_scale_of_longspans() -> None:
    torch.manual_seed(0)
    sizes = {"num_tokens": 97, "dim": 64, "seq_len": 101, "k": 31, "heads": 4, "depth": 3}
    for options in ({}, {"share_kv": True, "reversible": True}):
        older.assert_same_scale(ours.LinformerLM(**sizes, **options))
