"""The recorded variants of linear-attention-transformer: the class and the arguments that give each of them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from torch import nn

BARE: dict[str, Any] = {"dim": 32, "depth": 2, "max_seq_len": 64, "heads": 4}
LM: dict[str, Any] = {**BARE, "num_tokens": 20, "dim_head": 8, "local_attn_window_size": 16}
CAUSAL: dict[str, Any] = {"causal": True, "n_local_attn_heads": 2, "blindspot_size": 8}
# What a variant adds to these; settings are given by name, for the tuples of either package.
VARIANTS: dict[str, dict[str, Any]] = {
    "LinearAttentionTransformer": {},
    "LinearAttentionTransformer[reversible]": {"reversible": True},
    "LinearAttentionTransformerLM": {},
    "LinearAttentionTransformerLM[causal_local]": CAUSAL,
    "LinearAttentionTransformerLM[emb_dim]": {"emb_dim": 16},
    "LinearAttentionTransformerLM[axial]": {"attend_axially": True, "ff_glu": True, **CAUSAL},
    "LinearAttentionTransformerLM[pkm]": {"pkm_layers": (1,), "pkm_num_keys": 128},
    "LinearAttentionTransformerLM[rotary]": {"use_rotary_emb": True},
    "LinearAttentionTransformerLM[abs_pos]": {"use_axial_pos_emb": False},
    "LinearAttentionTransformerLM[context]": {"receives_context": True, **CAUSAL},
    "LinearAttentionTransformerLM[shift]": {"shift_tokens": True, **CAUSAL},
    "LinearAttentionTransformerLM[chunks]": {"ff_chunks": 2},
    "LinearAttentionTransformerLM[reversible]": {"reversible": True, **CAUSAL},
    "LinearAttentionTransformerLM[linformer]": {"linformer_settings": {"k": 4}},
    "LinearAttentionTransformerLM[ctx_linformer]": {
        "receives_context": True,
        "context_linformer_settings": {"seq_len": 16, "k": 4},
        **CAUSAL,
    },
    "LinearAttentionTransformerLM[return_embeddings]": {"return_embeddings": True},
    "AutoregressiveWrapper": CAUSAL,
    "ImageLinearAttention": {"chan": 8, "heads": 2, "key_dim": 4, "value_dim": 4},
}
MODELS = [name for name in VARIANTS if name.startswith("LinearAttention")]


def build(library: ModuleType, name: str, **more: Any) -> nn.Module:
    """A class of either package, with the arguments of a variant and more."""
    kind = name.partition("[")[0]
    extra = {**VARIANTS.get(name, {}), **more}
    if kind == "ImageLinearAttention":
        return library.ImageLinearAttention(**extra)
    if kind == "AutoregressiveWrapper":
        return library.AutoregressiveWrapper(build(library, "LinearAttentionTransformerLM", **extra))
    for option, settings in (
        ("linformer_settings", "LinformerSettings"),
        ("context_linformer_settings", "LinformerContextSettings"),
    ):
        if option in extra:
            extra[option] = getattr(library, settings)(**extra[option])
    arguments = {**(LM if kind.endswith("LM") else BARE), **extra}
    return getattr(library, kind)(**arguments)
