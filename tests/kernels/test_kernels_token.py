"""Linear layers, rotary angles and sampling of a decode step under Triton's interpreter, on the CPU."""

from __future__ import annotations

import pytest
import torch
from interpreter import interpreted
from token_cases import (
    HEADS,
    LAYERS,
    NORMS,
    OUTPUTS,
    SAMPLINGS,
    compare_embedding,
    compare_heads,
    compare_layers,
    compare_norms,
    compare_outputs,
    compare_rotary,
    compare_samples,
    compare_slot_samples,
)
from torch import nn

from longspan.ops import decode, rms_norm


@pytest.fixture
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "why_not_triton", lambda *_: None)


@interpreted
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.usefixtures("kernels_on_the_cpu")
def test_layers(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("wide") and dtype == torch.float32:
        pytest.skip("blocks are wider for half precision only")
    used, real = [], decode.kernels
    monkeypatch.setattr(decode, "kernels", lambda name: used.append(name) or real(name))
    compare_layers(name, dtype, "cpu")
    assert used == ([] if name == "large batch" else ["gemv"])


@interpreted
@pytest.mark.parametrize("shared_kb", [227, 163, 99])
@pytest.mark.parametrize(("BB", "BN"), [(16, 32), (16, 64), (32, 32), (64, 64)])
def test_blocks_of_columns_fit_into_shared_memory(BB: int, BN: int, shared_kb: int) -> None:
    columns = decode.kernels("gemv")._columns
    assert [columns(K, BB, BN, shared_kb) for K in (5, 64)] == [16, 64]
    for K in (512, 1536):
        in_flight = 1 if columns(K, BB, BN, shared_kb) >= K else 3 if BB == 64 else 2
        sizes = [in_flight * (BB + BN) * columns(K, BB, BN, shared_kb) * bytes_ for bytes_ in (2, 4)]
        assert sizes[0] <= (shared_kb - 19) * 1024
        assert sizes[1] > (shared_kb - 19) * 1024 or columns(K, BB, BN, shared_kb) == 512


@interpreted
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.usefixtures("kernels_on_the_cpu")
def test_heads(name: str, dtype: torch.dtype) -> None:
    compare_heads(name, dtype, "cpu")


@interpreted
@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.usefixtures("kernels_on_the_cpu")
def test_outputs(name: str, dtype: torch.dtype) -> None:
    compare_outputs(name, dtype, "cpu")


@interpreted
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_norms(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm, "_untraced", lambda x: True)
    compare_norms(name, dtype, "cpu")


@interpreted
def test_norms_that_need_a_gradient_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, norm, gates = torch.randn(1, 5, 2, 3), nn.RMSNorm(3), torch.randn(1, 5, 6)
    assert rms_norm.rms_norm_heads(x, norm.requires_grad_(False)) is None  # on a CPU
    monkeypatch.setattr(rms_norm, "_untraced", lambda x: True)
    assert rms_norm.rms_norm_heads(x, norm, gates) is not None
    assert rms_norm.rms_norm_heads(x, norm, gates.clone().requires_grad_()) is None
    assert rms_norm.rms_norm_heads(x, norm.requires_grad_()) is None
    assert rms_norm.rms_norm_heads(x, nn.LayerNorm(3).requires_grad_(False)) is None
    assert rms_norm.rms_norm_heads(x.double(), norm.double().requires_grad_(False)) is None


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.usefixtures("kernels_on_the_cpu")
def test_embedding(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    used, real = [], decode.kernels
    monkeypatch.setattr(decode, "kernels", lambda name: used.append(name) or real(name))
    compare_embedding(dtype, "cpu")
    assert used == ["embedding"] * 7


@interpreted
@pytest.mark.usefixtures("kernels_on_the_cpu")
def test_rotary() -> None:
    compare_rotary("cpu")


@interpreted
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_samples(name: str) -> None:
    compare_samples(name, "cpu")


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_samples_of_slots() -> None:
    compare_slot_samples("cpu")


@pytest.mark.usefixtures("kernels_on_the_cpu")
def test_other_modules_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subclasses, modules with hooks, other dtypes and transposed weights run in eager PyTorch."""
    monkeypatch.setattr(decode, "kernels", lambda _: pytest.fail("called a kernel"))
    x = torch.randn(1, 1, 6)

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    doubled, hooked = Doubled(6, 5), nn.Linear(6, 5)
    assert torch.equal(decode.fused_linear(x, doubled)[0], doubled(x))
    hooked.register_forward_hook(lambda *_: torch.zeros(1, 1, 5))
    assert torch.equal(decode.fused_linear(x, hooked)[0], torch.zeros(1, 1, 5))
    norm = nn.LayerNorm(6)
    norm.register_forward_pre_hook(lambda _, given: (given[0] * 0,))
    assert torch.equal(decode.fused_linear(x, nn.Linear(6, 5, bias=False), norm=norm)[0], torch.zeros(1, 1, 5))
    transposed = torch.randn(6, 5).T
    assert torch.equal(decode.fused_linear(x, transposed)[0], x @ transposed.T)
    wide = nn.Linear(6, 5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="dtype"):
        decode.fused_linear(x, wide)
