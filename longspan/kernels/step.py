"""One token's step in Triton, behind `ops.step`: memories are changed where they lie."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from longspan.kernels.choose_blocks import choose_kernel
from longspan.kernels.late_blocks import (
    favor_features_kernel,
    linear_late_kernel,
    linformer_add_kernel,
    linformer_late_kernel,
)
from longspan.kernels.step_blocks import linear_step_kernel, linformer_step_kernel, local_step_kernel
from longspan.kernels.step_maps import map_rows_kernel, map_vector_kernel, turns_kernel

LARGEST_CHOICE = 65536  # tokens to choose from: a program holds a row of them

Turned = tuple[Tensor, Tensor, bool] | None  # cos and sin (B or 1, 1, D / 2), and whether pairs are neighbours


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
    normalise: str,
    late: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    out: Tensor | None,
) -> Tensor:
    """As `ops.step.linear_step_`. late: lengths (B,), then slots of features, values and scales."""
    (_, _, H, D), E, M = q.shape, v.shape[3], z.shape[2]
    out = _room(out, q, E)
    BM = _block(M)
    weight = None if weight is None else weight.contiguous()
    sizes: dict[str, Any] = {
        "G": H // z.shape[1],
        "HKV": z.shape[1],
        "D": D,
        "M": M,
        "E": E,
        "BD": _block(D),
        "BM": BM,
        "BE": min(_block(E), max(16, 16384 // BM)),
        "MAP": feature_map,
        "NORMALISE": normalise,
        "TURN": _kind(turn),
        "num_warps": 8 if BM * _block(E) > 4096 else 4,
    }
    grid = (z.shape[0] * z.shape[1],)
    with on_device(q):
        if late is None:
            given = q, k, v, *_angles(turn), weight, kv, z, shift, out
            linear_step_kernel[grid](*given, *_strides(q, k, v, turn, out), **sizes)
            return out
        if weight is not None:
            q, turn, sizes["TURN"] = _favor_features(q, k, turn, weight, late, normalise), None, 0
        length, *slots = late
        sizes |= {"LATE": slots[0].shape[2], "BE": _block(E)}
        linear_late_kernel[grid](
            *(q, k, v, *_angles(turn), length, kv, z, shift, *slots, out), *_strides(q, k, v, turn, out), **sizes
        )
    return out


def _favor_features(
    q: Tensor, k: Tensor, turn: Turned, weight: Tensor, late: tuple[Tensor, Tensor, Tensor, Tensor], normalise: str
) -> Tensor:
    """φ(q) (B, 1, H, M) in float32; keys' features go to their slots."""
    (B, _, H, D), Hkv, (length, f, _, scale) = q.shape, k.shape[2], late
    query = f.new_empty(B, 1, H, len(weight))
    weight = weight if weight.dtype == q.dtype else weight.float()
    BX = 16
    strides = _strides(q, k, k, turn, query)
    favor_features_kernel[(-(-B * H // BX) + -(-B * Hkv // BX),)](
        *(q, k, *_angles(turn), weight, length, query, f, scale, B, *strides[:4], strides[6]),
        H=H,
        HKV=Hkv,
        D=D,
        M=len(weight),
        LATE=f.shape[2],
        BX=BX,
        BD=_block(D),
        BM=_block(len(weight)),
        TURN=_kind(turn),
        SHARES=normalise == "feature",
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
    (B, _, H, D), E = q.shape, v.shape[3]
    Hkv, ring = ring_k.shape[1:3]
    out = _room(out, q, E)
    halves = ring_k.dtype != torch.float32
    wide = max(_block(D), _block(E))
    with on_device(q):
        local_step_kernel[(B * Hkv,)](
            *(q, k, v, *_angles(turn), length, ring_k, ring_v, out, scale, *_strides(q, k, v, turn, out)),
            G=H // Hkv,
            HKV=Hkv,
            D=D,
            E=E,
            RING=ring,
            SIZE=window[0],
            BACK=window[1],
            ALONE=window[4],
            BG=_block(H // Hkv),
            BD=_block(D),
            BE=_block(E),
            BS=max(16, min(_rows(wide, ring), 64 if halves else 32)),
            TURN=_kind(turn),
            PRECISION="tf32" if halves else "ieee",
            num_warps=_warps(_block(H // Hkv)),
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
    late: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    out: Tensor | None,
) -> Tensor:
    """The token is added to compressed rows (B, Hkv, R, ·), over which its queries attend.

    late: slots of keys and values, and the rows as they are read.
    """
    (B, _, H, D), E = q.shape, v.shape[3]
    Hkv, R = rows_k.shape[1:3]
    out = _room(out, q, E)
    BG, wide = triton.next_power_of_2(H // Hkv), max(_block(D), _block(E))
    # What is one for all heads has no step from head to head: tables (1 or Hkv, …), biases (R, 1) or (Hkv, R, 1).
    steps = [table.stride(0) if len(table) > 1 else 0 for table in tables]
    steps += [0 if bias is None or bias.ndim == 2 else bias.stride(0) for bias in biases]
    sizes: dict[str, Any] = {
        "G": H // Hkv,
        "HKV": Hkv,
        "D": D,
        "E": E,
        "R": R,
        "LENGTH": tables[0].shape[1],
        "PERIODIC": periodic,
        "BG": BG,
        "BD": _block(D),
        "BE": _block(E),
        "BR": _rows(BG * wide, R),
        "TURN": _kind(turn),
        "num_warps": 8,
    }
    given = q, k, v, *_angles(turn), length, *tables, *biases
    strides = *_strides(q, k, v, turn, out), *steps
    with on_device(q):
        if late is None:
            linformer_step_kernel[(B * Hkv,)](*given, rows_k, rows_v, out, D**-0.5, *strides, **sizes)
            return out
        exact = late[0].dtype == torch.float32
        sizes |= {"LATE": late[0].shape[2], "BG": _block(H // Hkv), "PRECISION": "ieee" if exact else "tf32"}
        sizes |= {"BR": max(16, min(_rows(wide, R), 32 if exact else 64)), "num_warps": _warps(sizes["BG"])}
        linformer_late_kernel[(B * Hkv,)](*given, *late, out, D**-0.5, *strides, **sizes)
        sizes = {name: sizes[name] for name in linformer_add_kernel.arg_names if name in sizes}
        sizes["num_warps"] = 4 if min(sizes["BD"], sizes["BE"]) >= 64 else 2
        linformer_add_kernel[(B * Hkv,)](length, *tables, rows_k, rows_v, *late, *steps[:2], **sizes)
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
    given = x, weight, bias, other, other_bias, gain, shift, add, out, eps
    sizes = {"K": K, "N": N, "N_OTHER": N_other, "NORM": kind, "ACTIVATION": activation}
    BK = triton.next_power_of_2(K)
    with on_device(x):
        if B == 1:
            # Enough programs for every multiprocessor, each with at most 16,384 weights.
            BN = max(1, min(4 if N + N_other <= 1024 else 16, 16384 // BK))
            grid = -(-N // BN) + -(-N_other // BN)
            map_vector_kernel[(grid,)](*given, **sizes, BK=BK, BN=BN, num_warps=4)
            return out
        # As much of a row at a time as fits: then loads do not wait for one another.
        wide = N + N_other > 1024 and x.dtype != torch.float32
        BB, BN = 16 if B <= 16 else 64 if wide else 32, 64 if wide else 32
        map_rows_kernel[(-(-N // BN) + -(-N_other // BN), -(-B // BB))](
            *(*given, B, x.stride(0), 0 if add is None else add.stride(0)),
            **sizes,
            BB=BB,
            BK=max(16, min(BK, 32 if x.dtype == torch.float32 else 512)),
            BN=BN,
            PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
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


def _rows(width: int, all_rows: int) -> int:
    """Rows of a memory in a block: few enough for registers."""
    return max(1, min(triton.next_power_of_2(all_rows), 8192 // width))


def _angles(turn: Turned) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if turn is None else (turn[0], turn[1])


def _kind(turn: Turned) -> int:
    return 0 if turn is None else 2 if turn[2] else 1


def _strides(q: Tensor, k: Tensor, v: Tensor, turn: Turned, out: Tensor) -> tuple[int, ...]:
    assert all(x.stride(3) == 1 for x in (q, k, v, out))
    assert out.stride(2) == out.shape[3]
    angles = 0 if turn is None or len(turn[0]) == 1 else turn[0].stride(0)
    return *(x.stride(i) for x in (q, k, v) for i in (0, 2)), angles, out.stride(0)


def _room(out: Tensor | None, q: Tensor, E: int) -> Tensor:
    return q.new_empty(*q.shape[:3], E) if out is None else out


def _warps(rows: int) -> int:
    """For products of so many rows: four warps would make Hopper's own, of 64, which Triton 3.6 gets wrong where the
    other factor has fewer than 64 columns.
    """
    return 4 if rows < 64 else 2


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
