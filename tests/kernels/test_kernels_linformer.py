"""The Triton kernels of causal Linformer under Triton's interpreter, against the definition."""

from __future__ import annotations

import pytest
import torch
from interpreter import interpreted
from linformer_cases import CASES, LinformerCase, arguments, check, results

from longspan.mechanisms import linformer
from longspan.mechanisms.linformer import LinformerAttention
from longspan.ops import compressed
from longspan.ops.common import dispatch, plans


@interpreted
@pytest.mark.usefixtures("bfloat16", "on_kernels")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: LinformerCase) -> None:
    check(case, "cpu")


@interpreted
@pytest.mark.usefixtures("bfloat16", "on_kernels")
def test_segments_change_nothing_but_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan.ops.compressed.triton import causal

    case = LinformerCase(T=64 * 17, B=1, H=1, Hkv=1, R=5, state=True)
    given = arguments(case, "cpu")
    found = []
    for programs in (1, 1024):
        monkeypatch.setattr(causal, "PROGRAMS", programs)
        plans.clear()
        assert causal._CausalForward.of(causal._dense(given[1])).segments == (1 if programs == 1 else 3)
        found.append(results(case, given, None))
    plans.clear()
    for one, many in zip(*found, strict=True):
        assert float((one.double() - many.double()).norm() / one.double().norm()) < 3e-3


@interpreted
@pytest.mark.usefixtures("bfloat16", "on_kernels")
def test_traced_and_direct_calls_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    case = LinformerCase(T=70, B=1, state=True)
    given = arguments(case, "cpu")
    direct = results(case, given, None)
    monkeypatch.setattr(dispatch, "eager_untraced", lambda q: False)
    for one, other in zip(direct, results(case, given, None), strict=True):
        assert torch.equal(one, other)


OPTIONS = [
    {},
    {"bias": True},
    {"per_head": True, "bias": True},
    {"share_projection": True},
    {"projection": "random"},
    {"periodic": True, "max_length": 30},
]


@interpreted
@pytest.mark.usefixtures("bfloat16", "on_kernels")
@pytest.mark.parametrize("extended", [False, True], ids=["forward", "extend"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_mechanism(options: dict, extended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options, states and masks give what the same mechanism gives in eager PyTorch."""
    mechanism = LinformerAttention(4, 5, num_kv_heads=2, value_dim=7, **{"rank": 6, "max_length": 131, **options})
    for projection in (mechanism.keys, mechanism.values):
        if projection.bias is not None:
            torch.nn.init.normal_(projection.bias)
    mechanism.bfloat16()
    T, mask = 67, torch.arange(67) < torch.tensor([[67], [41]])
    inputs = [torch.randn(2, T, heads, dim).bfloat16() for heads, dim in ((4, 5), (2, 5), (2, 7), (4, 7))]
    inputs[3] = inputs[3].masked_fill(~mask[:, :, None, None], 0)
    calls: list[int] = []
    real = linformer.causal_linformer
    monkeypatch.setattr(linformer, "causal_linformer", lambda *given: calls.append(1) or real(*given))

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v, d = (x.to(dtype) for x in inputs)
        leaves = [*(x.requires_grad_() for x in (q, k, v)), *mechanism.to(dtype).parameters()]
        if extended:
            state = mechanism.new_state(2, dtype=dtype)
            first, state = mechanism.extend(state, *(x[:, :31] for x in leaves[:3]))
            second, state = mechanism.extend(state, *(x[:, 31:] for x in leaves[:3]), key_mask=mask[:, 31:])
            found = [torch.cat([first, second], 1), state.k, state.v]
        else:
            found = [mechanism(*leaves[:3], causal=True, key_mask=mask)]
        found[0] = found[0].masked_fill(~mask[:, :, None, None], 0)
        weights = [d, *(torch.full_like(x, 0.1) for x in found[1:])]
        return [x.detach().double() for x in (*found, *torch.autograd.grad(found, leaves, weights))]

    ours = run(torch.bfloat16)
    assert len(calls) == 1 + extended
    monkeypatch.setattr(dispatch, "unavailable", lambda q: "disabled")
    truth = run(torch.float64)
    assert len(calls) == 1 + extended
    # The same in eager PyTorch on a CPU sums in float32: what is compared here are options, not roundings.
    for own, exact in zip(ours, truth, strict=True):
        assert float((own - exact).norm()) <= 0.015 * float(exact.norm())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"projection": "convolution"}, "convolution"),
        ({"dropout": 0.5}, "dropout"),
        ({"periodic": True, "bias": True}, "periodic"),
        ({"rank": 257}, "rank 257"),
        ({"head_dim": 129}, "dimension 129"),
    ],
)
@pytest.mark.usefixtures("on_kernels")
def test_what_the_kernels_do_not_take(options: dict, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"rank": 4, "max_length": 131, **options}
    mechanism = LinformerAttention(2, sizes.pop("head_dim", 8), **sizes)
    q = torch.zeros(1, 9, 2, mechanism.head_dim, dtype=torch.bfloat16)
    recorded: list[str | None] = []
    monkeypatch.setattr(dispatch, "recording", object())
    monkeypatch.setattr(dispatch, "record", lambda operation, algorithm, why: recorded.append(why))
    assert not mechanism._fused_causal(q, q, q)
    assert why in str(recorded)
    assert "bfloat16" in str(compressed.why_not_triton_causal(q.float(), q, q, 4))
