"""Translate the arguments of linear-attention-transformer to longspan configurations."""

from __future__ import annotations

import math
import re
from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longspan.compat.options import head_counts
from longspan.models.config import AttentionConfig, FeedForwardConfig, LegacyConfig, ModelConfig, Positions

LinformerSettings = namedtuple("LinformerSettings", ["k"])
LinformerContextSettings = namedtuple("LinformerContextSettings", ["seq_len", "k"])

# The key of a feed-forward layer: the index of its pair of branches, and the tensor that identifies its type.
_FEED_FORWARD = re.compile(r"layers\.(?:layers|blocks)\.(\d+)\.(?:1|g\.net)\.(?:fn\.)+(w1\.weight|keys)$")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Arguments that both models share."""

    dim: int
    depth: int
    max_seq_len: int
    heads: int = 8
    dim_head: int | None = None
    causal: bool = False
    ff_chunks: int = 1
    ff_glu: bool = False
    ff_dropout: float = 0.0
    attn_layer_dropout: float = 0.0
    attn_dropout: float = 0.0
    reversible: bool = False
    blindspot_size: int = 1
    n_local_attn_heads: int | Sequence[int] = 0
    local_attn_window_size: int = 128
    receives_context: bool = False
    attend_axially: bool = False
    pkm_layers: int | Sequence[int] = ()
    pkm_num_keys: int = 128
    linformer_settings: LinformerSettings | None = None
    context_linformer_settings: LinformerContextSettings | None = None
    shift_tokens: bool = False
    faithful: bool | None = None
    _own_glu: bool = True
    """Whether ff_glu also applies to the feed-forward layers after self-attention; see `adapt`."""

    @property
    def rotary(self) -> bool:
        """Whether linear attention has rotary positions."""
        return False

    def check(self) -> None:
        """Raise ValueError if a value is not allowed."""
        if self.causal and self.linformer_settings is not None:
            raise ValueError(
                "linformer_settings need causal=False; for a causal Linformer build a longspan.LanguageModel"
            )
        if self.local_attn_window_size < 1 and self.has_windows:
            raise ValueError(
                "local_attn_window_size must be at least 1 with local heads, axial attention or axial positions, got "
                f"{self.local_attn_window_size}"
            )
        self.config()

    def check_convertible(self) -> None:
        """Raise ValueError if the model computes what no longspan model does."""
        if self.faithful:
            raise ValueError("a faithful model computes what no longspan model does: build it with faithful=False")

    def config(self) -> ModelConfig:
        """Return the configuration of the longspan model."""
        side = FeedForwardConfig(gated=self.ff_glu, dropout=self.ff_dropout, chunks=self.ff_chunks)
        axial = mechanism_spec(self.heads, self.dim // self.heads, 0, causal=self.causal)
        rotary = self.rotary and self.linformer_settings is None
        return ModelConfig(
            dim=self.dim,
            depth=self.depth,
            attention=self._attention(self._self_attention(), self.dim_head, rotary),
            cross=self._attention(self._cross_attention(), self.dim_head, False) if self.receives_context else None,
            feed_forward=replace(side, gated=self.own_feed_forward[0]),
            final_norm=False,
            causal=self.causal,
            token_shift=self.shifts,
            residual="double" if self.reversible else "single",
            execution="reverse" if self.reversible else "keep",
            legacy=LegacyConfig(
                axial_stride=self.local_attn_window_size if self.attend_axially else None,
                axial=self._attention(axial, None, self.rotary) if self.attend_axially else None,
                side_feed_forward=side if self.branch_pairs > 1 else None,
                product_keys=self.memory_layers,
                num_keys=self.num_keys,
            ),
        )

    def adapt(self, shapes: Mapping[str, Sequence[int]], requested: ModelOptions) -> tuple[ModelOptions, list[str]]:
        """Adapt the options to the shapes of a checkpoint.

        The original ignores ff_glu and pkm_num_keys in the feed-forward layers after self-attention, and pkm_layers if
        it is a list. Options that the shapes do not determine stay unchanged.

        Args:
            shapes: The shapes of the checkpoint by key.
            requested: The options that the model was built with.

        Returns:
            The adapted options, and the names of the requested options that the checkpoint was trained without.
        """
        widths: dict[int, int] = {}
        num_keys: dict[int, int] = {}
        for key, shape in shapes.items():
            if found := _FEED_FORWARD.search(key):
                layer, pair = divmod(int(found[1]), self.branch_pairs)
                if pair == 0 and found[2] == "keys":
                    num_keys[layer] = shape[1]
                elif pair == 0:
                    widths[layer] = shape[0]
        options, ignored = self, list[str]()
        if self.faithful:
            return options, ignored
        if requested.ff_glu and widths:
            options = replace(options, _own_glu=set(widths.values()) != {4 * self.dim})
            ignored += [] if options._own_glu else ["ff_glu"]
        if requested.memory_layers:
            present = {i for i in requested.memory_layers if i in num_keys or i in self.memory_layers} - set(widths)
            options = replace(options, pkm_layers=tuple(i + 1 for i in sorted(present)))
            ignored += ["pkm_layers"] if set(requested.memory_layers) & set(widths) else []
        if num_keys:
            default = set(num_keys.values()) == {128} and requested.pkm_num_keys != 128
            options = replace(options, pkm_num_keys=128 if default else requested.pkm_num_keys)
            ignored += ["pkm_num_keys"] if default else []
        return options, ignored

    def unused_arguments(self) -> list[str]:
        """Return the arguments that have no effect on this model, each with the reason."""
        linformer = self.linformer_settings is not None
        local = any(self.local_heads)
        reasons = {
            "attn_dropout (for local heads and Linformer; attn_layer_dropout is for all)": self.attn_dropout
            and not (local or linformer or self.context_linformer_settings is not None),
            "n_local_attn_heads (linformer_settings replace all heads)": linformer and local,
            "blindspot_size (for causal=True)": self.blindspot_size > 1 and not self.causal,
            "context_linformer_settings (for receives_context=True)": self.context_linformer_settings is not None
            and not self.receives_context,
            f"pkm_layers beyond 1 to {self.depth}": len(self.memory_layers) < len(self._pkm_layers),
        }
        return [reason for reason, applies in reasons.items() if applies]

    @property
    def has_windows(self) -> bool:
        """Whether anything depends on local_attn_window_size."""
        return any(self.local_heads) or self.attend_axially

    @property
    def shifts(self) -> tuple[int, ...]:
        """The offsets of the token shift."""
        return ((1, 0) if self.causal else (1, 0, -1)) if self.shift_tokens else ()

    @property
    def settings(self) -> LinformerSettings | None:
        """The settings of Linformer self-attention."""
        return _as_settings(LinformerSettings, self.linformer_settings)

    @property
    def context_settings(self) -> LinformerContextSettings | None:
        """The settings of Linformer attention to the context."""
        return _as_settings(LinformerContextSettings, self.context_linformer_settings)

    @property
    def own_feed_forward(self) -> tuple[bool, float]:
        """Whether the feed-forward layer after self-attention is gated, and its dropout; the original has neither."""
        return (False, 0.0) if self.faithful else (self.ff_glu and self._own_glu, self.ff_dropout)

    @property
    def num_keys(self) -> int:
        """The number of half-keys of a product-key memory; the original always has 128."""
        return 128 if self.faithful else self.pkm_num_keys

    @property
    def branch_pairs(self) -> int:
        """The number of pairs of an attention and a feed-forward layer in each layer."""
        return 1 + self.attend_axially + self.receives_context

    @property
    def memory_layers(self) -> tuple[int, ...]:
        """The layers, counted from 0, with a product-key memory."""
        return tuple(layer - 1 for layer in self._pkm_layers if 1 <= layer <= self.depth)

    @property
    def _pkm_layers(self) -> Sequence[int]:
        if isinstance(self.pkm_layers, int):
            return (self.pkm_layers,)
        # The original compares layers with the list itself.
        return () if self.faithful and not isinstance(self.pkm_layers, tuple) else self.pkm_layers

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads if self.dim_head is None else self.dim_head

    @property
    def pad_to_multiple(self) -> int:
        """The number of which lengths had to be a multiple in the original."""
        window = self.local_attn_window_size if any(self.local_heads) else 1
        return math.lcm(self.blindspot_size if self.causal else 1, window)

    @property
    def local_heads(self) -> tuple[int, ...]:
        """The number of local heads of each layer."""
        return head_counts("n_local_attn_heads", self.n_local_attn_heads, self.depth, self.heads)

    def _attention(self, mechanism: Any, head_dim: int | None, rotary: bool) -> AttentionConfig:
        return AttentionConfig(
            num_heads=self.heads,
            mechanism=mechanism,
            head_dim=head_dim,
            rotary="interleaved" if rotary else "none",
            dropout=self.attn_layer_dropout,
        )

    def _self_attention(self) -> Any:
        if self.settings is not None:
            return _linformer(self.settings.k, self.max_seq_len, self.attn_dropout)
        return [
            mechanism_spec(
                self.heads,
                self.head_dim,
                num_local,
                causal=self.causal,
                blindspot_size=self.blindspot_size,
                window=self.local_attn_window_size,
                dropout=self.attn_dropout,
            )
            for num_local in self.local_heads
        ]

    def _cross_attention(self) -> dict[str, Any]:
        settings = self.context_settings
        if settings is not None:
            return _linformer(settings.k, settings.seq_len, self.attn_dropout)
        return mechanism_spec(self.heads, self.head_dim, 0, causal=False)


@dataclass(frozen=True, kw_only=True)
class TransformerOptions(ModelOptions):
    """Arguments of LinearAttentionTransformer."""

    bucket_size: int = 64

    def unused_arguments(self) -> list[str]:
        unused = ["bucket_size (use blindspot_size)"] if self.bucket_size != 64 else []
        return [*unused, *super().unused_arguments()]


@dataclass(frozen=True, kw_only=True)
class LanguageModelOptions(ModelOptions):
    """Arguments of LinearAttentionTransformerLM."""

    num_tokens: int
    dim_head: int | None = 64
    emb_dim: int | None = None
    return_embeddings: bool = False
    use_axial_pos_emb: bool = True
    use_rotary_emb: bool = False

    @property
    def rotary(self) -> bool:
        return self.use_rotary_emb

    @property
    def has_windows(self) -> bool:
        return super().has_windows or (self.use_axial_pos_emb and not self.use_rotary_emb)

    @property
    def axial_shape(self) -> tuple[int, int]:
        """The grid of axial positions: windows, and tokens of a window."""
        return -(-self.max_seq_len // self.local_attn_window_size), self.local_attn_window_size

    def config(self) -> ModelConfig:
        config = super().config()
        projected = self.emb_dim is not None and self.emb_dim != self.dim
        positions: Positions = "axial" if self.use_axial_pos_emb else "learned"
        if self.use_rotary_emb:
            positions = "sinusoidal"
        return replace(
            config,
            vocab_size=self.num_tokens,
            embed_dim=self.emb_dim if projected else None,
            positions=positions,
            max_length=self.max_seq_len,
            axial_shape=self.axial_shape if positions == "axial" else None,
            # The original normalizes last: after the projection to emb_dim if there is one.
            final_norm=not projected or self.return_embeddings,
            legacy=replace(config.legacy, narrow_norm=projected and not self.return_embeddings),
            # Tied embeddings have no output layer, which return_embeddings would not use.
            tie_embeddings=self.return_embeddings,
        )


def mechanism_spec(
    num_heads: int,
    head_dim: int,
    num_local: int,
    *,
    causal: bool,
    blindspot_size: int = 1,
    window: int = 128,
    dropout: float = 0.0,
) -> dict[str, Any]:
    """Return the specification of heads, of which the first `num_local` are local and the others linear."""
    local: dict[str, Any] = {"mechanism": "local", "window": window, "look_back": 1, "look_ahead": int(not causal)}
    local["dropout"] = dropout
    linear: dict[str, Any] = {"mechanism": "linear", "feature_map": "softmax"}
    if causal:
        linear |= {"normalize": "query", "blind_spot": max(blindspot_size, 1), "first_bucket": "zero"}
    else:
        linear |= {"normalize": "feature", "output_scale": head_dim**-0.5}
    if num_local in (0, num_heads):
        return local if num_local else linear
    parts = [{**local, "num_heads": num_local}, {**linear, "num_heads": num_heads - num_local}]
    return {"mechanism": "split", "parts": parts}


def _as_settings(kind: Any, given: Any) -> Any:
    """Return a settings tuple, or None; JSON configurations contain a mapping instead."""
    if given is None or isinstance(given, kind):
        return given
    if isinstance(given, Mapping) and set(given) == set(kind._fields):
        return kind(**given)
    raise ValueError(f"expected {kind.__name__}({', '.join(kind._fields)}), or a mapping with these, got {given!r}")


def _linformer(rank: int, length: int, dropout: float) -> dict[str, Any]:
    return {"mechanism": "linformer", "rank": rank, "max_length": length, "dropout": dropout, "keep_slots": True}
