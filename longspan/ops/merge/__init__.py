"""A window and one or two memories as parts of one softmax: the mean of their outputs, weighted by exp of their scores.

    s_i = w·q_i + b,    t_i = w'·q_i + b'
    out_i = (exp(l_i) o_i + Σ_r (exp(m_i^r + s_i) r_i + exp(t_i) u)) / (exp(l_i) + Σ_r (exp(m_i^r + s_i) + exp(t_i)))

with o and l the output and log-sum-exp of the window, r and m^r those of a memory, and u the value of a learned sink,
which is seen wherever a memory is. Backward, with p the weight of a part and x its output: dx = p dout, and the
gradient of its score is p (dout·x − dout·out).
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import DifferentiableOp, differentiable_op, refuse_forward_mode

__all__ = ["merge_attention", "why_not_triton"]

LARGEST = 256  # dimension of a head


class MergeInputs(NamedTuple):
    """Tensors of `longspan::merge_attention`, see `merge_attention`."""

    window: Tensor
    window_lse: Tensor
    memory: Tensor
    memory_lse: Tensor
    later: Tensor | None
    later_lse: Tensor | None
    q: Tensor
    weight: Tensor
    bias: Tensor
    value: Tensor | None


class MergeSaved(NamedTuple):
    """What its backward pass takes before them."""

    d_out: Tensor


def merge_attention(
    window: Tensor,
    window_lse: Tensor,
    memory: Tensor,
    memory_lse: Tensor,
    q: Tensor,
    weight: Tensor,
    bias: Tensor,
    value: Tensor | None = None,
    later: Tensor | None = None,
    later_lse: Tensor | None = None,
) -> Tensor:
    """Return the mean of the outputs of a window and of memories. For arguments without `why_not_triton`.

    Args:
        window: Output of the window (B, T, H, E).
        window_lse: Log-sum-exp of its scores, (B, H, T, P) as `ops.window.window_attention_with_lse2` returns it.
        memory: Output of the memory (B, T, H, E).
        memory_lse: Logarithm of its normalizer (B, H, T), `BLIND` where it is empty: neither it nor its sink is seen.
        q: Queries (B, T, H, D).
        weight: w (1, H, D), with a sink w and w' (2, H, D).
        bias: b (1, H), with a sink b and b' (2, H).
        value: u (H, E); None without a sink.
        later: Output of a second memory (B, T, H, E), or None.
        later_lse: Logarithm of its normalizer (B, H, T).

    Returns:
        (B, T, H, E) in the dtype of q.
    """
    args = window, window_lse, memory, memory_lse, later, later_lse, q, weight, bias, value
    if dispatch.eager_untraced(q):
        return _Merge.direct(*args)
    return _Merge.traced(*refuse_forward_mode(*args))


def why_not_triton(q: Tensor, v: Tensor) -> str | None:
    """Return why the parts are joined in eager PyTorch; None if a kernel does."""
    why = dispatch.unavailable(q)
    if why is None and (q.dtype not in dispatch.DTYPES or max(q.shape[3], v.shape[3]) > LARGEST or not q.numel()):
        why = f"queries of {q.dtype}, dimensions {q.shape[3]} and {v.shape[3]}; the kernels take up to {LARGEST}"
    if dispatch.recording is not None:
        dispatch.record("join of window and memory", "merge", why)
    return why


@differentiable_op("longspan::merge_attention", (MergeInputs,), (MergeSaved,), outputs=1, grads=10)
class _Merge(DifferentiableOp):
    @staticmethod
    def forward(*args: Any, traced: bool = True) -> Any:
        out = _kernels().forward(MergeInputs(*args))
        return out if traced else (out,)

    @staticmethod
    def fake(*args: Any) -> Tensor:
        x = MergeInputs(*args)
        return x.q.new_empty(x.window.shape)

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def differentiate(backward: Any, ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        grads = backward(*refuse_forward_mode(d_out, *inputs))
        return tuple([None if x is None else grad for x, grad in zip(inputs, grads, strict=True)])

    @staticmethod
    def backward(*args: Any, traced: bool = True) -> tuple[Tensor, ...]:
        count = len(MergeSaved._fields)
        return _kernels().backward(MergeSaved(*args[:count]), MergeInputs(*args[count:]), traced=traced)

    @staticmethod
    def backward_fake(*args: Any) -> tuple[Tensor, ...]:
        x = MergeInputs(*args[len(MergeSaved._fields) :])
        return tuple([x.q.new_empty(0) if y is None else y.new_empty(y.shape) for y in x])


def _kernels() -> ModuleType:
    return import_module("longspan.ops.merge.triton")
