"""A pretrained decoder, swapped or not, as a longspan model: what `longspan generate` and `longspan serve` run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from longspan.hf.swap import FAMILIES, SwappedAttention
from longspan.models.config import AttentionConfig, FeedForwardConfig, LegacyConfig, ModelConfig
from longspan.models.transformer import LanguageModel

Tensors = dict[str, Tensor]
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


@dataclass(frozen=True)
class DecoderForm:
    """Where the decoders of a type keep what is not self-attention, for which see `swap.Family`.

    Attributes:
        embedding: Path from the base model to the token embedding.
        positions: Path to the learned positions.
        final_norm: Path to the norm after the last layer.
        norms: Names in a layer of the norms before attention and before the feed-forward layer; one may be both.
        hidden: Names in a layer of the projections to the hidden width; two of them, or one of both, are a gated unit.
        gated: Whether the feed-forward layer is a gated unit.
        out: Name of the feed-forward layer's output projection.
        parallel: Whether attention and feed-forward layer read the same residual.
        norm_offset: What a norm adds to its weight.
    """

    embedding: str = "embed_tokens"
    positions: str | None = None
    final_norm: str = "norm"
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    hidden: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    gated: bool = True
    out: str = "mlp.down_proj"
    parallel: bool = False
    norm_offset: float = 0.0


_LLAMA = DecoderForm()
FORMS: dict[str, DecoderForm] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "granite": _LLAMA,
    "gemma": DecoderForm(norm_offset=1.0),
    "phi": DecoderForm(
        final_norm="final_layernorm",
        norms=("input_layernorm", "input_layernorm"),
        hidden=("mlp.fc1",),
        gated=False,
        out="mlp.fc2",
        parallel=True,
    ),
    "phi3": DecoderForm(hidden=("mlp.gate_up_proj",)),
    "gpt2": DecoderForm(
        embedding="wte",
        positions="wpe",
        final_norm="ln_f",
        norms=("ln_1", "ln_2"),
        hidden=("mlp.c_fc",),
        gated=False,
        out="mlp.c_proj",
    ),
    "gpt_neox": DecoderForm(
        embedding="embed_in",
        final_norm="final_layer_norm",
        hidden=("mlp.dense_h_to_4h",),
        gated=False,
        out="mlp.dense_4h_to_h",
        parallel=True,
    ),
}


def why_not_native(model: Any) -> str | None:
    """Return why a transformers model cannot become a `LanguageModel`; None if it can."""
    config = model.config
    kind = getattr(config, "model_type", None)
    if kind not in FORMS:
        return f"longspan models have no form for type {kind!r}, only for {', '.join(FORMS)}"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        return f"its rotary embedding is of type {rope.get('rope_type')!r}, which longspan models do not have"
    activation = _activation_name(config)
    if activation not in _ACTIVATIONS:
        return f"its activation {activation!r} is not one of {', '.join(_ACTIVATIONS)}"
    decoder = _Decoder(model)
    if any(isinstance(norm, nn.LayerNorm) for norm in decoder.head_norms(decoder.attentions[0]).values()):
        return "its queries and keys have layer norms, and those of longspan models are RMS norms"
    factor = rope.get("partial_rotary_factor", 1.0)
    if int(decoder.head_dim * factor) % 2 and int(decoder.head_dim * factor) > 1:
        return f"it rotates {int(decoder.head_dim * factor)} features of a head, which is no even number"
    return None


def to_language_model(model: Any) -> LanguageModel:
    """Convert a decoder of transformers, whose attention `swap_attention` may have replaced.

    Constant factors of embeddings, residuals, scores and logits become part of the weights.

    Args:
        model: A model for causal language modeling of one of the types in `FORMS`: Llama, Mistral, Qwen2, Qwen3,
            Granite, Gemma, Phi, Phi-3, GPT-2 or GPT-NeoX.

    Returns:
        A model with the same logits, in eval mode, which shares no memory with the given one.

    Raises:
        ValueError: If longspan's models have no such form.
    """
    why = why_not_native(model)
    if why is not None:
        raise ValueError(f"this model cannot be converted: {why}; keep it as a transformers folder (save_pretrained)")
    decoder = _Decoder(model)
    with torch.device("meta"):
        native = LanguageModel(decoder.config())
    native = native.to_empty(device="cpu").to(next(model.parameters()).dtype)
    native.load_state_dict({name: x.detach().cpu().clone() for name, x in decoder.tensors().items()})
    return native.eval()


class _Decoder:
    """The parts of a transformers decoder, and the configuration and the tensors of the same `LanguageModel`."""

    def __init__(self, model: Any) -> None:
        kind = model.config.model_type
        self.model, self.base, self.form, self.family = model, model.base_model, FORMS[kind], FAMILIES[kind]
        self.layers = list(self.base.get_submodule(self.family.layers))
        self.attentions = [layer.get_submodule(self.family.attention) for layer in self.layers]
        first = self.attentions[0]
        swapped = isinstance(first, SwappedAttention)
        self.head_dim: int = first.mechanism.head_dim if swapped else getattr(first, self.family.head_dim)
        self.num_heads: int = model.config.num_attention_heads
        self.num_kv_heads: int = getattr(model.config, "num_key_value_heads", None) or self.num_heads
        self.head = model.get_output_embeddings()
        # A bias of the logits needs a layer of its own.
        self.tied = bool(model.config.tie_word_embeddings) and self.head.bias is None

    def config(self) -> ModelConfig:
        config, form, first = self.model.config, self.form, self.attentions[0]
        final = self.base.get_submodule(form.final_norm)
        out, hidden = (self.layers[0].get_submodule(name) for name in (form.out, form.hidden[0]))
        rope = getattr(config, "rope_parameters", None)
        rotary: dict[str, Any] = {}
        if rope is not None:
            rotary = {"rotary": "halves", "rotary_base": float(rope["rope_theta"])}
            if rope.get("partial_rotary_factor", 1.0) != 1:
                # transformers rotates one pair at least.
                rotary["rotary_dim"] = max(2, int(self.head_dim * rope["partial_rotary_factor"]))
        attention = AttentionConfig(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            mechanism=[self._mechanism(i) for i in range(len(self.layers))],
            qkv_bias=first.get_submodule(self.family.projections[0]).bias is not None,
            out_bias=self._attention_output(first).bias is not None,
            qk_norm=bool(self.head_norms(first)),
            **rotary,
        )
        parallel = getattr(config, "use_parallel_residual", form.parallel)
        return ModelConfig(
            dim=config.hidden_size,
            depth=len(self.layers),
            attention=attention,
            feed_forward=FeedForwardConfig(
                hidden=_matrix(out).shape[1],
                activation=_ACTIVATIONS[_activation_name(config)],  # type: ignore[arg-type]
                gated=form.gated,
                bias=hidden.bias is not None,
            ),
            norm="layer" if isinstance(final, nn.LayerNorm) else "rms",
            norm_eps=getattr(final, "eps", None) or final.variance_epsilon,
            residual="parallel" if parallel else "single",
            positions="none" if form.positions is None else "learned",
            max_length=None if form.positions is None else len(self.base.get_submodule(form.positions).weight),
            causal=True,
            vocab_size=config.vocab_size,
            tie_embeddings=self.tied,
            logit_softcap=getattr(config, "final_logit_softcapping", None),
            legacy=LegacyConfig(logits_bias=self.head.bias is not None),
        )

    def tensors(self) -> Tensors:
        config, form = self.model.config, self.form
        embedding = self.base.get_submodule(form.embedding)
        # Gemma and Granite multiply embeddings; Granite divides logits.
        factor = float(getattr(embedding, "scalar_embed_scale", getattr(config, "embedding_multiplier", 1.0)))
        logits = 1 / float(getattr(config, "logits_scaling", 1.0))
        found = {"embedding.weight": _scaled(embedding.weight, factor)}
        # Where the logits are computed with the multiplied embeddings, the norm before them takes the factor back.
        norm = _norm(self.base.get_submodule(form.final_norm), form.norm_offset, logits / factor if self.tied else 1.0)
        found |= _named("transformer.norm", norm)
        if not self.tied:
            found |= _named("to_logits", {name: _scaled(x, logits) for name, x in _linear(self.head).items()})
        if form.positions is not None:
            found["positions.table"] = self.base.get_submodule(form.positions).weight
        residual = float(getattr(config, "residual_multiplier", 1.0))
        for i, (layer, attention) in enumerate(zip(self.layers, self.attentions, strict=True)):
            first, second = (f"transformer.stack.branches.{2 * i + branch}" for branch in range(2))
            for branch, name in zip((first, second), form.norms, strict=True):
                found |= _named(f"{branch}.norm", _norm(layer.get_submodule(name), form.norm_offset))
            found |= _named(f"{first}.layer", self._attention(attention, residual))
            hidden = _joined([_linear(layer.get_submodule(name)) for name in form.hidden])
            out = {name: _scaled(x, residual) for name, x in _linear(layer.get_submodule(form.out)).items()}
            found |= _named(f"{second}.layer.to_hidden", hidden) | _named(f"{second}.layer.to_out", out)
        return found

    def head_norms(self, attention: Any) -> dict[str, Any]:
        """Return the norms of queries and keys that a layer has."""
        names = zip(("q_norm", "k_norm"), self.family.norms, strict=True)
        found = {ours: attention._modules.get(theirs) for ours, theirs in names}
        return {name: norm for name, norm in found.items() if norm is not None}

    def _attention_output(self, attention: Any) -> Any:
        assert self.family.output is not None
        return attention.get_submodule(self.family.output)

    def _attention(self, attention: Any, residual: float) -> Tensors:
        """Return the tensors of an attention layer, by their names in longspan's."""
        norms = self.head_norms(attention)
        # longspan's mechanisms divide scores by √D unless another scale is given.
        swapped = isinstance(attention, SwappedAttention)
        factor = attention.query_scale if swapped else attention.scaling * self.head_dim**0.5
        q, *kv = self._projections(attention)
        if not norms:
            q = {name: _scaled(x, factor) for name, x in q.items()}
        found = _named("to_q", q) | _named("to_kv", _joined(kv))
        out = _linear(self._attention_output(attention))
        found |= _named("to_out", {name: _scaled(x, residual) for name, x in out.items()})
        for name, norm in norms.items():
            found |= _named(name, _norm(norm, self.form.norm_offset, factor if name == "q_norm" else 1.0))
        if swapped:
            found |= _named("mechanism", attention.mechanism.state_dict(keep_vars=True))
            if attention.to_mechanism_gates is not None:
                found |= _named("to_mechanism_gates", _linear(attention.to_mechanism_gates))
        return found

    def _projections(self, attention: Any) -> Sequence[Tensors]:
        """Return weights and biases of the projections to queries, keys and values."""
        found = [_linear(attention.get_submodule(name)) for name in self.family.projections]
        if len(found) == 3:
            return found
        (joint,) = found
        parts: list[Tensors] = [{}, {}, {}]
        sizes = [heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        for name, x in joint.items():
            if self.family.per_head:
                split = [part.flatten(0, 1) for part in x.unflatten(0, (self.num_heads, 3, -1)).unbind(1)]
            else:
                split = list(x.split(sizes))
            for part, value in zip(parts, split, strict=True):
                part[name] = value
        return parts

    def _mechanism(self, i: int) -> str | Mapping[str, Any]:
        """Return the mechanism of a layer; where none was swapped in, that of the original."""
        for swap in getattr(self.model.config, "longspan_swap", None) or []:
            if i in swap["layers"]:
                return swap["mechanism"]
        attention = self.attentions[i]
        owner = attention if hasattr(attention, "sliding_window") else self.model.config
        window = getattr(owner, "sliding_window", None)
        return "softmax" if window is None else {"mechanism": "local", "window": window}


def _activation_name(config: Any) -> Any:
    return getattr(config, "hidden_act", None) or getattr(config, "activation_function", None)


def _matrix(layer: Any) -> Tensor:
    """Return the weight (out, in) of a linear layer; a Conv1D stores it transposed."""
    return layer.weight.T if isinstance(layer, Conv1D) else layer.weight


def _linear(layer: Any) -> Tensors:
    """Return the weight, and the bias where there is one."""
    return {"weight": _matrix(layer)} | ({} if layer.bias is None else {"bias": layer.bias})


def _joined(layers: Sequence[Tensors]) -> Tensors:
    """Return the tensors of linear layers that become one."""
    return {name: torch.cat([layer[name] for layer in layers]) for name in layers[0]}


def _norm(norm: Any, offset: float, factor: float = 1.0) -> Tensors:
    """Return the tensors of a norm whose output is multiplied by a factor."""
    weight = norm.weight if offset == 0 else _wide(norm.weight) + offset
    found = {"weight": weight} | ({"bias": norm.bias} if getattr(norm, "bias", None) is not None else {})
    return {name: _scaled(x, factor) for name, x in found.items()}


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if abs(factor - 1) < 1e-9 else _wide(x) * factor


def _wide(x: Tensor) -> Tensor:
    """Return x in float32 at least, so that what is computed of a weight is rounded once."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> Tensors:
    return {f"{prefix}.{name}": x for name, x in tensors.items()}
