"""Map linformer-pytorch's state-dict keys to those of longspan models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longspan.compat.state_dict import KeyMapping, concatenate, rename, rename_layer, with_prefix
from longspan.mechanisms.linformer import LinformerAttention, Projection
from longspan.models.layers import Attention, FeedForward
from longspan.models.residual import ResidualBranch
from longspan.models.transformer import LanguageModel, Transformer


class ProjectionUse(NamedTuple):
    """A projection in one mechanism: its old prefixes, one per head, and its new prefix."""

    old: list[str]
    new: str
    projection: Projection


def language_model_keys(net: nn.Module, model: LanguageModel) -> Iterator[KeyMapping]:
    """Map the keys of a LinformerLM to those of its longspan model."""
    yield rename("to_token_emb.weight", "embedding.weight")
    inner = "linformer."
    if model.to_dim is not None:
        yield from rename_layer(f"{inner}project_in", "to_dim")
        yield from rename_layer(f"{inner}project_out", "from_dim")
        inner += "fn."
    mappings = stack_keys(net.get_submodule(inner[:-1]), model.transformer)
    yield from with_prefix(mappings, inner, "transformer.")
    if model.to_logits is not None:
        yield from rename_layer("to_logits", "to_logits")


def stack_keys(net: nn.Module, model: Transformer) -> Iterator[KeyMapping]:
    """Map the keys of a Linformer to those of its longspan model."""
    uses: list[ProjectionUse] = []
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
        mechanism = branch.layer.mechanism
        if isinstance(mechanism, LinformerAttention):
            heads = [f"{old}fn.heads.{h}." for h in range(mechanism.num_heads)]
            sides = ("E", "keys", mechanism.keys), ("F", "values", mechanism.values)
            for side, name, projection in sides:
                prefixes = [f"{head}{side}." for head in heads]
                uses.append(ProjectionUse(prefixes, f"{new}layer.mechanism.{name}.", projection))
    yield from projection_keys(net, uses)


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


def projection_keys(net: nn.Module, uses: Iterable[ProjectionUse]) -> Iterator[KeyMapping]:
    """Map the tensors of projections; the original saves a shared tensor once per head and use, and fixed ones never.

    net: The module that old keys start from.
    """
    shared: dict[Projection, list[ProjectionUse]] = {}
    for use in uses:
        shared.setdefault(use.projection, []).append(use)
    for projection, group in shared.items():
        # Heads with their own projection have different tensors; other heads have copies of one.
        heads = group[0].old if projection.num_heads else group[0].old[:1]
        if projection.kind == "random":
            # The original does not save it.
            new = tuple(f"{use.new}table" for use in group)
            yield KeyMapping((), new, partial(_fixed_tables, net, heads, len(group)))
            continue
        for name, (tensor, transpose) in _tensors(projection).items():
            old, new = tuple(f"{head}{name}" for head in heads), tuple(f"{use.new}{tensor}" for use in group)
            yield KeyMapping(old, new, partial(_stack, transpose, len(group)))


def _fixed_tables(net: nn.Module, names: Sequence[str], uses: int, _: Sequence[Tensor]) -> list[Tensor]:
    """Return the stack of the tables at these names, which end with the attribute of a head and a dot, for each use."""
    heads = (name[:-1].rpartition(".") for name in names)
    return [torch.stack([getattr(net.get_submodule(head), side) for head, _, side in heads])] * uses


def _tensors(projection: Projection) -> dict[str, tuple[str, Callable[[Tensor], Tensor]]]:
    """Return {old name: (new name, what makes the new tensor of a head of the old one)}."""
    tensors: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {"weight": ("table", lambda x: x.T)}
    if projection.kind == "convolution":
        tensors["weight"] = "kernel", lambda x: x.permute(2, 1, 0)
    if projection.bias is not None:
        tensors["bias"] = "bias", lambda x: x
    return tensors


def _stack(transpose: Callable[[Tensor], Tensor], uses: int, heads: Sequence[Tensor]) -> list[Tensor]:
    return [torch.stack([transpose(x) for x in heads])] * uses
