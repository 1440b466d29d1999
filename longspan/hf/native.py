"""A pretrained decoder, swapped or not, as a longspan model: what `longspan generate` and `longspan serve` run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from longspan.models.config import AttentionConfig, FeedForwardConfig, LegacyConfig, ModelConfig
from longspan.models.transformer import LanguageModel

Tensors = dict[str, Tensor]
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def why_not_native(model: Any) -> str | None:
    """Return why a transformers model cannot become a `LanguageModel`; None if it can."""
    config = model.config
    family = getattr(config, "model_type", None)
    if family not in _CONVERTERS:
        return f"longspan models have no form for type {family!r}, only for {', '.join(_CONVERTERS)}"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return f"its rotary embedding is of type {rope.get('rope_type')!r}, which longspan models do not have"
    activation = getattr(config, "hidden_act", None) or getattr(config, "activation_function", None)
    if activation not in _ACTIVATIONS:
        return f"its activation {activation!r} is not one of {', '.join(_ACTIVATIONS)}"
    if getattr(config, "mlp_bias", False) or getattr(config, "attention_bias", False):
        return "its projections have biases that longspan models do not have"
    if getattr(config, "layer_types", None) and set(config.layer_types) != {"full_attention"}:
        return "some of its layers have sliding windows"
    return None


def to_language_model(model: Any) -> LanguageModel:
    """Convert a decoder of transformers, whose attention `swap_attention` may have replaced.

    Args:
        model: A Llama, Mistral, Qwen2, Qwen3 or GPT-2 model for causal language modeling.

    Returns:
        A model with the same logits, in eval mode, which shares no memory with the given one.

    Raises:
        ValueError: If longspan's models have no such form.
    """
    why = why_not_native(model)
    if why is not None:
        raise ValueError(f"this model cannot be converted: {why}; keep it as a transformers folder (save_pretrained)")
    with torch.device("meta"):
        native = LanguageModel(_CONVERTERS[model.config.model_type].config(model))
    native = native.to_empty(device="cpu").to(next(model.parameters()).dtype)
    tensors = _CONVERTERS[model.config.model_type].tensors(model)
    native.load_state_dict({name: x.detach().cpu().clone() for name, x in tensors.items()})
    return native.eval()


class _LlamaForm:
    """Llama, Mistral, Qwen2 and Qwen3: RMS norms, gated feed-forward layers, rotary positions, grouped heads."""

    @staticmethod
    def config(model: Any) -> ModelConfig:
        config = model.config
        first = model.base_model.layers[0].self_attn
        rope = getattr(config, "rope_parameters", None) or {}
        attention = AttentionConfig(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=first.head_dim if hasattr(first, "head_dim") else first.mechanism.head_dim,
            mechanism=_mechanisms(model, config.num_hidden_layers),
            qkv_bias=first.q_proj.bias is not None,
            out_bias=False,
            qk_norm=hasattr(first, "q_norm"),
            rotary="halves",
            rotary_base=float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))),
        )
        return ModelConfig(
            dim=config.hidden_size,
            depth=config.num_hidden_layers,
            attention=attention,
            feed_forward=FeedForwardConfig(
                hidden=config.intermediate_size, activation=_activation(config.hidden_act), gated=True, bias=False
            ),
            norm="rms",
            norm_eps=config.rms_norm_eps,
            causal=True,
            vocab_size=config.vocab_size,
            tie_embeddings=bool(config.tie_word_embeddings),
            legacy=LegacyConfig(logits_bias=False),
        )

    @staticmethod
    def tensors(model: Any) -> Tensors:
        found = {"embedding.weight": model.base_model.embed_tokens.weight}
        found["transformer.norm.weight"] = model.base_model.norm.weight
        if not model.config.tie_word_embeddings:
            found["to_logits.weight"] = model.lm_head.weight
        for i, layer in enumerate(model.base_model.layers):
            attention, mlp = layer.self_attn, layer.mlp
            own = {"to_q": [attention.q_proj], "to_kv": [attention.k_proj, attention.v_proj]}
            found |= _joined(f"{_branch(2 * i)}.layer", own | {"to_out": [attention.o_proj]})
            for name in ("q_norm", "k_norm"):
                if hasattr(attention, name):
                    found[f"{_branch(2 * i)}.layer.{name}.weight"] = getattr(attention, name).weight
            found |= _own_tensors(f"{_branch(2 * i)}.layer", attention)
            feed_forward = {"to_hidden": [mlp.gate_proj, mlp.up_proj], "to_out": [mlp.down_proj]}
            found |= _joined(f"{_branch(2 * i + 1)}.layer", feed_forward)
            found[f"{_branch(2 * i)}.norm.weight"] = layer.input_layernorm.weight
            found[f"{_branch(2 * i + 1)}.norm.weight"] = layer.post_attention_layernorm.weight
        return found


class _GPT2Form:
    """GPT-2: layer norms, learned positions, biases everywhere."""

    @staticmethod
    def config(model: Any) -> ModelConfig:
        config = model.config
        return ModelConfig(
            dim=config.n_embd,
            depth=config.n_layer,
            attention=AttentionConfig(
                num_heads=config.n_head, mechanism=_mechanisms(model, config.n_layer), qkv_bias=True
            ),
            feed_forward=FeedForwardConfig(
                hidden=config.n_inner or 4 * config.n_embd, activation=_activation(config.activation_function)
            ),
            norm_eps=config.layer_norm_epsilon,
            positions="learned",
            max_length=config.n_positions,
            causal=True,
            vocab_size=config.vocab_size,
            tie_embeddings=bool(config.tie_word_embeddings),
            legacy=LegacyConfig(logits_bias=False),
        )

    @staticmethod
    def tensors(model: Any) -> Tensors:
        base = model.base_model
        found = {"embedding.weight": base.wte.weight, "positions.table": base.wpe.weight}
        found |= _norm("transformer.norm", base.ln_f)
        if not model.config.tie_word_embeddings:
            found["to_logits.weight"] = model.lm_head.weight
        for i, layer in enumerate(base.h):
            attention, first, second = layer.attn, _branch(2 * i), _branch(2 * i + 1)
            # A Conv1D stores its weight transposed.
            q, kv = (x.T for x in attention.c_attn.weight.split([base.embed_dim, 2 * base.embed_dim], 1))
            q_bias, kv_bias = attention.c_attn.bias.split([base.embed_dim, 2 * base.embed_dim])
            found |= {f"{first}.layer.to_q.weight": q, f"{first}.layer.to_q.bias": q_bias}
            found |= {f"{first}.layer.to_kv.weight": kv, f"{first}.layer.to_kv.bias": kv_bias}
            for name, layer_of in (
                (f"{first}.layer.to_out", attention.c_proj),
                (f"{second}.layer.to_hidden", layer.mlp.c_fc),
                (f"{second}.layer.to_out", layer.mlp.c_proj),
            ):
                found |= {f"{name}.weight": layer_of.weight.T, f"{name}.bias": layer_of.bias}
            found |= _norm(f"{first}.norm", layer.ln_1) | _norm(f"{second}.norm", layer.ln_2)
            found |= _own_tensors(f"{first}.layer", attention)
        return found


_CONVERTERS: dict[str, Any] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LlamaForm),
    "gpt2": _GPT2Form,
}


def _mechanisms(model: Any, depth: int) -> list[str | Mapping[str, Any]]:
    """Return the mechanism of each layer, "softmax" where none was swapped in."""
    found: list[str | Mapping[str, Any]] = ["softmax"] * depth
    for swap in getattr(model.config, "longspan_swap", None) or []:
        for layer in swap["layers"]:
            found[layer] = swap["mechanism"]
    return found


def _activation(name: str) -> Any:
    return _ACTIVATIONS[name]


def _branch(index: int) -> str:
    return f"transformer.stack.branches.{index}"


def _joined(prefix: str, layers: Mapping[str, list[nn.Linear]]) -> Tensors:
    """Return the weights, and biases where there are any, of linear layers that become one."""
    found = {f"{prefix}.{name}.weight": torch.cat([x.weight for x in parts]) for name, parts in layers.items()}
    for name, parts in layers.items():
        if parts[0].bias is not None:
            found[f"{prefix}.{name}.bias"] = torch.cat([x.bias for x in parts])
    return found


def _norm(name: str, norm: nn.LayerNorm) -> Tensors:
    return {f"{name}.weight": norm.weight, f"{name}.bias": norm.bias}


def _own_tensors(prefix: str, attention: Any) -> Tensors:
    """Return what a swapped layer has and the original does not: the mechanism's tensors and its gates."""
    if not hasattr(attention, "mechanism"):
        return {}
    found = {f"{prefix}.mechanism.{name}": x for name, x in attention.mechanism.state_dict(keep_vars=True).items()}
    if getattr(attention, "to_mechanism_gates", None) is not None:
        found |= _joined(prefix, {"to_mechanism_gates": [attention.to_mechanism_gates]})
    return found
