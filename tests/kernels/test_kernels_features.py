"""Kernels of attention with given features, and of the join of window and memory, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from feature_cases import CASES, FeatureCase, check, check_merge
from interpreter import interpreted

from longspan.mechanisms import linear, mixture
from longspan.mechanisms.linear import LinearAttention
from longspan.mechanisms.mixture import MixtureAttention
from longspan.ops import features, merge
from longspan.ops.common import dispatch


@interpreted
@pytest.mark.usefixtures("bfloat16", "on_kernels")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: FeatureCase) -> None:
    check(case, "cpu")


@interpreted
@pytest.mark.usefixtures("bfloat16", "on_kernels")
@pytest.mark.parametrize("sink", [False, True], ids=["no sink", "sink"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_join(dtype: torch.dtype, sink: bool) -> None:
    check_merge((2, 67, 3, 5, 7), sink, dtype, "cpu")


@interpreted
@pytest.mark.usefixtures("bfloat16", "on_kernels")
def test_traced_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "eager_untraced", lambda q: False)
    check(CASES[1], "cpu")
    check_merge((1, 17, 2, 5, 7), True, torch.bfloat16, "cpu")


MECHANISMS = [
    MixtureAttention(4, 5, num_kv_heads=2, value_dim=7, window=6),
    MixtureAttention(4, 5, num_kv_heads=2, value_dim=7, window=6, sink=True),
    MixtureAttention(4, 5, num_kv_heads=2, value_dim=7, window=6, memory={"mechanism": "linear", "feature_map": "elu"}),
    LinearAttention(4, 5, num_kv_heads=2, value_dim=7, feature_map="hedgehog", output_scale=0.4),
]


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of elements that are masked later
@pytest.mark.parametrize("how", ["causal", "extend", "bidirectional"])
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=["mixture", "sink", "elu", "hedgehog"])
def test_the_mechanisms(
    mechanism: MixtureAttention | LinearAttention, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options, states and masks give what the same mechanism gives in eager PyTorch."""
    for name, parameter in mechanism.named_parameters():
        if "mix" in name or "sink" in name:
            torch.nn.init.normal_(parameter)
    T, mask = 67, torch.arange(67) < torch.tensor([[67], [41]])
    inputs = [torch.randn(2, T, heads, dim).bfloat16() for heads, dim in ((4, 5), (2, 5), (2, 7), (4, 7))]
    inputs[3] = inputs[3].masked_fill(~mask[:, :, None, None], 0)

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v, d = (x.to(dtype) for x in inputs)
        leaves = [*(x.requires_grad_() for x in (q, k, v)), *mechanism.to(dtype).parameters()]
        if how == "extend":
            state = mechanism.new_state(2, dtype=dtype)
            first, state = mechanism.extend(state, *(x[:, :31] for x in leaves[:3]))
            second, state = mechanism.extend(state, *(x[:, 31:] for x in leaves[:3]), key_mask=mask[:, 31:])
            out = torch.cat([first, second], 1)
        else:
            out = mechanism(*leaves[:3], causal=how == "causal", key_mask=mask)
        out = out.masked_fill(~mask[:, :, None, None], 0)
        return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, d))]

    truth = run(torch.float64)
    calls: list[int] = []
    for module in (linear, mixture):
        real = module.feature_attention
        monkeypatch.setattr(
            module, "feature_attention", lambda *given, real=real, **rest: calls.append(1) or real(*given, **rest)
        )
    monkeypatch.setattr(dispatch, "unavailable", lambda q: None)
    monkeypatch.setattr(dispatch, "eager_untraced", lambda q: True)
    monkeypatch.setattr(LinearAttention, "_feature_kernels", lambda self, q: q.dtype == torch.bfloat16)
    monkeypatch.setattr(linear, "FUSED_FEATURES", 0)
    ours = run(torch.bfloat16)
    expected = {"causal": 1, "extend": 2, "bidirectional": 2 * isinstance(mechanism, MixtureAttention)}
    assert len(calls) == expected[how]
    for own, exact in zip(ours, truth, strict=True):
        assert float((own - exact).norm()) <= 0.015 * float(exact.norm())


@interpreted
@pytest.mark.usefixtures("bfloat16", "on_kernels")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("memory", ["hedgehog", "decay", "delta"])
def test_sequences_within_the_window_of_a_mixture(memory: str, causal: bool) -> None:
    """Parameters of the memory, which is empty, have gradients of zero."""
    options = {"mechanism": "linear", "feature_map": memory} if memory == "hedgehog" else {"mechanism": memory}
    mechanism = MixtureAttention(4, 16, num_kv_heads=2, window=6, memory=options, sink=True).bfloat16()
    for T in (5, 6):
        q, k, v = (torch.randn(2, T, heads, 16).bfloat16() for heads in (4, 2, 2))
        gates = torch.randn(2, T, 2, mechanism.num_gates).bfloat16() if mechanism.num_gates else None
        out = mechanism(q, k, v, gates=gates, causal=causal)
        with torch.no_grad():
            assert torch.equal(mechanism(q, k, v, gates=gates, causal=causal), out)
        grads = torch.autograd.grad(out.sum(), list(mechanism.parameters()))
        assert not any(grad.any() for grad in grads)


@pytest.mark.usefixtures("on_kernels")
def test_what_the_kernels_do_not_take() -> None:
    q = torch.zeros(1, 9, 2, 8, dtype=torch.bfloat16)
    assert features.why_not_triton(q, q, 16) is None
    assert "257 features" in str(features.why_not_triton(q, q, 257))
    assert "129 values" in str(features.why_not_triton(q, q.new_zeros(1, 9, 2, 129), 16))
    assert "float32" in str(features.why_not_triton(q.float(), q, 16))
    assert "empty" in str(features.why_not_triton(q[:0], q[:0], 16))
    assert merge.why_not_triton(q, q) is None
    assert "257" in str(merge.why_not_triton(q, q.new_zeros(1, 9, 2, 257)))
    assert "float64" in str(merge.why_not_triton(q.double(), q))
