"""One token's step in Triton, behind `ops.step`: memories are changed where they lie."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
from torch import Tensor

from longspan.kernels.step_blocks import add_norm_kernel, linear_step_kernel, linformer_step_kernel, local_step_kernel

Turned = tuple[Tensor, Tensor, bool] | None  # cos and sin (B or 1, 1, D / 2), and whether pairs are neighbours


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
) -> Tensor:
    """As `ops.step.linear_step_`."""
    (B, _, H, D), E, M = q.shape, v.shape[3], z.shape[2]
    out = q.new_empty(B, 1, H, E)
    BM = _block(M)
    weight = None if weight is None else weight.contiguous()
    with _on(q):
        linear_step_kernel[(z.shape[0] * z.shape[1],)](
            *(q, k, v, *_angles(turn), weight, kv, z, shift, out, *_strides(q, k, v, turn)),
            G=H // z.shape[1],
            HKV=z.shape[1],
            D=D,
            M=M,
            E=E,
            BD=_block(D),
            BM=BM,
            BE=min(_block(E), max(16, 16384 // BM)),
            MAP=feature_map,
            NORMALISE=normalise,
            TURN=_kind(turn),
            num_warps=8 if BM * _block(E) > 4096 else 4,
        )
    return out


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
) -> Tensor:
    """As `ops.step.local_step_`."""
    (B, _, H, D), E = q.shape, v.shape[3]
    Hkv, ring = ring_k.shape[1:3]
    out = q.new_empty(B, 1, H, E)
    halves = ring_k.dtype != torch.float32
    wide = max(_block(D), _block(E))
    with _on(q):
        local_step_kernel[(B * Hkv,)](
            *(q, k, v, *_angles(turn), length, ring_k, ring_v, out, scale, *_strides(q, k, v, turn)),
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
            num_warps=4,
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
) -> Tensor:
    """As `ops.step.linformer_step_`."""
    (B, _, H, D), E = q.shape, v.shape[3]
    Hkv, R = rows_k.shape[1:3]
    out = q.new_empty(B, 1, H, E)
    BG, wide = triton.next_power_of_2(H // Hkv), max(_block(D), _block(E))
    # What is one for all heads has no step from head to head: tables (1 or Hkv, …), biases (R, 1) or (Hkv, R, 1).
    steps = [table.stride(0) if len(table) > 1 else 0 for table in tables]
    steps += [0 if bias is None or bias.ndim == 2 else bias.stride(0) for bias in biases]
    with _on(q):
        linformer_step_kernel[(B * Hkv,)](
            *(q, k, v, *_angles(turn), length, *tables, *biases, rows_k, rows_v, out, D**-0.5),
            *(*_strides(q, k, v, turn), *steps),
            G=H // Hkv,
            HKV=Hkv,
            D=D,
            E=E,
            R=R,
            LENGTH=tables[0].shape[1],
            PERIODIC=periodic,
            BG=BG,
            BD=_block(D),
            BE=_block(E),
            BR=_rows(BG * wide, R),
            TURN=_kind(turn),
            num_warps=8,
        )
    return out


def add_norm(x: Tensor, y: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """As `ops.step.add_norm`."""
    B, _, dim = x.shape
    total, out = x.new_empty(x.shape), x.new_empty(x.shape)
    with _on(x):
        add_norm_kernel[(B,)](
            *(x, y, weight, bias, total, out, x.stride(0), y.stride(0), eps),
            DIM=dim,
            BLOCK=triton.next_power_of_2(dim),
            num_warps=4,
        )
    return total, out


def _rows(width: int, all_rows: int) -> int:
    """Rows of a memory in a block: few enough for registers."""
    return max(1, min(triton.next_power_of_2(all_rows), 8192 // width))


def _angles(turn: Turned) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if turn is None else (turn[0], turn[1])


def _kind(turn: Turned) -> int:
    return 0 if turn is None else 2 if turn[2] else 1


def _strides(q: Tensor, k: Tensor, v: Tensor, turn: Turned) -> tuple[int, ...]:
    assert all(x.stride(3) == 1 for x in (q, k, v))
    angles = 0 if turn is None or len(turn[0]) == 1 else turn[0].stride(0)
    return *(x.stride(i) for x in (q, k, v) for i in (0, 2)), angles


def _block(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _on(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
