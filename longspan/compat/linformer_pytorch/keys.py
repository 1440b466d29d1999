"""Map linformer-pytorch's state-dict keys to those of longspan modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longspan.compat.layers import inverse_frequencies
from longspan.compat.linformer_pytorch.options import POSITION_BASE
from longspan.compat.state_dict import KeyMapping, concatenate, constant, rename, rename_layer, unsaved, with_prefix
from longspan.mechanisms.linformer import LinformerAttention, Projection
from longspan.models.layers import Attention, FeedForward
from longspan.models.residual import ResidualBranch
from longspan.models.transformer import LanguageModel, Transformer


class ProjectionUse(NamedTuple):
    """A projection in one mechanism: its old prefixes, one per head, and its new prefix."""

    old: list[str]
    new: str
    projection: Projection


def language_model_keys(
    model: LanguageModel, unused: nn.Module | None, prefix: str = "", unused_prefix: str = "unused."
) -> Iterator[KeyMapping]:
    """Map the keys of a LinformerLM. prefix: that of the model; unused: see `stack_keys`."""
    yield rename(f"{prefix}to_token_emb.weight", f"{prefix}embedding.weight")
    yield frequency_key(f"{prefix}pos_emb.inv_freq", model.embedding.weight.shape[1])
    inner = f"{prefix}linformer."
    if model.to_dim is not None:
        yield from rename_layer(f"{inner}project_in", f"{prefix}to_dim")
        yield from rename_layer(f"{inner}project_out", f"{prefix}from_dim")
        inner += "fn."
    yield from with_prefix(stack_keys(model.transformer, unused, unused_prefix), inner, f"{prefix}transformer.")
    if model.to_logits is not None:
        yield from rename_layer(f"{prefix}to_logits", f"{prefix}to_logits")


def stack_keys(model: Transformer, unused: nn.Module | None, unused_prefix: str = "unused.") -> Iterator[KeyMapping]:
    """Map the keys of a Linformer. unused: the projections saved for full attention, one mechanism per attention."""
    uses: list[ProjectionUse] = []
    mechanisms = list(unused) if isinstance(unused, nn.ModuleList) else []
    for i, branch in enumerate(model.stack.branches):
        assert isinstance(branch, ResidualBranch)
        old, new = f"seq.{i}.", f"stack.branches.{i}."
        yield from rename_layer(f"{old}norm", f"{new}norm")
        if branch.resample is not None:
            yield from rename_layer(f"{old}resample", f"{new}resample")
        if isinstance(branch.layer, FeedForward):
            yield from with_prefix(feed_forward_keys(), f"{old}fn.", f"{new}layer.")
            continue
        assert isinstance(branch.layer, Attention)
        yield from with_prefix(attention_keys(branch.layer), f"{old}fn.", f"{new}layer.")
        heads = [f"{old}fn.heads.{h}." for h in range(branch.layer.mechanism.num_heads)]
        if mechanisms:
            uses += projection_uses(mechanisms.pop(0), heads, f"{unused_prefix}{len(uses) // 2}.")
        else:
            uses += projection_uses(branch.layer.mechanism, heads, f"{new}layer.mechanism.")
    yield from projection_keys(uses)


def attention_keys(attention: Attention) -> Iterator[KeyMapping]:
    """Map the keys of an attention layer, except those of the sequence projections."""
    heads = range(attention.mechanism.num_heads)
    yield concatenate([f"to_q.{h}.weight" for h in heads], "to_q.weight")
    yield concatenate([f"{name}.{h}.weight" for name in ("to_k", "to_v") for h in heads], "to_kv.weight")
    if attention.to_mid is None:
        yield from rename_layer("w_o", "to_out")
    else:
        yield from rename_layer("w_o_1", "to_mid")
        yield from rename_layer("w_o_2", "to_out")


def feed_forward_keys() -> list[KeyMapping]:
    """Map the keys of a feed-forward layer."""
    return [*rename_layer("w_1", "to_hidden"), *rename_layer("w_2", "to_out")]


def frequency_key(old: str, dim: int) -> KeyMapping:
    """Map the frequencies of sinusoidal positions."""
    return constant(old, lambda: inverse_frequencies(dim, POSITION_BASE))


def projection_uses(mechanism: nn.Module, heads: Sequence[str], new: str) -> list[ProjectionUse]:
    """Return the projections of a mechanism, none for full attention. heads: the old prefix of each head."""
    if not isinstance(mechanism, LinformerAttention):
        return []
    return [
        ProjectionUse([f"{head}E." for head in heads], f"{new}keys.", mechanism.keys),
        ProjectionUse([f"{head}F." for head in heads], f"{new}values.", mechanism.values),
    ]


def projection_keys(uses: Iterable[ProjectionUse]) -> Iterator[KeyMapping]:
    """Map the tensors of projections; the original saves a shared tensor once per head and use."""
    shared: dict[Projection, list[ProjectionUse]] = {}
    for use in uses:
        shared.setdefault(use.projection, []).append(use)
    for projection, group in shared.items():
        if projection.kind == "random":
            # Loading retains the current table.
            yield unsaved([f"{use.new}table" for use in group], partial(getattr, projection, "table"))
            continue
        # Heads with their own projection have different tensors; other heads have copies of one.
        heads = [name for use in group for name in use.old]
        alternatives = [tuple(use.old) for use in group] if projection.num_heads else [(name,) for name in heads]
        for name, (tensor, ndim, transpose) in _tensors(projection).items():
            first, *aliases = (tuple(f"{head}{name}" for head in names) for names in alternatives)
            new = tuple(f"{use.new}{tensor}" for use in group)
            yield _stack_heads(first, new, ndim, transpose, tuple(aliases))


def _tensors(projection: Projection) -> dict[str, tuple[str, int, Callable[[Tensor], Tensor]]]:
    """Return {old name: (new name, dimensions without heads, transposition, which is its own inverse)}."""
    tensors: dict[str, tuple[str, int, Callable[[Tensor], Tensor]]] = {"weight": ("table", 2, lambda x: x.T)}
    if projection.kind == "convolution":
        tensors["weight"] = "kernel", 3, lambda x: x.permute(2, 1, 0)
    if projection.bias is not None:
        tensors["bias"] = "bias", 2, lambda x: x.flatten()
    return tensors


def _stack_heads(
    old: tuple[str, ...],
    new: tuple[str, ...],
    ndim: int,
    transpose: Callable[[Tensor], Tensor],
    aliases: tuple[tuple[str, ...], ...],
) -> KeyMapping:
    """Map one tensor per head to the stack of their transpositions, which every new key shares."""
    return KeyMapping(
        old,
        new,
        lambda tensors: [torch.stack([transpose(x) for x in tensors])] * len(new),
        lambda tensors: [transpose(x) for x in tensors[0].reshape(-1, *tensors[0].shape[-ndim:])],
        aliases,
    )
