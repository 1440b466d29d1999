"""What the tests share: the table of cases, inputs, and how numbers are compared; `truths` has what must come out."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import longspan
from longspan import FeatureMap, Mechanism, Packing, Projection, build_mechanism
from longspan.testing import compare

# Distinct primes: a swapped dimension cannot go unnoticed.
B, T, S, H, D, E = 2, 17, 19, 3, 5, 7


assert_same, gradients = compare.assert_same, compare.gradients
check_gradients_by_name, lengths_to_mask = compare.assert_same_gradients, compare.padding_mask


class SquaredFeatures(FeatureMap):
    """A user's own map, with a parameter: φ(x) = (x W)² + 0.01."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, 4, generator=torch.Generator().manual_seed(1)))

    def num_features(self, head_dim: int) -> int:
        return 4

    def query(self, q: Tensor) -> Tensor:
        return (q @ self.weight.to(q.dtype)).square() + 0.01

    def key(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.query(k), None


class ScaledExp(FeatureMap):
    """A user's own map whose keys carry a log scale: exp(a·x)."""

    unbounded = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 0.7, 0.9, 1.1, 1.3]))

    def num_features(self, head_dim: int) -> int:
        return head_dim

    def query(self, q: Tensor) -> Tensor:
        return (q * self.scale.to(q.dtype)).softmax(-1)

    def key(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        x = k * self.scale.to(k.dtype)
        largest = x.detach().amax(-1)
        return (x - largest[..., None]).exp(), largest


class DistanceBias(nn.Module):
    """A learned function of the distance for each head."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.linspace(-0.3, 0.4, num_heads))

    def forward(self, distance: Tensor) -> Tensor:
        distance = distance.to(self.slope.dtype)
        return self.slope[:, None] * distance + (0.1 * distance).sin()


def _table(heads: int, size: int, blocks: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(heads, size, blocks * size, generator=torch.Generator().manual_seed(2)))


def _shared_projection() -> Projection:
    return Projection(4, 131, num_heads=H, bias=True)


GROUPED: dict[str, Any] = {"num_heads": 6, "num_kv_heads": 2}

# Options by mechanism; num_heads, num_kv_heads, head_dim and value_dim may be among them. Modules are copied per test.
CASES: dict[str, list[dict[str, Any]]] = {
    "softmax": [{}, {"scale": 0.3}, {**GROUPED}],
    "local": [
        {"window": 5},
        {"window": 1},
        {"window": 40},
        {"window": (3, 2)},
        {"window": (0, 4), **GROUPED},
        {"window": 4, "look_back": 1},
        {"window": 3, "look_back": 2, "look_ahead": 1, **GROUPED},
        {"window": 4, "look_ahead": 1},
        {"window": 5, "shared_qk": True, "scale": 1.0},
        {"window": 4, "look_back": 1, "shared_qk": True, **GROUPED},
        {"window": 5, "bias": DistanceBias(H)},
        {"window": 4, "look_back": 1, "look_ahead": 1, "bias": DistanceBias(6), **GROUPED},
        {"window": 4, "look_back": 1, "look_ahead": 1, "bias": _table(H, 4, 3)},
        {"window": 3, "look_back": 1, "bias": _table(6, 3, 2), **GROUPED},
        {"window": 5, "scale": 0.25},
        {"window": 5, "xpos": 3.0, "head_dim": 6},
        {"window": 4, "look_back": 1, "look_ahead": 1, "xpos": 2.0, "shared_qk": True, "head_dim": 6, **GROUPED},
    ],
    "linear": [
        {},
        {"feature_map": "relu"},
        {"feature_map": "identity", "normalize": "none", **GROUPED},
        {"feature_map": "softmax"},
        {"feature_map": "softmax", "normalize": "feature", "output_scale": 0.4, **GROUPED},
        {"feature_map": "elu", "normalize": "feature"},
        {"feature_map": "elu", "normalize": "none", "output_scale": 0.4},
        {"feature_map": SquaredFeatures(), **GROUPED},
        {"feature_map": ScaledExp(), "normalize": "feature"},
        {"blind_spot": 4, **GROUPED},
        {"blind_spot": 4, "first_bucket": "zero"},
        {"blind_spot": 3, "feature_map": "softmax"},
        {"blind_spot": 3, "feature_map": "softmax", "first_bucket": "zero", "normalize": "feature", **GROUPED},
        {"blind_spot": 2, "feature_map": "elu", "normalize": "none", "first_bucket": "zero"},
        {"blind_spot": 5, "feature_map": ScaledExp(), "normalize": "feature"},
        {"feature_map": "elu", **GROUPED},
        {"feature_map": "hedgehog", **GROUPED},
    ],
    "performer": [
        {"num_features": 8},
        {"num_features": 11, "row_norms": "unit", **GROUPED},
        {"num_features": 11, "epsilon": 1e-2},
        {"num_features": 8, "epsilon": 1e-4, **GROUPED},
        {"num_features": 8, "normalize": "feature"},
        {"num_features": 8, "kernel": "relu"},
        {"num_features": 8, "kernel": "gelu", "epsilon": 0.5, "row_norms": "unit", **GROUPED},
        {"kernel": torch.sigmoid, "num_features": 4},
        {"kernel": "softplus", "projection": False},
        {"projection": False},
    ],
    "linformer": [
        {"rank": 4, "max_length": 131},
        {"rank": 4, "max_length": 131, "projection": "random"},
        {"rank": 4, "max_length": 131, "projection": "convolution"},
        {"rank": 13, "max_length": 131, "projection": "convolution", "bias": True, **GROUPED},
        {"rank": 13, "max_length": 131, "projection": "convolution", "share_projection": True, "value_dim": D},
        {"rank": 3, "max_length": 131, "projection": "convolution", "per_head": True, "bias": True, **GROUPED},
        {"rank": 41, "max_length": 131, "projection": "convolution", "whole_stretches": True, "bias": True},
        {"rank": 4, "max_length": 6, "periodic": True},
        {"rank": 4, "max_length": 5, "periodic": True, "bias": True, "per_head": True, **GROUPED},
        {"rank": 4, "max_length": 131, "per_head": True},
        {"rank": 4, "max_length": 131, "share_projection": True, "bias": True, **GROUPED},
        {"rank": 4, "max_length": 131, "bias": True},
        {"projection": _shared_projection()},
    ],
    "decay": [
        {"gate": "fixed", **GROUPED},
        {"gate": "head"},
        {"gate": "head", **GROUPED},
        {"gate": "channel"},
        {"gate": "channel", **GROUPED},
    ],
    "delta": [
        {"gate": "none"},
        {"gate": "none", "negative_eigenvalues": True, **GROUPED},
        {"gate": "head"},
        {"gate": "head", "negative_eigenvalues": True, **GROUPED},
        {"gate": "channel", **GROUPED},
    ],
    "split": [
        {
            "parts": [
                {"mechanism": "local", "num_heads": 2, "window": 5},
                {"mechanism": "performer", "num_heads": 1},
            ]
        },
        {
            "num_heads": 6,
            "num_kv_heads": 3,
            "parts": [
                {"mechanism": "linear", "num_heads": 2, "feature_map": "softmax"},
                {"mechanism": "softmax", "num_heads": 2},
                {"mechanism": "linformer", "num_heads": 2, "rank": 4, "max_length": 131, "bias": True},
            ],
        },
        {
            "num_heads": 4,
            "num_kv_heads": 1,
            "parts": [
                {"mechanism": "local", "num_heads": 1, "window": 4, "look_back": 1},
                {"mechanism": "linear", "num_heads": 2, "blind_spot": 4},
                {"mechanism": "linformer", "num_heads": 1, "rank": 4, "max_length": 5, "periodic": True},
            ],
        },
        {
            "num_heads": 4,
            "parts": [
                {"mechanism": "performer", "num_heads": 1, "epsilon": 1e-3},
                {
                    "mechanism": "split",
                    "num_heads": 3,
                    "parts": [{"mechanism": "softmax", "num_heads": 1}, {"mechanism": "linear", "num_heads": 2}],
                },
            ],
        },
        {
            "parts": [
                {"mechanism": "local", "num_heads": 1, "window": 5},
                {"mechanism": "decay", "num_heads": 1, "gate": "channel"},
                {"mechanism": "delta", "num_heads": 1},
            ],
        },
    ],
    "mixture": [{"window": 5, **GROUPED}, {"window": 3, "memory": "delta", "sink": True, **GROUPED}],
}


@dataclass(frozen=True)
class Case:
    """A mechanism with its options, ready to be built."""

    name: str
    options: Mapping[str, Any] = field(hash=False)

    @property
    def num_heads(self) -> int:
        return self.options.get("num_heads", H)

    @property
    def num_kv_heads(self) -> int:
        return self.options.get("num_kv_heads", self.num_heads)

    @property
    def head_dim(self) -> int:
        return self.options.get("head_dim", D)

    @property
    def value_dim(self) -> int:
        return self.options.get("value_dim", E)

    def build(self, dtype: torch.dtype = torch.float64) -> Mechanism:
        shape = {"num_kv_heads": self.num_kv_heads, "value_dim": self.value_dim}
        options = {key: value for key, value in self.options.items() if key not in (*shape, "num_heads", "head_dim")}
        mechanism = build_mechanism(self.name, self.num_heads, self.head_dim, **shape, **deepcopy(options))
        mechanism = mechanism.eval().to(dtype)
        for name, parameter in mechanism.named_parameters():
            if name.rsplit(".", 1)[-1] == "bias" and not parameter.any():
                nn.init.normal_(parameter)  # Biases begin at zero, where they would hide mistakes.
        return mechanism

    def inputs(
        self, batch: int = B, queries: int = T, keys: int | None = None, dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k, v."""
        keys = queries if keys is None else keys
        return (
            torch.randn(batch, queries, self.num_heads, self.head_dim, dtype=dtype),
            torch.randn(batch, keys, self.num_kv_heads, self.head_dim, dtype=dtype),
            torch.randn(batch, keys, self.num_kv_heads, self.value_dim, dtype=dtype),
        )

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{key}={_short(value)}" for key, value in self.options.items())])


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return "table"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, (list, tuple)):
        return "+".join(str(part["mechanism"] if isinstance(part, Mapping) else part) for part in value)
    return getattr(value, "__name__", str(value))


