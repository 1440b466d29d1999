"""ProjectionUpdater of performer-pytorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longspan.compat.performer_pytorch.attention import Attention, FastAttention
from longspan.compat.performer_pytorch.layers import find_modules
from longspan.compat.performer_pytorch.redraw import count_call


class ProjectionUpdater(nn.Module):
    """Redraw the random features in `instance` every feature_redraw_interval calls, in training mode.

    Layers inside then do not redraw by themselves.

    Args:
        instance: A module with FastAttention inside.
        feature_redraw_interval: None never redraws.
    """

    calls_since_last_redraw: Tensor

    def __init__(self, instance: nn.Module, feature_redraw_interval: int | None) -> None:
        super().__init__()
        self.instance, self.feature_redraw_interval = instance, feature_redraw_interval
        self.register_buffer("calls_since_last_redraw", torch.tensor(0))
        # The same number on the CPU, where reading it needs no synchronization with a device.
        self._clock = torch.tensor(0, device="cpu")
        for layer in find_modules(instance, Attention):
            layer.feature_redraw_interval = None

    def fix_projections_(self) -> None:
        """Stop redrawing."""
        self.feature_redraw_interval = None

    def redraw_projections(self) -> None:
        """In training mode, count a call, or redraw if the interval has passed."""
        if not self.training:
            return
        calls = self.calls_since_last_redraw
        if calls.device.type == "cpu":
            self._clock.copy_(calls)
        count_call(self._clock, calls, self.feature_redraw_interval, lambda: find_modules(self.instance, FastAttention))

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("ProjectionUpdater is not a layer: call redraw_projections() before each forward")

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._clock.copy_(self.calls_since_last_redraw)
