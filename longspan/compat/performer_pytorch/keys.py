"""Map the state-dict keys of a PerformerLM to those of a longspan model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from longspan.compat.containers import branch_prefix
from longspan.compat.layers import feed_forward_keys
from longspan.compat.performer_pytorch.options import PerformerLMOptions, PerformerOptions
from longspan.compat.state_dict import KeyMapping, concatenate, rename, rename_layer, with_prefix


def language_model_keys(options: PerformerLMOptions) -> Iterator[KeyMapping]:
    """Map the keys of a PerformerLM to those of a LanguageModel."""
    yield rename("token_emb.weight", "embedding.weight")
    if options.axial_position_emb:
        for i in range(len(options.axial_shape)):
            yield rename(f"pos_emb.weights.{i}", f"positions.tables.{i}")
    elif not options.rotary_position_emb:
        yield rename("pos_emb.emb.weight", "positions.table")
    yield from with_prefix(stack_keys(options), "performer.", "transformer.")
    yield from rename_layer("norm", "transformer.norm")
    if not options.tied:
        yield from rename_layer("to_out", "to_logits")


def upgrade_key(key: str) -> str:
    """Return the current key: earlier releases named axial tables and the number of calls differently."""
    key = key.replace("pos_emb.weights_", "pos_emb.weights.")
    return key.replace("performer.calls_since_last_redraw", "performer.proj_updater.calls_since_last_redraw")


def stack_keys(options: PerformerOptions) -> Iterator[KeyMapping]:
    """Map the keys of a Performer to those of a Transformer."""
    counts = []
    for i, (local_heads, kind) in enumerate(_branches(options)):
        old, new = "net." + branch_prefix(i, reversible=options.reversible), f"stack.branches.{i}."
        if options.use_scalenorm:
            yield rename(f"{old}g", f"{new}norm.scale")
        elif options.use_rezero:
            yield rename(f"{old}g", f"{new}weight")
        else:
            yield from rename_layer(f"{old}norm", f"{new}norm")
        # Each wrapper adds a level: the norm, token shift, chunks.
        shifted = options.shift_tokens and (i % 4 < 2 or not options.cross_attend)
        inside = old + "fn." * (1 + shifted + (kind == "feed-forward"))
        if kind == "feed-forward":
            yield from with_prefix(feed_forward_keys(), inside, f"{new}layer.")
            continue
        mechanism = f"{new}layer.mechanism." + ("parts.0." if 0 < local_heads < options.heads else "")
        yield from with_prefix(_attention_keys(options), inside, f"{new}layer.")
        if local_heads < options.heads:
            yield from _feature_keys(options, f"{inside}fast_attention.", f"{mechanism}feature_map.")
            counts.append(f"{mechanism}counts")
    if counts:
        yield _counts(counts)


def _branches(options: PerformerOptions) -> Iterator[tuple[int, str]]:
    """Yield the number of local heads and the kind of every residual branch."""
    for local_heads in options.local_heads:
        yield local_heads, "self"
        yield 0, "feed-forward"
        if options.cross_attend:
            yield 0, "cross"
            yield 0, "feed-forward"


def _attention_keys(options: PerformerOptions) -> Iterator[KeyMapping]:
    for name in ("weight", "bias") if options.qkv_bias else ("weight",):
        yield rename(f"to_q.{name}", f"to_q.{name}")
        yield concatenate([f"to_k.{name}", f"to_v.{name}"], f"to_kv.{name}")
    yield from rename_layer("to_out", "to_out", *(() if options.attn_out_bias else ("weight",)))


def _feature_keys(options: PerformerOptions, old: str, new: str) -> Iterator[KeyMapping]:
    if options.no_projection:
        return
    yield rename(f"{old}projection_matrix", f"{new}projection")
    if options.generalized_attention and isinstance(options.resolved_kernel, torch.nn.Module):
        for name in options.resolved_kernel.state_dict():
            yield rename(f"{old}kernel_fn.{name}", f"{new}activation.{name}")


def _counts(counts: Sequence[str]) -> KeyMapping:
    """Map the number of calls since the last redraw: a Performer has one counter, each of our mechanisms its own."""

    def to_new(tensors: Iterable[Tensor]) -> list[Tensor]:
        (calls,) = tensors
        return [torch.stack([torch.zeros_like(calls), calls])] * len(counts)

    return KeyMapping(("proj_updater.calls_since_last_redraw",), tuple(counts), to_new)
