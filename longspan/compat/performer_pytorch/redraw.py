"""Count training steps and redraw random features, wherever the random features are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from longspan.compat.performer_pytorch.kernels import gaussian_orthogonal_random_matrix
from longspan.ops.common.torch_private import in_backward


class Redrawable(Protocol):
    """What `count_call` needs of a FastAttention."""

    projection_matrix: Tensor
    ortho_scaling: int

    def redraw_projection_matrix(self, device: torch.device) -> None:
        """Draw new random features."""


def count_call(clock: Tensor, calls: Tensor, interval: int | None, layers: Callable[[], Sequence[Redrawable]]) -> None:
    """Count a training forward pass, or redraw the features of all layers if `interval` of them were counted.

    A recomputation in a backward pass is no forward pass: it neither counts nor redraws, and a redraw leaves the random
    numbers that follow it as they were, so that dropout is recomputed as it was computed.

    Args:
        clock: () int64 on the CPU, the number of calls since the last redraw.
        calls: The same number, to be saved with a model.
        interval: None never redraws.
        layers: Returns the layers to redraw.
    """
    if torch.compiler.is_compiling():
        found = layers()
        matrices, scalings = [layer.projection_matrix for layer in found], [layer.ortho_scaling for layer in found]
        _count_call(clock, calls, -1 if interval is None else interval, matrices, scalings)
        return
    if in_backward():
        return
    if interval is None or int(clock) < interval:
        clock += 1
    else:
        found = layers()
        with _own_random_numbers([layer.projection_matrix for layer in found]):
            for layer in found:
                layer.redraw_projection_matrix(layer.projection_matrix.device)
        clock.zero_()
    calls.fill_(int(clock))  # A copy from the host would wait for the device.


@contextmanager
def _own_random_numbers(matrices: Sequence[Tensor]) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        # With the old features in the seed, redraws differ although none of them advances the generator.
        seed = hash((int(torch.randint(2**62, ())), *(float(matrix.double().sum()) for matrix in matrices)))
        torch.default_generator.manual_seed(seed)
        yield


# An operation of its own to a compiler, which would otherwise compile another graph for each count.
@torch.library.custom_op(
    "longspan::count_performer_call",
    mutates_args=("clock", "calls", "matrices"),
    # A replayed CUDA graph would count nothing.
    tags=[torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else (),
)
def _count_call(
    clock: Tensor, calls: Tensor, interval: int, matrices: Sequence[Tensor], scalings: Sequence[int]
) -> None:
    if in_backward():
        return
    if interval < 0 or int(clock) < interval:
        clock += 1
    else:
        with _own_random_numbers(matrices):
            for matrix, scaling in zip(matrices, scalings, strict=True):
                matrix.copy_(gaussian_orthogonal_random_matrix(matrix.shape[0], matrix.shape[1], scaling))
        clock.zero_()
    calls.fill_(int(clock))
