"""Performer and PerformerLM: performer-pytorch's models as longspan's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from longspan.compat.performer_pytorch.attention import (
    CrossAttention,
    FastAttention,
    FixedPositionalEmbedding,
    ProjectionUpdater,
    SelfAttention,
    gaussian_orthogonal_random_matrix,
    turned,
)
from longspan.compat.performer_pytorch.keys import idle_tensors, initialize, stack_entries
from longspan.compat.performer_pytorch.options import RELU, Kernel, Options, features_of
from longspan.compat.performer_pytorch.redrawing import Schedule
from longspan.compat.state_dict import CompatModule, KeyMapping, constant, rename, rename_layer, reshape
from longspan.models.positions import AxialPositions, SinusoidalPositions
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

_INSIDE = ("token_emb", "pos_emb", "layer_pos_emb", "dropout", "performer", "norm", "to_out")


class Performer(CompatModule):
    """Vectors in, vectors out: (B, T, dim) -> (B, T, dim). dim_head: dim / heads unless given."""

    model: Transformer

    def __init__(
        self,
        dim: int,
        depth: int,
        heads: int,
        dim_head: int | None = None,
        local_attn_heads: int | Sequence[int] = 0,
        local_window_size: int = 256,
        causal: bool = False,
        ff_mult: int = 4,
        nb_features: int | None = None,
        feature_redraw_interval: int | None = 1000,
        reversible: bool = False,
        ff_chunks: int = 1,
        generalized_attention: bool = False,
        kernel_fn: Kernel = RELU,
        use_scalenorm: bool = False,
        use_rezero: bool = False,
        ff_glu: bool = False,
        ff_dropout: float = 0.0,
        attn_dropout: float = 0.0,
        cross_attend: bool = False,
        no_projection: bool = False,
        auto_check_redraw: bool = True,
        qkv_bias: bool = True,
        attn_out_bias: bool = True,
        shift_tokens: bool = False,
    ) -> None:
        options = _options(locals())
        model = Transformer(options.config())
        initialize(model)
        super().__init__()
        self._hold(model, options)
        self.unused = idle_tensors(model, features_of(options.head_dim, nb_features))

    @classmethod
    def around(cls, model: Transformer, options: Options) -> Performer:
        """A second view of a transformer that another module holds."""
        view = cls.__new__(cls)
        CompatModule.__init__(view)
        view._hold(model, options)
        view.training = model.training
        return view

    def _hold(self, model: Transformer, options: Options) -> None:
        self.model, self.options = model, options
        self.auto_check_redraw = options.auto_check_redraw
        self.proj_updater = Schedule(model, options)

    def fix_projection_matrices_(self) -> None:
        """No redraws from now on."""
        self.proj_updater.fix_projections_()

    def check_redraw_projections(self) -> None:
        """Counts a training forward, and redraws if it is time: for auto_check_redraw=False."""
        self.proj_updater.redraw_projections()

    def forward(
        self,
        x: Tensor,
        pos_emb: Tensor | None = None,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """pos_emb: what FixedPositionalEmbedding(dim_head, …) gives. Masks are True for what is kept."""
        model = self.model if pos_emb is None else turned(self.model, pos_emb, x)
        return model(x, **_how(mask, context, context_mask))

    def key_mappings(self) -> Iterator[KeyMapping]:
        yield from stack_entries(self.model, reversible=self.options.reversible)

    def upgrade_key(self, key: str) -> str:
        return "proj_updater.calls_since_last_redraw" if key == "calls_since_last_redraw" else key


class PerformerLM(CompatModule):
    """Tokens in, logits out: (B, T) -> (B, T, num_tokens). tie_embedding: another name for tie_embed."""

    model: LanguageModel

    def __init__(
        self,
        *,
        num_tokens: int,
        max_seq_len: int,
        dim: int,
        depth: int,
        heads: int,
        dim_head: int | None = 64,
        local_attn_heads: int | Sequence[int] = 0,
        local_window_size: int = 256,
        causal: bool = False,
        ff_mult: int = 4,
        nb_features: int | None = None,
        feature_redraw_interval: int | None = 1000,
        reversible: bool = False,
        ff_chunks: int = 1,
        ff_glu: bool = False,
        emb_dropout: float = 0.0,
        ff_dropout: float = 0.0,
        attn_dropout: float = 0.0,
        generalized_attention: bool = False,
        kernel_fn: Kernel = RELU,
        use_scalenorm: bool = False,
        use_rezero: bool = False,
        cross_attend: bool = False,
        no_projection: bool = False,
        tie_embed: bool = False,
        rotary_position_emb: bool = True,
        axial_position_emb: bool = False,
        axial_position_shape: Sequence[int] | None = None,
        auto_check_redraw: bool = True,
        qkv_bias: bool = False,
        attn_out_bias: bool = False,
        shift_tokens: bool = False,
        tie_embedding: bool = False,
    ) -> None:
        options = _options({**locals(), "tie_embed": tie_embed or tie_embedding})
        model = LanguageModel(options.config())
        initialize(model)
        super().__init__()
        self._hold(model, options)
        self.unused = idle_tensors(model, features_of(options.head_dim, nb_features))

    @classmethod
    def around(cls, model: LanguageModel, options: Options) -> PerformerLM:
        """A second view of a language model that another module holds."""
        view = cls.__new__(cls)
        CompatModule.__init__(view)
        view._hold(model, options)
        view.training = model.training
        return view

    def _hold(self, model: LanguageModel, options: Options) -> None:
        assert options.max_seq_len is not None
        self.model, self.options, self.max_seq_len = model, options, options.max_seq_len
        self._schedule = Schedule(model, options)

    @property
    def performer(self) -> Performer:
        """The layers without the embeddings."""
        view = Performer.around(self.model.transformer, self.options)
        view.proj_updater = self._schedule
        return view

    def fix_projection_matrices_(self) -> None:
        """No redraws from now on."""
        self._schedule.fix_projections_()

    def check_redraw_projections(self) -> None:
        """Counts a training forward, and redraws if it is time: for auto_check_redraw=False."""
        self._schedule.redraw_projections()

    def forward(
        self,
        x: Tensor,
        return_encodings: bool = False,
        mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, T, num_tokens) of x (B, T), or with return_encodings the vectors (B, T, dim) before them.

        Masks (B, T) and (B, S) are True for what is kept.
        """
        self._check(x)
        hidden = self.model.hidden(x, **_how(mask, context, context_mask))
        return hidden if return_encodings else self.model.logits(hidden)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _INSIDE:
            raise AttributeError(
                f"{name} cannot be exchanged: a PerformerLM holds no such module, but a longspan.LanguageModel as "
                "`model`, whose parts can be (embedding, positions, dropout, transformer, to_logits)"
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
        """The mean cross-entropy of labels (B, T), −100 where one does not count."""
        self._check(x)
        return self.model.loss(x, labels, **_how(mask, context, context_mask))

    def _check(self, x: Tensor) -> None:
        if x.shape[1] > self.max_seq_len:
            raise ValueError(
                f"x has {x.shape[1]} tokens, more than max_seq_len ({self.max_seq_len}): shorten it, or build the "
                "model with a larger max_seq_len"
            )

    def key_mappings(self) -> Iterator[KeyMapping]:
        yield from language_model_entries(self.model, self.options)

    def upgrade_key(self, key: str) -> str:
        return upgrade_key(key)

    def adapt_to_checkpoint(self, shapes: Mapping[str, torch.Size]) -> None:
        options = settled(self.options, shapes)
        if options is not self.options:
            self._hold(self.model, options)
            place_positions(self.model, options)


def language_model_entries(
    model: LanguageModel, options: Options, old: str = "", new: str = "", idle: str = ""
) -> Iterator[KeyMapping]:
    """Those of PerformerLM. old, new, idle: prefixes where it is part of another module."""
    device = model.embedding.weight.device
    yield rename(f"{old}token_emb.weight", f"{new}embedding.weight")
    if isinstance(model.positions, AxialPositions):
        for i, table in enumerate(model.positions.tables):
            shape = [1, *(len(table) if axis == i else 1 for axis in range(len(options.axial_shape))), options.dim]
            yield reshape(f"{old}pos_emb.weights.{i}", f"{new}positions.tables.{i}", shape)
    elif isinstance(model.positions, SinusoidalPositions):
        yield constant(f"{old}pos_emb.emb", lambda: _table(options.max_seq_len, options.dim, device))
    else:
        yield rename(f"{old}pos_emb.emb.weight", f"{new}positions.table")
    if options.rotary_position_emb:
        yield constant(f"{old}layer_pos_emb.emb", lambda: _table(options.max_seq_len, options.head_dim, device))
    yield from stack_entries(
        model.transformer,
        reversible=options.reversible,
        old=f"{old}performer.",
        new=f"{new}transformer.",
        idle=idle,
    )
    yield from rename_layer(f"{old}norm", f"{new}transformer.norm")
    if model.to_logits is not None:
        yield from rename_layer(f"{old}to_out", f"{new}to_logits")


def upgrade_key(key: str) -> str:
    """PerformerLM's names of today: axial tables and the count of calls were named differently once."""
    key = key.replace("pos_emb.weights_", "pos_emb.weights.")
    return key.replace("performer.calls_since_last_redraw", "performer.proj_updater.calls_since_last_redraw")


def settled(options: Options, shapes: Mapping[str, torch.Size], old: str = "") -> Options:
    """The original ignored axial_position_emb beside rotary positions: its checkpoint then has no axial tables."""
    if not (options.axial_position_emb and options.rotary_position_emb and f"{old}pos_emb.emb" in shapes):
        return options
    warnings.warn(
        "this checkpoint was trained without axial_position_emb, which the original ignored beside "
        "rotary_position_emb: its sinusoidal positions are kept",
        stacklevel=6,
    )
    return replace(options, axial_position_emb=False)


def place_positions(model: LanguageModel, options: Options) -> None:
    """Brings the positions, which have no weights, to what the options say."""
    model.positions = SinusoidalPositions(options.dim)
    model.config = model.transformer.config = options.config()


def _options(arguments: Mapping[str, Any]) -> Options:
    """Those of a constructor's arguments that describe the model."""
    return Options(**{field.name: arguments[field.name] for field in fields(Options) if field.name in arguments})


def _how(mask: Tensor | None, context: Tensor | None, context_mask: Tensor | None) -> dict[str, Any]:
    return {"key_mask": _hiding(mask), "context": context, "context_mask": _hiding(context_mask)}


def _hiding(mask: Tensor | None) -> Tensor | None:
    """A mask that hides nothing is none, where looking costs nothing: scripts pass masks full of ones."""
    if mask is None or (mask.device.type == "cpu" and bool(mask.all())):
        return None
    return mask.bool()


def _table(length: int | None, dim: int, device: torch.device) -> Tensor:
    return SinusoidalPositions(dim)(torch.arange(length or 0, device=device)[None])[0]
