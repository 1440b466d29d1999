"""The arguments of local-attention, and the longspan configuration of its models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from longspan.models.config import AttentionConfig, FeedForwardConfig, LegacyConfig, ModelConfig


@dataclass(frozen=True, kw_only=True)
class LayerOptions:
    """Arguments that LocalMHA and LocalTransformer share."""

    dim: int
    dim_head: int = 64
    heads: int = 8
    causal: bool
    use_xpos: bool = False
    xpos_scale_base: float | None = None
    qk_rmsnorm: bool = False
    qk_scale: float = 8
    exact_windowsize: bool | None = None
    gate_values_per_head: bool = False
    look_backward: int = 1
    look_forward: int | None = None
    shared_qk: bool = False
    rel_pos_emb_config: tuple[int, int] | None = None
    faithful: bool | None = None

    def __post_init__(self) -> None:
        if self.rel_pos_emb_config is not None and self.rel_pos_emb_config[0] != self.dim_head:
            raise ValueError(
                f"rel_pos_emb_config is for {self.rel_pos_emb_config[0]} features, but dim_head is {self.dim_head}"
            )


@dataclass(frozen=True, kw_only=True)
class MHAOptions(LayerOptions):
    """Arguments of LocalMHA."""

    window_size: int
    causal: bool = False
    dropout: float = 0.0
    prenorm: bool = False
    use_rotary_pos_emb: bool = True


@dataclass(frozen=True, kw_only=True)
class TransformerOptions(LayerOptions):
    """Arguments of LocalTransformer."""

    num_tokens: int | None
    max_seq_len: int
    depth: int
    causal: bool = True
    local_attn_window_size: int = 512
    ff_mult: float = 4
    attn_dropout: float = 0.0
    ff_dropout: float = 0.0
    ignore_index: int = -1
    use_dynamic_pos_bias: bool = False
    global_attn_layer: nn.Module | None = None
    layers_insert_global_attn: tuple[int, ...] | None = None
    num_residual_streams: int = 4

    def attention(self) -> dict[str, Any]:
        """Return the arguments of each LocalMHA."""
        shared = {name: getattr(self, name) for name in LayerOptions.__dataclass_fields__}
        return shared | {
            "window_size": self.local_attn_window_size,
            "dropout": self.attn_dropout,
            "prenorm": True,
            "use_rotary_pos_emb": not self.use_dynamic_pos_bias,
        }

    def config(self, specs: list[dict[str, Any]], *, single: bool) -> ModelConfig:
        """Return the configuration of the longspan model.

        Args:
            specs: The mechanism of each layer.
            single: Whether there is one residual stream.
        """
        rotary = not self.use_dynamic_pos_bias
        if self.qk_rmsnorm:
            # Our norm returns vectors of length √dim_head, theirs of length 1; shared_qk normalizes keys once more.
            length = self.dim_head**0.5 if self.shared_qk else self.dim_head
            specs = [spec | {"scale": spec["scale"] / length} for spec in specs]
        return ModelConfig(
            dim=self.dim,
            depth=self.depth,
            attention=AttentionConfig(
                num_heads=self.heads,
                head_dim=self.dim_head,
                mechanism=specs[0] if all(spec == specs[0] for spec in specs) else specs,
                out_bias=False,
                qk_norm=self.qk_rmsnorm,
                rotary="halves" if rotary and not self.use_xpos else "none",
                value_gates=self.gate_values_per_head,
                dynamic_bias=0 if rotary else self.dim // 2,
            ),
            feed_forward=FeedForwardConfig(
                hidden=int(self.dim * self.ff_mult * 2 / 3), gated=True, bias=False, dropout=self.ff_dropout
            ),
            final_norm=self.num_tokens is not None,
            positions="none" if self.num_tokens is None else "learned",
            max_length=self.max_seq_len,
            causal=self.causal,
            residual="single" if single else "hyper",
            num_streams=self.num_residual_streams,
            vocab_size=self.num_tokens,
            legacy=LegacyConfig(logits_bias=False),
        )

    @property
    def global_layers(self) -> tuple[int, ...]:
        """The layers, counted from 1, with a global attention layer."""
        if self.global_attn_layer is None:
            return ()
        given = self.layers_insert_global_attn
        layers = tuple(range(1, self.depth + 1)) if given is None else tuple(sorted(set(given)))
        wrong = [i for i in layers if not 0 < i <= self.depth]
        if wrong:
            raise ValueError(f"layers_insert_global_attn must be layers from 1 to {self.depth}, got {wrong}")
        return layers


def windows_ahead(causal: bool, look_forward: int | None) -> int:
    """Return look_forward, by default 1 unless causal."""
    if causal and look_forward:
        raise ValueError(f"look_forward is {look_forward}, but causal attention cannot look forward")
    return int(not causal) if look_forward is None else look_forward
