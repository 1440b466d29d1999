"""Tensors saved for backward: linear in the sequence length, and no large intermediate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longspan import Mechanism, build_mechanism
from longspan.ops.linear import torch as chunks

HEADS, D, E, N = 3, 8, 11, 1024

LINEAR_TIME = [
    ("linear", {}),
    ("linear", {"feature_map": "softmax"}),
    ("linear", {"feature_map": "softmax", "normalize": "feature"}),
    ("linear", {"feature_map": "relu", "normalize": "none"}),
    ("linear", {"blind_spot": 64}),
    ("performer", {"num_features": 13}),
    ("performer", {"num_features": 13, "epsilon": 1e-4}),
    ("performer", {"kernel": "relu", "num_features": 13}),
    ("linformer", {"rank": 16, "max_length": 4 * N}),
    ("linformer", {"rank": 16, "max_length": 100, "periodic": True}),
    ("local", {"window": 32}),
    ("local", {"window": (40, 7)}),
    ("local", {"window": 32, "look_back": 1}),
    ("local", {"window": 32, "look_back": 1, "look_ahead": 1, "shared_qk": True}),
    (
        "split",
        {
            "parts": [
                {"mechanism": "local", "num_heads": 1, "window": 32},
                {"mechanism": "performer", "num_heads": 2},
            ]
        },
    ),
]


def saved(m: Mechanism, length: int, causal: bool) -> list[int]:
    """The elements of each storage that autograd keeps for one forward pass, the inputs among them."""
    q, k = (torch.randn(1, length, HEADS, D, requires_grad=True) for _ in range(2))
    v = torch.randn(1, length, HEADS, E, requires_grad=True)
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(x: Tensor) -> Tensor:
        # Held, so that no other tensor takes its address.
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size(), x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = m(q, k, v, causal=causal)
    grads = torch.autograd.grad(out.sum(), [q, k, v])
    assert all(grad.isfinite().all() for grad in grads)
    return [size for size, _ in kept.values()]


def build(name: str, options: dict[str, object]) -> Mechanism:
    return build_mechanism(name, HEADS, D, value_dim=E, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linear", {}),
        ("linear", {"feature_map": "softmax"}),
        ("linear", {"feature_map": "softmax", "normalize": "feature"}),
        ("linear", {"blind_spot": 64}),
        ("performer", {"num_features": 13}),
        ("performer", {"num_features": 13, "kernel": "relu"}),
        ("performer", {"num_features": 13, "epsilon": 1e-4}),
    ],
    ids=str,
)
def test_causal_linear_saves_nothing_large(name: str, options: dict[str, object]) -> None:
    m = build(name, options)
    sizes = saved(m, N, causal=True)
    assert sizes, "the hooks saw nothing"
    assert max(sizes) <= 2 * N * HEADS * max(m.num_features, D, E)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("linear", {}),
        ("linear", {"blind_spot": 16, "first_bucket": "zero"}),
        ("performer", {"num_features": 64}),
        ("performer", {"num_features": 64, "epsilon": 1e-4}),
    ],
    ids=str,
)
def test_fused_maps_save_inputs_output_and_a_few_sums(name: str, options: dict[str, object]) -> None:
    """Features are made chunk by chunk, forward and backward; kept are only the sums before each group of chunks."""
    sizes = saved(build(name, options), N, causal=True)
    inputs_and_output = N * HEADS * (2 * D + 2 * E)
    sums = HEADS * 64 * (E + 2)
    assert sum(sizes) <= inputs_and_output + N * HEADS + (4 + N // chunks.GROUP + 2) * sums


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(("name", "options"), [case for case in LINEAR_TIME if case[0] == "local"], ids=str)
def test_local_saves_nothing_square(name: str, options: dict[str, object], causal: bool) -> None:
    sizes = saved(build(name, options), N, causal)
    assert sizes
    assert max(sizes) < N * N


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(("name", "options"), LINEAR_TIME, ids=str)
def test_what_is_saved_grows_linearly(name: str, options: dict[str, object], causal: bool) -> None:
    m = build(name, options)
    once, twice = (sum(saved(m, n, causal)) for n in (N, 2 * N))
    assert once >= N * HEADS * D
    assert twice <= 2.2 * once


def test_the_measure_sees_what_is_square() -> None:
    """Weights made in full are found, or the tests above would prove nothing."""

    class Square(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
            weights = torch.einsum("bthd,bshd->bhts", q, k).softmax(-1)
            return torch.einsum("bhts,bshe->bthe", weights, v)

    once, twice = (saved(Square(), n, causal=False) for n in (256, 512))
    assert max(once) == HEADS * 256 * 256
    assert sum(twice) > 3 * sum(once)


def test_a_state_does_not_grow() -> None:
    for name, options in LINEAR_TIME:
        m = build(name, options)
        sizes = []
        for length in (1, 200):
            _, state = m.extend(m.new_state(1), *(torch.randn(1, length, HEADS, dim) for dim in (D, D, E)))
            sizes.append({key: x.numel() for key, x in state.tensors().items()})
        assert sizes[0] == sizes[1], name
