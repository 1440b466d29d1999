"""Queries, keys and values of the parts of a layer from one product: RMS norm, rotation, division of heads.

For a head x of the queries or keys with r = 1 / √(x·x / D + ε), y = w ∘ r x is rotated by the angles of its position if
its part is. With the gradient dy, rotated back, and g = w ∘ dy,

    dx = r (g − x r² (g·x) / D),    dw = Σ dy ∘ r x.

Values are copied. The kernels read the product once and write each part's heads contiguously; the backward pass reads
the gradients of all of them and writes that of the product, for which inductor would concatenate. Only the product and
the parameters are saved.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.ops.common import dispatch
from longspan.ops.common.autograd import DifferentiableOp, differentiable_op, group, lazy_module, refuse_forward_mode
from longspan.ops.common.batches import split_batch

_kernels = lazy_module("longspan.ops.heads.triton")

Heads = tuple[Tensor, Tensor, Tensor]  # q, k and v of a part
TOKENS = 32  # of a tile
PARTS = 128  # programs of a head in the backward pass, at most


def num_parts(tokens: int) -> int:
    """Return the number of programs of a head in the backward pass, each with a part of the weights' gradients."""
    return min(PARTS, -(-tokens // TOKENS))


def divide_heads(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    sizes: tuple[int, ...],
    rotated: tuple[bool, ...],
    cos_sin: tuple[Tensor, Tensor] | None,
    epsilon: float,
) -> list[Heads] | None:
    """Return normalized queries and keys, rotated where a part is, and values of each part.

    Args:
        x: (B, T, 3 · H · D): queries, keys and values side by side.
        weights: Of the RMS norm of queries, and of keys: (D,).
        sizes: Heads of each part; one or two parts.
        rotated: Whether each part is rotated.
        cos_sin: (T, D / 2) each, of the angles by which feature i is rotated with feature i + D / 2. None: no part is.
        epsilon: ε of the norms.

    Returns:
        (B, T, heads, D) three times for each part, in the dtype of x; None if no kernel supports the arguments.
    """
    why = why_not_triton(x, weights, sizes, rotated, cos_sin)
    if dispatch.recording is not None:
        dispatch.record("norm and rotation of heads", "heads", why)
    if why is not None:
        return None
    cos, sin = (None, None) if cos_sin is None else cos_sin
    flags = (*rotated, False)[:2]

    def run(x: Tensor) -> tuple[Tensor, ...]:
        arguments = x, *weights, cos, sin, sum(sizes), sizes[0], *flags, epsilon
        outputs: tuple[Tensor, ...] = _DivideHeads.traced(*refuse_forward_mode(*arguments))
        return outputs

    found = split_batch(run, dispatch.LARGEST_AXIS * TOKENS // x.shape[1], x)
    return [(found[i], found[i + 1], found[i + 2]) for i in range(0, 3 * len(sizes), 3)]


def divide_heads_torch(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    sizes: tuple[int, ...],
    rotated: tuple[bool, ...],
    cos_sin: tuple[Tensor, Tensor] | None,
    epsilon: float,
) -> list[Heads]:
    """Compute `divide_heads` in eager PyTorch, in float32 or wider: the definition."""
    wide = torch.promote_types(x.dtype, torch.float32)
    q, k, v = x.unflatten(2, (3, sum(sizes), -1)).unbind(2)
    parts: list[list[Tensor]] = []
    for heads, weight in zip((q, k), weights, strict=True):
        y = heads.to(wide)
        y = y * (y.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight.to(wide)
        found = []
        for part, rotate in zip(y.split(list(sizes), 2), rotated, strict=True):
            if rotate and cos_sin is not None:
                cos, sin = (angle.to(wide)[:, None] for angle in cos_sin)
                a, b = part.chunk(2, -1)
                part = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
            found.append(part.to(x.dtype))
        parts.append(found)
    return list(zip(*parts, v.split(list(sizes), 2), strict=True))


def why_not_triton(
    x: Tensor,
    weights: tuple[Tensor, Tensor],
    sizes: tuple[int, ...],
    rotated: tuple[bool, ...],
    cos_sin: tuple[Tensor, Tensor] | None,
) -> str | None:
    """Return why no kernel supports the arguments of `divide_heads`; None if one does."""
    if (why := dispatch.unavailable(x)) is not None:
        return why
    D = weights[0].numel()
    if x.dtype not in dispatch.DTYPES:
        return f"x is {x.dtype}; the kernels take bfloat16, float16 and float32"
    if len(sizes) > 2:
        return f"there are {len(sizes)} parts; the kernels take two"
    if D % 2 or D > dispatch.LARGEST:
        return f"head dimension {D} is odd, or over {dispatch.LARGEST}"
    if x.shape[2] != 3 * sum(sizes) * D:
        return "queries, keys and values have different numbers of heads or head dimensions"
    if any(rotated) and (cos_sin is None or cos_sin[0].shape != (x.shape[1], D // 2)):
        return "rows have positions of their own, or only some of the features are rotated"
    if not x.numel():
        return "an empty tensor"
    return dispatch.large_axis(-(-x.shape[1] // TOKENS), f"tiles of {TOKENS} tokens")


class HeadsInputs(NamedTuple):
    """Arguments of `longspan::divide_heads`. heads: H; first: heads of the first part."""

    x: Tensor
    weight_q: Tensor
    weight_k: Tensor
    cos: Tensor | None
    sin: Tensor | None
    heads: int
    first: int
    rotate_first: bool
    rotate_second: bool
    epsilon: float


class HeadsSaved(NamedTuple):
    """What its backward pass takes before them: the gradients of the parts."""

    d_q_first: Tensor
    d_k_first: Tensor
    d_v_first: Tensor
    d_q_second: Tensor
    d_k_second: Tensor
    d_v_second: Tensor


@differentiable_op(
    "longspan::divide_heads",
    (HeadsInputs,),
    (HeadsSaved,),
    outputs=6,
    grads=2,
    leaves=(0, 1, 2),
    differentiable=6,
)
class _DivideHeads(DifferentiableOp):
    @staticmethod
    def forward(*args: Any, traced: bool = True) -> tuple[Tensor, ...]:
        return _kernels().forward(HeadsInputs(*args))

    @staticmethod
    def fake(*args: Any) -> tuple[Tensor, ...]:
        inputs = HeadsInputs(*args)
        (B, T, _), sizes = inputs.x.shape, (inputs.first, inputs.heads - inputs.first)
        return tuple(inputs.x.new_empty(B, T, n, inputs.weight_q.shape[0]) for n in sizes for _ in range(3))

    @staticmethod
    def visible(outputs: tuple[Any, ...]) -> Any:
        return outputs

    @staticmethod
    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.options = inputs[5:]

    @staticmethod
    def differentiate(backward: Any, ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        _, weight_q, weight_k, *_ = ctx.saved_tensors
        d_x, parts = backward(*refuse_forward_mode(*grads, *ctx.saved_tensors), *ctx.options)
        d_q, d_k = parts.sum(0).unbind()  # outside of the op, for a compiler to fuse
        return d_x, d_q.to(weight_q.dtype), d_k.to(weight_k.dtype), *[None] * 7

    @staticmethod
    def backward(*args: Any, traced: bool = True) -> tuple[Tensor, Tensor]:
        return _kernels().backward(*group(args, HeadsSaved, HeadsInputs))

    @staticmethod
    def backward_fake(*args: Any) -> tuple[Tensor, Tensor]:
        _, inputs = group(args, HeadsSaved, HeadsInputs)
        x, weight = inputs.x, inputs.weight_q
        parts = inputs.heads * num_parts(x.shape[0] * x.shape[1])
        return x.new_empty(x.shape), weight.new_empty(parts, 2, *weight.shape, dtype=torch.float32)
