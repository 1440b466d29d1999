"""The built-in feature maps and their derivatives, for code that processes a sequence by chunks.

A key's features are f · exp(β), with f of order one and β the log scale; None means β ≡ 0.
`weight` is the projection (M, D) of FAVOR+, None for maps without one.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# relu(x) + RELU_EPSILON makes every normalizer positive.
RELU_EPSILON = 1e-3


class Apply(Protocol):
    """x (..., D) -> features (..., M) and log scale (...)."""

    def __call__(self, x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]: ...


class Differentiate(Protocol):
    """d features (..., M), x, features -> d x (..., D); log scales are constants."""

    def __call__(self, g: Tensor, x: Tensor, f: Tensor, weight: Tensor | None) -> Tensor: ...


class Map(NamedTuple):
    """φ for queries and keys. A query's log scale cancels in normalized attention and is omitted."""

    query: Apply
    key: Apply
    query_grad: Differentiate
    key_grad: Differentiate


def favor_projection(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """w·x (..., M) and ‖x‖²/2 (..., 1) of x scaled by D^−¼: exp of their difference is FAVOR+'s feature."""
    x = x * x.shape[-1] ** -0.25
    return x @ weight.T, x.square().sum(-1, keepdim=True) / 2


def _identity(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return x, None


def _identity_grad(g: Tensor, x: Tensor, f: Tensor, weight: Tensor | None) -> Tensor:
    return g


def _elu(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return F.elu(x) + 1, None


def _elu_grad(g: Tensor, x: Tensor, f: Tensor, weight: Tensor | None) -> Tensor:
    return g * f.clamp(max=1)


def _relu(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return F.relu(x) + RELU_EPSILON, None


def _relu_grad(g: Tensor, x: Tensor, f: Tensor, weight: Tensor | None) -> Tensor:
    return g * (x > 0)


def _softmax_query(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return x.softmax(-1), None


def _softmax_query_grad(g: Tensor, x: Tensor, f: Tensor, weight: Tensor | None) -> Tensor:
    return f * (g - (g * f).sum(-1, keepdim=True))


def _exp(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    largest = x.detach().amax(-1)
    return (x - largest[..., None]).exp(), largest


def _exp_grad(g: Tensor, x: Tensor, f: Tensor, weight: Tensor | None) -> Tensor:
    return g * f


def _favor_query(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    assert weight is not None
    return _exp(favor_projection(x, weight)[0], None)[0], None


def _favor_query_grad(g: Tensor, x: Tensor, f: Tensor, weight: Tensor | None) -> Tensor:
    assert weight is not None
    return (g * f) @ (weight * x.shape[-1] ** -0.25)


def _favor_key(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    assert weight is not None
    projected, half_norm = favor_projection(x, weight)
    return _exp(projected - half_norm, None)


def _favor_key_grad(g: Tensor, x: Tensor, f: Tensor, weight: Tensor | None) -> Tensor:
    assert weight is not None
    g = g * f
    return g @ (weight * x.shape[-1] ** -0.25) - x * (g.sum(-1, keepdim=True) * x.shape[-1] ** -0.5)


MAPS = {
    "identity": Map(_identity, _identity, _identity_grad, _identity_grad),
    "elu": Map(_elu, _elu, _elu_grad, _elu_grad),
    "relu": Map(_relu, _relu, _relu_grad, _relu_grad),
    "softmax": Map(_softmax_query, _exp, _softmax_query_grad, _exp_grad),
    "favor": Map(_favor_query, _favor_key, _favor_query_grad, _favor_key_grad),
}


def orthogonal_rows(number: int, dim: int, *, unit: bool, generator: torch.Generator | None = None) -> Tensor:
    """Draw Gaussian directions that are orthogonal in blocks of `dim`.

    Every element is exactly representable in bfloat16, so that bfloat16 products with it are exact. Directions and
    norms are accurate to 2^−8, far below the variance of the draw.

    Args:
        number: Number of rows.
        dim: Dimension of a row.
        unit: Give every row the norm √dim (lower variance, slightly biased) instead of that of a Gaussian vector.
        generator: Source of random numbers.

    Returns:
        (number, dim) in float32.
    """
    q, r = torch.linalg.qr(torch.randn(-(-number // dim), dim, dim, generator=generator))
    # Without the signs of R the directions, and the estimate, would be biased.
    rows = (q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]).mT.reshape(-1, dim)[:number]
    norms = dim**0.5 if unit else torch.randn(number, dim, generator=generator).norm(dim=1, keepdim=True)
    return (rows * norms).bfloat16().float()
