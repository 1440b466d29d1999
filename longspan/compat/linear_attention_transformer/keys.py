"""Map linear-attention-transformer's state-dict keys to those of longspan modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from longspan.compat.containers import branch_prefix
from longspan.compat.layers import feed_forward_keys, sinusoidal_table
from longspan.compat.linear_attention_transformer.options import LanguageModelOptions
from longspan.compat.state_dict import KeyMapping, concatenate, constant, rename, rename_layer, reshape, with_prefix
from longspan.mechanisms.linformer import LinformerAttention
from longspan.models.layers import Attention, FeedForward, ProductKeyMemory
from longspan.models.positions import AxialPositions, LearnedPositions
from longspan.models.residual import ResidualBranch
from longspan.models.transformer import LanguageModel, Transformer


def language_model_keys(model: LanguageModel, options: LanguageModelOptions) -> Iterator[KeyMapping]:
    """Map the keys of a LinearAttentionTransformerLM."""
    inner = "transformer."
    yield rename("token_emb.weight", "embedding.weight")
    yield from _position_keys(model, options)
    if model.to_dim is not None:
        inner = "transformer.fn."
        yield from rename_layer("transformer.project_in", "to_dim")
        yield from rename_layer("transformer.project_out", "from_dim")
    yield from with_prefix(stack_keys(model.transformer, reversible=options.reversible), inner, "transformer.")
    yield from rename_layer("norm", "transformer.norm" if model.narrow_norm is None else "narrow_norm")
    if not options.return_embeddings:
        yield from rename_layer("out", "to_logits")


def stack_keys(model: Transformer, *, reversible: bool) -> Iterator[KeyMapping]:
    """Map the keys of a LinearAttentionTransformer, whose branches are pairs of attention and feed-forward layers."""
    for i, branch in enumerate(model.stack.branches):
        assert isinstance(branch, ResidualBranch)
        old, new = f"layers.{branch_prefix(i, reversible=reversible)}", f"stack.branches.{i}."
        yield from rename_layer(f"{old}norm", f"{new}norm")
        # Each of the original's wrappers adds a level: token shift, axial folding, chunks.
        wrappers = bool(branch.token_shift) + (branch.stride > 1) + isinstance(branch.layer, FeedForward)
        yield from with_prefix(layer_keys(branch.layer), old + "fn." * (1 + wrappers), f"{new}layer.")


def layer_keys(layer: nn.Module) -> Iterable[KeyMapping]:
    """Map the keys of an attention, feed-forward or product-key memory layer."""
    if isinstance(layer, FeedForward):
        return feed_forward_keys()
    if isinstance(layer, ProductKeyMemory):
        names = ("keys", "to_queries.weight", "norm.weight", "norm.bias", "values.weight")
        return [rename(name, name) for name in names]
    assert isinstance(layer, Attention)
    mappings = [
        rename("to_q.weight", "to_q.weight"),
        concatenate(["to_k.weight", "to_v.weight"], "to_kv.weight"),
        *rename_layer("to_out", "to_out"),
    ]
    if isinstance(layer.mechanism, LinformerAttention):
        for old, new in (("proj_k", "keys"), ("proj_v", "values")):
            shape = getattr(layer.mechanism, new).table.shape[1:]
            mappings.append(reshape(old, f"mechanism.{new}.table", shape))
    return mappings


def _position_keys(model: LanguageModel, options: LanguageModelOptions) -> Iterator[KeyMapping]:
    if isinstance(model.positions, LearnedPositions):
        yield rename("pos_emb.emb.weight", "positions.table")
    elif isinstance(model.positions, AxialPositions):
        rows, columns = model.positions.shape
        for i, shape in enumerate([(1, rows, 1, -1), (1, 1, columns, -1)]):
            yield reshape(f"pos_emb.weights.{i}", f"positions.tables.{i}", shape)
    else:
        weight = model.embedding.weight

        def table(dim: int) -> Tensor:
            return sinusoidal_table(dim, options.max_seq_len, weight.device).to(weight.dtype)

        yield constant("pos_emb.emb", lambda: table(model.embedding.embedding_dim))
        yield constant("layer_pos_emb.emb", lambda: table(options.head_dim))
