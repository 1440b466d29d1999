"""The Triton kernels of windowed attention under Triton's interpreter, on the CPU, where bfloat16 is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import check_errors
from interpreter import interpreted, take_kernels
from local_cases import CASES, Case, arguments, by_kernels, check, check_lse, dropped, visible

from longspan.layout import Packing
from longspan.mechanisms.local import LocalAttention
from longspan.ops import window as window_op
from longspan.ops.common import dispatch
from longspan.ops.rotary import Rotate, rotate
from longspan.ops.window import Window, _Window, kernels, reference, why_not_triton, why_unsupported

quiet = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of elements that are masked later


@interpreted
@quiet
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: Case, dtype: torch.dtype) -> None:
    if dtype == torch.float16 and CASES.index(case) % 2:
        pytest.skip("every other case suffices")
    check(case, dtype, "cpu")


@interpreted
@quiet
def test_large_inputs_are_finite() -> None:
    for result in by_kernels(*arguments(Case(large=50, masked=True), torch.float16, "cpu")):
        assert result.isfinite().all()


@interpreted
@quiet
def test_the_future_does_not_change_the_past() -> None:
    _, problem = arguments(Case(causal=True), torch.float32, "cpu")
    before = kernels().forward(problem)[0]
    k, v = problem.k.clone(), problem.v.clone()
    k[:, 40:], v[:, 40:] = 30, 0
    after = kernels().forward(problem._replace(k=k, v=v))[0]
    assert torch.equal(after[:, :40], before[:, :40])
    assert not torch.equal(after[:, 40:], before[:, 40:])


@interpreted
@quiet
def test_dropout() -> None:
    """The rate and the scale are right, and gradients use the same mask."""
    case, rate = Case(T=37, H=4, Hkv=2, B=2), 0.3
    d_out, problem = arguments(case, torch.float32, "cpu")
    factor, with_dropout = dropped(problem, rate, 5)
    seen = visible(case, None).expand_as(factor)
    hidden = (factor[seen] == 0).float().mean().item()
    assert abs(hidden - rate) < 0.05
    left = factor[seen & (factor > 0)]
    torch.testing.assert_close(left, torch.full_like(left, 1 / (1 - rate)), rtol=1e-4, atol=0)
    assert not torch.equal(factor[0, 0], factor[0, 1])
    assert not torch.equal(factor[0, 0], factor[1, 0])
    other, _ = dropped(problem, rate, 6)
    assert not torch.equal(factor, other)

    q, k, v = (x.double().requires_grad_() for x in problem[:3])
    scores = torch.einsum("bthd,bshd->bhts", q, reference.repeat_kv(k, 4)) * problem.scale
    weights = reference.masked_softmax(scores, visible(case, None)) * (factor > 0) / (1 - rate)
    out = torch.einsum("bhts,bshe->bthe", weights, reference.repeat_kv(v, 4))
    exact = [out, *torch.autograd.grad(out, (q, k, v), d_out.double())]
    for found, expected in zip(by_kernels(d_out, with_dropout), exact, strict=True):
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@interpreted
@quiet
@pytest.mark.parametrize("call", ["direct", "traced"])
def test_the_op_has_the_gradients_of_the_kernels(call: str) -> None:
    d_out, problem = arguments(Case(T=37, causal=True), torch.float32, "cpu")
    leaves = [x.clone().requires_grad_() for x in problem[:3]]
    out = getattr(_Window, call)(*leaves, *problem[3:])
    out = out if call == "direct" else out[0]
    found = [out, *torch.autograd.grad(out, leaves, d_out)]
    for ours, expected in zip(found, by_kernels(d_out, problem), strict=True):
        assert torch.equal(ours, expected)


@interpreted
@quiet
@pytest.mark.parametrize(
    ("case", "dtype", "call"),
    [
        (Case(T=65, causal=True, H=4, Hkv=2), torch.float32, "direct"),
        (Case(T=65, causal=True, masked=True, past=19), torch.float16, "direct"),
        (Case(T=37, masked=True, B=1), torch.float32, "traced"),
    ],
    ids=str,
)
def test_gradients_of_the_log_sum_exp(case: Case, dtype: torch.dtype, call: str) -> None:
    check_lse(case, dtype, "cpu", call)


@interpreted
@quiet
@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"window": 17}, torch.float16),
        ({"window": 8, "look_back": 1, "look_ahead": 1, "shared_qk": True, "query_offset": 2}, torch.float32),
    ],
    ids=["exact", "blocks"],
)
def test_xpos(options: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    B, T, causal = (2, 35, True) if dtype == torch.float16 else (1, 37, False)
    mechanism = LocalAttention(2, 6, num_kv_heads=1, value_dim=7, xpos=7.0, **options)
    inputs = [torch.randn(B, T, heads, dim) for heads, dim in ((2, 6), (1, 6), (1, 7), (2, 7))]
    how: dict[str, Any] = {"key_mask": torch.arange(T) < torch.tensor([[T], [13]])}
    if B == 1:
        how = {"packing": Packing.from_lengths([20, 17])}

    def results(kind: torch.dtype) -> list[torch.Tensor]:
        q, k, v, d_out = (x.to(dtype).to(kind) for x in inputs)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = mechanism(*leaves, causal=causal, **how)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    truth, eager = results(torch.float64), results(dtype)
    take_kernels(monkeypatch, window_op, "tiled_window_attention")
    check_errors(truth, eager, results(dtype), dtype)


@interpreted
@quiet
@pytest.mark.parametrize("start", [None, (-4, 3)], ids=["causal", "bidirectional"])
def test_xpos_over_more_tokens_than_its_scales(start: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries are computed in spans, here with 4 keys before the first query."""
    window = Window(0, 7, 3, start is None, False)
    inputs = [torch.randn(2, length, 1, 6) for length in (37, 41, 41, 37)]
    how: dict[str, Any] = {"xpos": 0.5, "scale": 0.3}
    if start is not None:
        how |= {"start": torch.tensor(start), "key_mask": torch.rand(2, 41) < 0.8}
        how["bias"] = torch.randn(1, 5, 20)

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v, d_out = (x.to(dtype) for x in inputs)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        options = {**how, "bias": how["bias"].to(dtype)} if "bias" in how else how
        out = window_op.window_attention(*leaves, window, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    truth, eager = results(torch.float64), results(torch.float32)
    take_kernels(monkeypatch, window_op, "tiled_window_attention")
    check_errors(truth, eager, results(torch.float32), torch.float32)


class ByDistance(torch.nn.Module):
    """A learned bias of distances up to 100 on either side."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(heads, 201))

    def forward(self, distance: torch.Tensor) -> torch.Tensor:
        return self.table[:, distance + 100]


@interpreted
@quiet
@pytest.mark.parametrize(
    ("options", "causal"),
    [({"window": (70, 3)}, False), ({"window": 64, "look_back": 0, "look_ahead": 0}, True)],
    ids=["exact", "blocks"],
)
def test_bias_by_distance(options: dict[str, Any], causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = LocalAttention(2, 6, num_kv_heads=1, value_dim=7, bias=ByDistance(2), **options)
    inputs = [torch.randn(1, 79, heads, dim) for heads, dim in ((2, 6), (1, 6), (1, 7), (2, 7))]

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v, d_out = (x.to(dtype) for x in inputs)
        leaves = [*(x.requires_grad_() for x in (q, k, v)), *mechanism.to(dtype).parameters()]
        out = mechanism(*leaves[:3], causal=causal)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    truth, eager = results(torch.float64), results(torch.float32)
    take_kernels(monkeypatch, window_op, "tiled_window_attention")
    check_errors(truth, eager, results(torch.float32), torch.float32)


@interpreted
@pytest.mark.parametrize("dim", [6, 9, 29], ids=["all features", "some features", "few features"])
def test_the_rotation_direct_and_traced(dim: int) -> None:
    x, cos, sin = torch.randn(2, 3, 35, 30)[..., :dim].transpose(1, 2), torch.randn(35, 3), torch.randn(35, 3)
    expected = rotate(x, cos[:, None], sin[:, None])
    d_out = torch.randn_like(expected)
    for call in (Rotate.direct, Rotate.traced):
        leaf = x.detach().requires_grad_()
        found = call(leaf, cos, sin)
        torch.testing.assert_close(found.detach(), expected)
        (d_x,) = torch.autograd.grad(found, leaf, d_out)
        torch.testing.assert_close(d_x, rotate(d_out, cos[:, None], -sin[:, None]))


@interpreted
def test_rotary_embeddings_without_gradients_take_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    x, cos, sin = torch.randn(2, 35, 3, 6), torch.randn(1, 35, 1, 3), torch.randn(1, 35, 1, 3)
    expected = rotate(x, cos, sin)
    monkeypatch.setattr(dispatch, "unavailable", lambda q: None)
    monkeypatch.setattr(dispatch, "eager_untraced", lambda q: True)
    calls = []
    direct = Rotate.direct
    monkeypatch.setattr(Rotate, "direct", staticmethod(lambda *args: calls.append(1) or direct(*args)))
    torch.testing.assert_close(rotate(x, cos, sin), expected)
    assert calls == [1]
    some = rotate(x, cos[..., :2], sin[..., :2])
    assert calls == [1, 1]
    assert torch.equal(some[..., 4:], x[..., 4:])
    calls.clear()
    rotate(x.requires_grad_(), cos, sin)  # can be differentiated twice
    for shape in ((2, 35, 1, 3), (1, 1, 1, 3)):  # angles of each row, and of one token
        rotate(x.detach(), *torch.randn(2, *shape))
    rotate(x.detach(), cos, sin, interleaved=True)
    rotate(x.detach().double(), cos.double(), sin.double())
    assert not calls


def test_reasons() -> None:
    q = torch.zeros(1, 4, 2, 8)
    assert why_unsupported(q, q, q) is None
    assert "CUDA" in str(why_not_triton(q, q, q))
    near = Window(0, 1, 0, False, False)
    assert why_unsupported(q, q, q, near, xpos=0.0625, packed=True) is None
    assert "xPos over 4 packed tokens" in str(why_unsupported(q, q, q, near, xpos=0.0624, packed=True))
    assert why_unsupported(q, q, q, near, xpos=0.0625) is None
    assert "a window of 2 keys; in this dtype its scales are in range for up to 1" in str(
        why_unsupported(q.half(), q.half(), q.half(), near, xpos=0.4)
    )
    assert "float64" in str(why_unsupported(q.double(), q.double(), q.double()))
    assert "over 256" in str(why_unsupported(q, q, torch.zeros(1, 4, 2, 257)))
    assert "empty" in str(why_unsupported(q[:, :0], q[:, :0], q[:, :0]))


def test_bounds_of_packed_rows() -> None:
    bounds = Packing.from_lengths([2, 0, 3, 1, 0]).bounds(6)
    assert bounds.tolist() == [[0, 0, 2, 2, 2, 5], [2, 2, 5, 5, 5, 6]]
    assert bounds.dtype == torch.int32
