"""The models of linformer, and the layers that people take out of them.

Masks are (B, n) bool, True = keep; the original had none, and swallowed what it was given.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from longspan.compat.state_dict import CompatModule, KeyMapping, concatenate, rename, rename_layer, reshape
from longspan.mechanisms.linformer import LinformerAttention
from longspan.models.config import AttentionConfig, FeedForwardConfig, LegacyConfig, ModelConfig
from longspan.models.layers import Attention
from longspan.models.layers import FeedForward as _FeedForward
from longspan.models.transformer import LanguageModel, Transformer

__all__ = ["FeedForward", "Linformer", "LinformerLM", "LinformerSelfAttention"]

_ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.GELU: "gelu",
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
    nn.Identity: "identity",
}


class LinformerSelfAttention(CompatModule):
    """Attention over k compressed rows: (B, n, dim) -> (B, n, dim). share_kv: values are the keys, too."""

    model: Attention

    def __init__(
        self,
        dim: int,
        seq_len: int,
        k: int = 256,
        heads: int = 8,
        dim_head: int | None = None,
        one_kv_head: bool = False,
        share_kv: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.seq_len, self.k = seq_len, k
        self.model = Attention(dim, _attention(seq_len, k, heads, dim_head, one_kv_head, share_kv, dropout))

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        context_mask: Tensor | None = None,
    ) -> Tensor:
        """x: (B, n, dim). context: (B, m, dim), where keys and values come from in place of x."""
        if context is None and context_mask is not None:
            raise ValueError("context_mask was given without a context: the mask of x itself is mask=")
        if context is None:
            return self.model(x, key_mask=mask)
        across = copy.copy(self.model)
        across.cross = True
        return across(x, key_mask=mask, context=context, context_mask=context_mask)

    def key_mappings(self) -> Iterable[KeyMapping]:
        return _attention_entries(self.model, "", "")


class FeedForward(CompatModule):
    """activation(x W₁) W₂, or gated with glu. activation: a class of torch.nn, GELU unless given."""

    model: _FeedForward

    def __init__(
        self,
        dim: int,
        mult: int = 4,
        dropout: float = 0.0,
        activation: type[nn.Module] | None = None,
        glu: bool = False,
    ) -> None:
        super().__init__()
        name: Any = _ACTIVATIONS.get(nn.GELU if activation is None else activation)
        if name is None:
            allowed = ", ".join(known.__name__ for known in _ACTIVATIONS)
            raise ValueError(f"activation must be one of torch.nn's {allowed}, as a class, got {activation!r}")
        config = FeedForwardConfig(mult=mult, dropout=dropout, activation=name, gated=glu)
        self.model = _FeedForward(dim, config)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def key_mappings(self) -> Iterable[KeyMapping]:
        return _feed_forward_entries("", "")


class Linformer(CompatModule):
    """Vectors in, vectors out: (B, n, dim) -> (B, n, dim), for n up to seq_len."""

    model: Transformer

    def __init__(
        self,
        dim: int,
        seq_len: int,
        depth: int,
        k: int = 256,
        heads: int = 8,
        dim_head: int | None = None,
        one_kv_head: bool = False,
        share_kv: bool = False,
        reversible: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        attention = _attention(seq_len, k, heads, dim_head, one_kv_head, share_kv, dropout)
        self.model = Transformer(_config(dim, depth, attention, reversible, dropout))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: (B, n, dim)."""
        return self.model(x, key_mask=mask)

    def key_mappings(self) -> Iterable[KeyMapping]:
        return _stack_entries(self.model, "", "")


