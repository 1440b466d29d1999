"""Parts of a batch that are processed one after the other on a CPU, so that their tensors stay in cache."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from longspan.ops.common.torch_private import is_exporting

# Numbers of a part's queries, their features, or values that are processed together: 1 MiB in float32.
CACHED = 1 << 18


class Part(NamedTuple):
    """Rows of the batch, heads of the keys, and sequences, which are rows times heads."""

    rows: slice
    heads: slice
    sequences: slice


def parts_in_cache(q: Tensor, k: Tensor, numbers: int) -> list[Part]:
    """Divide a batch of q (B, T, H, D) and k (B, S, Hkv, D) into parts of few rows or heads on a CPU.

    Args:
        q: Queries.
        k: Keys.
        numbers: Numbers per query head that are processed together.

    Returns:
        The parts; a single one on other devices and in an export.
    """
    (B, _, Hkv, _), H = k.shape, q.shape[2]
    if k.device.type != "cpu" or is_exporting():
        return [Part(slice(None), slice(None), slice(None))]
    step = max(1, CACHED // max(1, numbers * H // Hkv))
    if step < Hkv:
        starts = [(b, h, min(step, Hkv - h)) for b in range(B) for h in range(0, Hkv, step)]
        return [Part(slice(b, b + 1), slice(h, h + n), slice(b * Hkv + h, b * Hkv + h + n)) for b, h, n in starts]
    step //= Hkv
    return [Part(slice(b, b + step), slice(None), slice(b * Hkv, (b + step) * Hkv)) for b in range(0, B, step)]
