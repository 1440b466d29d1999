"""LocalMHA beside the original: outputs, gradients, caches, masks, biases, dropout."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from older import assert_close, assert_parity, original
from torch import Tensor, nn

from longspan.compat.local_attention import LocalMHA

B, N, DIM, W = 2, 19, 12, 5
LAYER = {"dim": DIM, "window_size": W, "heads": 3, "dim_head": 6}


def vectors(n: int = N) -> Tensor:
    return torch.randn(B, n, DIM, generator=torch.Generator().manual_seed(7))


def right_padded(n: int = N) -> Tensor:
    return torch.arange(n) < torch.tensor([[n], [n - 6]])


def shaken(module: nn.Module) -> nn.Module:
    """Weights away from where they begin: zeros and ones would hide mistakes."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    return module


MHA: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "prenorm": {"causal": True, "prenorm": True},
    "normed": {"causal": True, "qk_rmsnorm": True},
    "normed both ways": {"qk_rmsnorm": True, "qk_scale": 5, "prenorm": True},
    "blocks": {"causal": True, "exact_windowsize": False},
    "blocks both ways": {"exact_windowsize": False},
    "gates": {"causal": True, "gate_values_per_head": True, "prenorm": True},
    "xpos": {"causal": True, "use_xpos": True},
    "xpos both ways": {"use_xpos": True, "xpos_scale_base": 4},
    "shared": {"causal": True, "shared_qk": True},
    "shared normed": {"causal": True, "shared_qk": True, "qk_rmsnorm": True},
    "shared normed both ways": {"shared_qk": True, "qk_rmsnorm": True, "qk_scale": 5},
    "far": {"look_backward": 2, "look_forward": 0},
    "bare": {"causal": True, "use_rotary_pos_emb": False},
    "rel_pos_emb_config": {"causal": True, "rel_pos_emb_config": (6, 3)},
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MHA)
def test_layer(name: str, training: bool) -> None:
    arguments = LAYER | MHA[name]
    theirs = shaken(original("local_attention").LocalMHA(**arguments)).train(training)
    n = N if arguments.get("causal") else 20  # What the original pads both ways, it attends to.
    keep = torch.ones(n, dtype=torch.bool)
    masks = [None, keep if arguments.get("causal") else torch.arange(n) % 4 != 2]  # both ways, with holes

    def run(module: nn.Module, mask: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        x = vectors(n).requires_grad_()
        out = module(x, mask=None if mask is None else mask.expand(B, n))
        return out * (keep if mask is None else mask)[:, None], {"x": x}

    for mask in masks:
        assert_parity(theirs, LocalMHA(**arguments).train(training), partial(run, mask=mask))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_layer_with_a_bias(causal: bool, exact: bool) -> None:
    arguments = LAYER | {"causal": causal, "exact_windowsize": exact}
    theirs = shaken(original("local_attention").LocalMHA(**arguments))
    table = torch.randn(3, W, (2 if causal else 3) * W)

    def run(module: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        x, bias = vectors(20).requires_grad_(), table.clone().requires_grad_()
        return module(x, attn_bias=bias), {"x": x, "bias": bias}

    assert_parity(theirs, LocalMHA(**arguments), run)


def test_layer_padding() -> None:
    """Both ways, to a length that does not divide: the original attends to its padding unless a mask says otherwise."""
    theirs = shaken(original("local_attention").LocalMHA(**LAYER))
    ours = LocalMHA(**LAYER)
    ours.load_state_dict(theirs.state_dict())
    x = vectors()
    right = theirs(x, mask=torch.ones(B, N, dtype=torch.bool))
    assert_close(ours(x), right)
    assert (theirs(x) - right).abs().max() > 1e-3


CACHED = ["causal", "prenorm", "normed", "blocks", "gates", "xpos", "shared", "bare"]


@pytest.mark.parametrize("name", CACHED)
def test_layer_cache_is_recomputing(name: str) -> None:
    layer = shaken(LocalMHA(**LAYER | MHA[name]))
    x, bias = vectors(), torch.randn(3, W, 2 * W)
    for table in (None, bias):
        whole = layer(x, attn_bias=table)
        out, cache = layer(x[:, :9], attn_bias=table, return_cache=True)
        pieces = [out]
        for t in range(9, N):
            again, _ = layer(x[:, t : t + 1], attn_bias=table, cache=cache, return_cache=True)
            out, cache = layer(x[:, t : t + 1], attn_bias=table, cache=cache, return_cache=True)
            assert torch.equal(again, out)
            pieces.append(out)
        assert_close(torch.cat(pieces, 1), whole)
        with torch.no_grad():
            assert_close(layer(x[:, 4:], attn_bias=table, cache=layer(x[:, :4], return_cache=True)[1]), whole[:, 4:])


def test_layer_cache_after_padding() -> None:
    layer = shaken(LocalMHA(**LAYER, causal=True))
    x, mask = vectors(), right_padded(N).flip(1)
    _, cache = layer(x, mask=mask, return_cache=True)
    more = vectors(1)
    alone = layer(torch.cat([x[1:, 6:], more[1:]], 1))[:, -1:]
    assert_close(layer(more, cache=cache)[1:], alone)


def test_the_original_cache_is_wrong() -> None:
    """With rotary positions from the second cached token; ours is recomputing."""
    arguments = LAYER | {"causal": True}
    theirs = shaken(original("local_attention").LocalMHA(**arguments)).eval()
    ours = LocalMHA(**arguments).eval()
    ours.load_state_dict(theirs.state_dict())
    x = vectors(9)
    errors = {}
    for name, module in (("theirs", theirs), ("ours", ours)):
        whole = module(x)
        _, cache = module(x[:, :6], return_cache=True)
        errors[name] = []
        for t in range(6, 9):
            out, cache = module(x[:, t : t + 1], cache=cache, return_cache=True)
            errors[name].append(float((out[:, 0] - whole[:, t]).detach().abs().max()))
    assert max(errors["ours"]) < 1e-5
    assert errors["theirs"][0] < 1e-5
    assert min(errors["theirs"][1:]) > 1e-2


def test_layer_dropout() -> None:
    """Ignored by the original, here on the weights; and only in training."""
    arguments = LAYER | {"causal": True, "dropout": 0.5}
    theirs = original("local_attention").LocalMHA(**arguments).train()
    ours = LocalMHA(**arguments).train()
    ours.load_state_dict(theirs.state_dict())
    x = vectors()
    assert torch.equal(theirs(x), theirs(x))
    assert (ours(x) - ours(x)).abs().max() > 1e-2
    assert_close(ours.eval()(x), theirs(x))


def test_layer_errors() -> None:
    with pytest.raises(TypeError, match=r"LocalMHA got an unexpected keyword argument 'dropuot'.*mean 'dropout'"):
        LocalMHA(**LAYER, dropuot=0.1)
    with pytest.raises(ValueError, match="rel_pos_emb_config is for 8 features, but dim_head is 6"):
        LocalMHA(**LAYER, rel_pos_emb_config=(8, 3))
    layer = LocalMHA(**LAYER)
    assert layer(vectors(), return_cache=True)[1] is None
    with pytest.raises(ValueError, match="a cache is for causal attention only"):
        layer(vectors(1), cache=LocalMHA(**LAYER, causal=True)(vectors(), return_cache=True)[1])
