"""A window and a memory as parts of one softmax: the mean of their outputs, weighted by exp of their scores.

    s_i = w·q_i + b,    t_i = w'·q_i + b'
    out_i = (exp(l_i) o_i + exp(m_i + s_i) r_i + exp(t_i) u) / (exp(l_i) + exp(m_i + s_i) + exp(t_i))

with o and l the output and log-sum-exp of the window, r and m those of the memory, and u the value of a learned sink,
which is seen where the memory is. Backward, with p the weight of a part and x its output: dx = p dout, and the gradient
of its score is p (dout·x − dout·out).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import DifferentiableOp, differentiable_op, group, lazy_module, refuse_forward_mode
from longspan.ops.common.batches import split_batch

__all__ = ["merge_attention", "why_not_triton"]

_kernels = lazy_module("longspan.ops.merge.triton")

LARGEST = 256  # dimension of a head


class MergeInputs(NamedTuple):
    """Tensors of `longspan::merge_attention`, see `merge_attention`."""

    window: Tensor
    window_lse: Tensor
    memory: Tensor
    memory_lse: Tensor
    q: Tensor
    weight: Tensor
    bias: Tensor
    value: Tensor | None


class MergeSaved(NamedTuple):
    """What its backward pass takes before them."""

    d_out: Tensor
    out: Tensor


def merge_attention(
    window: Tensor,
    window_lse: Tensor,
    memory: Tensor,
    memory_lse: Tensor,
    q: Tensor,
    weight: Tensor,
    bias: Tensor,
    value: Tensor | None = None,
) -> Tensor:
    """Return the mean of a window's and a memory's outputs. For arguments without `why_not_triton`.

    Args:
        window: Output of the window (B, T, H, E).
        window_lse: Log-sum-exp of its scores (B, T, H), `BLIND` where there is no key.
        memory: Output of the memory (B, T, H, E).
        memory_lse: Logarithm of its normalizer (B, T, H), `BLIND` where it is empty: neither it nor the sink is seen.
        q: Queries (B, T, H, D).
        weight: w (1, H, D), with a sink w and w' (2, H, D).
        bias: b (1, H), with a sink b and b' (2, H).
        value: u (H, E); None without a sink.

    Returns:
        (B, T, H, E) in the dtype of q.
    """

    def run(*tensors: Tensor | None) -> tuple[Tensor]:
        return (_Merge.run(*tensors, weight, bias, value),)

    return split_batch(run, dispatch.LARGEST_AXIS // q.shape[2], window, window_lse, memory, memory_lse, q)[0]


def why_not_triton(q: Tensor, v: Tensor) -> str | None:
    """Return why the parts are joined in eager PyTorch; None if a kernel does."""
    why = dispatch.unavailable(q)
    if why is None and (q.dtype not in dispatch.DTYPES or max(q.shape[3], v.shape[3]) > LARGEST or not q.numel()):
        why = f"queries of {q.dtype}, dimensions {q.shape[3]} and {v.shape[3]}; the kernels take up to {LARGEST}"
    if why is None:
        why = dispatch.large_axis(q.shape[2], "heads")
    if dispatch.recording is not None:
        dispatch.record("join of window and memory", "merge", why)
    return why


@differentiable_op("longspan::merge_attention", (MergeInputs,), (MergeSaved,), outputs=1, grads=8)
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
        ctx.save_for_backward(output[0] if isinstance(output, tuple) else output, *inputs)

    @staticmethod
    def differentiate(backward: Any, ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        out, *inputs = ctx.saved_tensors
        *grads, d_value = backward(*refuse_forward_mode(d_out, out, *inputs))
        return *grads, None if inputs[7] is None else d_value

    @staticmethod
    def backward(*args: Any, traced: bool = True) -> tuple[Tensor, ...]:
        return _kernels().backward(*group(args, MergeSaved, MergeInputs))

    @staticmethod
    def backward_fake(*args: Any) -> tuple[Tensor, ...]:
        _, x = group(args, MergeSaved, MergeInputs)
        B, T, H = x.window_lse.shape
        lse = [y.new_empty(B, H, T).transpose(1, 2) for y in (x.window_lse, x.memory_lse)]
        outs = [y.new_empty(y.shape) for y in (x.window, x.memory, x.q, x.weight, x.bias)]
        value = x.weight.new_empty(0) if x.value is None else x.value.new_empty(x.value.shape)
        return outs[0], lse[0], outs[1], lse[1], *outs[2:], value
