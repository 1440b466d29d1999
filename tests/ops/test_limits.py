"""What is too large for a kernel: strides whose offsets overflow, and grids of more programs than CUDA takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.ops import compressed, features, gated, heads, merge, normalizer
from longspan.ops.common import dispatch
from longspan.ops.common.plans import dense_rows
from longspan.ops.compressed.fused import CompressedProblem


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


def test_rows_of_which_offsets_overflow_are_copied() -> None:
    million = 2**20
    kept = [
        meta(1, million, 32, 128),
        meta(1, million, 3, 32, 128)[:, :, 0],
        meta(1, 15, million, 128).transpose(1, 2),
        meta(64, 4096, 16, 64).transpose(0, 1),
        meta(1, 1, 8, 64).expand(1, million, 8, 64),
    ]
    assert all(dense_rows(x) is x for x in kept)
    by_heads = meta(1, 32, million, 128).transpose(1, 2)
    copied = [
        by_heads,
        by_heads[:, :1024],
        meta(64, 65536, 4, 64).transpose(0, 1)[:, :, ::2],
        meta(2, 5, 3, 8)[..., ::2],
    ]
    for x in [*copied, meta(64, 65536, 8, 64).transpose(0, 1)]:
        assert dense_rows(x).is_contiguous(), x.stride()


def linformer(q: Tensor) -> CompressedProblem:
    return CompressedProblem(q.shape[2], q.shape[2], 64, 64, 64)


Why = Callable[[Tensor], str | None]
OPERATIONS: dict[str, Why] = {
    "compressed": lambda q: compressed.why_not_triton(q, q.dtype, linformer(q)),
    "causal linformer": lambda q: compressed.why_not_triton_causal(q, q, q, 64),
    "features": lambda q: features.why_not_triton(q, q, 128),
    "normalizer": lambda q: normalizer.why_not_triton(q, q, "elu"),
    "merge": lambda q: merge.why_not_triton(q, q),
}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without data pass for those of a Hopper GPU."""
    monkeypatch.setattr(dispatch, "unavailable", lambda q: None)
    monkeypatch.setattr(dispatch, "eager_untraced", lambda q: True)
    monkeypatch.setattr(dispatch, "recording", dispatch.Recording(hypothetical=True))


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("name", OPERATIONS)
def test_many_rows_have_kernels_and_many_heads_have_none(name: str) -> None:
    why = OPERATIONS[name]
    assert why(meta(2**20, 256, 2, 64)) is None
    assert why(meta(1, 256, 65535, 64)) is None
    assert "heads; the kernels take up to 65535" in str(why(meta(1, 256, 65536, 64)))


@pytest.mark.usefixtures("cuda")
def test_what_explain_records_of_many_rows() -> None:
    q = meta(70000, 256, 2, 64)
    assert gated.gated_linear(q, q, q)[0].shape == q.shape
    assert dispatch.recording is not None
    assert dispatch.recording.decisions == [dispatch.Decision("gated linear attention", "decay", None)]


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize(("dtype", "chunk"), [(torch.bfloat16, 64), (torch.float32, 32)])
def test_many_chunks_have_no_kernels(dtype: torch.dtype, chunk: int) -> None:
    def why(T: int) -> str | None:
        x = meta(1, T, 1, 64, dtype=dtype)
        return gated.why_not_triton(gated.GatedInputs(x, x, x, None, None, None), False)

    assert why(65535 * chunk) is None
    assert why(65535 * chunk + 1) == f"65536 chunks of {chunk} tokens; the kernels take up to 65535"


@pytest.mark.usefixtures("cuda")
def test_many_tokens_have_no_kernels() -> None:
    def why(T: int) -> str | None:
        return heads.why_not_triton(meta(2, T, 192), (meta(64), meta(64)), (1,), (False,), None)

    assert why(65535 * 32) is None
    assert why(65535 * 32 + 1) == "65536 tiles of 32 tokens; the kernels take up to 65535"


def test_a_grid_is_checked() -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install 'longspan[triton]'")
    from longspan.ops.common.launch import Plan

    class Kernel:
        arg_names: tuple[Any, ...] = ()
        __name__ = "kernel"

    assert Plan(-1).launch(Kernel(), (2**20, 65535), (), {}).grid == (2**20, 65535, 1)
    with pytest.raises(AssertionError, match="kernel has a grid of 1 × 65536 × 1 programs"):
        Plan(-1).launch(Kernel(), (1, 65536), (), {})


@pytest.mark.parametrize(
    ("D", "E", "delta", "dtype", "needed"),
    [
        (128, 129, False, torch.bfloat16, 147),
        (129, 64, False, torch.float16, 147),
        (128, 128, False, torch.float32, None),
        (129, 64, True, torch.bfloat16, 132),
        (128, 256, True, torch.bfloat16, None),
        (256, 256, True, torch.float32, None),
    ],
)
def test_wide_heads_need_shared_memory(
    D: int, E: int, delta: bool, dtype: torch.dtype, needed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "unavailable", lambda q: None)
    q, v = meta(1, 64, 1, D, dtype=dtype), meta(1, 64, 1, E, dtype=dtype)
    inputs = gated.GatedInputs(q, q, v, None, None, None)
    expected = {99: needed and f"a program needs up to {needed} KB of shared memory, this device has 99", 163: None}
    for found, why in expected.items():
        monkeypatch.setattr(dispatch, "_shared_memory_kb", lambda device, found=found: found)
        assert gated.why_not_triton(inputs, delta) == why
