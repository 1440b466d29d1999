"""The Triton kernels of Hedgehog's features under Triton's interpreter, on the CPU."""

from __future__ import annotations

import pytest
import torch
from hedgehog_cases import SIZES, check, check_op, inputs
from interpreter import interpreted

from longspan.mechanisms.linear import LinearAttention
from longspan.ops.common import dispatch
from longspan.ops.hedgehog import kernels, why_not_triton, why_unsupported


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernels(size: tuple[int, ...], dtype: torch.dtype) -> None:
    check(size, dtype, "cpu")


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_bfloat16(size: tuple[int, ...]) -> None:
    check(size, torch.bfloat16, "cpu")


@interpreted
@pytest.mark.parametrize("call", ["direct", "traced"])
def test_the_op(call: str) -> None:
    check_op(call, torch.float32, "cpu")


@interpreted
def test_large_inputs_are_finite() -> None:
    x, weight, d_features = inputs(SIZES[0], torch.float16, "cpu", scale=300.0)
    for result in (kernels().forward(x, weight), *kernels().backward(d_features, x, weight)):
        assert result.isfinite().all()


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of elements that are masked later
@pytest.mark.parametrize(
    ("normalize", "causal"), [("query", False), ("feature", False), ("none", False), ("none", True)]
)
def test_the_kernels_of_the_sums_take_the_features(
    normalize: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism = LinearAttention(2, 5, num_kv_heads=1, value_dim=7, feature_map="hedgehog", normalize=normalize)
    mask = torch.arange(67) < torch.tensor([[67], [31]])
    inputs = [torch.randn(2, 67, heads, dim) for heads, dim in ((2, 5), (1, 5), (1, 7), (2, 7))]

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v, d_out = (x.to(dtype) for x in inputs)
        leaves = [*(x.requires_grad_() for x in (q, k, v)), *mechanism.to(dtype).parameters()]
        out = mechanism(*leaves[:3], causal=causal, key_mask=mask)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    truth = results(torch.float64)
    monkeypatch.setattr(dispatch, "unavailable", lambda q: None)
    monkeypatch.setattr(dispatch, "eager_untraced", lambda q: True)
    monkeypatch.setattr(LinearAttention, "_feature_kernels", lambda *_: True)
    monkeypatch.setattr(LinearAttention, "_from_sums", None)  # The kernels take it.
    monkeypatch.setattr(LinearAttention, "_from_prefixes", None)
    for exact, ours in zip(truth, results(torch.float32), strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)


def test_reasons() -> None:
    x, weight = torch.zeros(1, 4, 2, 8), torch.zeros(2, 8, 8)
    assert why_unsupported(x, weight) is None
    assert "CUDA" in str(why_not_triton(x, weight))
    assert "float64" in str(why_unsupported(x.double(), weight))
    assert "64 × 64 at most" in str(why_unsupported(x, torch.zeros(2, 65, 8)))
    assert why_unsupported(x.bfloat16(), torch.zeros(2, 65, 8)) is None
    assert "256 × 256 at most" in str(why_unsupported(x.half(), torch.zeros(2, 257, 8)))
    assert "empty" in str(why_unsupported(x[:, :0], weight))
