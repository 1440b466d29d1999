"""Residual connections of one or several streams, as the package that local-attention uses for them names them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) · (1 + gamma)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = dim**0.5
        self.gamma = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.gamma.shape, 1 + self.gamma, 1e-12)


class Residual(nn.Module):
    """Add the output of a branch, the first one if it has several, to its input."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.residual_transform = nn.Identity()

    def forward(self, residuals: Tensor, *args: Any, **kwargs: Any) -> Any:
        out = self.branch(residuals, *args, **kwargs)
        first, *rest = out if isinstance(out, tuple) else (out,)
        total = first + self.residual_transform(residuals)
        return (total, *rest) if isinstance(out, tuple) else total


class HyperConnections(nn.Module):
    """Mix n residual streams (b · n, …, dim) by learned weights before and after a branch on (b, …, dim).

    Args:
        num_residual_streams: n.
        dim: Width of the streams.
        branch: Returns a tensor, or a tuple whose first entry belongs to the streams.
        layer_index: The stream that the branch first reads, modulo n.
    """

    def __init__(self, num_residual_streams: int, *, dim: int, branch: nn.Module, layer_index: int) -> None:
        super().__init__()
        n = num_residual_streams
        self.branch = branch
        self.act = nn.Tanh()
        self.split_fracs, self.merge_fracs = nn.Identity(), nn.Identity()  # the original's options for parts of dim
        self.norm = RMSNorm(dim)
        self.num_residual_streams = n
        into = F.one_hot(torch.tensor([layer_index % n]), n).T.float()
        self.static_alpha = nn.Parameter(torch.cat([into, torch.eye(n)], 1))  # into the branch, and into each stream
        self.dynamic_alpha_fn = nn.Parameter(torch.zeros(dim, n + 1))
        self.dynamic_alpha_scale = nn.Parameter(torch.tensor(0.01))
        self.static_beta = nn.Parameter(torch.ones(n))
        self.dynamic_beta_fn = nn.Parameter(torch.zeros(dim))
        self.dynamic_beta_scale = nn.Parameter(torch.tensor(0.01))
        self.dropout = nn.Dropout(0.0)

    def forward(self, residuals: Tensor, *args: Any, **kwargs: Any) -> Any:
        streams = self.split_fracs(residuals).unflatten(0, (-1, self.num_residual_streams)).movedim(1, -2)
        normed = self.norm(streams)  # (b, …, n, dim)
        mix = self.act(normed @ self.dynamic_alpha_fn) * self.dynamic_alpha_scale + self.static_alpha
        share = self.act(normed @ self.dynamic_beta_fn) * self.dynamic_beta_scale + self.static_beta
        mixed = mix.mT @ streams  # (b, …, 1 + n, dim)
        out = self.branch(self.merge_fracs(mixed[..., 0, :]), *args, **kwargs)
        first, *rest = out if isinstance(out, tuple) else (out,)
        after = mixed[..., 1:, :] + share[..., None] * first[..., None, :]
        after = self.dropout(after.movedim(-2, 1).flatten(0, 1))
        return (after, *rest) if isinstance(out, tuple) else after


class ExpandStreams(nn.Module):
    """Repeat x (b, …) for each of n streams: (b · n, …)."""

    def __init__(self, num_streams: int) -> None:
        super().__init__()
        self.num_streams = num_streams

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.num_streams, 0)


class ReduceStreams(nn.Module):
    """Add the n streams of x (b · n, …): (b, …)."""

    def __init__(self, num_streams: int) -> None:
        super().__init__()
        self.num_streams = num_streams

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (-1, self.num_streams)).sum(1)
