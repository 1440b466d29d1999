"""Replace the self-attention of a pretrained model by a longspan mechanism."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import CacheLayerMixin
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from longspan.hf.config import SavedAsStub
from longspan.mechanisms.local import LocalAttention
from longspan.models.checkpoint import CONFIG
from longspan.models.hub import SWAPPED_MAP, write_stub
from longspan.models.layers import mechanism_from
from longspan.protocol import Mechanism, State
from longspan.utils import write_atomically

MECHANISMS = "mechanisms.safetensors"
# Fields of configurations: the share of attention weights that are dropped out.
ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_ADDED = (".mechanism.", ".to_mechanism_gates.")  # in the names of tensors that the original model does not have


@dataclass(frozen=True)
class Family:
    """Where the models of a type keep their self-attention, and how it projects.

    Attributes:
        layers: Path from the base model to its list of layers.
        attention: Path from a layer to its self-attention.
        projections: Names of the projections to queries, keys and values, or the name of one to all three.
        per_head: Whether one projection gives q, k and v head by head instead of one after the other.
        norms: Names of the norms of queries and keys, head by head; a layer may lack them.
        output: Name of the output projection, None if it is outside of the self-attention.
        output_dropout: Name of the dropout after it.
        dropout: Name of the dropout of the attention weights, a number or a module.
        head_dim: Name of the attribute that holds the head dimension.
    """

    layers: str = "layers"
    attention: str = "self_attn"
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    per_head: bool = False
    norms: tuple[str, str] = ("q_norm", "k_norm")
    output: str | None = "o_proj"
    output_dropout: str | None = None
    dropout: str = "attention_dropout"
    head_dim: str = "head_dim"


_LLAMA = Family()
_BERT = Family(
    layers="encoder.layer",
    attention="attention.self",
    projections=("query", "key", "value"),
    output=None,
    dropout="dropout",
    head_dim="attention_head_size",
)
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": _LLAMA,
    "gemma2": _LLAMA,
    "gemma3_text": _LLAMA,
    "granite": _LLAMA,
    "phi": Family(norms=("q_layernorm", "k_layernorm"), output="dense"),
    "phi3": Family(projections=("qkv_proj",)),
    "gpt2": Family(
        layers="h",
        attention="attn",
        projections=("c_attn",),
        output="c_proj",
        output_dropout="resid_dropout",
        dropout="attn_dropout",
    ),
    "gpt_neox": Family(
        attention="attention", projections=("query_key_value",), per_head=True, output="dense", head_dim="head_size"
    ),
    "bert": _BERT,
    "roberta": _BERT,
    "vit": Family(attention="attention"),
}


class UnsupportedModelError(ValueError):
    """A model whose attention cannot be replaced, or not by this mechanism."""


def swap_attention(model: Any, mechanism: str | Mapping[str, Any], layers: Sequence[int] | None = None) -> Any:
    """Replace the self-attention of a pretrained model, in place.

    The projections of queries, keys, values and outputs keep their weights and names; norms of queries and keys, rotary
    positions, the scale of the scores and grouped heads stay too. A mechanism with gates (`decay`, `delta`) gets a
    projection for them that starts at zero. In the replaced layers of a decoder a generation cache holds the
    mechanism's state.

    Args:
        model: A transformers model of one of `FAMILIES`.
        mechanism: A name, or {"mechanism": name, **options}.
        layers: Which layers to replace; by default all.

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: If the model is of another family, or has sliding windows, attention dropout or capped
            scores that the mechanism does not have.
        ValueError: If the mechanism cannot be causal or bidirectional as the model is.
    """
    config = model.config
    name = str(getattr(config, "model_type", None))
    family = FAMILIES.get(name)
    if family is None:
        raise UnsupportedModelError(
            f"swap_attention supports {', '.join(FAMILIES)}; this model is of type {name!r}, which can be added to "
            "longspan.hf.swap.FAMILIES"
        )
    blocks = model.base_model.get_submodule(family.layers)
    chosen = list(range(len(blocks))) if layers is None else sorted(set(layers))
    if any(not 0 <= i < len(blocks) for i in chosen):
        raise ValueError(f"layers must be from 0 to {len(blocks) - 1}, got {chosen}")
    old = [blocks[i].get_submodule(family.attention) for i in chosen]
    if any(isinstance(layer, SwappedAttention) for layer in old):
        raise ValueError(f"attention of one of the layers {chosen} was replaced before: start from the original model")
    built = [SwappedAttention(layer, mechanism, family, i) for i, layer in zip(chosen, old, strict=True)]
    for i, new in zip(chosen, built, strict=True):
        blocks[i].set_submodule(family.attention, new)
    spec = mechanism if isinstance(mechanism, str) else dict(mechanism)
    config.longspan_swap = [*getattr(config, "longspan_swap", []), {"mechanism": spec, "layers": chosen}]
    model.save_pretrained = functools.partial(_save_swapped, model)
    return model


def _save_swapped(model: Any, save_directory: Any, **options: Any) -> None:
    """Write a checkpoint under a model type of its own: transformers alone would load it with softmax attention.

    The mechanisms' tensors are in a file of their own, so that transformers finds in its files what it expects.
    """
    tensors = options.pop("state_dict", None) or model.state_dict()
    own = {name: x.contiguous() for name, x in tensors.items() if _is_added(name)}
    others = {name: x for name, x in tensors.items() if name not in own}
    type(model).save_pretrained(model, save_directory, state_dict=others, **options)
    if options.get("is_main_process", True):
        save_file(own, Path(save_directory) / MECHANISMS, {"format": "pt"})
        path = Path(save_directory) / CONFIG
        config = json.loads(path.read_text(encoding="utf-8"))
        config |= {"model_type": SwappedConfig.model_type, "base_model_type": config["model_type"]}
        config["auto_map"] = SWAPPED_MAP
        write_stub(path.parent)
        write_atomically(path, json.dumps(config, indent=2) + "\n")


class SwappedConfig(SavedAsStub, PreTrainedConfig):
    """The configuration of a checkpoint that `swap_attention` changed; `base_model_type` is that of the original."""

    model_type = "longspan_swap"


class SwappedPreTrainedModel(SavedAsStub, PreTrainedModel):
    """What an Auto class calls for such a checkpoint; the loaded model is of a class of the original's type."""

    config_class = SwappedConfig
    auto_class: Any

    @classmethod
    def from_pretrained(cls, folder: Any, *_: Any, config: Any = None, **options: Any) -> Any:
        """Load the model; see `load_swapped`."""
        return load_swapped(folder, cls.auto_class, config=config, **options)


