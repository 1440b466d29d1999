"""Backward passes of some rows of a batch at a time, where the workspace of all rows would be large."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from longspan.ops.common.launch import Signature, new_like

# The memory that a workspace may take beside inputs, outputs and gradients.
WORKSPACE = 0.55


def rows_at_once(batch_size: int, programs: int, resident: int, needed: int, key: Signature) -> int:
    """Return the most rows of a batch whose workspace takes no more memory than it may, or else the fewest.

    No number is considered with which the programs that go through sequences take more rounds than with all rows.

    Args:
        batch_size: Rows of the batch.
        programs: Programs for all rows.
        resident: Programs that the device runs at once.
        needed: Bytes of the workspace for all rows.
        key: Signatures of the inputs and of the gradient of the outputs.
    """
    limit = WORKSPACE * 2 * sum(x[0].numel() * x[2].itemsize for x in key if x is not None)

    def rounds(rows: int) -> int:
        return -(-rows * programs // (batch_size * resident))

    if needed <= limit:
        return batch_size
    even = [
        rows
        for rows in range(1, batch_size + 1)
        if batch_size // rows * rounds(rows) + rounds(batch_size % rows) <= rounds(batch_size)
    ]
    return max((rows for rows in even if rows * needed <= batch_size * limit), default=even[0])


def gradients(
    plan_type: Any, inputs: tuple[Tensor | None, ...], starts: Tensor, problem: Hashable, *options: Hashable
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the first six inputs, those of `gated_linear`.

    Args:
        plan_type: A `Plan` with `rows_at_once` and `write_gradients(inputs, saved, grads)`.
        inputs: All tensors of the backward pass, each (B, …).
        starts: What the forward pass saved.
        problem: An option of the plan.
        options: Further ones of plans for some rows.
    """
    plan = plan_type.of((*inputs, starts), problem)
    grads = [None if x is None else new_like(x) for x in inputs[:6]]
    if plan.rows_at_once == plan.B:
        plan.write_gradients(inputs, plan.pointers(plan.saved, starts), grads)
        return tuple(grads)
    saved = plan.saved.views(starts)
    for start in range(0, plan.B, plan.rows_at_once):
        stop = min(start + plan.rows_at_once, plan.B)
        kept = [x[len(x) // plan.B * start : len(x) // plan.B * stop] for x in saved]
        given, written = ([None if x is None else x[start:stop] for x in tensors] for tensors in (inputs, grads))
        # The plan is also that of the alignment of what it does not allocate itself.
        part = plan_type.of((*given, *kept, *written), problem, *options)
        part.write_gradients(given, part.addresses(*kept), written)
    return tuple(grads)


def buffer_like(grad: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the gradient itself if kernels write this shape and dtype, otherwise a buffer for them."""
    return grad if grad.shape == shape and grad.dtype == dtype else grad.new_empty(shape, dtype=dtype)


def store(grad: Tensor, x: Tensor, group: int, heads: int = 2) -> None:
    """Write x to the gradient of key heads: added up over the query heads of each group, dimension `heads`."""
    if x is grad:
        return
    if group > 1:
        x = x.unflatten(heads, (-1, group))
        if x.dtype == grad.dtype:
            torch.sum(x, heads + 1, out=grad)
            return
        x = x.sum(heads + 1)
    grad.copy_(x)
