"""The chunked form of gated linear attention and the delta rule equals the recurrence, ours and the field's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from older import original
from torch import Tensor

from longspan.ops.gated import gated_linear, reference

B, H, Hkv, D, E = 2, 6, 2, 5, 7
F64 = torch.float64


def draw(T: int, *, width: int | None, delta: bool, beta: bool = True, dtype: torch.dtype = F64) -> dict[str, Any]:
    """q, k, v, log_decay (of this width), beta and a state, with tokens that forget all or nearly everything."""
    k = torch.randn(B, T, Hkv, D, dtype=dtype)
    x: dict[str, Any] = {
        "q": torch.randn(B, T, H, D, dtype=dtype),
        "k": k / k.norm(dim=-1, keepdim=True) if delta else k,
        "v": torch.randn(B, T, Hkv, E, dtype=dtype),
        "log_decay": None,
        "beta": torch.rand(B, T, Hkv, dtype=dtype) * 2 if beta else None,
        "state": torch.randn(B, Hkv, D, E, dtype=dtype),
    }
    if width is not None:
        x["log_decay"] = -2 * torch.rand(B, T, Hkv, width, dtype=dtype)
        x["log_decay"][:, T // 2] = -100
        x["log_decay"][:, T // 3] = -1e30
    return x


def with_gradients(x: dict[str, Any], out: Tensor, state: Tensor, weights: tuple[Tensor, Tensor]) -> list[Tensor]:
    given = [y for y in x.values() if y is not None]
    loss = (out * weights[0]).sum() + (state * weights[1]).sum()
    return [out, state, *torch.autograd.grad(loss, given)]


@pytest.mark.parametrize("delta", [False, True], ids=["decay", "delta"])
@pytest.mark.parametrize("width", [None, 1, D])
@pytest.mark.parametrize("T", [1, 17, 63, 65, 130, 577])
def test_chunks_equal_the_recurrence(T: int, width: int | None, delta: bool) -> None:
    x = draw(T, width=width, delta=delta, beta=T != 63)
    for y in x.values():
        if y is not None:
            y.requires_grad_()
    out, state = gated_linear(**x, delta=delta, scale=0.7)
    weights = torch.randn_like(out), torch.randn_like(state)
    got = with_gradients(x, out, state, weights)
    q, others = x["q"] * 0.7, {name: y for name, y in x.items() if name != "q"}
    expected = with_gradients(x, *reference.gated_linear(q, **others, delta=delta), weights)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("delta", [False, True], ids=["decay", "delta"])
@pytest.mark.parametrize("width", [1, D])
def test_strong_decay_costs_no_accuracy(width: int, delta: bool) -> None:
    """In float32, after tokens that forget everything; the recurrence itself is as far from the truth."""
    x = draw(130, width=width, delta=delta, dtype=torch.float32)
    for step, value in ((3, -104), (7, -1e30), (11, -math.inf)):
        x["log_decay"][:, ::step] = value
    exact = reference.gated_linear(*(y.double() for y in list(x.values())[:5]), delta=delta, state=x["state"].double())
    for got, plain, truth in zip(gated_linear(**x, delta=delta), _plain(x, delta), exact, strict=True):
        error, plain_error = ((y.double() - truth).abs().max().item() for y in (got, plain))
        assert error <= 2 * plain_error + torch.finfo(torch.float32).eps * truth.abs().max().item()


def _plain(x: dict[str, Any], delta: bool) -> tuple[Tensor, Tensor]:
    return reference.gated_linear(*list(x.values())[:5], delta=delta, state=x["state"])


@pytest.mark.parametrize("delta", [False, True], ids=["decay", "delta"])
@pytest.mark.parametrize("width", [1, D])
@pytest.mark.parametrize("forgets", [-104, -math.inf])
@pytest.mark.parametrize("at", [0, 21, 40])
def test_what_is_forgotten_has_no_weight(at: int, forgets: float, width: int, delta: bool) -> None:
    """A state and values near the largest float32, in the chunk of a token that forgets them and in one before."""
    x = draw(70, width=width, delta=delta, dtype=torch.float32)
    x["log_decay"] = -torch.rand_like(x["log_decay"])
    x["log_decay"][:, at] = forgets
    x["state"] *= 1e37
    x["v"][:, :at] *= 1e36
    out, state = gated_linear(**x, delta=delta)
    rest = {name: torch.zeros_like(y) if name == "state" else y[:, at:] for name, y in x.items()}
    expected = gated_linear(**rest, delta=delta)
    for got, alone in zip((out[:, at:], state), expected, strict=True):
        torch.testing.assert_close(got, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("delta", [False, True], ids=["decay", "delta"])
def test_gated_linear_is_a_proper_operator(delta: bool) -> None:
    x = {name: y.requires_grad_() for name, y in draw(65, width=1, delta=delta, dtype=torch.float32).items()}
    torch.library.opcheck(torch.ops.longspan.gated_linear.default, (*x.values(), delta, 0.5, "torch"))
    x["log_decay"] = x["beta"] = x["state"] = None
    torch.library.opcheck(torch.ops.longspan.gated_linear.default, (*x.values(), delta, 0.5, "torch"))


def test_padding_leaves_the_state_as_it_is() -> None:
    x = draw(9, width=D, delta=True)
    whole = gated_linear(**x, delta=True)[1]
    padded = {name: y if name == "state" else torch.cat([y, torch.zeros_like(y)], 1) for name, y in x.items()}
    torch.testing.assert_close(gated_linear(**padded, delta=True)[1], whole, atol=1e-12, rtol=1e-12)


# For each recurrence of flash-linear-attention: its name, width and name of log_decay, whether heads come first.
FLA = {
    "simple_gla": ("naive_recurrent_simple_gla", 1, "g", False),
    "gla": ("naive_recurrent_gla", D, "gk", False),
    "delta_rule": ("delta_rule_recurrence", None, "", True),
    "gated_delta_rule": ("naive_recurrent_gated_delta_rule", 1, "g", False),
    "kda": ("naive_recurrent_kda", D, "g", False),
}


@pytest.mark.parametrize("name", FLA)
def test_flash_linear_attention_agrees(name: str) -> None:
    function, width, decay, heads_first = FLA[name]
    run, delta = getattr(original(f"fla.ops.{name}.naive"), function), "gla" not in name
    x = draw(67, width=width, delta=delta, dtype=torch.float32)
    x |= {"q": x["q"][:, :, :Hkv], "beta": x["beta"] / 2 if delta else None}
    out, state = gated_linear(**x, delta=delta, scale=D**-0.5)
    given = {key: x[key] for key in ("q", "k", "v", "beta") if x[key] is not None}
    if width is not None:
        given[decay] = x["log_decay"] if width > 1 else x["log_decay"][..., 0]
    if heads_first:
        given = {key: y.transpose(1, 2) for key, y in given.items()}
    got, final = run(**given, initial_state=x["state"], output_final_state=True)
    torch.testing.assert_close(got.transpose(1, 2) if heads_first else got, out, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(final, state, atol=1e-5, rtol=1e-5)
