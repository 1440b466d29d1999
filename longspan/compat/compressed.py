"""Attention over compressed keys and values for layers that own their projections, as in both Linformer libraries."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from longspan.ops import compressed
from longspan.ops.compressed import CompressedProblem, compressed_attention
from longspan.ops.softmax import attend


def has_hooks(module: nn.Module) -> bool:
    """Return whether a hook observes the calls of a module."""
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    everywhere = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
    return any(own) or any(everywhere) or "forward" in vars(module)


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module is an nn.Linear without hooks, so that its weight can be used in its place."""
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not has_hooks(module)


def is_product(module: nn.Module) -> bool:
    """Return whether a module is a plain nn.Linear without a bias."""
    return is_plain_linear(module) and getattr(module, "bias", None) is None


def is_plain_dropout(module: nn.Module) -> bool:
    """Return whether a module is an nn.Dropout without hooks, so that its rate can be used in its place."""
    return type(module) is nn.Dropout and not has_hooks(module)


def is_identity(dropout: nn.Module) -> bool:
    """Return whether dropout, unless it was replaced or has a hook, does nothing now."""
    return is_plain_dropout(dropout) and not (dropout.training and getattr(dropout, "p", 0.0) > 0)


def zero_fill(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return x (B, n, dim) with zeros where mask (B, n) is False, whatever is there; None hides nothing."""
    if mask is None:
        return x
    if mask.shape != x.shape[:2]:
        raise ValueError(f"a mask has the shape (B, n) of the tokens, {tuple(x.shape[:2])}, got {tuple(mask.shape)}")
    return x.masked_fill(~mask.bool()[..., None], 0)


def attend_compressed(q: Tensor, k: Tensor, v: Tensor, dropout: nn.Module, live: Tensor | None = None) -> Tensor:
    """Attend to compressed keys and values, in a kernel where one applies.

    Args:
        q: Queries (B, T, H, D).
        k: Compressed keys (B, Hkv, R, D).
        v: Compressed values (B, Hkv, R, E); k itself if they are the keys.
        dropout: The layer's dropout of attention weights.
        live: (B, R) bool, True for compressed keys that hold a token; all if None.

    Returns:
        (B, T, H, E).
    """
    shared, heads, kv_heads = v is k, q.shape[2], k.shape[1]
    mask = None if live is None else live[:, None, None]
    if not is_plain_dropout(dropout):
        v = v.repeat_interleave(heads // kv_heads, 1).to(q.dtype)
        return (dropout(attention_weights(q, k, mask)) @ v).transpose(1, 2)
    rate = 0.0 if is_identity(dropout) else getattr(dropout, "p", 0.0)
    problem = CompressedProblem(heads, kv_heads, q.shape[3], v.shape[3], k.shape[2], shared)
    if live is None and not rate and compressed.why_not_triton(q, q.dtype, problem) is None:
        return compressed_attention(q, k, v)
    k = k.to(q.dtype)
    v = k if shared else v.to(q.dtype)
    return attend(q.transpose(1, 2), k, v, mask, grouped=heads > kv_heads, dropout=rate).transpose(1, 2)


def attention_weights(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the weights (B, H, T, R) of queries on keys, 0 for those that the mask hides.

    Args:
        q: Queries (B, T, H, D).
        k: Keys (B, Hkv, R, D).
        mask: True for visible keys, broadcast to (B, H, T, R).
    """
    k = k.repeat_interleave(q.shape[2] // k.shape[1], 1).to(q.dtype)
    scores = q.transpose(1, 2) @ k.mT * q.shape[3] ** -0.5
    if mask is None:
        return scores.softmax(-1)
    return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~mask, 0)
