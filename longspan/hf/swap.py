"""Replace the self-attention of a pretrained decoder by a longspan mechanism."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from longspan.models.checkpoint import CONFIG
from longspan.models.layers import mechanism_from
from longspan.protocol import Mechanism, State
from longspan.utils import write_atomically

FAMILIES = ("llama", "mistral", "qwen2", "gpt2")


def swap_attention(model: Any, mechanism: str | Mapping[str, Any], layers: Sequence[int] | None = None) -> Any:
    """Replace the self-attention of a decoder, in place.

    The projections of queries, keys, values and outputs keep their weights and names; rotary positions and grouped
    heads stay too. In the replaced layers a generation cache holds the mechanism's state.

    Args:
        model: A transformers model of one of `FAMILIES`.
        mechanism: A name, or {"mechanism": name, **options}.
        layers: Which layers to replace; by default all.

    Returns:
        The same model.

    Raises:
        ValueError: If the model is of another family, has sliding windows or attention dropout that the mechanism does
            not have, or the mechanism cannot be causal or needs gates.
    """
    config = model.config
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        raise ValueError(f"swap_attention supports {', '.join(FAMILIES)}; this model is of type {family!r}")
    if getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None) is not None:
        raise ValueError(
            f"this model has a sliding window of {config.sliding_window}: swap_attention needs full attention"
        )
    blocks = model.base_model.h if family == "gpt2" else model.base_model.layers
    chosen = list(range(len(blocks))) if layers is None else sorted(set(layers))
    if any(not 0 <= i < len(blocks) for i in chosen):
        raise ValueError(f"layers must be from 0 to {len(blocks) - 1}, got {chosen}")
    place = "attn" if family == "gpt2" else "self_attn"
    for i in chosen:
        old = getattr(blocks[i], place)
        new = (_GPT2 if family == "gpt2" else _Llama)(old, mechanism)
        setattr(blocks[i], place, new.to(next(old.parameters()).device).train(old.training))
    spec = mechanism if isinstance(mechanism, str) else dict(mechanism)
    config.longspan_swap = [*getattr(config, "longspan_swap", []), {"mechanism": spec, "layers": chosen}]
    model.save_pretrained = functools.partial(_save_swapped, model)
    return model


def _save_swapped(model: Any, save_directory: Any, **options: Any) -> None:
    """Write a checkpoint under a model type of its own: transformers alone would load it with softmax attention."""
    type(model).save_pretrained(model, save_directory, **options)
    if options.get("is_main_process", True):
        path = Path(save_directory) / CONFIG
        config = json.loads(path.read_text(encoding="utf-8"))
        config |= {"model_type": SwappedConfig.model_type, "base_model_type": config["model_type"]}
        write_atomically(path, json.dumps(config, indent=2) + "\n")


class SwappedConfig(PreTrainedConfig):
    """The configuration of a checkpoint that `swap_attention` changed; `base_model_type` is that of the original."""

    model_type = "longspan_swap"


class SwappedForCausalLM(PreTrainedModel):
    """What AutoModelForCausalLM calls for such a checkpoint; the loaded model is of its original class."""

    config_class = SwappedConfig

    @classmethod
    def from_pretrained(cls, folder: Any, *_: Any, config: Any = None, **options: Any) -> Any:
        """Load the model; see `load_swapped`."""
        return load_swapped(folder, **options)


def load_swapped(folder: str | os.PathLike[str], **options: Any) -> Any:
    """Load a model that `swap_attention` changed and `save_pretrained` wrote.

    Args:
        folder: The checkpoint folder.
        **options: Those of `from_pretrained`.

    Returns:
        The model.

    Raises:
        ValueError: If the checkpoint is not of such a model.
    """
    described, _ = PreTrainedConfig.get_config_dict(folder)
    if described.get("model_type") == SwappedConfig.model_type:
        values = {name: value for name, value in described.items() if name not in ("model_type", "base_model_type")}
        options["config"] = AutoConfig.for_model(described["base_model_type"], **values)
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    swaps = getattr(model.config, "longspan_swap", None)
    if not swaps:
        raise ValueError(f"{folder} does not hold a model that swap_attention changed: load it as usual")
    model.config.longspan_swap = []
    for swap in swaps:
        swap_attention(model, **swap)
    # The mechanisms' own tensors are in the files too; before the swap there was nothing to load them into.
    remaining = {
        name: tensor
        for path in sorted(Path(folder).glob("*.safetensors"))
        for name, tensor in load_file(path).items()
        if name in found["unexpected_keys"]
    }
    unknown = model.load_state_dict(remaining, strict=False).unexpected_keys
    if unknown:
        raise ValueError(f"{folder} holds tensors that the swapped model does not have: {', '.join(unknown)}")
    return model


class SwappedAttention(nn.Module):
    """The projections of the replaced layer around a mechanism."""

    mechanism: Mechanism

    def __init__(self, old: Any, spec: str | Mapping[str, Any], num_heads: int, num_kv_heads: int, dropout: float):
        super().__init__()
        self.layer_idx = old.layer_idx
        for name, child in old.named_children():
            self.add_module(name, child)
        self.mechanism = mechanism_from(spec, num_heads, old.head_dim, num_kv_heads)
        if self.mechanism.num_gates:
            raise ValueError(
                f"{spec!r} needs gates, for which the layer it would replace has no projection: use a mechanism without"
            )
        if not self.mechanism.supports_causal:
            raise ValueError(f"a decoder needs causal attention, which {spec!r} does not support")
        scale = getattr(self.mechanism, "scale", None)
        if abs(old.scaling - old.head_dim**-0.5) > 1e-9 and scale != old.scaling:
            raise ValueError(f"this model scales its scores by {old.scaling}: give the mechanism scale={old.scaling}")
        if dropout and getattr(self.mechanism, "dropout", None) != dropout:
            raise ValueError(
                f"this model drops attention out by {dropout}: give the mechanism dropout={dropout}, or set it to 0"
            )

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Compute what the replaced layer would; attention weights are None."""
        q, k, v = self._heads(hidden_states, position_embeddings)
        key_mask = _key_mask(attention_mask, q.shape[1])
        if past_key_values is None:
            out = self.mechanism(q, k, v, causal=True, key_mask=key_mask)
        else:
            out = _state_layer(past_key_values, self.layer_idx).extend(self.mechanism, q, k, v, key_mask)
        return self._output(out.flatten(2)), None

    def _heads(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def _output(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _Llama(SwappedAttention):
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear

    def __init__(self, old: Any, spec: str | Mapping[str, Any]) -> None:
        heads, kv_heads = (layer.out_features // old.head_dim for layer in (old.q_proj, old.k_proj))
        super().__init__(old, spec, heads, kv_heads, old.attention_dropout)

    def _heads(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        size = (-1, self.mechanism.head_dim)
        q, k, v = (layer(x).unflatten(2, size) for layer in (self.q_proj, self.k_proj, self.v_proj))
        assert position_embeddings is not None
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
        return q, k, v

    def _output(self, x: Tensor) -> Tensor:
        return self.o_proj(x)


class _GPT2(SwappedAttention):
    c_attn: nn.Module
    c_proj: nn.Module
    resid_dropout: nn.Dropout

    def __init__(self, old: Any, spec: str | Mapping[str, Any]) -> None:
        super().__init__(old, spec, old.num_heads, old.num_heads, old.attn_dropout.p)

    def _heads(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (part.unflatten(2, (-1, self.mechanism.head_dim)) for part in self.c_attn(x).chunk(3, 2))
        return q, k, v

    def _output(self, x: Tensor) -> Tensor:
        return self.resid_dropout(self.c_proj(x.contiguous()))


class StateLayer(CacheLayerMixin):
    """A layer of a transformers cache that holds a mechanism's state instead of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self.seen_tokens = 0

    def extend(self, mechanism: Mechanism, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        """Attend to new tokens and those before, and write the new ones to the state."""
        if self.state is None:
            self.state = mechanism.new_state(len(q), device=q.device, dtype=q.dtype)
        if q.shape[1] == 1 and self.seen_tokens:
            out, self.state = mechanism.step(self.state, q, k, v)
        else:
            out, self.state = mechanism.extend(self.state, q, k, v, key_mask=key_mask)
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


def _key_mask(mask: Tensor | None, T: int) -> Tensor | None:
    """Return (B, T), which of the new tokens are real, from the (B, 1, T, S) mask that transformers makes."""
    if mask is None or T == 1:
        return None
    if mask.ndim == 2:
        return mask[:, -T:].bool()
    seen = mask[:, 0] if mask.dtype == torch.bool else mask[:, 0] >= 0
    real = seen[:, -1, -T:]  # (B, T)
    own = torch.diagonal(seen[:, :, -T:], dim1=1, dim2=2)
    if bool((own & ~real).any()):
        raise ValueError("a swapped layer supports padding, not masks between tokens: packed sequences are refused")
    return None if bool(real.all()) else real
