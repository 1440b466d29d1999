"""Causal linear attention by features in full, in spans of tokens: the same numbers as at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from longspan import build_mechanism
from longspan.mechanisms import linear

B, T, H, HKV, D, E = 2, 61, 4, 2, 5, 7


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("performer", {"kernel": "relu", "num_features": 11}),
        ("linear", {"blind_spot": 3}),
        ("linear", {"normalize": "feature", "feature_map": "softmax"}),
    ],
    ids=["generalized kernel", "blind spot", "per feature"],
)
@pytest.mark.parametrize(("masked", "saved"), [(False, 4), (True, 3), (False, 1)])
def test_spans_of_features_change_no_number(
    name: str, options: dict[str, Any], masked: bool, saved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism = build_mechanism(name, H, D, num_kv_heads=HKV, value_dim=E, **options).double().eval()
    shapes = (B, T, H, D), (B, T, HKV, D), (B, T, HKV, E)
    xs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    mask = torch.arange(T) < torch.tensor([[T], [29]]) if masked else None
    sizes: list[int] = []
    extend = type(mechanism)._extend_span

    def counted(self: Any, state: Any, q: torch.Tensor, *rest: Any) -> Any:
        sizes.append(q.shape[1])
        return extend(self, state, q, *rest)

    monkeypatch.setattr(type(mechanism), "_extend_span", counted)

    def run() -> list[torch.Tensor]:
        out, state = mechanism.extend(mechanism.new_state(B, dtype=torch.float64), *xs, key_mask=mask)
        weight = torch.linspace(-1, 1, E, dtype=torch.float64)
        grads = torch.autograd.grad((out * weight).sum() + state.kv.sin().sum(), xs)
        return [out, *grads, *state.tensors().values()]

    whole = run()
    assert sizes == [T]
    monkeypatch.setattr(linear, "MIN_SPAN", 17)
    monkeypatch.setattr(linear, "MAX_FEATURES", 1)
    monkeypatch.setattr(linear, "MAX_SAVED", saved)
    sizes.clear()
    spans = run()
    assert sizes == [17, 17, 17, 10] + [17] * (4 - saved)  # all but the last ones are recomputed
    for one, other in zip(spans, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        sizes.clear()
        torch.testing.assert_close(mechanism(*xs, causal=True, key_mask=mask), spans[0], rtol=1e-9, atol=1e-9)
    # Without a state `causal_linear` computes a blind spot.
    assert sizes == ([] if options.get("blind_spot") else [17, 17, 17, 10])
