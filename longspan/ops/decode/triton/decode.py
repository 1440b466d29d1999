"""One token's step in Triton, behind `ops.step`: memories are changed where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import triton
from torch import Tensor

from longspan.ops.common.launch import on_device
from longspan.ops.decode.triton.decode_device import Sizes, Token
from longspan.ops.decode.triton.gemv import Maps, Widths, map_rows_kernel, map_vector_kernel, turns_kernel
from longspan.ops.decode.triton.linear import Sums, favor_features_kernel, linear_step_kernel
from longspan.ops.decode.triton.sample import choose_kernel
from longspan.ops.decode.triton.window import (
    Rows,
    Table,
    linformer_add_kernel,
    linformer_step_kernel,
    local_step_kernel,
)

LARGEST_CHOICE = 65536  # tokens to choose from: a program holds a row of them

Turned = tuple[Tensor, Tensor, bool] | None  # cos and sin (B or 1, 1, D / 2), and whether pairs are neighbors


class Sampling(Protocol):
    """See `loop.Sampling`."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float


def linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: Turned,
    weight: Tensor | None,
    kv: Tensor,
    z: Tensor,
    shift: Tensor,
    feature_map: str,
    normalize: str,
    late: tuple[Tensor, Tensor, Tensor, Tensor],
    out: Tensor | None,
) -> Tensor:
    """As `ops.step.linear_decode_step`. late: lengths (B,), then slots of features, values and scales."""
    M, E = kv.shape[2:]
    out = _room(out, q, E)
    with on_device(q):
        if weight is not None:
            q, turn = _favor_features(q, k, turn, weight, late, normalize), None
        sizes = _sizes(q, v, turn)
        if sizes.BD * sizes.BE > 32768:
            sizes = sizes._replace(BE=16384 // sizes.BD)
        linear_step_kernel[(len(kv) * sizes.HKV,)](
            *(_token(q, k, v, turn, out), Sums(kv, z, shift, *late)),
            S=sizes,
            LATE=late[1].shape[2],
            MAP=feature_map,
            NORMALIZE=normalize,
            num_warps=8 if sizes.BD * sizes.BE > 4096 else 4,
        )
    return out


def _favor_features(
    q: Tensor, k: Tensor, turn: Turned, weight: Tensor, late: tuple[Tensor, Tensor, Tensor, Tensor], normalize: str
) -> Tensor:
    """φ(q) (B, 1, H, M) in float32; keys' features go to their slots."""
    (B, _, H, _), M, (length, f, _, scale) = q.shape, len(weight), late
    query = f.new_empty(B, 1, H, M)
    weight = weight.contiguous() if weight.dtype == q.dtype else weight.contiguous().float()
    sizes, BX = _sizes(q, k, turn), 16
    favor_features_kernel[(-(-B * H // BX) + -(-B * sizes.HKV // BX),)](
        *(_token(q, k, k, turn, query), weight, length, query, f, scale, B),
        S=sizes,
        M=M,
        LATE=f.shape[2],
        BX=BX,
        BM=_block(M),
        SHARES=normalize == "feature",
        PRECISION="tf32" if weight.dtype != torch.float32 else "ieee",
        num_warps=4,
    )
    return query


def local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: Turned,
    length: Tensor,
    ring_k: Tensor,
    ring_v: Tensor,
    window: tuple[int, int, int, bool, bool],
    scale: float,
    out: Tensor | None,
) -> Tensor:
    """The token takes its slot in a ring (B, Hkv, size, ·), its queries see the slots within their window."""
    out, sizes = _room(out, q, v.shape[3]), _sizes(q, v, turn)
    halves = ring_k.dtype != torch.float32
    with on_device(q):
        local_step_kernel[(len(q) * sizes.HKV,)](
            *(_token(q, k, v, turn, out), length, ring_k, ring_v, scale),
            S=sizes,
            RING=ring_k.shape[2],
            SIZE=window[0],
            BACK=window[1],
            ALONE=window[4],
            BS=_rows(sizes, ring_k.shape[2], halves),
            PRECISION="tf32" if halves else "ieee",
            num_warps=_warps(sizes.BG),
        )
    return out


def linformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: Turned,
    length: Tensor,
    tables: tuple[Tensor, Tensor],
    biases: tuple[Tensor | None, Tensor | None],
    rows_k: Tensor,
    rows_v: Tensor,
    periodic: bool,
    late: tuple[Tensor, Tensor, Tensor, Tensor],
    out: Tensor | None,
) -> Tensor:
    """The token is added to compressed rows (B, Hkv, R, ·), over which its queries attend.

    late: slots of keys and values, and the rows as they are read.
    """
    out, sizes = _room(out, q, v.shape[3]), _sizes(q, v, turn)
    # What is one for all heads has no step from head to head: tables (1 or Hkv, …), biases (R, 1) or (Hkv, R, 1).
    steps = [table.stride(0) if len(table) > 1 else 0 for table in tables]
    steps += [0 if bias is None or bias.ndim == 2 else bias.stride(0) for bias in biases]
    rows = Rows(rows_k, rows_v, length, *late, *tables, *biases, *steps)
    grid, R, halves = (len(q) * sizes.HKV,), rows_k.shape[2], late[0].dtype != torch.float32
    table = Table(R, _rows(sizes, R, halves), tables[0].shape[1], late[0].shape[2], periodic)
    with on_device(q):
        linformer_step_kernel[grid](
            *(_token(q, k, v, turn, out), rows, q.shape[3] ** -0.5),
            S=sizes,
            T=table,
            PRECISION="tf32" if halves else "ieee",
            num_warps=_warps(sizes.BG),
        )
        linformer_add_kernel[grid](rows, S=sizes, T=table, num_warps=4 if min(sizes.BD, sizes.BE) >= 64 else 2)
    return out


def project(
    x: Tensor,
    weights: Sequence[tuple[Tensor, Tensor | None]],
    norm: tuple[int, Tensor | None, Tensor | None, float],
    activation: str,
    add: Tensor | None,
) -> Tensor:
    """As `ops.step.project`, (B, 1, N) of all maps end to end. norm: 0 none, 1 layer, 2 rms; gain, shift, epsilon."""
    B, _, K = x.shape
    (weight, bias), (other, other_bias) = weights[0], weights[1] if len(weights) > 1 else (None, None)
    N, N_other = len(weight), 0 if other is None else len(other)
    out = x.new_empty(B, 1, N + N_other)
    kind, gain, shift, eps = norm
    maps = Maps(x, gain, shift, weight, bias, other, other_bias, add, out, eps)
    whole = x.dtype == torch.float32
    BK, wide = triton.next_power_of_2(K), N + N_other > 1024
    if B == 1:
        # Enough programs for every multiprocessor, each with at most 16,384 weights.
        BB, BN = 1, max(1, min(16 if wide else 4, 16384 // BK))
    else:
        # As much of a row at a time as fits: then loads do not wait for one another.
        wide = wide and not whole
        BB, BN, BK = 16 if B <= 16 else 64 if wide else 32, 64 if wide else 32, max(16, min(BK, 32 if whole else 512))
    widths = Widths(K, N, N_other, BK, BN, kind, activation)
    grid = -(-N // BN) + -(-N_other // BN), -(-B // BB)
    with on_device(x):
        if B == 1:
            map_vector_kernel[grid](maps, W=widths, num_warps=4)
        else:
            map_rows_kernel[grid](
                *(maps, B, x.stride(0), 0 if add is None else add.stride(0)),
                W=widths,
                BB=BB,
                PRECISION="ieee" if whole else "tf32",
                num_warps=8 if BB == 64 else 4,
                num_stages=3,
            )
    return out


def turns(length: Tensor, frequency: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin (B, 1, D / 2) at positions (B,), for frequencies (D / 2,) in float64."""
    half = len(frequency)
    cos, sin = (frequency.new_empty((len(length), 1, half), dtype=torch.float32) for _ in range(2))
    with on_device(length):
        turns_kernel[(len(length),)](
            *(length, frequency, cos, sin), HALF=half, BLOCK=triton.next_power_of_2(half), num_warps=1
        )
    return cos, sin


def choose(
    logits: Tensor,
    recent: Tensor,
    token: Tensor,
    drawn: Tensor,
    index: Tensor,
    stop: Tensor,
    ended: Tensor,
    answer: Tensor,
    *,
    joins: bool,
    how: Sampling,
) -> None:
    """As `Loop._choose`; all tensors are the loop's own and changed where they lie."""
    B, V = logits.shape
    with on_device(logits):
        choose_kernel[(B,)](
            *(logits, recent, token, drawn, index, stop, ended, answer, B, drawn.shape[1]),
            *(float(how.temperature), how.top_k or 0, float(how.top_p or 0), float(how.min_p or 0)),
            float(how.repetition_penalty),
            V=V,
            WINDOW=recent.shape[1],
            STOPS=len(stop),
            BV=triton.next_power_of_2(V),
            BW=triton.next_power_of_2(recent.shape[1]),
            JOINS=joins,
            GREEDY=how.temperature == 0,
            TOP_K=how.top_k is not None and how.top_k < V,
            TOP_P=how.top_p is not None,
            MIN_P=how.min_p is not None,
            PENALTY=how.repetition_penalty != 1,
            num_warps=1 if V <= 1024 else 4 if V <= 8192 else 16,
        )


def _token(q: Tensor, k: Tensor, v: Tensor, turn: Turned, out: Tensor) -> Token:
    assert all(x.stride(3) == 1 for x in (q, k, v, out))
    assert out.stride(2) == out.shape[3]
    cos, sin = (None, None) if turn is None else (turn[0], turn[1])
    angles = 0 if cos is None or len(cos) == 1 else cos.stride(0)
    (q_b, q_h), (k_b, k_h), (v_b, v_h) = ((x.stride(0), x.stride(2)) for x in (q, k, v))
    return Token(q, k, v, cos, sin, out, q_b, q_h, k_b, k_h, v_b, v_h, angles, out.stride(0))


def _sizes(q: Tensor, v: Tensor, turn: Turned) -> Sizes:
    (H, D), (Hkv, E) = q.shape[2:], v.shape[2:]
    kind = 0 if turn is None else 2 if turn[2] else 1
    return Sizes(H // Hkv, Hkv, D, E, _block(H // Hkv), _block(D), _block(E), kind)


def _rows(sizes: Sizes, all_rows: int, halves: bool) -> int:
    """Rows of a memory in a block: few enough for registers."""
    few = min(triton.next_power_of_2(all_rows), 8192 // max(sizes.BD, sizes.BE))
    return max(16, min(few, 64 if halves else 32))


def _room(out: Tensor | None, q: Tensor, E: int) -> Tensor:
    return q.new_empty(*q.shape[:3], E) if out is None else out


def _warps(rows: int) -> int:
    """For products of so many rows: four warps would make Hopper's own, of 64, which Triton 3.6 gets wrong where the
    other factor has fewer than 64 columns.
    """
    return 4 if rows < 64 else 2


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))
