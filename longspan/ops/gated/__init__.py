"""Gated linear attention and the gated delta rule: S_t = Diag(α_t) S_{t−1} + k_t u_tᵀ, o_t = S_tᵀ q_t.

The write is u_t = β_t v_t, or by the delta rule u_t = β_t (v_t − (Diag(α_t) S_{t−1})ᵀ k_t). α is one number per token
and head (RetNet, Mamba-2, Gated DeltaNet) or per channel too (GLA, KDA), given as its logarithm. O(T·C·(D + E) + T·D·E)
time in chunks of C tokens. README.md in this folder derives forward and backward.

`torch` computes this on any device; `triton` on CUDA, by one of three algorithms: "decay" and "delta" for a decay per
head, "channel" for one per channel. Which one runs is decided once per call, by `choose_algorithm`.

This file imports names from PyTorch, because `torch` is a module of this package.
"""

from __future__ import annotations

from functools import cache, partial
from importlib import import_module
from typing import Any, Literal, NamedTuple

from torch import Tensor, bfloat16, float32

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import (
    DifferentiableOp,
    differentiable_op,
    refuse_forward_mode,
    run_planned,
    without_autocast,
)
from longspan.ops.common.batches import split_batch
from longspan.ops.common.plans import cached, signature
from longspan.ops.common.torch_private import is_exporting
from longspan.ops.gated import torch as torch_chunk
from longspan.ops.gated.torch import LOG_UNDERFLOW
from longspan.ops.gated.triton import ALGORITHMS, decay_chunk

__all__ = ["LOG_UNDERFLOW", "gated_linear", "gated_linear_out", "why_not_triton"]


class GatedInputs(NamedTuple):
    """Tensors of `longspan::gated_linear`."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None
    state: Tensor | None


class GatedProblem(NamedTuple):
    """Options of `longspan::gated_linear` and the algorithm that computes it: "torch" or a module of `triton`."""

    delta: bool
    scale: float
    algorithm: str


class GatedSaved(NamedTuple):
    """What `longspan::gated_linear_backward` takes before the inputs. starts: the states before each span of `torch`,
    or the kernels' workspace.
    """

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
            -inf, or any number whose exponential is 0, forgets everything.
        beta: The strength of a write, (B, T, Hkv) in the dtype of log_decay; None for 1.
        delta: Whether to follow the delta rule.
        scale: Factor of the queries.
        state: (B, Hkv, D, E) before the first token, in the dtype of log_decay or wider; zeros unless given.

    Returns:
        The outputs (B, T, H, E) in the dtype of v, and the state after the last token.
    """
    x = GatedInputs(q, k, v, log_decay, beta, state)
    problem = GatedProblem(delta, scale, choose_algorithm(x, delta))
    out, after = split_batch(partial(_run, problem), _most_rows(q, problem.algorithm), *x)
    return out, after