class LinformerLM(CompatModule):
    """Tokens in, logits out: (B, n) -> (B, n, num_tokens), for n up to seq_len. Each sees all; there is no causal."""

    model: LanguageModel

    def __init__(
        self,
        num_tokens: int,
        dim: int,
        seq_len: int,
        depth: int,
        k: int = 256,
        heads: int = 8,
        dim_head: int | None = None,
        one_kv_head: bool = False,
        share_kv: bool = False,
        reversible: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        attention = _attention(seq_len, k, heads, dim_head, one_kv_head, share_kv, dropout)
        config = _config(dim, depth, attention, reversible, dropout, num_tokens=num_tokens, seq_len=seq_len)
        self.model = LanguageModel(config)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: (B, n) tokens."""
        return self.model(x, key_mask=mask)

    def key_mappings(self) -> Iterable[KeyMapping]:
        yield rename("token_emb.weight", "embedding.weight")
        yield rename("pos_emb.weight", "positions.table")
        yield from _stack_entries(self.model.transformer, "linformer.", "transformer.")
        yield from rename_layer("to_logits", "to_logits")


def _attention(
    seq_len: int, k: int, heads: int, dim_head: int | None, one_kv_head: bool, share_kv: bool, dropout: float
) -> AttentionConfig:
    mechanism = {
        "mechanism": "linformer",
        "rank": k,
        "max_length": seq_len,
        "share_projection": share_kv,
        "dropout": dropout,
    }
    return AttentionConfig(
        num_heads=heads,
        head_dim=dim_head,
        num_kv_heads=1 if one_kv_head else None,
        shared_kv=share_kv,
        mechanism=mechanism,
    )


def _config(
    dim: int,
    depth: int,
    attention: AttentionConfig,
    reversible: bool,
    dropout: float,
    *,
    num_tokens: int | None = None,
    seq_len: int | None = None,
) -> ModelConfig:
    """num_tokens, seq_len: of a language model."""
    return ModelConfig(
        dim=dim,
        depth=depth,
        attention=attention,
        feed_forward=FeedForwardConfig(dropout=dropout),
        final_norm=False,
        residual="double" if reversible else "single",
        legacy=LegacyConfig(sum_streams=reversible),
        execution="reverse" if reversible else "keep",
        vocab_size=num_tokens,
        positions="none" if num_tokens is None else "learned",
        max_length=seq_len,
    )


def _stack_entries(model: Transformer, old: str, new: str) -> Iterator[KeyMapping]:
    reversible = model.config.residual == "double"
    for i, branch in enumerate(model.stack.branches):
        pair, second = divmod(i, 2)
        there = f"{old}net.blocks.{pair}.{'fg'[second]}.net" if reversible else f"{old}net.layers.{pair}.{second}"
        here = f"{new}stack.branches.{i}"
        yield from rename_layer(f"{there}.norm", f"{here}.norm")
        if isinstance(branch.layer, Attention):
            yield from _attention_entries(branch.layer, f"{there}.fn.", f"{here}.layer.")
        else:
            yield from _feed_forward_entries(f"{there}.fn.", f"{here}.layer.")


def _attention_entries(attention: Attention, old: str, new: str) -> Iterator[KeyMapping]:
    keys, values = f"{new}mechanism.keys.table", f"{new}mechanism.values.table"
    assert isinstance(attention.mechanism, LinformerAttention)
    shape = attention.mechanism.keys.table.shape[1:]
    yield rename(f"{old}to_q.weight", f"{new}to_q.weight")
    yield from rename_layer(f"{old}to_out", f"{new}to_out")
    if attention.shared_kv:
        yield rename(f"{old}to_k.weight", f"{new}to_kv.weight")
        both = (f"{old}proj_k",), (keys, values)
        yield KeyMapping(*both, lambda tensors: [tensors[0]] * 2, lambda tensors: [tensors[0].reshape(shape)])
    else:
        yield concatenate([f"{old}to_k.weight", f"{old}to_v.weight"], f"{new}to_kv.weight")
        yield reshape(f"{old}proj_k", keys, shape)
        yield reshape(f"{old}proj_v", values, shape)


def _feed_forward_entries(old: str, new: str) -> Iterator[KeyMapping]:
    yield from rename_layer(f"{old}w1", f"{new}to_hidden")
    yield from rename_layer(f"{old}w2", f"{new}to_out")
