"""Map local-attention's state-dict keys to those of longspan modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from longspan.compat.local_attention.rotary import frequencies
from longspan.compat.state_dict import KeyMapping, constant, rename, rename_layer
from longspan.models.config import AttentionConfig
from longspan.models.residual import ResidualBranch

HYPER_CONNECTION_KEYS = [
    rename("static_alpha", "static_mix"),
    rename("dynamic_alpha_fn", "dynamic_mix"),
    rename("dynamic_alpha_scale", "mix_scale"),
    rename("static_beta", "static_out"),
    rename("dynamic_beta_fn", "dynamic_out"),
    rename("dynamic_beta_scale", "out_scale"),
    rename("norm.gamma", "norm.offset"),
]


def attention_keys(branch: ResidualBranch, config: AttentionConfig) -> Iterator[KeyMapping]:
    """Map the keys of a LocalMHA."""
    head_dim, spec = config.head_dim, config.mechanism
    assert head_dim is not None
    assert isinstance(spec, Mapping)
    inner = config.num_heads * head_dim
    if branch.norm is not None:
        yield from rename_layer("norm", "norm")
    yield KeyMapping(
        ("to_qkv.weight",),
        ("layer.to_q.weight", "layer.to_kv.weight"),
        lambda old: old[0].split([inner, 2 * inner]),
        lambda new: [torch.cat(list(new))],
    )
    yield rename("to_out.weight", "layer.to_out.weight")
    if config.qk_norm:
        yield rename("q_scale", "layer.q_norm.weight")
        yield rename("k_scale", "layer.k_norm.weight")
    if config.value_gates:
        yield from rename_layer("to_v_gate.0", "layer.to_gates")
    if config.rotary != "none" or "xpos" in spec:
        yield constant("attn_fn.rel_pos.inv_freq", lambda: frequencies(head_dim))


def feed_forward_keys() -> Iterator[KeyMapping]:
    """Map the keys of a FeedForward, which gates by the second half of its hidden features; ours gate by the first."""
    yield from rename_layer("0", "norm")
    yield KeyMapping(("1.weight",), ("layer.to_hidden.weight",), _swap_halves, _swap_halves)
    yield rename("4.weight", "layer.to_out.weight")


def bias_keys(old: str, new: Sequence[str]) -> Iterator[KeyMapping]:
    """Map the keys of a DynamicPositionBias. new: its prefix in each attention layer that shares it."""
    for old_layer, new_layer in (("0", "0"), ("2", "1"), ("4", "2")):
        for name in ("weight", "bias"):
            keys = tuple(f"{prefix}layers.{new_layer}.{name}" for prefix in new)
            yield KeyMapping((f"{old}mlp.{old_layer}.{name}",), keys, lambda x: [x[0]] * len(new), lambda x: [x[0]])


def _swap_halves(tensors: Sequence[Tensor]) -> list[Tensor]:
    first, second = tensors[0].chunk(2)
    return [torch.cat([second, first])]
