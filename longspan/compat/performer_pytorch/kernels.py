"""Feature maps, random projections and linear attention of performer-pytorch, as functions of (B, H, T, D) tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from longspan.ops.linear import causal_linear_out, divide

Device = torch.device | str | None
RELU = nn.ReLU()  # the default kernel


def softmax_kernel(
    data: Tensor,
    *,
    projection_matrix: Tensor,
    is_query: bool,
    normalize_data: bool = True,
    eps: float = 1e-4,
    device: Device = None,
) -> Tensor:
    """Return positive random features (B, H, T, M) of FAVOR+, divided by their largest value and √M.

    Args:
        data: Queries or keys (B, H, T, D).
        projection_matrix: (M, D).
        is_query: Whether each token has its own largest value; keys of a sequence share one.
        normalize_data: Whether to multiply data by D^−¼, so that the features estimate exp(q·k/√D).
        eps: Added to the features.
        device: Not used; features are on the device of data.
    """
    scaled = data * data.shape[-1] ** -0.25 if normalize_data else data
    projected = scaled @ projection_matrix.to(data.dtype).T
    largest = projected.detach().amax(-1 if is_query else (-1, -2), keepdim=True)
    features = (projected - scaled.square().sum(-1, keepdim=True) / 2 - largest).exp() + eps
    return features * len(projection_matrix) ** -0.5


def generalized_kernel(
    data: Tensor,
    *,
    projection_matrix: Tensor | None,
    kernel_fn: Callable[[Tensor], Tensor] = RELU,
    kernel_epsilon: float = 0.001,
    normalize_data: bool = True,
    device: Device = None,
) -> Tensor:
    """Return features kernel_fn(w·x) + kernel_epsilon (B, H, T, M) of data (B, H, T, D).

    Args:
        data: Queries or keys.
        projection_matrix: (M, D), or None for kernel_fn(x).
        kernel_fn: An elementwise function.
        kernel_epsilon: Added to the features.
        normalize_data: Whether to multiply data by D^−¼.
        device: Not used; features are on the device of data.
    """
    data = data * data.shape[-1] ** -0.25 if normalize_data else data
    data = data if projection_matrix is None else data @ projection_matrix.to(data.dtype).T
    return kernel_fn(data) + kernel_epsilon


def orthogonal_matrix_chunk(cols: int, device: Device = None) -> Tensor:
    """Draw a random orthogonal matrix (cols, cols), uniformly."""
    q, r = torch.linalg.qr(torch.randn(cols, cols))
    # Without the signs of R the directions would be biased.
    return (q * r.diagonal().sign()).T.to(device)


def gaussian_orthogonal_random_matrix(nb_rows: int, nb_columns: int, scaling: int = 0, device: Device = None) -> Tensor:
    """Draw a matrix (nb_rows, nb_columns) of orthogonal blocks.

    Args:
        nb_rows: The number of rows.
        nb_columns: The number of columns, which is the size of a block.
        scaling: 0 for row norms distributed as those of Gaussian vectors, 1 for norms √nb_columns.
        device: The device of the matrix.
    """
    if scaling not in (0, 1):
        raise ValueError(f"scaling must be 0 or 1, got {scaling}")
    blocks = [orthogonal_matrix_chunk(nb_columns) for _ in range(-(-nb_rows // nb_columns))]
    rows = torch.cat(blocks)[:nb_rows]
    norms = math.sqrt(nb_columns) if scaling else torch.randn(nb_rows, nb_columns).norm(dim=1, keepdim=True)
    return (rows * norms).to(device)


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute Σ_j (q_i·k_j) v_j / Σ_j q_i·k_j for features q (…, T, M), k (…, S, M) and values v (…, S, E)."""
    normalizer = q @ k.sum(-2)[..., None].to(q.dtype)
    return divide(q @ (k.mT @ v), normalizer[..., 0])


def causal_linear_attention(q: Tensor, k: Tensor, v: Tensor, eps: float = 1e-6) -> Tensor:
    """Compute Σ_{j≤i} (q_i·k_j) v_j / q_i·(eps + Σ_{j≤i} k_j), for q and k (B, H, T, M) and v (B, H, T, E).

    Args:
        q: Features of queries.
        k: Features of keys.
        v: Values.
        eps: Added to each sum of key features.
    """
    total = causal_linear_out(*(x.transpose(1, 2) for x in (q, k, v)), normalize=False).transpose(1, 2)
    return divide(total, (q * (k.cumsum(-2) + eps)).sum(-1))


def causal_linear_attention_noncuda(
    q: Tensor, k: Tensor, v: Tensor, chunk_size: int = 128, eps: float = 1e-6
) -> Tensor:
    """Compute `causal_linear_attention`, which needs no extension here; chunk_size does not change the result."""
    return causal_linear_attention(q, k, v, eps)