def all_cases() -> list[Case]:
    """Every registered mechanism in each of its cases; one without an entry is tested as it comes."""
    return [Case(name, options) for name in longspan.list_mechanisms() for options in CASES.get(name, [{}])]


def each_case(cases: Sequence[Case] | None = None) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", all_cases() if cases is None else cases, ids=str)


def assert_close_to_truth(fast: Tensor, plain_same_dtype: Tensor, truth64: Tensor) -> None:
    """`fast` is no further from the truth than twice what plain PyTorch in the same dtype is, plus one ulp of the
    largest value.
    """
    assert fast.dtype == plain_same_dtype.dtype
    assert truth64.dtype == torch.float64
    assert fast.isfinite().all(), "the fast result is not finite"
    error, plain_error = ((x.double() - truth64).abs().max().item() for x in (fast, plain_same_dtype))
    ulp = torch.finfo(fast.dtype).eps * truth64.abs().max().item()
    assert error <= 2 * plain_error + ulp, f"{error:.3g} from the truth, plain PyTorch {plain_error:.3g}, ulp {ulp:.3g}"


def case_id(case: Any) -> str:
    """The fields of a case that differ from their defaults, as the id of a test."""
    default = type(case)()
    changed = {name: value for name, value in vars(case).items() if value != getattr(default, name)}
    return "-".join(f"{name}={value}" for name, value in changed.items()) or "default"


