"""Map performer-pytorch's state-dict keys to those of longspan modules, and initialize weights as it does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from longspan.compat.containers import branch_prefix
from longspan.compat.layers import feed_forward_keys, inverse_frequencies, sinusoidal_table
from longspan.compat.performer_pytorch.options import PerformerLMOptions
from longspan.compat.state_dict import KeyMapping, concatenate, constant, rename, rename_layer, reshape, with_prefix
from longspan.mechanisms.feature_maps import Generalized, RandomFeatures, orthogonal_rows
from longspan.mechanisms.local import LocalAttention
from longspan.mechanisms.performer import PerformerAttention, random_feature_mechanisms
from longspan.mechanisms.split import SplitAttention
from longspan.models.layers import Attention, FeedForward, ScaleNorm
from longspan.models.positions import AxialPositions, LearnedPositions, SinusoidalPositions
from longspan.models.residual import ResidualBranch
from longspan.models.transformer import LanguageModel, Transformer
from longspan.protocol import Mechanism


def language_model_keys(
    model: LanguageModel, options: PerformerLMOptions, old: str = "", new: str = "", unused: str = ""
) -> Iterator[KeyMapping]:
    """Map the keys of a PerformerLM. old, new, unused: prefixes if it is part of another model."""
    table = partial(sinusoidal_table, length=options.max_seq_len, device=model.embedding.weight.device)
    yield rename(f"{old}token_emb.weight", f"{new}embedding.weight")
    if isinstance(model.positions, AxialPositions):
        for i, axis_table in enumerate(model.positions.tables):
            shape = [1, *(len(axis_table) if axis == i else 1 for axis in range(len(options.axial_shape))), options.dim]
            yield reshape(f"{old}pos_emb.weights.{i}", f"{new}positions.tables.{i}", shape)
    elif isinstance(model.positions, SinusoidalPositions):
        yield constant(f"{old}pos_emb.emb", lambda: table(options.dim))
    else:
        yield rename(f"{old}pos_emb.emb.weight", f"{new}positions.table")
    if options.rotary_position_emb:
        yield constant(f"{old}layer_pos_emb.emb", lambda: table(options.head_dim))
    mappings = stack_keys(model.transformer, reversible=options.reversible, unused=unused)
    yield from with_prefix(mappings, f"{old}performer.", f"{new}transformer.")
    yield from rename_layer(f"{old}norm", f"{new}transformer.norm")
    if model.to_logits is not None:
        yield from rename_layer(f"{old}to_out", f"{new}to_logits")


def upgrade_key(key: str) -> str:
    """Return the current key: earlier releases named axial tables and the number of calls differently."""
    key = key.replace("pos_emb.weights_", "pos_emb.weights.")
    return key.replace("performer.calls_since_last_redraw", "performer.proj_updater.calls_since_last_redraw")


def stack_keys(model: Transformer, *, reversible: bool, unused: str = "") -> Iterator[KeyMapping]:
    """Map the keys of a Performer, which saves every layer twice: `proj_updater` contains them too."""
    for mapping in _branch_keys(model, reversible, unused):
        aliases = (tuple(f"proj_updater.instance.{key}" for key in mapping.old),)
        yield replace(mapping.with_prefix("net.", ""), aliases=aliases)
    counts = [f"{name}.counts" for name, module in model.named_modules() if isinstance(module, PerformerAttention)]
    counts = counts or [f"unused.{unused}counts"]

    def to_new(tensors: Iterable[Tensor]) -> list[Tensor]:
        (calls,) = tensors
        return [torch.stack([torch.zeros_like(calls), calls])] * len(counts)

    # The original has one counter, each of our mechanisms its own; the original does not save the number of redraws.
    old = ("proj_updater.calls_since_last_redraw",)
    yield KeyMapping(old, tuple(counts), to_new, lambda tensors: [tensors[0][1]])


def attention_keys(attention: Attention, unused: str) -> Iterator[KeyMapping]:
    """Map the keys of an attention layer, except the counters. unused: the prefix of its unused tensors."""
    mechanism = attention.mechanism
    new = "mechanism.parts.0." if isinstance(mechanism, SplitAttention) else "mechanism."
    yield from feature_keys(global_heads(mechanism), "fast_attention.", new, unused)
    if any(isinstance(part, LocalAttention) for part in mechanism.modules()):
        yield constant("local_attn.rel_pos.inv_freq", lambda: inverse_frequencies(mechanism.head_dim))
    for name in ("weight",) if attention.to_q.bias is None else ("weight", "bias"):
        yield rename(f"to_q.{name}", f"to_q.{name}")
        yield concatenate([f"to_k.{name}", f"to_v.{name}"], f"to_kv.{name}")
    yield from rename_layer("to_out", "to_out", *(("weight",) if attention.to_out.bias is None else ()))


def feature_keys(mechanism: PerformerAttention | None, old: str, new: str, unused: str) -> Iterator[KeyMapping]:
    """Map the keys of random features; the original has a projection even if the mechanism uses none."""
    feature_map = None if mechanism is None else mechanism.feature_map
    used = isinstance(feature_map, RandomFeatures) and feature_map.projection is not None
    yield rename(f"{old}projection_matrix", f"{new}feature_map.projection" if used else f"unused.{unused}projection")
    if isinstance(feature_map, Generalized) and isinstance(feature_map.activation, nn.Module):
        for name in feature_map.activation.state_dict():
            yield rename(f"{old}kernel_fn.{name}", f"{new}feature_map.activation.{name}")


def zero_counts() -> Tensor:
    """Return the counters of a Performer mechanism before the first forward; a layer on its own does not save them."""
    return torch.zeros(2, dtype=torch.int64)


def global_heads(mechanism: Mechanism) -> PerformerAttention | None:
    """Return the part of a mechanism that is not local."""
    return next(iter(random_feature_mechanisms(mechanism)), None)


def unused_tensors(model: nn.Module, num_features: int) -> nn.Module:
    """Return a module with projections for layers that use none, and a counter if no layer has one."""
    unused = nn.Module()
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    for i, attention in enumerate(attentions):
        performer = global_heads(attention.mechanism)
        if performer is None or performer._projection is None:
            unused.add_module(f"attention_{i}", unused_projection(num_features, attention.mechanism.head_dim))
    if all(global_heads(attention.mechanism) is None for attention in attentions):
        unused.register_buffer("counts", zero_counts())
    return unused


def unused_projection(num_features: int, head_dim: int) -> nn.Module:
    """Return a module with a projection."""
    unused = nn.Module()
    unused.register_buffer("projection", orthogonal_rows(num_features, head_dim, unit=False))
    return unused


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Initialize weights as the original does, so that the learning rates of scripts keep their effect."""
    kernels = {m for g in model.modules() if isinstance(g, Generalized) for m in g.modules()}
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding) and module not in kernels:
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


def _branch_keys(model: Transformer, reversible: bool, unused: str) -> Iterator[KeyMapping]:
    attentions = 0
    for i, branch in enumerate(model.stack.branches):
        assert isinstance(branch, ResidualBranch)
        old, new = branch_prefix(i, reversible=reversible), f"stack.branches.{i}."
        if branch.weight is not None:
            yield rename(f"{old}g", f"{new}weight")
        elif isinstance(branch.norm, ScaleNorm):
            yield reshape(f"{old}g", f"{new}norm.scale", (1,))
        else:
            yield from rename_layer(f"{old}norm", f"{new}norm")
        # Each of the original's wrappers adds a level: the norm, token shift, chunks.
        inside = old + "fn." * (1 + bool(branch.token_shift) + isinstance(branch.layer, FeedForward))
        mappings: Iterable[KeyMapping] = feed_forward_keys()
        if isinstance(branch.layer, Attention):
            mappings = attention_keys(branch.layer, f"{unused}attention_{attentions}.")
            attentions += 1
        yield from with_prefix(mappings, inside, f"{new}layer.")
