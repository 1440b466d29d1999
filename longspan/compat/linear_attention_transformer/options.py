"""The arguments of linear-attention-transformer's models as a configuration of ours."""

from __future__ import annotations

import math
import re
from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longspan.models.config import AttentionConfig, FeedForwardConfig, LegacyConfig, ModelConfig

LinformerSettings = namedtuple("LinformerSettings", ["k"])
LinformerContextSettings = namedtuple("LinformerContextSettings", ["seq_len", "k"])

# A feed-forward layer in a checkpoint: the number of its pair of branches, and the tensor that tells its kind.
_FEED_FORWARD = re.compile(r"layers\.(?:layers|blocks)\.(\d+)\.(?:1|g\.net)\.(?:fn\.)+(w1\.weight|keys)$")


@dataclass(frozen=True)
class Options:
    """What both models are given. num_keys, glu: of the feed-forward layers right after self-attention."""

    dim: int
    depth: int
    max_seq_len: int
    heads: int
    dim_head: int | None
    causal: bool
    ff_chunks: int
    ff_glu: bool
    ff_dropout: float
    attn_layer_dropout: float
    attn_dropout: float
    reversible: bool
    blindspot_size: int
    n_local_attn_heads: int | Sequence[int]
    local_attn_window_size: int
    receives_context: bool
    attend_axially: bool
    pkm_layers: int | Sequence[int]
    pkm_num_keys: int
    linformer_settings: Any
    context_linformer_settings: Any
    shift_tokens: bool
    rotary: bool = False
    glu: bool = True

    def config(self, narrow_norm: bool = False, **more: Any) -> ModelConfig:
        """more: further fields, those of a language model."""
        if self.causal and self.linformer_settings is not None:
            raise ValueError("linformer_settings need causal=False; the causal Linformer is longspan's own (docs)")
        side = FeedForwardConfig(gated=self.ff_glu, dropout=self.ff_dropout, chunks=self.ff_chunks)
        own = replace(side, gated=self.ff_glu and self.glu)
        axial = heads(self.heads, self.dim // self.heads, 0, causal=self.causal)
        return ModelConfig(
            dim=self.dim,
            depth=self.depth,
            attention=self._attention(self._own(), self.dim_head, self.rotary and self.linformer_settings is None),
            cross=self._attention(self._cross(), self.dim_head, False) if self.receives_context else None,
            feed_forward=own,
            causal=self.causal,
            token_shift=((1, 0) if self.causal else (1, 0, -1)) if self.shift_tokens else (),
            residual="double" if self.reversible else "single",
            execution="reverse" if self.reversible else "keep",
            legacy=LegacyConfig(
                axial_stride=self.local_attn_window_size if self.attend_axially else None,
                axial=self._attention(axial, None, self.rotary) if self.attend_axially else None,
                side_feed_forward=side if self.pairs > 1 else None,
                product_keys=self.memories,
                num_keys=self.pkm_num_keys,
                narrow_norm=narrow_norm,
            ),
            **more,
        )

    def settled(self, shapes: Mapping[str, Sequence[int]], asked: Options) -> tuple[Options, list[str]]:
        """These options as a checkpoint of such shapes has them, and which of those asked for had no effect on it.

        The original makes the feed-forward layers after self-attention without looking at ff_glu and pkm_num_keys, and
        overlooks pkm_layers given as a list. What the shapes do not tell stays as it is.
        """
        widths: dict[int, int] = {}
        keys: dict[int, int] = {}
        for name, shape in shapes.items():
            if found := _FEED_FORWARD.search(name):
                layer, place = divmod(int(found[1]), self.pairs)
                if place == 0:
                    (keys if found[2] == "keys" else widths)[layer] = shape[1 if found[2] == "keys" else 0]
        options, without = self, list[str]()
        if asked.ff_glu and widths:
            options = replace(options, glu=set(widths.values()) != {4 * self.dim})
            without += [] if options.glu else ["ff_glu"]
        if asked.memories:
            held = {layer for layer in asked.memories if layer in keys or layer in self.memories} - set(widths)
            options = replace(options, pkm_layers=tuple(layer + 1 for layer in sorted(held)))
            without += ["pkm_layers"] if set(asked.memories) & set(widths) else []
        if keys:
            ignored = set(keys.values()) == {128} and asked.pkm_num_keys != 128
            options = replace(options, pkm_num_keys=128 if ignored else asked.pkm_num_keys)
            without += ["pkm_num_keys"] if ignored else []
        return options, without

    def idle(self) -> list[str]:
        """Arguments that this model has no use for, and why."""
        linformer = self.linformer_settings is not None
        near = any(self.local_heads) or linformer or self.context_linformer_settings is not None
        layers = (self.pkm_layers,) if isinstance(self.pkm_layers, int) else self.pkm_layers
        found = {
            "attn_dropout (for local heads and Linformer; attn_layer_dropout is for all)": self.attn_dropout
            and not near,
            "n_local_attn_heads (linformer_settings replace all heads)": linformer and any(self.local_heads),
            "blindspot_size (for causal=True)": self.blindspot_size > 1 and not self.causal,
            "context_linformer_settings (for receives_context=True)": self.context_linformer_settings is not None
            and not self.receives_context,
            f"pkm_layers beyond 1 to {self.depth}": len(self.memories) < len(layers),
        }
        return [name for name, unused in found.items() if unused]

    @property
    def pairs(self) -> int:
        """Pairs of branches in a layer: an attention and a feed-forward layer each."""
        return 1 + self.attend_axially + self.receives_context

    @property
    def memories(self) -> tuple[int, ...]:
        """Layers, counted from 0, with a product-key memory."""
        layers = (self.pkm_layers,) if isinstance(self.pkm_layers, int) else self.pkm_layers
        return tuple(layer - 1 for layer in layers if 1 <= layer <= self.depth)

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads if self.dim_head is None else self.dim_head

    @property
    def pad_to_multiple(self) -> int:
        """What lengths had to divide by in the original."""
        window = self.local_attn_window_size if any(self.local_heads) else 1
        return math.lcm(self.blindspot_size if self.causal else 1, window)

    @property
    def local_heads(self) -> tuple[int, ...]:
        """Local heads of each layer."""
        given = self.n_local_attn_heads
        counts = (given,) * self.depth if isinstance(given, int) else tuple(given)
        if len(counts) != self.depth or any(not 0 <= count <= self.heads for count in counts):
            raise ValueError(
                f"n_local_attn_heads must be one number, or one for each of {self.depth} layers, from 0 to heads "
                f"({self.heads}), got {given}"
            )
        return counts

    def _attention(self, mechanism: Any, head_dim: int | None, rotary: bool) -> AttentionConfig:
        return AttentionConfig(
            num_heads=self.heads,
            mechanism=mechanism,
            head_dim=head_dim,
            rotary="interleaved" if rotary else "none",
            dropout=self.attn_layer_dropout,
        )

    def _own(self) -> Any:
        """One mechanism, or one for each layer."""
        settings = settings_of(LinformerSettings, self.linformer_settings)
        if settings is not None:
            return _linformer(settings.k, self.max_seq_len, self.attn_dropout)
        shape = {"blindspot_size": self.blindspot_size, "window": self.local_attn_window_size}
        return [
            heads(self.heads, self.head_dim, local, causal=self.causal, dropout=self.attn_dropout, **shape)
            for local in self.local_heads
        ]

    def _cross(self) -> dict[str, Any]:
        settings = settings_of(LinformerContextSettings, self.context_linformer_settings)
        if settings is not None:
            return _linformer(settings.k, settings.seq_len, self.attn_dropout)
        return heads(self.heads, self.head_dim, 0, causal=False)


def heads(
    number: int,
    head_dim: int,
    local: int,
    *,
    causal: bool,
    blindspot_size: int = 1,
    window: int = 128,
    dropout: float = 0.0,
) -> dict[str, Any]:
    """So many heads, the first `local` of them local and the rest linear: the two kinds of that library."""
    near: dict[str, Any] = {"mechanism": "local", "window": window, "look_back": 1, "look_ahead": int(not causal)}
    near["dropout"] = dropout
    far: dict[str, Any] = {"mechanism": "linear", "feature_map": "softmax"}
    if causal:
        far |= {"normalize": "query", "blind_spot": max(blindspot_size, 1), "first_bucket": "zero"}
    else:
        far |= {"normalize": "feature", "output_scale": head_dim**-0.5}
    if local in (0, number):
        return near if local else far
    parts = [{**near, "num_heads": local}, {**far, "num_heads": number - local}]
    return {"mechanism": "split", "parts": parts}


def settings_of(kind: Any, given: Any) -> Any:
    """A settings tuple, or the mapping that says the same in JSON."""
    if given is None or isinstance(given, kind):
        return given
    if isinstance(given, Mapping) and set(given) == set(kind._fields):
        return kind(**given)
    raise ValueError(f"expected {kind.__name__}({', '.join(kind._fields)}), or a mapping with these, got {given!r}")


def _linformer(rank: int, length: int, dropout: float) -> dict[str, Any]:
    return {"mechanism": "linformer", "rank": rank, "max_length": length, "dropout": dropout}
