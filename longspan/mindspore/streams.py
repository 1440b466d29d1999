"""Residual connections: one stream, or several with hyper-connections."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from longspan.mindspore.local_attention import inverse_length
from longspan.mindspore.precision import cast_for_exp, on_cpu


class Residual(nn.Cell):
    """Compute x + branch(x)."""

    def __init__(self, branch: nn.Cell) -> None:
        super().__init__()
        self.branch = branch

    def width(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the branch's input, the residual, and the weight of the branch's output or None."""
        return x, x, None

    def depth(self, out: Tensor, residual: Tensor, beta: Tensor | None) -> Tensor:
        """Add the branch's output to the residual."""
        return out + residual

    def construct(self, x: Tensor) -> Tensor:
        inner, residual, beta = self.width(x)
        return self.depth(self.branch(inner), residual, beta)


class HyperConnections(Residual):
    """Hyper-connections (Zhu et al., 2024, https://arxiv.org/abs/2409.19606) of S residual streams x (B, n, S, D).

    (input, streams) = (static_alpha + s_α · tanh(norm(x) · A))ᵀ x, and the output is streams + β · branch(input) with
    β = static_beta + s_β · tanh(norm(x) · b). At initialization a branch reads stream `index`, and its output is added
    to all streams.
    """

    def __init__(self, branch: nn.Cell, num_streams: int, dim: int, index: int) -> None:
        super().__init__(branch)
        self.norm = StreamNorm(dim)
        self.on_cpu = on_cpu()
        first = np.zeros((num_streams, 1), np.float32)
        first[index % num_streams] = 1
        self.static_alpha = Parameter(Tensor(np.concatenate([first, np.eye(num_streams, dtype=np.float32)], 1)))
        self.dynamic_alpha_fn = Parameter(Tensor(np.zeros((dim, num_streams + 1), np.float32)))
        self.dynamic_alpha_scale = Parameter(Tensor(np.float32(0.01)))
        self.static_beta = Parameter(Tensor(np.ones(num_streams, np.float32)))
        self.dynamic_beta_fn = Parameter(Tensor(np.zeros(dim, np.float32)))
        self.dynamic_beta_scale = Parameter(Tensor(np.float32(0.01)))

    def width(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the branch's input (B, n, D), the mixed streams (B, n, S, D) and β (B, n, S, 1)."""
        # The norm is one factor per token, applied after the product, which is smaller.
        fn = ops.cat((self.dynamic_alpha_fn, self.dynamic_beta_fn.expand_dims(-1)), 1)
        weight = ops.matmul(x, self.norm.scale_rows(fn).astype(x.dtype)).astype(ms.float32) * inverse_length(x)
        weight = ops.tanh(cast_for_exp(weight, self.on_cpu)).astype(ms.float32)  # (B, n, S, S + 2)
        alpha = weight[..., :-1] * self.dynamic_alpha_scale + self.static_alpha
        beta = weight[..., -1:] * self.dynamic_beta_scale + self.static_beta.expand_dims(-1)
        alpha = alpha.swapaxes(-1, -2).astype(x.dtype)  # (B, n, S + 1, S)
        inner = ops.matmul(alpha[..., :1, :], x).squeeze(-2)
        return inner, ops.matmul(alpha[..., 1:, :], x), beta.astype(x.dtype)

    def depth(self, out: Tensor, residual: Tensor, beta: Tensor | None) -> Tensor:
        return residual + beta * out.expand_dims(-2)


class StreamNorm(nn.Cell):
    """RMS norm √D · x / |x| · (1 + gamma), without the factor 1 / |x|."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = dim**0.5
        self.gamma = Parameter(Tensor(np.zeros(dim, np.float32)))

    def scale_rows(self, matrix: Tensor) -> Tensor:
        """Multiply the rows of a matrix (D, ·) by the factors √D · (1 + gamma)."""
        return matrix * ((self.gamma + 1) * self.scale).expand_dims(-1)
