"""Local attention by its definition, one query after the other, in float64."""

from __future__ import annotations

import numpy as np


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    window: int,
    causal: bool = False,
    back: int = 1,
    ahead: int = 0,
    exact: bool = False,
    shared: bool = False,
    rotary: bool = True,
    xpos: float | None = None,
    scale: float | None = None,
    bias: np.ndarray | None = None,
    mask: np.ndarray | None = None,
) -> np.ndarray:
    """q, k, v: (n, D), mask: (n,), bias: (W, (back + 1 + ahead) · W) -> (n, D)."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    n, dim = q.shape
    if shared:
        k = k / np.linalg.norm(k, axis=-1, keepdims=True)
    out = np.zeros_like(v)
    for i in range(n):
        block = i // window
        keys = [j for j in range((block - back) * window, (block + 1 + ahead) * window) if 0 <= j < n]
        if exact:
            keys = [j for j in keys if -ahead * window <= i - j <= back * window]
        keys = [j for j in keys if (not causal or j <= i) and (mask is None or mask[j])]
        if shared and len(keys) > 1:
            keys = [j for j in keys if j != i]
        if not keys:
            continue
        scores = []
        for j in keys:
            # A query that looks ahead has the angle of the last block it sees.
            apart = i - j + ahead * window
            score = q[i] @ (_turned(k[j], -apart, dim, xpos) if rotary else k[j]) * (scale or dim**-0.5)
            scores.append(score + (0 if bias is None else bias[i % window, j - (block - back) * window]))
        weights = np.exp(np.array(scores) - max(scores))
        out[i] = weights @ v[keys] / weights.sum()
    return out


def _turned(x: np.ndarray, position: int, dim: int, xpos: float | None) -> np.ndarray:
    pair = np.arange(0, dim, 2)
    angle, a, b = position / 10000 ** (pair / dim), x[: dim // 2], x[dim // 2 :]
    turned = np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])
    if xpos is not None:
        turned *= np.tile(((pair + 0.4 * dim) / (1.4 * dim)) ** (-position / xpos), 2)
    return turned
