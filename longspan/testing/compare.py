"""Random inputs for a mechanism, and how results and gradients are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from longspan.protocol import Mechanism, State

EXACT = 1e-9
Inputs = dict[str, Any]


def draw_inputs(
    m: Mechanism, batch: int, queries: int, keys: int | None = None, dtype: torch.dtype = torch.float64
) -> Inputs:
    """Return random q, k, v, and gates where the mechanism has any, as arguments of `Mechanism.forward`."""
    keys = queries if keys is None else keys
    shapes = {
        "q": (batch, queries, m.num_heads, m.head_dim),
        "k": (batch, keys, m.num_kv_heads, m.head_dim),
        "v": (batch, keys, m.num_kv_heads, m.value_dim),
    }
    if m.num_gates:
        shapes["gates"] = batch, keys, m.num_kv_heads, m.num_gates
    return {name: torch.randn(shape, dtype=dtype) for name, shape in shapes.items()}


def require_grad(inputs: Mapping[str, Tensor]) -> Inputs:
    """Return detached inputs that require gradients."""
    return {name: x.detach().requires_grad_() for name, x in inputs.items()}


def tokens(inputs: Mapping[str, Tensor], start: int | None, stop: int | None = None) -> Inputs:
    """Return the tokens from start to stop of every input."""
    return {name: x[:, start:stop] for name, x in inputs.items()}


def without_queries(inputs: Mapping[str, Tensor]) -> Inputs:
    """Return what `Mechanism.write` takes."""
    return {name: x for name, x in inputs.items() if name != "q"}


def fill_hidden(inputs: Mapping[str, Tensor], mask: Tensor) -> Inputs:
    """Return inputs with hidden slots of mask (B, T) set to NaN, that require gradients."""
    return require_grad({name: x.masked_fill(~mask[:, :, None, None], float("nan")) for name, x in inputs.items()})


def padding_mask(lengths: Sequence[int], size: int, side: str = "right") -> Tensor:
    """Return a mask (B, size) of rows with these numbers of tokens, padded on one side."""
    slot, number = torch.arange(size), torch.tensor(lengths)[:, None]
    return slot < number if side == "right" else slot >= size - number


def run_steps(m: Mechanism, state: State, inputs: Mapping[str, Tensor]) -> tuple[Tensor, State]:
    """Return the outputs of `Mechanism.step` for every token, and the state after them."""
    outs = []
    for t in range(inputs["q"].shape[1]):
        out, state = m.step(state, **tokens(inputs, t, t + 1))
        outs.append(out)
    return torch.cat(outs, 1), state


def snapshot(state: State) -> dict[str, Tensor]:
    """Return a copy of a state's tensors."""
    return {name: x.detach().clone() for name, x in state.tensors().items()}


def assert_unchanged(state: State, before: Mapping[str, Tensor]) -> None:
    """Assert that a state's tensors are those of a snapshot, bit for bit."""
    for name, x in state.tensors().items():
        assert torch.equal(x, before[name]), f"{name} has changed"


def assert_same(got: Tensor, expected: Tensor, what: str = "output") -> None:
    """Assert equality to 1e-9, relative to the larger of 1 and the largest value; NaN equals nothing."""
    torch.testing.assert_close(got, expected, atol=EXACT, rtol=EXACT, msg=lambda text: f"{what}: {text}")


def gradients(out: Tensor, of: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of a fixed random combination of `out`; zeros where there is no path."""
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(out.dtype)
    if not out.requires_grad:
        return {name: torch.zeros_like(x) for name, x in of.items()}
    found = torch.autograd.grad((out * weight).sum(), list(of.values()), allow_unused=True, retain_graph=True)
    return {
        name: torch.zeros_like(x) if grad is None else grad for (name, x), grad in zip(of.items(), found, strict=True)
    }


def assert_same_gradients(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Assert that gradients are equal by name to 1e-9; names all that are not."""
    assert got.keys() == expected.keys()
    wrong = []
    for name, want in expected.items():
        scale = max(1.0, want.abs().max().item()) if want.numel() else 1.0
        difference = (got[name] - want).abs().max().item() if want.numel() else 0.0
        if not difference <= EXACT * scale:
            wrong.append(f"{name}: differs by {difference:.3g} (largest value {scale:.3g})")
    assert not wrong, "gradients differ: " + "; ".join(wrong)


def assert_equal_with_gradients(
    m: nn.Module,
    got: Tensor,
    expected: Tensor,
    inputs: Mapping[str, Tensor],
    others: Mapping[str, Tensor] | None = None,
) -> None:
    """Assert that two outputs agree, and their gradients with respect to inputs and parameters.

    Args:
        m: The mechanism.
        got: Its output.
        expected: What it must be.
        inputs: What `got` was computed from.
        others: What `expected` was computed from, by the same names; the same inputs unless given.
    """
    assert_same(got, expected)
    parameters = dict(m.named_parameters())
    mine, theirs = ({**x, **parameters} for x in (inputs, inputs if others is None else others))
    assert_same_gradients(gradients(got, mine), gradients(expected, theirs))