def random_heads(shape: tuple[int, int, int, int], strided: bool, dtype: torch.dtype, device: str) -> Tensor:
    """Standard normal numbers (B, T, H, D); if strided, neither heads nor tokens are adjacent in memory."""
    B, T, H, D = shape
    if strided:
        return torch.randn(B, H, T + 1, D + 3)[:, :, 1:, :D].transpose(1, 2).to(device, dtype)
    return torch.randn(B, T, H, D).to(device, dtype)


def refused(*parts: str, error: type[Exception] = ValueError) -> Any:
    """pytest.raises for an error whose text holds these parts in this order."""
    return pytest.raises(error, match=r"(?s)" + ".*".join(re.escape(part) for part in parts))


def within_tolerance(draws: Iterable[Mapping[str, tuple[float, float, float]]]) -> None:
    """Assert that no result is further from the truth than twice what eager PyTorch is, plus one ulp.

    Args:
        draws: For every draw of the inputs, each result's largest error, that of eager PyTorch, and an ulp of the
            largest value. In one draw the two may belong to one badly conditioned element, where their ratio is a
            matter of chance and of the CPU: a result above the limit is drawn again, and the means are compared.
    """
    sums: dict[str, tuple[float, float, float]] = {}
    above = ["nothing was compared"]
    for errors in draws:
        for name, row in errors.items():
            sums[name] = tuple(map(operator.add, row, sums.get(name, (0.0, 0.0, 0.0))))
        above = [
            f"{name}: {ours / (2 * eager + ulp):.3g} times as far from the truth as allowed"
            for name, (ours, eager, ulp) in sums.items()
            if not ours <= 2 * eager + ulp
        ]
        if not above:
            return
    raise AssertionError("; ".join(above))


