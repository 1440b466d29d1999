"""Map linformer's state-dict keys to those of longspan modules."""

from __future__ import annotations

from collections.abc import Iterator

from longspan.compat.containers import branch_prefix
from longspan.compat.layers import feed_forward_keys
from longspan.compat.state_dict import KeyMapping, concatenate, rename, rename_layer, reshape, with_prefix
from longspan.mechanisms.linformer import LinformerAttention
from longspan.models.layers import Attention
from longspan.models.transformer import LanguageModel, Transformer


def language_model_keys(model: LanguageModel) -> Iterator[KeyMapping]:
    """Map the keys of a LinformerLM."""
    yield rename("token_emb.weight", "embedding.weight")
    yield rename("pos_emb.weight", "positions.table")
    yield from with_prefix(stack_keys(model.transformer), "linformer.", "transformer.")
    yield from rename_layer("to_logits", "to_logits")


def stack_keys(model: Transformer) -> Iterator[KeyMapping]:
    """Map the keys of a Linformer."""
    for i, branch in enumerate(model.stack.branches):
        old, new = f"net.{branch_prefix(i, reversible=model.config.residual == 'double')}", f"stack.branches.{i}."
        yield from rename_layer(f"{old}norm", f"{new}norm")
        mappings = attention_keys(branch.layer) if isinstance(branch.layer, Attention) else feed_forward_keys()
        yield from with_prefix(mappings, f"{old}fn.", f"{new}layer.")


def attention_keys(attention: Attention) -> Iterator[KeyMapping]:
    """Map the keys of a LinformerSelfAttention."""
    keys, values = "mechanism.keys.table", "mechanism.values.table"
    assert isinstance(attention.mechanism, LinformerAttention)
    shape = attention.mechanism.keys.table.shape[1:]
    yield rename("to_q.weight", "to_q.weight")
    yield from rename_layer("to_out", "to_out")
    if attention.shared_kv:
        yield rename("to_k.weight", "to_kv.weight")
        yield KeyMapping(("proj_k",), (keys, values), lambda old: [old[0]] * 2, lambda new: [new[0].reshape(shape)])
    else:
        yield concatenate(["to_k.weight", "to_v.weight"], "to_kv.weight")
        yield reshape("proj_k", keys, shape)
        yield reshape("proj_v", values, shape)
