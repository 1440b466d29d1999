"""Map linear-attention-transformer's state-dict keys to those of longspan modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

from longspan.compat.containers import branch_prefix
from longspan.compat.layers import FeedForward, PreNorm, feed_forward_keys
from longspan.compat.linear_attention_transformer.layers import PKM, LinformerSelfAttention
from longspan.compat.state_dict import KeyMapping, concatenate, rename, rename_layer, with_prefix


def stack_keys(branches: Iterable[PreNorm], *, reversible: bool) -> Iterator[KeyMapping]:
    """Map the keys of a LinearAttentionTransformer, given its residual branches."""
    for i, branch in enumerate(branches):
        old, new = f"layers.{branch_prefix(i, reversible=reversible)}", f"stack.branches.{i}."
        yield from rename_layer(f"{old}norm", f"{new}norm")
        layer, path = branch.fn, f"{old}fn."
        while isinstance(inner := getattr(layer, "fn", None), nn.Module):  # token shift, axial folding, chunks
            layer, path = inner, f"{path}fn."
        yield from with_prefix(_layer_keys(layer), path, f"{new}layer.")


def _layer_keys(layer: nn.Module) -> Iterable[KeyMapping]:
    """Map the keys of an attention, feed-forward or product-key memory layer."""
    if isinstance(layer, FeedForward):
        return feed_forward_keys()
    if isinstance(layer, PKM):
        names = ("keys", "to_queries.weight", "norm.weight", "norm.bias", "values.weight")
        return [rename(name, name) for name in names]
    mappings = [
        rename("to_q.weight", "to_q.weight"),
        concatenate(["to_k.weight", "to_v.weight"], "to_kv.weight"),
        *rename_layer("to_out", "to_out"),
    ]
    if isinstance(layer, LinformerSelfAttention):
        mappings += [rename("proj_k", "mechanism.keys.table"), rename("proj_v", "mechanism.values.table")]
    return mappings
