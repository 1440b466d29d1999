"""Map linformer's state-dict keys to those of longspan models."""

from __future__ import annotations

from collections.abc import Iterator

from longspan.compat.containers import branch_prefix
from longspan.compat.layers import feed_forward_keys
from longspan.compat.linformer.options import LinformerOptions
from longspan.compat.state_dict import KeyMapping, concatenate, rename, rename_layer, with_prefix


def language_model_keys(options: LinformerOptions) -> Iterator[KeyMapping]:
    """Map the keys of a LinformerLM."""
    yield rename("token_emb.weight", "embedding.weight")
    yield rename("pos_emb.weight", "positions.table")
    yield from with_prefix(stack_keys(options), "linformer.", "transformer.")
    yield from rename_layer("to_logits", "to_logits")


def stack_keys(options: LinformerOptions) -> Iterator[KeyMapping]:
    """Map the keys of a Linformer."""
    for i in range(2 * options.depth):
        old, new = f"net.{branch_prefix(i, reversible=options.reversible)}", f"stack.branches.{i}."
        yield from rename_layer(f"{old}norm", f"{new}norm")
        mappings = feed_forward_keys() if i % 2 else attention_keys(options.share_kv)
        yield from with_prefix(mappings, f"{old}fn.", f"{new}layer.")


def attention_keys(share_kv: bool) -> Iterator[KeyMapping]:
    """Map the keys of a LinformerSelfAttention."""
    keys, values = "mechanism.keys.table", "mechanism.values.table"
    yield rename("to_q.weight", "to_q.weight")
    yield from rename_layer("to_out", "to_out")
    if share_kv:
        yield rename("to_k.weight", "to_kv.weight")
        yield KeyMapping(("proj_k",), (keys, values), lambda old: [old[0]] * 2)
    else:
        yield concatenate(["to_k.weight", "to_v.weight"], "to_kv.weight")
        yield rename("proj_k", keys)
        yield rename("proj_v", values)
