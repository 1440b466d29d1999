"""What performer-pytorch calls the tensors of our layers, and how it starts them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from longspan.compat.state_dict import KeyMapping, concatenate, constant, rename, rename_layer, reshape
from longspan.mechanisms.feature_maps import Generalized, RandomFeatures
from longspan.mechanisms.local import LocalAttention
from longspan.mechanisms.performer import PerformerAttention
from longspan.mechanisms.split import SplitAttention
from longspan.models.layers import Attention, FeedForward, ScaleNorm
from longspan.models.positions import AxialPositions, LearnedPositions
from longspan.models.residual import ResidualBranch
from longspan.models.transformer import Transformer
from longspan.ops.linear.feature_maps import orthogonal_rows
from longspan.protocol import Mechanism


def stack_entries(
    model: Transformer, *, reversible: bool, old: str = "", new: str = "", idle: str = ""
) -> Iterator[KeyMapping]:
    """A transformer's: each layer twice, for the updater of its projections holds them too."""
    for entry in _branches(model, reversible, idle):
        yield replace(
            entry,
            old=tuple(f"{old}net.{name}" for name in entry.old),
            new=tuple(name if name.startswith("unused.") else new + name for name in entry.new),
            aliases=(tuple(f"{old}proj_updater.instance.{name}" for name in entry.old),),
        )
    counts = [f"{new}{name}.counts" for name, module in model.named_modules() if isinstance(module, PerformerAttention)]
    yield calls_entry(f"{old}proj_updater.calls_since_last_redraw", counts or [f"unused.{idle}counts"])


def calls_entry(old: str, counts: list[str]) -> KeyMapping:
    """One count there, one for each mechanism here; how often they were redrawn was never kept."""

    def each(tensors: Iterable[Tensor]) -> list[Tensor]:
        (calls,) = tensors
        return [torch.stack([torch.zeros_like(calls), calls])] * len(counts)

    return KeyMapping((old,), tuple(counts), each, lambda tensors: [tensors[0][1]])


def attention_entries(attention: Attention, idle: str) -> Iterator[KeyMapping]:
    """An attention's, without the count of calls."""
    yield from fast_entries(fast_part(attention.mechanism), "fast_attention.", *_fast_place(attention), idle)
    if any(isinstance(part, LocalAttention) for part in _parts(attention.mechanism)):
        D = attention.mechanism.head_dim
        yield constant("local_attn.rel_pos.inv_freq", lambda: 10000 ** -(torch.arange(0, D, 2) / D))
    biased = attention.to_q.bias is not None
    for name in ("weight", "bias") if biased else ("weight",):
        yield rename(f"to_q.{name}", f"to_q.{name}")
        yield concatenate([f"to_k.{name}", f"to_v.{name}"], f"to_kv.{name}")
    yield from rename_layer("to_out", "to_out", *(("weight",) if attention.to_out.bias is None else ("weight", "bias")))


def fast_entries(fast: PerformerAttention | None, old: str, new: str, idle: str) -> Iterator[KeyMapping]:
    """Of random features; `idle` keeps a projection that the original has without using it."""
    feature_map = None if fast is None else fast.feature_map
    if isinstance(feature_map, RandomFeatures) and feature_map.projection is not None:
        yield rename(f"{old}projection_matrix", f"{new}feature_map.projection")
    else:
        yield rename(f"{old}projection_matrix", f"unused.{idle}projection")
    if isinstance(feature_map, Generalized) and isinstance(feature_map.activation, nn.Module):
        for name in feature_map.activation.state_dict():
            yield rename(f"{old}kernel_fn.{name}", f"{new}feature_map.activation.{name}")


def fast_part(mechanism: Mechanism) -> PerformerAttention | None:
    """The heads that are not local."""
    return next((part for part in _parts(mechanism) if isinstance(part, PerformerAttention)), None)


def idle_tensors(model: nn.Module, features: int) -> nn.Module:
    """Projections of layers that use none, and a count where no layer counts, by the names that entries give them."""
    idle = nn.Module()
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    for i, attention in enumerate(attentions):
        fast = fast_part(attention.mechanism)
        if fast is None or fast._projection is None:
            rows = orthogonal_rows(features, attention.mechanism.head_dim, unit=False)
            idle.add_module(f"attention_{i}", held := nn.Module())
            held.register_buffer("projection", rows)
    if all(fast_part(attention.mechanism) is None for attention in attentions):
        idle.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
    return idle


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Starts weights as the original does, so that a script's learning rates mean what they meant."""
    given = {m for g in model.modules() if isinstance(g, Generalized) for m in g.modules()}
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and module not in given:
            module.reset_parameters()
        elif isinstance(module, ScaleNorm):
            module.scale.fill_(1)
        elif isinstance(module, ResidualBranch) and module.weight is not None:
            module.weight.fill_(1e-3)
        elif isinstance(module, LearnedPositions):
            module.table.normal_()
        elif isinstance(module, AxialPositions):
            for table in module.tables:
                table.normal_()


def _branches(model: Transformer, reversible: bool, idle: str) -> Iterator[KeyMapping]:
    attentions = 0
    for i, branch in enumerate(model.stack.branches):
        assert isinstance(branch, ResidualBranch)
        pair, second = divmod(i, 2)
        old = f"blocks.{pair}.{'fg'[second]}.net." if reversible else f"layers.{pair}.{second}."
        new = f"stack.branches.{i}."
        if branch.weight is not None:
            yield rename(f"{old}g", f"{new}weight")
        elif isinstance(branch.norm, ScaleNorm):
            yield reshape(f"{old}g", f"{new}norm.scale", (1,))
        else:
            yield from rename_layer(f"{old}norm", f"{new}norm")
        # Each wrapper there adds a level: the norm, token shift, chunks.
        inside = old + "fn." * (1 + bool(branch.token_shift) + isinstance(branch.layer, FeedForward))
        if isinstance(branch.layer, Attention):
            entries = attention_entries(branch.layer, f"{idle}attention_{attentions}.")
            attentions += 1
        else:
            entries = iter([*rename_layer("w1", "to_hidden"), *rename_layer("w2", "to_out")])
        for entry in entries:
            moved = entry.with_prefix(inside, f"{new}layer.")
            yield replace(moved, new=entry.new) if any(name.startswith("unused.") for name in entry.new) else moved


def _parts(mechanism: Mechanism) -> list[nn.Module]:
    return list(mechanism.parts) if isinstance(mechanism, SplitAttention) else [mechanism]


def _fast_place(attention: Attention) -> tuple[str]:
    return ("mechanism.parts.0." if isinstance(attention.mechanism, SplitAttention) else "mechanism.",)
