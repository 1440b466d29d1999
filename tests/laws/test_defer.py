"""Attention begun before its past is known: `defer` gives what `forward` with the past gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longspan import build_mechanism

H, HKV, D, B = 4, 2, 6, 2
MECHANISMS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "local": {"window": 5},
    "linear": {},
    "linear-relu": {"feature_map": "relu"},
    "linear-softmax": {"feature_map": "softmax"},
    "linear-identity": {"feature_map": "identity"},
    "linear-none": {"feature_map": "identity", "normalize": "none", "output_scale": 0.5},
    "linear-feature": {"feature_map": "softmax", "normalize": "feature"},
    "linear-blind": {"blind_spot": 4},
    "performer": {"num_features": 7},
    "linformer": {"rank": 3, "max_length": 128},
    "linformer-periodic": {"rank": 3, "max_length": 17, "periodic": True, "bias": True},
    "linformer-convolution": {"rank": 9, "max_length": 128, "projection": "convolution"},
    "decay": {},
    "decay-fixed": {"gate": "fixed"},
    "decay-channel": {"gate": "channel"},
    "delta": {},
    "delta-channel": {"gate": "channel", "negative_eigenvalues": True},
    "split": {
        "parts": [{"mechanism": "local", "num_heads": 2, "window": 5}, {"mechanism": "delta", "num_heads": 2}],
    },
}


def build(name: str) -> Any:
    torch.manual_seed(0)
    return build_mechanism(name.split("-")[0], H, D, num_kv_heads=HKV, **MECHANISMS[name]).double()


def inputs(mechanism: Any, T: int, scale: float = 1.0) -> list[Tensor | None]:
    shapes = (H, D), (HKV, D), (HKV, D), (HKV, mechanism.num_gates)
    made = [torch.randn(B, T, *shape, dtype=torch.float64) * scale for shape in shapes]
    return [*made[:3], made[3] if mechanism.num_gates else None]


@pytest.mark.parametrize("T", [1, 3, 13, 67])
@pytest.mark.parametrize("name", MECHANISMS)
def test_defer_is_forward_with_past(name: str, T: int) -> None:
    mechanism = build(name)
    q, k, v, gates = inputs(mechanism, 11)
    past = mechanism.write(mechanism.new_state(B, dtype=torch.float64), k, v, gates=gates)
    q, k, v, gates = inputs(mechanism, T)
    mask = torch.arange(T) >= torch.tensor([[0], [T // 2]])
    for key_mask in (None, mask):
        given = {"gates": gates, "key_mask": key_mask}
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = mechanism.defer(q, k, v, start=past.end, **given)(past)
        expected = mechanism(q, k, v, causal=True, past=past, **given)
        weights = torch.randn_like(expected)
        found, exact = (torch.autograd.grad((x * weights).sum(), leaves) for x in (out, expected))
        for a, b in zip((out, *found), (expected, *exact), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["linear", "linear-softmax", "performer", "decay", "delta"])
def test_deferred_attention_to_large_inputs_is_finite(name: str) -> None:
    mechanism = build(name).float()
    past = mechanism.new_state(B)
    (_, *first), (q, *second) = (inputs(mechanism, 9, scale) for scale in (0.1, 60.0))
    for begin, rest in ((first, second), (second, first)):
        k, v, gates = (None if x is None else x.float() for x in begin)
        past = mechanism.write(mechanism.new_state(B), k, v, gates=gates)
        k, v, gates = (None if x is None else x.float() for x in rest)
        out = mechanism.defer(q.float(), k, v, gates=gates, start=past.end)(past)
        expected = mechanism(q.float(), k, v, gates=gates, causal=True, past=past)
        torch.testing.assert_close(out, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["decay", "decay-fixed", "decay-channel", "delta", "delta-channel"])
def test_a_state_from_either_side_is_all_that_both_directions_need(name: str) -> None:
    mechanism = build(name)
    x = inputs(mechanism, 29)
    pieces = [[None if y is None else y[:, low:high] for y in x] for low, high in ((0, 11), (11, 18), (18, 29))]
    before, after = (mechanism.new_state(B, dtype=torch.float64, transition=True) for _ in range(2))
    before = mechanism.write(before, *pieces[0][1:3], gates=pieces[0][3])
    turned = [None if y is None else y.flip(1) for y in pieces[2]]
    after = mechanism.write(after, *turned[1:3], gates=turned[3])
    q, k, v, gates = pieces[1]
    out = mechanism._defer_bidirectional(q, k, v, gates=gates, key_mask=None)(before, after)
    expected = mechanism(*x[:3], gates=x[3])[:, 11:18]
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


def test_a_window_says_how_far_it_reaches() -> None:
    local = build_mechanism("local", H, D, window=4, look_back=1, look_ahead=2)
    assert local.reach == (7, 11)
    assert local.position_period == 4
    assert build_mechanism("local", H, D, window=(3, 5)).reach == (3, 5)
    assert build_mechanism("linear", H, D).reach is None
