"""L2 norm of queries and keys, as the delta rule takes them: y = x r with r = 1 / √(x·x + ε).

The gradient is dx = r (dy − (y·dy) y): the results and r are saved, the inputs are not.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, float32

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import DifferentiableOp, differentiable_op, lazy_module, refuse_forward_mode
from longspan.ops.decode.torch import KEY_EPSILON
from longspan.ops.linear import sum_dtype

_kernels = lazy_module("longspan.ops.l2_norm.triton")


def l2_normalize(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Divide queries and keys by their lengths, in one launch forward and one backward. Zeros stay zeros.

    Args:
        q: Queries (B, T, H, D).
        k: Keys (B, S, Hkv, D).

    Returns:
        Both, in their dtype, computed in float32 or wider; on a CPU in the dtype of the sums.
    """
    why = why_not_triton(q, k)
    if dispatch.recording is not None:
        dispatch.record("L2 norm", "l2_norm", why)
    if why is not None:
        return l2_normalize_torch(q), l2_normalize_torch(k)
    return _L2Norm.run(q, k)


def l2_normalize_torch(x: Tensor) -> Tensor:
    """Compute `l2_normalize` of one tensor (..., D) in eager PyTorch."""
    y = x.to(sum_dtype(x))
    y = y * (y.square().sum(-1, keepdim=True) + KEY_EPSILON).rsqrt()
    # The kernels take queries, keys and values of one dtype.
    return y.to(x.dtype) if x.is_cuda else y


def why_not_triton(q: Tensor, k: Tensor) -> str | None:
    """Return why these tensors are normalized in eager PyTorch; None if the kernel supports them."""
    return dispatch.unavailable(q) or why_unsupported(q, k)


def why_unsupported(q: Tensor, k: Tensor) -> str | None:
    """Return a reason if the kernel does not support these tensors on any device."""
    if (why := dispatch.unsupported_dtypes(q, k, k)) is not None:
        return why
    if q.shape[3] > dispatch.LARGEST:
        return f"head dimension {q.shape[3]} is over {dispatch.LARGEST}"
    return None if q.numel() and k.numel() else "an empty tensor"


class NormInputs(NamedTuple):
    """Tensors of `longspan::l2_norm`."""

    q: Tensor
    k: Tensor


class NormSaved(NamedTuple):
    """What its backward pass takes before the results, which stand for the inputs. scale: r, of q and then of k."""

    d_q: Tensor
    d_k: Tensor
    scale: Tensor


@differentiable_op("longspan::l2_norm", (NormInputs,), (NormSaved,), outputs=3, grads=2, differentiable=2)
class _L2Norm(DifferentiableOp):
    @staticmethod
    def forward(q: Tensor, k: Tensor, traced: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        return _kernels().forward(q, k)

    @staticmethod
    def fake(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = (q.numel() + k.numel()) // q.shape[3]
        return q.new_empty(q.shape), k.new_empty(k.shape), q.new_empty(rows, dtype=float32)

    @staticmethod
    def visible(outputs: tuple[Any, ...]) -> Any:
        return outputs[:2]

    @staticmethod
    def save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*output)

    @staticmethod
    def differentiate(backward: Any, ctx: Any, d_q: Tensor, d_k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        q, k, scale = ctx.saved_tensors
        d_q, d_k = backward(*refuse_forward_mode(d_q, d_k, scale, q, k))
        return d_q, d_k

    @staticmethod
    def backward(
        d_q: Tensor, d_k: Tensor, scale: Tensor, q: Tensor, k: Tensor, traced: bool = True
    ) -> tuple[Tensor, Tensor]:
        return _kernels().backward(d_q, d_k, scale, q, k)

    @staticmethod
    def backward_fake(d_q: Tensor, d_k: Tensor, scale: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), k.new_empty(k.shape)