def _run(problem: GatedProblem, q: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    if problem.algorithm != "torch" and dispatch.eager_untraced(q):
        results: tuple[Tensor, ...] = _GatedLinear.direct(q, *others, *problem)
    else:
        # In torch.export PyTorch's own operations, which other runtimes support.
        plain = problem.algorithm == "torch" and is_exporting()
        results = (_GatedLinear.forward if plain else _GatedLinear.traced)(*refuse_forward_mode(q, *others), *problem)
    return results[:2]


def gated_linear_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    delta: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """`gated_linear` without a state before or after it, which takes less time on the host."""
    if dispatch.recording is None and dispatch.eager_untraced(q):
        x = GatedInputs(q, k, v, log_decay, beta, None)
        plan = cached((_StatelessGated, q.get_device(), signature(*x), delta, scale), _eager_plan, x, delta, scale)
        if plan:
            return run_planned(plan, *x)
    return gated_linear(q, k, v, log_decay=log_decay, beta=beta, delta=delta, scale=scale)[0]


class _StatelessGated:
    """Eager calls without a state of tensors of one signature, see `EagerPlan`."""

    def __init__(self, problem: GatedProblem) -> None:
        self.problem, self.kernels = problem, _kernels(problem.algorithm)

    def forward(self, *x: Any) -> tuple[Tensor, tuple[Tensor]]:
        out, _, starts = self.kernels.forward(GatedInputs(*x), self.problem, zeroed=False)
        return out, (starts,)

    def backward(self, d_out: Tensor, starts: Tensor, *x: Any) -> tuple[Tensor | None, ...]:
        saved = GatedSaved(d_out, None, starts)
        grads: tuple[Tensor | None, ...] = self.kernels.backward(saved, GatedInputs(*x), self.problem)
        return grads


def _eager_plan(x: GatedInputs, delta: bool, scale: float) -> _StatelessGated | Literal[False]:
    """Return the plan of a call without a state; False if there is none."""
    algorithm = choose_algorithm(x, delta)
    if algorithm == "torch" or x.q.shape[0] > _most_rows(x.q, algorithm):
        return False
    return _StatelessGated(GatedProblem(delta, scale, algorithm))


def _most_rows(q: Tensor, algorithm: str) -> int:
    """Return the most rows of the batch that one call computes."""
    return dispatch.LARGEST_AXIS if algorithm == "decay" else q.shape[0]


def choose_algorithm(x: GatedInputs, delta: bool) -> str:
    """Return the algorithm that computes `longspan::gated_linear`: "torch" or a module of `triton`."""
    why = why_not_triton(x, delta)
    algorithm = "torch" if why is not None else triton_algorithm(x, delta)
    if dispatch.recording is not None:
        dispatch.record("gated linear attention", algorithm, why)
    return algorithm


def triton_algorithm(x: GatedInputs, delta: bool) -> str:
    """Return the Triton module for inputs that the kernels take: "decay", "delta" or "channel"."""
    if x.log_decay is not None and x.log_decay.shape[3] > 1:
        return "channel"
    return "delta" if delta else "decay"


def why_not_triton(x: GatedInputs, delta: bool) -> str | None:
    """Return why these inputs run in eager PyTorch; None if they run on the kernels."""
    why = dispatch.unavailable(x.q) or why_unsupported(x, delta)
    if why is not None or (needed := _shared_memory(x, triton_algorithm(x, delta))) is None:
        return why
    return dispatch.insufficient_shared_memory(x.q, needed)


def _shared_memory(x: GatedInputs, algorithm: str) -> int | None:
    """Return the shared memory in KB that programs need; None where every device has enough."""
    D, E = x.q.shape[3], x.v.shape[3]
    if algorithm == "decay":
        return 147 if max(D, E) > 128 else None
    if D <= 128 or (algorithm == "delta" and x.q.dtype != bfloat16):
        return None
    return 132 if algorithm == "delta" else 120


def why_unsupported(x: GatedInputs, delta: bool) -> str | None:
    """Return what the kernels do not support about these inputs, whatever the device."""
    if (why := dispatch.unsupported_dtypes(x.q, x.k, x.v)) is not None:
        return why
    for name, y in zip(GatedInputs._fields[3:], x[3:], strict=True):
        if y is not None and y.dtype != float32:
            return f"{name} is {str(y.dtype).removeprefix('torch.')}; the kernels take float32"
    D, E = x.q.shape[3], x.v.shape[3]
    if max(D, E) > dispatch.LARGEST:
        return f"head or value dimension ({D}, {E}) is over {dispatch.LARGEST}"
    if x.q.shape[1] == 1:
        return "a single token"
    if not x.q.numel() or not x.v.numel():
        return "an empty tensor"
    if (algorithm := triton_algorithm(x, delta)) not in ALGORITHMS:
        return f"the algorithm {algorithm!r}; there are kernels for {', '.join(ALGORITHMS) or 'none'}"
    if algorithm == "decay":
        chunk = decay_chunk(x.q.dtype)
        return dispatch.large_axis(-(-x.q.shape[1] // chunk), f"chunks of {chunk} tokens")
    return None


@cache
def _kernels(algorithm: str) -> Any:
    """Import a module of `triton`, which need not be installed."""
    return import_module(f"longspan.ops.gated.triton.{algorithm}")


@differentiable_op(
    "longspan::gated_linear", (GatedInputs, GatedProblem), (GatedSaved,), outputs=3, grads=6, differentiable=2
)
class _GatedLinear(DifferentiableOp):
    """The outputs, the state after them, and what is saved for the backward pass."""

    @staticmethod
    def forward(*args: Any, traced: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        x, problem = _problem(args)
        if problem.algorithm == "torch":
            return torch_chunk.forward(x, problem)
        out, state, saved = _kernels(problem.algorithm).forward(x, problem, zeroed=traced)
        return out, state, saved

    @staticmethod
    def fake(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, problem = _problem(args)
        (B, _, Hkv, D), E = x.k.shape, x.v.shape[3]
        state = x.k.new_empty(B, Hkv, D, E, dtype=torch_chunk.state_dtype(x))
        if problem.algorithm == "torch":
            starts = torch_chunk.new_starts(x)
        elif dispatch.recording is not None:  # The kernels are not launched.
            starts = state.new_empty(0)
        else:
            starts = state.new_empty(_kernels(problem.algorithm).saved_size(x, problem))
        return x.v.new_empty(*x.q.shape[:3], E), state, starts

    @staticmethod
    def visible(outputs: tuple[Any, ...]) -> Any:
        return outputs[:2]

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
        grads = backward(*refuse_forward_mode(d_out, d_state, starts, *x), *ctx.problem)
        given = [None if tensor is None else grad for grad, tensor in zip(grads, x, strict=True)]
        return *given, *[None] * len(ctx.problem)

    @staticmethod
    def backward(*args: Any, traced: bool = True) -> tuple[Tensor, ...]:
        """Return the gradients of the inputs; empty tensors for those that were not given."""
        count = len(GatedSaved._fields)
        saved, (x, problem) = GatedSaved(*args[:count]), _problem(args[count:])
        run = torch_chunk.backward if problem.algorithm == "torch" else _kernels(problem.algorithm).backward
        with without_autocast(x.q):
            grads = zip(run(saved, x, problem), x, strict=True)
        # torch.library takes no None.
        return tuple([saved.starts.new_empty(0) if y is None and traced else grad for grad, y in grads])

    @staticmethod
    def backward_fake(*args: Any) -> tuple[Tensor, ...]:
        count = len(GatedSaved._fields)
        starts, (x, _) = args[count - 1], _problem(args[count:])
        return tuple(starts.new_empty(0) if y is None else y.new_empty(y.shape) for y in x)


def _problem(args: tuple[Any, ...]) -> tuple[GatedInputs, GatedProblem]:
    count = len(GatedInputs._fields)
    return GatedInputs(*args[:count]), GatedProblem(*args[count:])