class SwappedModel(SwappedPreTrainedModel):
    """For AutoModel."""

    auto_class = AutoModel


class SwappedForCausalLM(SwappedPreTrainedModel):
    """For AutoModelForCausalLM."""

    auto_class = AutoModelForCausalLM


class SwappedForMaskedLM(SwappedPreTrainedModel):
    """For AutoModelForMaskedLM."""

    auto_class = AutoModelForMaskedLM


class SwappedForSequenceClassification(SwappedPreTrainedModel):
    """For AutoModelForSequenceClassification."""

    auto_class = AutoModelForSequenceClassification


class SwappedForTokenClassification(SwappedPreTrainedModel):
    """For AutoModelForTokenClassification."""

    auto_class = AutoModelForTokenClassification


class SwappedForQuestionAnswering(SwappedPreTrainedModel):
    """For AutoModelForQuestionAnswering."""

    auto_class = AutoModelForQuestionAnswering


class SwappedForImageClassification(SwappedPreTrainedModel):
    """For AutoModelForImageClassification."""

    auto_class = AutoModelForImageClassification


_HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision")


def load_swapped(folder: str | os.PathLike[str], auto_class: Any = None, *, config: Any = None, **options: Any) -> Any:
    """Load a model that `swap_attention` changed and `save_pretrained` wrote.

    Args:
        folder: The checkpoint folder, or the name of a repository on the Hub.
        auto_class: The Auto class that chooses the model's class; by default it is the class that was saved.
        config: The checkpoint's configuration, if it was loaded or changed before.
        **options: Those of `from_pretrained`.

    Returns:
        The model.

    Raises:
        ValueError: If the checkpoint is not of such a model, or lacks tensors of a mechanism.
    """
    if not os.path.isdir(folder):
        hub = {name: options.pop(name) for name in _HUB if name in options}
        folder = huggingface_hub.snapshot_download(str(folder), **hub)
    described = PreTrainedConfig.get_config_dict(folder)[0] if config is None else config.to_dict()
    swaps = described.pop("longspan_swap", None)
    if not swaps:
        raise ValueError(f"{folder} does not hold a model that swap_attention changed: load it as usual")
    own = ("model_type", "base_model_type", "auto_map")
    values = {name: value for name, value in described.items() if name not in own}
    base = type(AutoConfig.for_model(described.get("base_model_type", described["model_type"])))
    config, options = base.from_dict(values, return_unused_kwargs=True, **options)
    loader = auto_class or getattr(transformers, described["architectures"][0])
    model = loader.from_pretrained(folder, config=config, **options)
    for swap in swaps:
        swap_attention(model, **swap)
    _load_mechanisms(model, Path(folder))
    return model


