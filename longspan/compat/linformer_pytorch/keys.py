"""What linformer-pytorch calls the tensors of our layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longspan.compat.state_dict import KeyMapping, TensorMap, concatenate, constant, rename, rename_layer
from longspan.mechanisms.linformer import LinformerAttention, Projection
from longspan.models.layers import Attention, FeedForward
from longspan.models.residual import ResidualBranch
from longspan.models.transformer import LanguageModel, Transformer

BASE = 100000.0  # of the sinusoidal positions
Turn = Callable[[Tensor], Tensor]


class Use(NamedTuple):
    """A projection in one place: its older names, one a head, and its name here."""

    old: list[str]
    new: str
    projection: Projection


def language_model_entries(
    model: LanguageModel, idle: nn.Module | None, old: str, new: str, at: str
) -> Iterator[KeyMapping]:
    """at: the name of `idle` within the module's own."""
    yield rename(f"{old}to_token_emb.weight", f"{new}embedding.weight")
    width = model.embedding.weight.shape[1]
    yield constant(f"{old}pos_emb.inv_freq", lambda: frequencies(width))
    inner = f"{old}linformer."
    if model.to_dim is not None:
        yield from rename_layer(f"{inner}project_in", f"{new}to_dim")
        yield from rename_layer(f"{inner}project_out", f"{new}from_dim")
        inner += "fn."
    yield from stack_entries(model.transformer, idle, inner, f"{new}transformer.", at)
    if model.to_logits is not None:
        yield from rename_layer(f"{old}to_logits", f"{new}to_logits")


def stack_entries(model: Transformer, idle: nn.Module | None, old: str, new: str, at: str) -> Iterator[KeyMapping]:
    """idle: the unused projections, one mechanism for each attention."""
    uses: list[Use] = []
    unused = list(idle) if isinstance(idle, nn.ModuleList) else []
    for i, branch in enumerate(model.stack.branches):
        assert isinstance(branch, ResidualBranch)
        there, here = f"{old}seq.{i}.", f"{new}stack.branches.{i}."
        yield from rename_layer(f"{there}norm", f"{here}norm")
        if branch.resample is not None:
            yield from rename_layer(f"{there}resample", f"{here}resample")
        if isinstance(branch.layer, FeedForward):
            yield from feed_forward_entries(f"{there}fn.", f"{here}layer.")
            continue
        assert isinstance(branch.layer, Attention)
        yield from attention_entries(branch.layer, f"{there}fn.", f"{here}layer.")
        heads = [f"{there}fn.heads.{h}." for h in range(branch.layer.mechanism.num_heads)]
        if unused:
            uses += mechanism_uses(unused.pop(0), heads, f"{at}{len(uses) // 2}.")
        else:
            uses += mechanism_uses(branch.layer.mechanism, heads, f"{here}layer.mechanism.")
    yield from projection_entries(uses)


def attention_entries(attention: Attention, old: str, new: str) -> Iterator[KeyMapping]:
    """Without the projections of the sequence."""
    heads = range(attention.mechanism.num_heads)
    yield concatenate([f"{old}to_q.{h}.weight" for h in heads], f"{new}to_q.weight")
    yield concatenate([f"{old}{name}.{h}.weight" for name in ("to_k", "to_v") for h in heads], f"{new}to_kv.weight")
    if attention.to_mid is None:
        yield from rename_layer(f"{old}w_o", f"{new}to_out")
    else:
        yield from rename_layer(f"{old}w_o_1", f"{new}to_mid")
        yield from rename_layer(f"{old}w_o_2", f"{new}to_out")


def feed_forward_entries(old: str, new: str) -> Iterator[KeyMapping]:
    yield from rename_layer(f"{old}w_1", f"{new}to_hidden")
    yield from rename_layer(f"{old}w_2", f"{new}to_out")


def mechanism_uses(mechanism: nn.Module, heads: Sequence[str], new: str) -> list[Use]:
    """heads: what each head's names begin with. None of them for full attention."""
    if not isinstance(mechanism, LinformerAttention):
        return []
    return [
        Use([f"{head}E." for head in heads], f"{new}keys.", mechanism.keys),
        Use([f"{head}F." for head in heads], f"{new}values.", mechanism.values),
    ]


def projection_entries(uses: Iterable[Use]) -> Iterator[KeyMapping]:
    """One entry for each tensor, however many places share it: there under a name for each head of each place."""
    places: dict[Projection, list[Use]] = {}
    for use in uses:
        places.setdefault(use.projection, []).append(use)
    for projection, shared in places.items():
        if projection.kind == "random":
            yield _unsaved(projection, [f"{use.new}table" for use in shared])
            continue
        heads = [name for use in shared for name in use.old]
        # Heads of their own are tensors of their own; others are copies of one.
        groups = [tuple(use.old) for use in shared] if projection.num_heads else [(name,) for name in heads]
        for name, (tensor, ndim, turned) in _tensors(projection).items():
            first, *copies = (tuple(f"{head}{name}" for head in group) for group in groups)
            news = tuple(f"{use.new}{tensor}" for use in shared)
            yield KeyMapping(first, news, *_both_ways(len(news), ndim, turned), aliases=tuple(copies))


def frequencies(width: int) -> Tensor:
    """What the original keeps of its sinusoidal positions."""
    return BASE ** -(torch.arange(0, width, 2) / width)


def _tensors(projection: Projection) -> dict[str, tuple[str, int, Turn]]:
    """{the older name: ours, its dimensions beside that of heads, and the map between them, which undoes itself}."""
    found: dict[str, tuple[str, int, Turn]] = {"weight": ("table", 2, lambda x: x.T)}
    if projection.kind == "convolution":
        found["weight"] = "kernel", 3, lambda x: x.permute(2, 1, 0)
    if projection.bias is not None:
        found["bias"] = "bias", 2, lambda x: x.flatten()
    return found


def _both_ways(places: int, ndim: int, turned: Turn) -> tuple[TensorMap, TensorMap]:
    def to_new(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.stack([turned(x) for x in tensors])] * places

    def to_old(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        whole = tensors[0]
        return [turned(x) for x in whole.reshape(-1, *whole.shape[-ndim:])]

    return to_new, to_old


def _unsaved(projection: Projection, names: list[str]) -> KeyMapping:
    """Tables that the original draws and does not save: what was drawn here stays."""
    return KeyMapping((), tuple(names), lambda _: [projection.table] * len(names), lambda _: [])