def check_errors(truth: Sequence[Tensor], near: Sequence[Tensor], ours: Sequence[Tensor], dtype: torch.dtype) -> None:
    """`assert_close_to_truth` of several results, by their norms."""
    for exact, plain, own in zip(truth, near, ours, strict=True):
        allowed = 2 * (plain - exact).norm() + exact.norm() * torch.finfo(dtype).eps
        assert (own - exact).norm() <= allowed


def leaves(mechanism: nn.Module, **tensors: Tensor) -> dict[str, Tensor]:
    """Everything that may have a gradient, by name: the given tensors and the parameters."""
    return {**tensors, **dict(mechanism.named_parameters())}


def require_gradients(*xs: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.detach().requires_grad_() for x in xs)


def poisoned(mask: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
    """NaN in hidden slots."""
    return require_gradients(*(x.detach().masked_fill(~mask[:, :, None, None], float("nan")) for x in xs))


def pack(rows: Sequence[Sequence[Tensor]]) -> tuple[tuple[Tensor, ...], Packing]:
    """Sequences (1, T_n, ...) laid end to end."""
    packed = tuple(torch.cat(parts, 1) for parts in zip(*rows, strict=True))
    return packed, Packing.from_lengths([row[0].shape[1] for row in rows])


def float8_products_on_cpu() -> bool:
    """Whether this PyTorch has FP8 products with a scale for each row on a CPU; 2.10 has not."""
    x, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
    try:
        torch._scaled_mm(x, x.mT, scale, scale.mT, out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


needs_float8 = pytest.mark.skipif(
    not float8_products_on_cpu(), reason="this PyTorch has no FP8 products with row scales on a CPU"
)


def casts_without_gradients_are_used_again() -> bool:
    """Whether autocast, as in PyTorch 2.10, uses a weight cast under no_grad where gradients are needed too."""
    layer, x = nn.Linear(1, 1), torch.ones(1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            layer(x)
        return not layer(x).requires_grad
