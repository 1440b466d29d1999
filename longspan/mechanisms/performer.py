"""Performer: linear attention whose random features estimate softmax attention (FAVOR+), or a generalized kernel."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longspan.mechanisms.feature_maps import ACTIVATIONS, Favor, Generalized, RandomFeatures, Softmax
from longspan.mechanisms.linear import LinearAttention, LinearState
from longspan.protocol import FeatureMap, State
from longspan.utils import choose


class PerformerAttention(LinearAttention):
    """Choromanski et al., 2021: exp(q·k/√D) estimated by M positive orthogonal random features.

    Causal keys are stabilized by a running maximum kept in the state, not by a maximum over all positions: the future
    moves nothing, and decoding reproduces training.

    num_features: M, by default ⌊D ln D⌋.
    kernel: "softmax", or an activation (by name, or a function) for the generalized kernel activation(w·x) + epsilon.
    projection: False takes x in place of w·x; with "softmax" that is `linear` with its softmax map.
    row_norms: "sampled" like Gaussian rows, or "unit", all √D.
    epsilon: added to features: None is 0 for "softmax" and 0.001 for a generalized kernel.
    redraw_interval: training forwards (calls of `advance`) between redraws; None never redraws.
    """

    counts: Tensor  # (2,) int64: draws so far, training forwards since the last; saved, so that a resumed run goes on

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
        number = num_features or max(1, math.floor(head_dim * math.log(head_dim)))
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
            feature_map = Generalized(
                kernel,
                head_dim,
                number if projection else None,
                row_norms=row_norms,
                epsilon=1e-3 if epsilon is None else epsilon,
            )
        super().__init__(
            num_heads,
            head_dim,
            num_kv_heads=num_kv_heads,
            value_dim=value_dim,
            feature_map=feature_map,
            normalize=normalize,
            phantom=phantom,
        )
        self.redraw_interval = redraw_interval
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
        self.draw, self._forwards = 0, 0  # the same numbers, known without asking the device
        self._ticket = _new_ticket(self)

    def redraw(self, generator: torch.Generator | None = None) -> None:
        """New random features; states made before are refused from now on. Nothing without a projection."""
        self._redraw(self.counts, self._projection, generator)

    def advance(self) -> None:
        """Counts a training forward and redraws when the interval has passed; does nothing in eval mode."""
        if not self.training or self.redraw_interval is None:
            return
        if torch.compiler.is_compiling():
            # Counted out of the compiler's sight, which would take each count for another program.
            _advance_ticket(self.counts, self._projection, self._ticket)
        else:
            self._advance(self.counts, self._projection)

    def _advance(self, counts: Tensor, projection: Tensor | None) -> None:
        assert self.redraw_interval is not None
        self._count(counts, self.draw, self._forwards + 1)
        if self._forwards >= self.redraw_interval:
            self._redraw(counts, projection, None)

    def _redraw(self, counts: Tensor, projection: Tensor | None, generator: torch.Generator | None) -> None:
        if projection is not None:
            assert isinstance(self.feature_map, RandomFeatures)
            projection.copy_(self.feature_map.drawn(generator))
            self._count(counts, self.draw + 1, 0)

    @property
    def _projection(self) -> Tensor | None:
        return self.feature_map.projection if isinstance(self.feature_map, RandomFeatures) else None

    def new_state(
        self,
        batch_size: int,
        *,
        max_length: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> LinearState:
        state = super().new_state(batch_size, max_length=max_length, device=device, dtype=dtype)
        return replace(state, draw=self.draw)

    def _new_state_like(self, q: Tensor, batch_size: int) -> LinearState:
        # Nobody keeps it, so the draw is not asked for: to a compiler each would be another program.
        return super().new_state(batch_size, device=q.device, dtype=q.dtype)

    def _check_state(self, state: State, x: Tensor, packing: Any) -> None:
        super()._check_state(state, x, packing)
        assert isinstance(state, LinearState)
        if state.draw != self.draw:
            raise ValueError(
                f"this state was written with draw {state.draw} of the random features, the mechanism now has draw "
                f"{self.draw}: start from new_state(), or redraw less often"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._ticket = _new_ticket(self)  # a copy is advanced for itself

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.draw, self._forwards = self.counts.tolist()

    def _count(self, counts: Tensor, draw: int, forwards: int) -> None:
        self.draw, self._forwards = draw, forwards
        # Filled, not copied: a copy from the host would wait for the device.
        counts[0].fill_(draw)
        counts[1].fill_(forwards)


_tickets = itertools.count()
_holders: weakref.WeakValueDictionary[int, PerformerAttention] = weakref.WeakValueDictionary()


def _new_ticket(mechanism: PerformerAttention) -> int:
    ticket = next(_tickets)
    _holders[ticket] = mechanism
    return ticket


def _advance_holder(counts: Tensor, projection: Tensor | None, ticket: int) -> None:
    """Into the tensors given, which a compiler may have put in place of the mechanism's own."""
    _holders[ticket]._advance(counts, projection)


_advance_ticket = torch.library.custom_op(
    "longspan::advance_random_features",
    _advance_holder,
    mutates_args=("counts", "projection"),
    # A replayed CUDA graph would count nothing.
    tags=[torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else (),
)
