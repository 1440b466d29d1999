"""Gated linear attention and the gated delta rule: S_t = Diag(α_t) S_{t−1} + k_t u_tᵀ, o_t = S_tᵀ q_t.

The write is u_t = β_t v_t, or by the delta rule u_t = β_t (v_t − (Diag(α_t) S_{t−1})ᵀ k_t). α is one number per token
and head (RetNet, Mamba-2, Gated DeltaNet) or per channel too (GLA, KDA), given as its logarithm. O(T·C·(D + E) + T·D·E)
time in chunks of C tokens. README.md in this folder derives forward and backward.

This file imports names from PyTorch, because `torch` is a module of this package.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, float32, float64

from longspan.ops.common.autograd import DifferentiableOp, differentiable_op
from longspan.ops.gated import torch as torch_chunk

__all__ = ["LOG_UNDERFLOW", "gated_linear"]

# exp of less than this is 0 in float32 and float64.
LOG_UNDERFLOW = {float32: -104.0, float64: -746.0}


class GatedInputs(NamedTuple):
    """Tensors of `longspan::gated_linear`."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None
    state: Tensor | None


class GatedProblem(NamedTuple):
    """Options of `longspan::gated_linear`."""

    delta: bool
    scale: float


class GatedSaved(NamedTuple):
    """What `longspan::gated_linear_backward` takes before the inputs."""

    d_out: Tensor
    d_state: Tensor | None
    starts: Tensor


def gated_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    delta: bool = False,
    scale: float = 1.0,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute gated linear attention, or the gated delta rule, and the state after it.

    A token with k = 0, log_decay = 0 and beta = 0 leaves the state as it is: padding is such a token.

    Args:
        q: Queries (B, T, H, D).
        k: Keys (B, T, Hkv, D). The delta rule is stable for keys of norm 1 at most and beta from 0 to 2.
        v: Values (B, T, Hkv, E).
        log_decay: log α, (B, T, Hkv, 1) or (B, T, Hkv, D) float32 (float64 if k is), not positive; None for α = 1.
        beta: The strength of a write, (B, T, Hkv) in the dtype of log_decay; None for 1.
        delta: Whether to follow the delta rule.
        scale: Factor of the queries.
        state: (B, Hkv, D, E) before the first token, in the dtype of log_decay; zeros unless given.

    Returns:
        The outputs (B, T, H, E) in the dtype of v, and the state after the last token.
    """
    return _GatedLinear.traced(q, k, v, log_decay, beta, state, delta, scale)[:2]


@differentiable_op(
    "longspan::gated_linear", (GatedInputs, GatedProblem), (GatedSaved,), outputs=3, grads=6, differentiable=2
)
class _GatedLinear(DifferentiableOp):
    """The outputs, the state after them, and the states before each span of chunks."""

    @staticmethod
    def forward(*args: Any, traced: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        return torch_chunk.forward(*_problem(args))

    @staticmethod
    def fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, _ = _problem(args)
        starts = torch_chunk.new_starts(x)
        B, Hkv = x.k.shape[0], x.k.shape[2]
        state = starts.new_empty(B, Hkv, *starts.shape[2:])
        return x.v.new_empty(*x.q.shape[:3], x.v.shape[3]), state, starts

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        count = len(GatedInputs._fields)
        ctx.save_for_backward(output[2], *inputs[:count])
        ctx.problem = inputs[count:]
        ctx.set_materialize_grads(False)

    @staticmethod
    def differentiate(
        backward: Any, ctx: Any, d_out: Tensor | None, d_state: Tensor | None = None, *_: None
    ) -> tuple[Tensor | None, ...]:
        starts, *inputs = ctx.saved_tensors
        x = GatedInputs(*inputs)
        if d_out is None:
            d_out = x.v.new_zeros(*x.q.shape[:3], x.v.shape[3])
        grads = backward(d_out, d_state, starts, *x, *ctx.problem)
        given = [None if tensor is None else grad for grad, tensor in zip(grads, x, strict=True)]
        return *given, *[None] * len(ctx.problem)

    @staticmethod
    def backward(*args: Any, traced: bool = True) -> tuple[Tensor, ...]:
        """Return the gradients of the inputs; empty tensors for those that were not given."""
        count = len(GatedSaved._fields)
        saved, (x, problem) = GatedSaved(*args[:count]), _problem(args[count:])
        grads = torch_chunk.backward(saved.d_out, saved.d_state, saved.starts, x, problem)
        return tuple(saved.starts.new_empty(0) if grad is None else grad for grad in grads)

    @staticmethod
    def backward_fake(*args: Any) -> tuple[Tensor, ...]:
        count = len(GatedSaved._fields)
        starts, (x, _) = args[count - 1], _problem(args[count:])
        first = starts.new_empty(x.k.shape[0], x.k.shape[2], *starts.shape[2:])
        given = [starts.new_empty(0) if y is None else y.new_empty(y.shape) for y in x[:5]]
        return *given, first


def _problem(args: tuple[Any, ...]) -> tuple[GatedInputs, GatedProblem]:
    count = len(GatedInputs._fields)
    return GatedInputs(*args[:count]), GatedProblem(*args[count:])
