"""Performer and PerformerLM of performer-pytorch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from longspan.compat.options import init_from
from longspan.compat.performer_pytorch import keys
from longspan.compat.performer_pytorch.layers import (
    CrossAttention,
    FastAttention,
    FixedPositionalEmbedding,
    SelfAttention,
    gaussian_orthogonal_random_matrix,
    with_rotary,
)
from longspan.compat.performer_pytorch.options import PerformerLMOptions, PerformerOptions
from longspan.compat.performer_pytorch.projection_updater import ModelProjectionUpdater, ProjectionUpdater
from longspan.compat.state_dict import CompatModule, KeyMapping
from longspan.models.positions import SinusoidalPositions
from longspan.models.transformer import LanguageModel, Transformer

__all__ = [
    "CrossAttention",
    "FastAttention",
    "FixedPositionalEmbedding",
    "Performer",
    "PerformerLM",
    "ProjectionUpdater",
    "SelfAttention",
    "gaussian_orthogonal_random_matrix",
]

_PERFORMER_POSITIONAL = (
    "dim depth heads dim_head local_attn_heads local_window_size causal ff_mult nb_features feature_redraw_interval "
    "reversible ff_chunks generalized_attention kernel_fn use_scalenorm use_rezero ff_glu ff_dropout attn_dropout "
    "cross_attend no_projection auto_check_redraw qkv_bias attn_out_bias shift_tokens"
)
_LM_SUBMODULES = ("token_emb", "pos_emb", "layer_pos_emb", "dropout", "performer", "norm", "to_out")
Model = TypeVar("Model", Transformer, LanguageModel)
P = TypeVar("P", bound="_PerformerModule[Any]")


class _PerformerModule(CompatModule, Generic[Model]):
    model: Model
    options: Any

    def _build(self, model: Model, options: PerformerOptions) -> None:
        keys.initialize(model)
        CompatModule.__init__(self)
        self._wrap(model, options)
        self.unused = keys.unused_tensors(model, options.num_features(options.head_dim))

    def _wrap(self, model: Model, options: Any) -> None:
        self.model, self.options = model, options
        self.proj_updater = ModelProjectionUpdater(model, options)

    @classmethod
    def around(cls: type[P], model: Any, options: PerformerOptions) -> P:
        """Return a wrapper around a model that another module owns."""
        wrapper = cls.__new__(cls)
        CompatModule.__init__(wrapper)
        wrapper._wrap(model, options)
        wrapper.training = model.training
        return wrapper

    def fix_projection_matrices_(self) -> None:
        """Stop redrawing random features."""
        self.proj_updater.fix_projections_()

    def check_redraw_projections(self) -> None:
        """Count a training step and redraw if the interval has passed: for auto_check_redraw=False."""
        self.proj_updater.redraw_projections()


class Performer(_PerformerModule[Transformer]):
    """Transformer of FAVOR+ attention for vectors, (B, T, dim) -> (B, T, dim). dim_head: by default dim / heads."""

    options: PerformerOptions

    @init_from(PerformerOptions, _PERFORMER_POSITIONAL)
    def __init__(self, options: PerformerOptions) -> None:
        self._build(Transformer(options.config()), options)

    @property
    def auto_check_redraw(self) -> bool:
        """Whether forward counts training steps and redraws random features."""
        return self.options.auto_check_redraw

    def forward(
        self,
        x: Tensor,
        pos_emb: Tensor | None = None,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Map x (B, T, dim) to (B, T, dim).

        Args:
            x: The input.
            pos_emb: The output of FixedPositionalEmbedding(dim_head, …), for rotary positions.
            mask: (B, T), True for tokens to attend to.
            context: (B, S, dim), for cross-attention.
            context_mask: (B, S), True for tokens of the context to attend to.
        """
        model = self.model if pos_emb is None else with_rotary(self.model, pos_emb, x)
        return model(x, **_model_arguments(mask, context, context_mask))

    def key_mappings(self) -> Iterator[KeyMapping]:
        return keys.stack_keys(self.model, reversible=self.options.reversible)

    def upgrade_key(self, key: str) -> str:
        return "proj_updater.calls_since_last_redraw" if key == "calls_since_last_redraw" else key


