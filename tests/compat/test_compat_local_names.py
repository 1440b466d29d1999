"""Every name that local-attention defines, with its values; the names of its models' modules and parameters."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest
import torch
from older import assert_close, original
from test_compat_local import MODEL
from test_compat_local_layer import LAYER, MHA
from test_compat_local_transformer import TRANSFORMERS, Mixer
from torch import nn

SUBMODULES = ("local_attention", "rotary", "transformer")


def pair(submodule: str) -> tuple[Any, Any]:
    theirs = original(f"local_attention.{submodule}")
    return theirs, import_module(f"longspan.compat.local_attention.{submodule}")


@pytest.mark.parametrize("submodule", SUBMODULES)
def test_every_name_is_there(submodule: str) -> None:
    theirs, ours = pair(submodule)
    defined = {
        name: value
        for name, value in vars(theirs).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and getattr(value, "__module__", theirs.__name__) == theirs.__name__
    }
    assert len(defined) >= 4
    for name, value in defined.items():
        held = getattr(ours, name)
        if isinstance(value, type):
            assert isinstance(held, type), name
        elif callable(value):
            given = [list(inspect.signature(f).parameters.values()) for f in (value, held)]
            names, defaults = ([[getattr(p, what) for p in one] for one in given] for what in ("name", "default"))
            assert defaults[0] == defaults[1], name
            assert names[0] == names[1] or name in ("default", "exists", "l2norm"), name
        else:
            assert held == value, name


def test_helpers_have_the_originals_values() -> None:
    theirs, ours = pair("local_attention")
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 3, 5, 7, generator=generator)
    for dim, multiple in ((-1, 5), (-2, 4), (-3, 3)):
        for value in (0, -1):
            padded = [module.pad_to_multiple(x, multiple, dim=dim, value=value) for module in (theirs, ours)]
            assert padded[0][0] == padded[1][0]
            assert torch.equal(padded[0][1], padded[1][1])
    for windows in (x, torch.arange(2 * 3 * 5).view(2, 3, 5), x.view(2, 3, 5, 7, 1), x[..., 0] > 0):
        for back, ahead in ((1, 0), (0, 2), (2, 1), (0, 0)):
            options: dict[str, Any] = {"backward": back, "forward": ahead, "pad_value": 0}
            assert torch.equal(ours.look_around(windows, **options), theirs.look_around(windows, **options))
    assert torch.equal(ours.look_around(x), theirs.look_around(x))
    assert torch.equal(ours.look_around(x, dim=3), theirs.look_around(x, dim=3))
    for dtype in (torch.float32, torch.float64):
        assert_close(ours.l2norm(x.to(dtype)), theirs.l2norm(x.to(dtype)), tolerance=1e-6)
        assert ours.max_neg_value(x.to(dtype)) == theirs.max_neg_value(x.to(dtype))
        assert ours.to(x.to(dtype)) == theirs.to(x.to(dtype))
    assert not ours.l2norm(torch.zeros(1, 4, dtype=torch.float16)).any()  # the original's are NaN
    for module in (theirs, ours):
        assert [module.exists(None), module.exists(0), module.default(None, 3), module.default(0, 3)] == [0, 1, 3, 0]


def test_pieces_of_the_transformer_have_the_originals_values() -> None:
    theirs, ours = pair("transformer")
    x = torch.randn(2, 5, 14, generator=torch.Generator().manual_seed(2))
    assert_close(ours.GEGLU()(x), theirs.GEGLU()(x), tolerance=1e-6)
    assert_close(ours.l2norm(x), theirs.l2norm(x), tolerance=1e-6)
    logits = x[:, 0]
    assert torch.equal(ours.top_k(logits, thres=0.6), theirs.top_k(logits, thres=0.6))
    layer = nn.Dropout(0.5).train()
    assert ours.eval_decorator(lambda model, x: (model.training, x))(layer, 4) == (False, 4)
    assert layer.training
    with pytest.raises(ZeroDivisionError):
        ours.eval_decorator(lambda model: 1 / 0)(layer)
    assert layer.training  # the original stays in eval mode
    assert isinstance(ours.FeedForward(4), nn.Sequential)
    assert ours.Cache._fields == theirs.Cache._fields


STRUCTURES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"LocalTransformer {name}": ("LocalTransformer", MODEL | options) for name, options in TRANSFORMERS.items()},
    **{f"LocalMHA {name}": ("LocalMHA", LAYER | options) for name, options in MHA.items()},
    "LocalAttention": ("LocalAttention", {"window_size": 4, "dim": 6}),
    "LocalAttention without positions": ("LocalAttention", {"window_size": 4}),
    "DynamicPositionBias": ("DynamicPositionBias", {"dim": 3, "heads": 5}),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_modules_parameters_and_buffers(name: str) -> None:
    """In the original's order, too, so that the state of an optimizer fits."""
    cls, arguments = STRUCTURES[name]
    if "global_attn_layer" in arguments:
        arguments = arguments | {"global_attn_layer": Mixer()}
    arguments = arguments | ({"dim": 12} if "num_tokens" in arguments else {})
    theirs = getattr(original("local_attention"), cls)(**arguments)
    ours = getattr(import_module("longspan.compat.local_attention"), cls)(**arguments)
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in theirs.named_modules()]
    for held, wanted in (
        (ours.named_parameters(), theirs.named_parameters()),
        (ours.named_buffers(), theirs.named_buffers()),
    ):
        assert [(n, x.shape) for n, x in held] == [(n, x.shape) for n, x in wanted]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for mine, yours in zip(ours.modules(), theirs.modules(), strict=True):
        if type(yours).__module__.startswith(("torch.", "local_attention.")):
            assert type(mine).__name__ == type(yours).__name__
