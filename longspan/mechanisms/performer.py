"""Performer: linear attention whose random features estimate softmax attention (FAVOR+), or a generalized kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longspan.mechanisms.feature_maps import (
    ACTIVATIONS,
    Favor,
    Generalized,
    GeneralizedExp,
    RandomFeatures,
    Softmax,
    orthogonal_rows,
)
from longspan.mechanisms.linear import LinearAttention
from longspan.ops.common.torch_private import in_backward
from longspan.protocol import FeatureMap
from longspan.utils import choose

# By default: the most that kernels of decode steps and of float16 take. Kernels compute tiles of 64.
NUM_FEATURES = 256


class PerformerAttention(LinearAttention):
    """Choromanski et al., 2021: exp(q·k/√D) estimated by M positive orthogonal random features.

    Causal keys are stabilized by a running maximum in the state, not by a maximum over all positions, so that future
    keys change no output and decoding reproduces training.

    Args:
        num_heads: H.
        head_dim: D.
        num_kv_heads: Hkv, shared by groups of query heads; H unless given.
        value_dim: E; D unless given.
        num_features: M, 256 unless given.
        kernel: "softmax", or an activation (a name or a function) for the generalized kernel activation(w·x) + epsilon.
        projection: Whether features are of w·x, or of x itself; "softmax" without is `linear` with its softmax map.
        row_norms: "sampled" as of Gaussian vectors, or "unit", all √D.
        epsilon: Added to the features: None is 0 for "softmax" and 0.001 for a generalized kernel.
        redraw_interval: Training forwards of a model (calls of `count_forward`) between redraws; None never redraws.
            Recomputations of a forward do not count.
        normalize: As for `linear`.
        phantom: As for `linear`.
    """

    counts: Tensor  # (2,) int64: number of redraws, training forwards since the last one

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        value_dim: int | None = None,
        num_features: int | None = None,
        kernel: str | Callable[[Tensor], Tensor] = "softmax",
        projection: bool = True,
        row_norms: str = "sampled",
        epsilon: float | None = None,
        redraw_interval: int | None = 1000,
        normalize: str = "query",
        phantom: float = 0.0,
    ) -> None:
        if num_features is not None and (num_features < 1 or not projection):
            raise ValueError(f"num_features must be positive and needs projection=True, got {num_features}")
        if redraw_interval is not None and redraw_interval < 1:
            raise ValueError(f"redraw_interval must be positive, or None for never, got {redraw_interval}")
        choose("row_norms", row_norms, ("sampled", "unit"))
        if epsilon is not None and epsilon < 0:
            raise ValueError(f"epsilon must not be negative, got {epsilon}")
        number = num_features or NUM_FEATURES
        feature_map: FeatureMap
        if kernel == "softmax":
            if not projection and epsilon:
                raise ValueError(f"epsilon belongs to random features: it must be 0 or None without, got {epsilon}")
            feature_map = (
                Favor(head_dim, number, row_norms=row_norms, epsilon=epsilon or 0.0) if projection else Softmax()
            )
        else:
            if isinstance(kernel, str):
                kernel = ACTIVATIONS[choose("kernel", kernel, ["softmax", *ACTIVATIONS])]
            elif not callable(kernel) or isinstance(kernel, type):
                raise ValueError(f"kernel must be a name or a function such as torch.relu or nn.ReLU(), got {kernel!r}")
            options: dict[str, Any] = {"row_norms": row_norms, "epsilon": 1e-3 if epsilon is None else epsilon}
            drawn = number if projection else None
            if kernel is torch.exp:
                feature_map = GeneralizedExp(head_dim, drawn, **options)
            else:
                feature_map = Generalized(kernel, head_dim, drawn, **options)
        super().__init__(
            num_heads,
            head_dim,
            num_kv_heads=num_kv_heads,
            value_dim=value_dim,
            feature_map=feature_map,
            normalize=normalize,
            phantom=phantom,
        )
        self.redraw_interval, self.row_norms = redraw_interval, row_norms
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
        # The same numbers on the CPU, where reading them needs no synchronization; never on the meta device.
        self.clock = torch.zeros(2, dtype=torch.int64, device="cpu")

    @property
    def draw(self) -> int | None:
        """Number of redraws so far; None in compiled code, which must not depend on it."""
        return None if torch.compiler.is_compiling() else int(self.clock[0])

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """Draw new random features; earlier states are refused from now on. Does nothing without a projection."""
        if self._projection is not None:
            _redraw(self.clock, self.counts, self._projection, self.row_norms == "unit", generator)

    def count_forward(self) -> None:
        """Count a training forward and redraw when the interval has passed; does nothing in eval mode.

        A model calls it before its first layer. A forward inside a backward pass is a recomputation
        (`torch.utils.checkpoint`): it does not count, and runs with the features of the forward it repeats.
        """
        if not self.training or self.redraw_interval is None:
            return
        # An operation of its own to a compiler, which would otherwise compile another graph for each count.
        count = _count_forward_op if torch.compiler.is_compiling() else _count_forward
        count(self.clock, self.counts, self._projection, self.redraw_interval, self.row_norms == "unit")

    @property
    def _projection(self) -> Tensor | None:
        return self.feature_map.projection if isinstance(self.feature_map, RandomFeatures) else None

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.clock.copy_(self.counts)


def random_feature_mechanisms(module: nn.Module) -> list[PerformerAttention]:
    """Return every Performer in a module, to redraw its features on a schedule of the caller's."""
    return [found for found in module.modules() if isinstance(found, PerformerAttention)]


def _count_forward(clock: Tensor, counts: Tensor, projection: Tensor | None, interval: int, unit: bool) -> None:
    """Add a training forward to the counts, or redraw the projection (M, D) when there are `interval` of them."""
    if in_backward():
        if projection is not None and clock[1] == 0:
            # The forward that is repeated has redrawn: what it draws later, such as dropout, must follow as it did.
            orthogonal_rows(*projection.shape, unit=unit)
        return
    clock[1] += 1
    if projection is not None and clock[1] >= interval:
        _redraw(clock, counts, projection, unit, None)
    else:
        _store(clock, counts)


def _redraw(clock: Tensor, counts: Tensor, projection: Tensor, unit: bool, generator: torch.Generator | None) -> None:
    projection.copy_(orthogonal_rows(*projection.shape, unit=unit, generator=generator))
    clock[0] += 1
    clock[1] = 0
    _store(clock, counts)


def _store(clock: Tensor, counts: Tensor) -> None:
    # Filled, not copied: a copy from the host would wait for the device.
    for count, number in zip(counts, clock.tolist(), strict=True):
        count.fill_(number)


_count_forward_op = torch.library.custom_op(
    "longspan::count_forward",
    _count_forward,
    mutates_args=("clock", "counts", "projection"),
    # A replayed CUDA graph would count nothing.
    tags=[torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else (),
)