class PerformerLM(_PerformerModule[LanguageModel]):
    """Language model of FAVOR+ attention: tokens (B, T) -> logits (B, T, num_tokens).

    tie_embedding: An alias of tie_embed.
    """

    options: PerformerLMOptions

    @init_from(PerformerLMOptions)
    def __init__(self, options: PerformerLMOptions) -> None:
        self._build(LanguageModel(options.config()), options)

    def _wrap(self, model: LanguageModel, options: PerformerLMOptions) -> None:
        super()._wrap(model, options)
        self.max_seq_len = options.max_seq_len

    @property
    def performer(self) -> Performer:
        """The layers without the embeddings."""
        wrapper = Performer.around(self.model.transformer, self.options)
        wrapper.proj_updater = self.proj_updater
        return wrapper

    def forward(
        self,
        x: Tensor,
        return_encodings: bool = False,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, T, num_tokens), or with return_encodings the final hidden states (B, T, dim).

        Args:
            x: Tokens (B, T).
            return_encodings: Whether to return hidden states.
            mask: (B, T), True for tokens to attend to.
            context: (B, S, dim), for cross-attention.
            context_mask: (B, S), True for tokens of the context to attend to.
        """
        self._check_length(x)
        hidden = self.model.hidden(x, **_model_arguments(mask, context, context_mask))
        return hidden if return_encodings else self.model.logits(hidden)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _LM_SUBMODULES:
            raise AttributeError(
                f"{name} cannot be replaced: PerformerLM has no such submodule; replace a submodule of its `model`, a "
                "longspan.LanguageModel (embedding, positions, dropout, transformer, to_logits)"
            )
        super().__setattr__(name, value)

    def loss(
        self,
        x: Tensor,
        labels: Tensor,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the mean cross-entropy of labels (B, T), ignoring labels of −100."""
        self._check_length(x)
        return self.model.loss(x, labels, **_model_arguments(mask, context, context_mask))

    def _check_length(self, x: Tensor) -> None:
        if x.shape[1] > self.max_seq_len:
            raise ValueError(
                f"x has {x.shape[1]} tokens, more than max_seq_len ({self.max_seq_len}): shorten it, or build the "
                "model with a larger max_seq_len"
            )

    def key_mappings(self) -> Iterator[KeyMapping]:
        return keys.language_model_keys(self.model, self.options)

    def upgrade_key(self, key: str) -> str:
        return keys.upgrade_key(key)

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        if ignored_axial_positions(self.options, shapes):
            self._wrap(self.model, without_axial_positions(self.model, self.options))


def ignored_axial_positions(options: PerformerLMOptions, shapes: Mapping[str, torch.Size], old: str = "") -> bool:
    """Whether the original ignored axial_position_emb for a checkpoint: it does so with rotary positions."""
    return options.axial_position_emb and options.rotary_position_emb and f"{old}pos_emb.emb" in shapes


def without_axial_positions(model: LanguageModel, options: PerformerLMOptions) -> PerformerLMOptions:
    """Give the model sinusoidal positions, which have no weights, and return its new options."""
    warnings.warn(
        "this checkpoint was trained without axial_position_emb, which the original ignores with rotary_position_emb: "
        "the model now has sinusoidal positions",
        stacklevel=6,
    )
    options = replace(options, axial_position_emb=False)
    model.positions = SinusoidalPositions(options.dim)
    model.config = model.transformer.config = options.config()
    return options


def _model_arguments(mask: Tensor | None, context: Tensor | None, context_mask: Tensor | None) -> dict[str, Any]:
    return {"key_mask": _drop_full(mask), "context": context, "context_mask": _drop_full(context_mask)}


def _drop_full(mask: Tensor | None) -> Tensor | None:
    """Replace a mask that is all True by None, where the check needs no synchronization: scripts often pass one."""
    if mask is None or (mask.device.type == "cpu" and bool(mask.all())):
        return None
    return mask.bool()
