"""Checks of what callers pass in: the value got, what is allowed, what to do about it."""

from __future__ import annotations

import torch
from torch import Tensor

from longspan.rows import Packing


def check_tensor(name: str, x: Tensor, shape: str, heads: int, dim: int) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor of shape {shape}, got {describe(x)}")
    if x.ndim != 4:
        raise ValueError(f"{name} must have four dimensions {shape}, got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {x.dtype}")
    if x.shape[2:] != (heads, dim):
        hint = " (are heads and length swapped?)" if x.shape[1] == heads and x.shape[3] == dim else ""
        raise ValueError(
            f"{name} must be {shape} with {heads} heads of {dim}, got {tuple(x.shape)}{hint}; "
            "heads come third, after the sequence"
        )


def check_key_mask(key_mask: Tensor, k: Tensor, packing: Packing | None) -> None:
    if packing is not None:
        raise ValueError("packing and key_mask exclude each other: a packed row has no padding; leave key_mask out")
    if key_mask.dtype != torch.bool:
        raise ValueError(f"key_mask must be bool, True = keep, got {key_mask.dtype}; use key_mask.bool()")
    if key_mask.shape != k.shape[:2]:
        hint = "; masks over (T, S) pairs are not supported" if key_mask.ndim > 2 else ""
        raise ValueError(f"key_mask must be (B, S) = {tuple(k.shape[:2])}, got {tuple(key_mask.shape)}{hint}")
    if key_mask.device != k.device:
        raise ValueError(f"key_mask must be on the keys' device {k.device}, got {key_mask.device}")


def check_packing(packing: Packing, x: Tensor, name: str = "packing") -> None:
    offsets = packing.offsets
    if x.shape[0] != 1:
        raise ValueError(f"packed sequences lie in one row: batch size must be 1 with {name}, got {x.shape[0]}")
    if offsets.ndim != 1 or len(offsets) < 2 or offsets.dtype != torch.int32:
        raise ValueError(
            f"{name}.offsets must be (N + 1,) int32, got {tuple(offsets.shape)} {offsets.dtype}; "
            "Packing.from_lengths makes them"
        )
    if offsets.device != x.device:
        raise ValueError(f"{name}.offsets must be on the inputs' device {x.device}, got {offsets.device}")
    if torch.compiler.is_compiling() or offsets.device.type != "cpu":
        return  # Looking at the values would wait for the device.
    lengths = packing.lengths
    if offsets[0] != 0 or offsets[-1] != x.shape[1] or bool((lengths < 0).any()):
        raise ValueError(f"{name}.offsets must rise from 0 to the row's length {x.shape[1]}, got {offsets.tolist()}")
    if int(lengths.max()) > packing.max_length:
        raise ValueError(f"{name}.max_length is {packing.max_length}, but a sequence has {int(lengths.max())} tokens")


def check_key_packing(packing: Packing | None, key_packing: Packing, k: Tensor) -> None:
    if packing is None:
        raise ValueError("key_packing needs packing for the queries too")
    check_packing(key_packing, k, "key_packing")
    if len(key_packing.offsets) != len(packing.offsets):
        raise ValueError(
            f"packing and key_packing must hold as many sequences, got {len(packing.offsets) - 1} "
            f"and {len(key_packing.offsets) - 1}"
        )


def describe(x: object) -> str:
    return "None" if x is None else f"a {type(x).__name__}"
