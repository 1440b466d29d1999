"""Attention weights: rows of the matrix that a linear-time mechanism never computes.

The output of every mechanism is linear in the values, out_i = Σ_j a_ij v_j (plus a constant for a Linformer with a
bias), so the gradient of w·out_i with respect to v_j is a_ij w: one backward pass gives a row of the matrix for any
mechanism, in the time and memory of one query.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module

import torch
from torch import Tensor

from longspan.layout import TokenLayout
from longspan.models.layers import Attention
from longspan.protocol import Mechanism


def attention_map(
    layer: Attention,
    x: Tensor,
    queries: Sequence[int],
    *,
    key_mask: Tensor | None = None,
    context: Tensor | None = None,
) -> Tensor:
    """Compute the weights a_ij of the chosen queries i on every key j.

    The layer's attention before gates and output projection is Σ_j a_ij v_j, plus a constant for linformer with a bias.
    Weights need not be positive or sum to one. Dropout applies: call ``layer.eval()`` first. Time and memory are O(S)
    per query, except that softmax heads beside bidirectional local ones cost as much as their forward.

    Args:
        layer: The layer to look at.
        x: (B, T, dim), its input.
        queries: Positions in x; negative ones count from its end.
        key_mask: (B, S) bool, True = keep.
        context: (B, S, dim), the source of the keys for cross-attention; otherwise keys are those of x and S = T.

    Returns:
        (B, H, len(queries), S), detached.

    Raises:
        ValueError: If a query is out of range, or the mechanism mixes features of values (Linformer's convolution).
    """
    positions = _positions(queries, x.shape[1])
    with torch.inference_mode(False):  # Weights are gradients, which inference mode would disable.
        key_mask = None if key_mask is None else key_mask.clone()
        q, k, v, gates = _projected(layer, x, key_mask, context)
        rows = [_row(layer, q, k, v, gates, i, key_mask) for i in positions]
    return torch.stack(rows, 2) if rows else q.new_zeros(len(x), q.shape[2], 0, k.shape[1])


def compressed_map(layer: Attention, x: Tensor, *, key_mask: Tensor | None = None) -> Tensor:
    """Compute Linformer's weights on its R compressed keys for every query, in O(T·R·(D + R)).

    A causal query's keys are compressed from what it sees.

    Args:
        layer: A self-attention layer with Linformer.
        x: (B, T, dim), its input.
        key_mask: (B, T) bool, True = keep.

    Returns:
        (B, H, T, R), detached.
    """
    weights = getattr(layer.mechanism, "compressed_weights", None)
    if weights is None or layer.cross:
        kind = type(layer.mechanism).__name__
        kind = f"cross-attention with {kind}" if layer.cross else kind
        raise ValueError(f"only linformer's self-attention has compressed keys, got {kind}; use attention_map")
    q, k, *_ = _projected(layer, x, key_mask, None)
    return weights(q, k, causal=layer.causal, key_mask=key_mask)


def plot_attention(maps: Tensor, path: str | os.PathLike[str], *, queries: Sequence[int] | None = None) -> None:
    """Save a heat map of every head as a PNG, with one color scale for all.

    Args:
        maps: (H, queries, keys), one sequence of the output of `attention_map` or `compressed_map`.
        path: The file to write.
        queries: The queries' positions, to label the rows of the map with.

    Raises:
        ValueError: If the shape of maps is not that of one sequence, or there is nothing to plot.
        ImportError: If matplotlib is not installed.
    """
    if maps.ndim != 3:
        raise ValueError(
            f"maps must be (H, queries, keys), one sequence of a batch, got {tuple(maps.shape)}; plot maps[b]"
        )
    if 0 in maps.shape:
        raise ValueError(f"there is nothing to plot in maps of shape {tuple(maps.shape)}")
    if queries is not None and len(queries) != maps.shape[1]:
        raise ValueError(f"queries must label {maps.shape[1]} rows, got {len(queries)}")
    try:
        figure_module = import_module("matplotlib.figure")
    except ImportError as error:
        raise ImportError("plot_attention needs matplotlib: pip install 'longspan[train]'") from error
    values = maps.detach().float().cpu()
    heads, rows, _ = values.shape
    labels = list(range(rows)) if queries is None else list(queries)
    low, high = min(0.0, values.min().item()), max(0.0, values.max().item())
    colors = "viridis"
    if low < 0:  # A diverging scale with zero in the middle.
        low, high, colors = -max(-low, high), max(-low, high), "RdBu_r"
    across = math.ceil(math.sqrt(heads))
    down = math.ceil(heads / across)
    height = 0.9 + min(3.0, max(1.0, 0.25 * rows))
    figure = figure_module.Figure(figsize=(1 + 3.6 * across, 0.4 + height * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    scale = {"vmin": low, "vmax": high, "cmap": colors}
    for head, ax in zip(range(heads), axes.flat, strict=False):
        image = ax.imshow(values[head].numpy(), aspect="auto", interpolation="nearest", **scale)
        ax.set_title(f"head {head}")
    for column in range(across - (across * down - heads), across):
        axes[-1, column].set_visible(False)
        axes[-2, column].tick_params(labelbottom=True)
    ticks = range(0, rows, -(-rows // 12))
    axes[0, 0].set_yticks(ticks, [str(labels[i]) for i in ticks])
    figure.supxlabel("key")
    figure.supylabel("query")
    figure.colorbar(image, ax=axes, label="weight")
    figure.savefig(path, format="png", dpi=120)


def _positions(queries: Sequence[int], T: int) -> list[int]:
    for i in queries:
        if not -T <= i < T:
            raise ValueError(f"queries must be positions in x, {-T} to {T - 1}, got {i}")
    return [i % T for i in queries]


def _projected(
    layer: Attention, x: Tensor, key_mask: Tensor | None, context: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return q, k, v and gates as the layer's mechanism gets them, in float32 at least."""
    if layer.cross != (context is not None):
        need = "needs context=, of shape (B, S, dim)" if layer.cross else "takes no context"
        raise ValueError(f"this layer {need}")
    with torch.no_grad():
        layout = TokenLayout.of(x, causal=layer.causal, key_mask=None if layer.cross else key_mask)
        x = layout.zero_fill(x)
        if layer.value_embedding is not None:  # Weights do not depend on values: any tokens will do.
            layout = replace(layout, tokens=torch.zeros(x.shape[:2], dtype=torch.int64, device=x.device))
        if context is None:
            q, k, v, gates, _ = layer.project(x, layout)
        else:
            q = layer.project_queries(x, layout)
            context_layout = TokenLayout.of(context, causal=False, key_mask=key_mask)
            k, v, gates = layer._project_keys(context_layout.zero_fill(context), None)
    dtype = torch.promote_types(q.dtype, torch.float32)
    return q.to(dtype), k.to(dtype), v.to(dtype), None if gates is None else gates.to(dtype)


def _row(
    layer: Attention, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, i: int, key_mask: Tensor | None
) -> Tensor:
    """Return the weights of query i: (B, H, S)."""
    m, (Hkv, E) = layer.mechanism, v.shape[2:]
    with torch.enable_grad():
        v = v.detach().requires_grad_()
        out = _one_query(m, q, k, v, gates, i, layer.causal, key_mask)  # (B, H, E)
    # Different for each feature, to detect a mechanism that mixes features.
    w = torch.arange(1, E + 1, dtype=v.dtype, device=v.device) / E
    weights = []
    group = m.num_heads // Hkv
    for member in range(group):
        # The gradients of query heads that share a key/value head add up: take one of each group at a time.
        chosen = torch.zeros_like(out).unflatten(1, (Hkv, group))
        chosen[:, :, member] = w
        (gradient,) = torch.autograd.grad(out, v, chosen.flatten(1, 2), retain_graph=True)  # (B, S, Hkv, E)
        weight = (gradient / w).mean(-1)
        if ((gradient - weight[..., None] * w).abs().amax() > 1e-3 * gradient.abs().amax()).item():
            raise ValueError(
                f"this {type(m).__name__} mixes the features of values, so a key has no single weight; "
                "for linformer's convolution use compressed_map"
            )
        weights.append(weight)
    return torch.stack(weights, 3).flatten(2).transpose(1, 2)


def _one_query(
    m: Mechanism, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, i: int, causal: bool, key_mask: Tensor | None
) -> Tensor:
    """Return the mechanism's output for query i alone: (B, H, E)."""
    query = q[:, i : i + 1]
    if causal:
        # The state after token i, read by query i.
        k, v, seen = k[:, : i + 1], v[:, : i + 1], None if key_mask is None else key_mask[:, : i + 1]
        gates = None if gates is None else gates[:, : i + 1]
        state = m.write(m.new_state(len(q), device=q.device, dtype=q.dtype), k, v, gates=gates, key_mask=seen)
        out = m.read(state, query)[:, 0]
        return out if seen is None else out.masked_fill(~seen[:, i, None, None], 0)
    if m.supports_cross:
        return m(query, k, v, gates=gates, key_mask=key_mask)[:, 0]
    return m(q, k, v, gates=gates, key_mask=key_mask)[:, i]
