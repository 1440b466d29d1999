"""The Triton kernels of normalization by feature under Triton's interpreter, against the definition."""

from __future__ import annotations

import pytest
import torch
from helpers import check_errors
from interpreter import interpreted
from normalizer_cases import CASES, NormalizerCase, check

from longspan.mechanisms.linear import LinearAttention
from longspan.ops import normalizer
from longspan.ops.common import dispatch


@interpreted
@pytest.mark.usefixtures("bfloat16", "on_kernels")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: NormalizerCase) -> None:
    check(case, "cpu")


@interpreted
@pytest.mark.usefixtures("bfloat16", "on_kernels")
def test_traced_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "eager_untraced", lambda q: False)
    check(CASES[0], "cpu")


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of elements that are masked later
@pytest.mark.parametrize("extended", [False, True], ids=["forward", "extend"])
@pytest.mark.parametrize("feature_map", ["elu", "relu", "softmax", "hedgehog"])
def test_the_mechanism(feature_map: str, extended: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = LinearAttention(
        4, 5, num_kv_heads=2, value_dim=7, feature_map=feature_map, normalize="feature", output_scale=0.4
    )
    T, mask = 67, torch.arange(67) < torch.tensor([[67], [41]])
    inputs = [torch.randn(2, T, heads, dim).bfloat16() for heads, dim in ((4, 5), (2, 5), (2, 7), (4, 7))]
    inputs[3] = inputs[3].masked_fill(~mask[:, :, None, None], 0)

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v, d = (x.to(dtype) for x in inputs)
        leaves = [*(x.requires_grad_() for x in (q, k, v)), *mechanism.to(dtype).parameters()]
        if extended:
            state = mechanism.new_state(2, dtype=dtype)
            first, state = mechanism.extend(state, *(x[:, :31] for x in leaves[:3]))
            second, state = mechanism.extend(state, *(x[:, 31:] for x in leaves[:3]), key_mask=mask[:, 31:])
            found = [torch.cat([first, second], 1), state.kv, state.z]
        else:
            found = [mechanism(*leaves[:3], causal=True, key_mask=mask)]
        found[0] = found[0].masked_fill(~mask[:, :, None, None], 0)
        weights = [d, *(torch.full_like(x, 0.1) for x in found[1:])]
        return [x.detach() for x in (*found, *torch.autograd.grad(found, leaves, weights))]

    truth, eager = run(torch.float64), run(torch.bfloat16)
    monkeypatch.setattr(dispatch, "unavailable", lambda q: None)
    monkeypatch.setattr(dispatch, "eager_untraced", lambda q: True)
    monkeypatch.setattr(LinearAttention, "_from_prefixes", None)  # The kernels take it.
    for own, near, exact in zip(run(torch.bfloat16), eager, truth, strict=True):
        check_errors([exact], [near], [own], torch.bfloat16)


@pytest.mark.usefixtures("on_kernels")
def test_what_the_kernels_do_not_take() -> None:
    q = torch.zeros(1, 9, 2, 8, dtype=torch.bfloat16)
    wide = torch.zeros(1, 9, 2, 257, dtype=torch.bfloat16)
    assert normalizer.why_not_triton(q, q, "elu") is None
    assert "favor" in str(normalizer.why_not_triton(q, q, "favor"))
    assert "float32" in str(normalizer.why_not_triton(q.float(), q, "elu"))
    assert "257" in str(normalizer.why_not_triton(wide, wide, "elu"))
    assert "empty" in str(normalizer.why_not_triton(q[:0], q[:0], "elu"))