def _load_mechanisms(model: Any, folder: Path) -> None:
    """Load the mechanisms' own tensors: before the swap there was nothing to load them into."""
    prefix = f"{model.base_model_prefix}."
    bare: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if _is_added(name)]  # noqa: SIM118  not a dict
            bare |= {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    wanted = [name for name in model.state_dict() if _is_added(name)]
    missing = sorted(name for name in wanted if name.removeprefix(prefix) not in bare)
    if missing:
        raise ValueError(f"{folder} lacks tensors of the swapped layers: {', '.join(missing)}")
    model.load_state_dict({name: bare[name.removeprefix(prefix)] for name in wanted}, strict=False)


class SwappedAttention(nn.Module):
    """The projections of the replaced layer around a mechanism.

    Args:
        old: The replaced layer.
        spec: The mechanism: a name, or {"mechanism": name, **options}.
        family: Where the layer keeps its projections.
        index: Which layer of the model it is.
    """

    mechanism: Mechanism
    to_mechanism_gates: nn.Linear | None

    def __init__(self, old: Any, spec: str | Mapping[str, Any], family: Family, index: int) -> None:
        super().__init__()
        self.family, self.layer_idx, self.causal = family, index, bool(getattr(old, "is_causal", True))
        for name, child in old.named_children():
            self.add_module(name, child)
        heads, head_dim = old.config.num_attention_heads, getattr(old, family.head_dim)
        built = mechanism_from(spec, heads, head_dim, heads // getattr(old, "num_key_value_groups", 1))
        self.mechanism = built.to(next(old.parameters()).device).train(old.training)
        self.training, self.to_mechanism_gates = old.training, None
        if built.num_gates:
            weight, width = next(old.parameters()), built.num_kv_heads * built.num_gates
            self.to_mechanism_gates = nn.Linear(old.config.hidden_size, width).to(weight)
            nn.init.zeros_(self.to_mechanism_gates.weight)
            nn.init.zeros_(self.to_mechanism_gates.bias)
        self.sliding_window = getattr(old if hasattr(old, "sliding_window") else old.config, "sliding_window", None)
        self._check(old, spec)
        own = getattr(self.mechanism, "scale", None)
        if own is not None and abs(own - old.scaling) > 1e-9:
            raise ValueError(f"this model scales its scores by {old.scaling}: leave out scale={own}, or give that")
        self.query_scale = 1.0 if own is not None else old.scaling * head_dim**0.5

    def _check(self, old: Any, spec: str | Mapping[str, Any]) -> None:
        """Refuse a mechanism that lacks something of the replaced layer, or needs what it does not have."""
        mechanism = self.mechanism
        if self.causal and not mechanism.supports_causal:
            raise ValueError(f"a decoder needs causal attention, which {spec!r} does not support")
        config, window = old.config, self.sliding_window
        if window is not None and not (isinstance(mechanism, LocalAttention) and mechanism.reach[0] + 1 == window):
            raise UnsupportedModelError(
                f"layer {self.layer_idx} has a sliding window of {window}: give it "
                f'{{"mechanism": "local", "window": {window}}}, or name the other layers in `layers`'
            )
        if getattr(config, "attn_logit_softcapping", None) is not None:
            raise UnsupportedModelError(
                f"this model caps its scores at {config.attn_logit_softcapping}, which no mechanism does: set "
                "config.attn_logit_softcapping to None to replace its attention by one without"
            )
        dropout = getattr(old, self.family.dropout)
        rate = dropout.p if isinstance(dropout, nn.Dropout) else dropout
        if rate and getattr(mechanism, "dropout", None) != rate:
            field = next((name for name in ATTENTION_DROPOUT if getattr(config, name, None)), "its attention dropout")
            raise UnsupportedModelError(
                f"this model drops attention out by {rate}: give the mechanism dropout={rate}, if it takes that, or "
                f"load the model without, as from_pretrained(…, {field}=0.0)"
            )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        past_key_values: Any = None,
        layer_past: Any = None,
        output_attentions: bool | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Compute what the replaced layer would; attention weights are None."""
        if output_attentions:
            raise ValueError("a swapped layer has no attention weights to return: leave out output_attentions")
        q, k, v = self.heads(hidden_states, position_embeddings)
        gates = None
        if self.to_mechanism_gates is not None:
            gates = self.to_mechanism_gates(hidden_states).unflatten(2, (k.shape[2], -1))
        key_mask = _key_mask(attention_mask, q.shape[1], self.causal, self.sliding_window)
        cache = layer_past if past_key_values is None else past_key_values
        if cache is None:
            out = self.mechanism(q, k, v, gates=gates, causal=self.causal, key_mask=key_mask)
        else:
            out = _state_layer(cache, self.layer_idx).extend(self.mechanism, q, k, v, gates, key_mask)
        return self.output(out.flatten(2)), None

    def heads(
        self, x: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, T, H, D), keys and values (B, T, Hkv, D), rotated and scaled."""
        H, Hkv, D = self.mechanism.num_heads, self.mechanism.num_kv_heads, self.mechanism.head_dim
        projected = [self.get_submodule(name)(x) for name in self.family.projections]
        if self.family.per_head:
            q, k, v = projected[0].unflatten(2, (H, 3, D)).unbind(3)
        else:
            if len(projected) == 1:
                projected = list(projected[0].split([H * D, Hkv * D, Hkv * D], 2))
            q, k, v = (part.unflatten(2, (-1, D)) for part in projected)
        q_norm, k_norm = (self._modules.get(name) for name in self.family.norms)
        q, k = q if q_norm is None else q_norm(q), k if k_norm is None else k_norm(k)
        if position_embeddings is not None:
            q, k = _rotate(q, k, *position_embeddings)
        if abs(self.query_scale - 1) > 1e-9:
            q = q * self.query_scale
        return q.to(v.dtype), k.to(v.dtype), v  # Under autocast norms and rotary embeddings return float32.

    def output(self, x: Tensor) -> Tensor:
        """Project the heads' outputs (B, T, H·D)."""
        for name in (self.family.output, self.family.output_dropout):
            x = x if name is None else self.get_submodule(name)(x.contiguous())
        return x


def _is_added(name: str) -> bool:
    """Whether a tensor is of a mechanism or of its gates."""
    return any(part in name for part in _ADDED)


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first features of each head, as many as there are angles."""
    n = cos.shape[-1]
    rotated = apply_rotary_pos_emb(q[..., :n], k[..., :n], cos, sin, unsqueeze_dim=2)
    if n < q.shape[-1]:
        rotated = (torch.cat([part, x[..., n:]], -1) for part, x in zip(rotated, (q, k), strict=True))
    q, k = rotated
    return q, k


class StateLayer(CacheLayerMixin):
    """A layer of a transformers cache that holds a mechanism's state instead of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.seen_tokens = 0

    def extend(
        self, mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, key_mask: Tensor | None
    ) -> Tensor:
        """Attend to new tokens and those before, and write the new ones to the state."""
        if self.state is None:
            self.state = mechanism.new_state(len(q), device=q.device, dtype=q.dtype)
        if q.shape[1] == 1 and self.seen_tokens:
            out, self.state = mechanism.step(self.state, q, k, v, gates=gates)
        else:
            out, self.state = mechanism.extend(self.state, q, k, v, gates=gates, key_mask=key_mask)
        self.seen_tokens += q.shape[1]
        return out

    def get_seq_length(self, *_: Any) -> int:
        """Return the number of tokens per row, padding included."""
        return self.seen_tokens

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return the length and the offset of the attention mask."""
        new = query_length if isinstance(query_length, int) else len(query_length)
        return self.seen_tokens + new, 0

    def get_max_length(self) -> int:
        """Return −1: there is no maximum."""
        return -1

    get_max_cache_shape = get_max_length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select rows, for beam search."""
        if self.state is not None:
            self.state = self.state.select(beam_idx)

    def reset(self) -> None:
        """Forget every token."""
        self.state, self.seen_tokens = None, 0

    def lazy_initialization(self, *_: Any) -> None:
        """Not used: `extend` creates the state."""
        raise NotImplementedError

    def update(self, *_: Any, **__: Any) -> Any:
        """Not used: `extend` writes the state."""
        raise NotImplementedError("this cache layer holds a state, which SwappedAttention writes")


def _state_layer(cache: Any, index: int) -> StateLayer:
    """Return a layer of the cache, created on first use."""
    cache = getattr(cache, "self_attention_cache", cache)
    while len(cache.layers) <= index:
        cache.layers.append(StateLayer() if len(cache.layers) == index else cache.layer_class_to_replicate())
    layer = cache.layers[index]
    if not isinstance(layer, StateLayer):
        if layer.get_seq_length():
            raise ValueError(
                "past_key_values was made before the model's attention was swapped: call the model without it"
            )
        layer = cache.layers[index] = StateLayer()
    return layer


def _key_mask(mask: Tensor | None, T: int, causal: bool, window: int | None) -> Tensor | None:
    """Return (B, T), which of the new tokens are real, from the (B, 1, T, S) mask that transformers makes."""
    if mask is None or (causal and T == 1):
        return None
    if mask.ndim == 2:
        return mask[:, -T:].bool()
    seen = (mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] >= 0)[:, :, -T:]
    real = torch.diagonal(seen, dim1=1, dim2=2)  # (B, T)
    expected = real[:, None].expand_as(seen)
    expected = expected.tril() if causal else expected
    expected = expected if window is None else expected.triu(1 - window)
    if bool(((seen != expected) & real[:, :, None]).any()):
        raise ValueError("a swapped layer supports padding, not masks between tokens: packed sequences are refused")
    return None if bool(real.all()) else real
