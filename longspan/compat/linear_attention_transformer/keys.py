"""What linear-attention-transformer calls the tensors of our layers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from longspan.compat.state_dict import KeyMapping, concatenate, rename, rename_layer, reshape
from longspan.mechanisms.linformer import LinformerAttention
from longspan.models.layers import Attention, FeedForward, ProductKeyMemory
from longspan.models.residual import ResidualBranch
from longspan.models.transformer import Transformer


def stack_entries(model: Transformer, *, reversible: bool) -> Iterator[KeyMapping]:
    """A transformer's: branches come in pairs, each an attention and a feed-forward layer."""
    for i, branch in enumerate(model.stack.branches):
        assert isinstance(branch, ResidualBranch)
        old, new = _pair(i, reversible), f"stack.branches.{i}"
        yield from rename_layer(f"{old}norm", f"{new}.norm")
        # Each wrapper there adds a level: token shift, axial folding, chunks.
        wrappers = bool(branch.token_shift) + (branch.stride > 1) + isinstance(branch.layer, FeedForward)
        for entry in layer_entries(branch.layer):
            yield entry.with_prefix(old + "fn." * (1 + wrappers), f"{new}.layer.")


def layer_entries(layer_: nn.Module) -> Iterator[KeyMapping]:
    """A single layer's."""
    if isinstance(layer_, Attention):
        yield rename("to_q.weight", "to_q.weight")
        yield concatenate(["to_k.weight", "to_v.weight"], "to_kv.weight")
        yield from rename_layer("to_out", "to_out")
        if isinstance(layer_.mechanism, LinformerAttention):
            for old, new in (("proj_k", "keys"), ("proj_v", "values")):
                yield reshape(old, f"mechanism.{new}.table", getattr(layer_.mechanism, new).table.shape[1:])
    elif isinstance(layer_, FeedForward):
        yield from rename_layer("w1", "to_hidden")
        yield from rename_layer("w2", "to_out")
    else:
        assert isinstance(layer_, ProductKeyMemory)
        for name in ("keys", "to_queries.weight", "norm.weight", "norm.bias", "values.weight"):
            yield rename(name, name)


def _pair(i: int, reversible: bool) -> str:
    pair, second = divmod(i, 2)
    return f"layers.blocks.{pair}.{'fg'[second]}.net." if reversible else f"layers.layers.{pair}.{second}."
