"""Redraw random features: performer-pytorch's counter, and an equivalent for longspan models."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from longspan.compat.performer_pytorch.options import PerformerOptions, redraw_interval
from longspan.mechanisms.performer import random_feature_mechanisms
from longspan.models.transformer import LanguageModel, Transformer


class ModelProjectionUpdater:
    """`proj_updater` of a longspan model, which counts calls and redraws by itself."""

    def __init__(self, model: Transformer | LanguageModel, options: PerformerOptions) -> None:
        self.instance, self._options = model, options

    @property
    def feature_redraw_interval(self) -> int | None:
        """The number of training steps between redraws, or None for no redraws."""
        return self._options.feature_redraw_interval

    @feature_redraw_interval.setter
    def feature_redraw_interval(self, interval: int | None) -> None:
        self._options = replace(self._options, feature_redraw_interval=interval)
        for mechanism in random_feature_mechanisms(self.instance):
            mechanism.redraw_interval = redraw_interval(interval) if self._options.auto_check_redraw else None
        # Save the new interval with the model.
        for module in (self.instance, *self.instance.modules()):
            if isinstance(module, Transformer | LanguageModel):
                module.config = self._options.config()

    @property
    def calls_since_last_redraw(self) -> Tensor:
        """The number of training steps since the last redraw."""
        return next((mechanism.clock[1] for mechanism in random_feature_mechanisms(self.instance)), torch.tensor(0))

    def fix_projections_(self) -> None:
        """Stop redrawing."""
        self.feature_redraw_interval = None

    def redraw_projections(self) -> None:
        """Count a training step, and redraw if the interval has passed."""
        for mechanism in random_feature_mechanisms(self.instance):
            previous = mechanism.redraw_interval
            mechanism.redraw_interval = redraw_interval(self.feature_redraw_interval)
            mechanism.count_forward()
            mechanism.redraw_interval = previous


class ProjectionUpdater(nn.Module):
    """Redraw the random features in `instance` every feature_redraw_interval calls, in training mode."""

    calls_since_last_redraw: Tensor

    def __init__(self, instance: nn.Module, feature_redraw_interval: int | None) -> None:
        super().__init__()
        self.instance, self.feature_redraw_interval = instance, feature_redraw_interval
        self.register_buffer("calls_since_last_redraw", torch.tensor(0))

    def fix_projections_(self) -> None:
        """Stop redrawing."""
        self.feature_redraw_interval = None

    def redraw_projections(self) -> None:
        """In training mode, count a call, or redraw if the interval has passed."""
        if not self.training:
            return
        if self.feature_redraw_interval is None or self.calls_since_last_redraw < self.feature_redraw_interval:
            self.calls_since_last_redraw += 1
            return
        for mechanism in random_feature_mechanisms(self.instance):
            mechanism.redraw()
        self.calls_since_last_redraw.zero_()

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("ProjectionUpdater is not a layer: call redraw_projections() before each forward")
