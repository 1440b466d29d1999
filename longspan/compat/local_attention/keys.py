"""Map the state-dict keys of a LocalTransformer to those of a longspan model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longspan.compat.state_dict import KeyMapping, rename, rename_layer

HYPER_CONNECTION_KEYS = [
    rename("static_alpha", "static_mix"),
    rename("dynamic_alpha_fn", "dynamic_mix"),
    rename("dynamic_alpha_scale", "mix_scale"),
    rename("static_beta", "static_out"),
    rename("dynamic_beta_fn", "dynamic_out"),
    rename("dynamic_beta_scale", "out_scale"),
    rename("norm.gamma", "norm.offset"),
]


def attention_keys(inner: int, *, qk_norm: bool, gates: bool) -> Iterator[KeyMapping]:
    """Map the keys of a LocalMHA with a norm. inner: the width of all heads."""
    yield from rename_layer("norm", "norm")
    yield KeyMapping(
        ("to_qkv.weight",),
        ("layer.to_q.weight", "layer.to_kv.weight"),
        lambda old: old[0].split([inner, 2 * inner]),
    )
    yield rename("to_out.weight", "layer.to_out.weight")
    if qk_norm:
        yield rename("q_scale", "layer.q_norm.weight")
        yield rename("k_scale", "layer.k_norm.weight")
    if gates:
        yield from rename_layer("to_v_gate.0", "layer.to_gates")


def feed_forward_keys() -> Iterator[KeyMapping]:
    """Map the keys of a FeedForward, which gates by the second half of its hidden features; ours gate by the first."""
    yield from rename_layer("0", "norm")
    yield KeyMapping(("1.weight",), ("layer.to_hidden.weight",), _swap_halves)
    yield rename("4.weight", "layer.to_out.weight")


def bias_keys(old: str, new: Sequence[str]) -> Iterator[KeyMapping]:
    """Map the keys of a DynamicPositionBias. new: its prefix in each attention layer that shares it."""
    for old_layer, new_layer in (("0", "0"), ("2", "1"), ("4", "2")):
        for name in ("weight", "bias"):
            keys = tuple(f"{prefix}layers.{new_layer}.{name}" for prefix in new)
            yield KeyMapping((f"{old}mlp.{old_layer}.{name}",), keys, lambda x: [x[0]] * len(new))


def _swap_halves(tensors: Sequence[Tensor]) -> list[Tensor]:
    first, second = tensors[0].chunk(2)
    return [torch.cat([second, first])]
