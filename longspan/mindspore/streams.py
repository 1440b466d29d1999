"""How a branch meets the residual: one stream that it is added to, or several it reads from and writes to."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from longspan.mindspore.local_attention import inverse_length
from longspan.mindspore.precision import exact, on_cpu


class Residual(nn.Cell):
    """x + branch(x)."""

    def __init__(self, branch: nn.Cell) -> None:
        super().__init__()
        self.branch = branch

    def width(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return x, x, None

    def depth(self, out: Tensor, residual: Tensor, beta: Tensor | None) -> Tensor:
        return out + residual

    def construct(self, x: Tensor) -> Tensor:
        inner, residual, beta = self.width(x)
        return self.depth(self.branch(inner), residual, beta)


class HyperConnections(nn.Cell):
    """S residual streams x (B, n, S, D): a branch reads a mix of them, and each stream takes its share of the output.

    (input, streams) = (static_alpha + s_α · tanh(norm(x) · A))ᵀ x and streams + β · branch(input), with
    β = static_beta + s_β · tanh(norm(x) · b): Zhu et al. (2024), https://arxiv.org/abs/2409.19606. At first a branch
    reads one stream, `index`, and all of them take its output.
    """

    def __init__(self, branch: nn.Cell, num_streams: int, dim: int, index: int) -> None:
        super().__init__()
        self.branch = branch
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
        """x (B, n, S, D) -> the branch's input (B, n, D), the streams (B, n, S, D), their shares β (B, n, S, 1)."""
        # A norm is a number for each token: it goes on after the product, which is small.
        fn = ops.cat((self.dynamic_alpha_fn, self.dynamic_beta_fn.expand_dims(-1)), 1)
        weight = ops.matmul(x, self.norm.weighed(fn).astype(x.dtype)).astype(ms.float32) * inverse_length(x)
        weight = ops.tanh(exact(weight, self.on_cpu)).astype(ms.float32)  # (B, n, S, S + 2)
        alpha = weight[..., :-1] * self.dynamic_alpha_scale + self.static_alpha
        beta = weight[..., -1:] * self.dynamic_beta_scale + self.static_beta.expand_dims(-1)
        alpha = alpha.swapaxes(-1, -2).astype(x.dtype)  # (B, n, S + 1, S)
        inner = ops.matmul(alpha[..., :1, :], x).squeeze(-2)
        return inner, ops.matmul(alpha[..., 1:, :], x), beta.astype(x.dtype)

    def depth(self, out: Tensor, residual: Tensor, beta: Tensor | None) -> Tensor:
        return residual + beta * out.expand_dims(-2)

    def construct(self, x: Tensor) -> Tensor:
        inner, residual, beta = self.width(x)
        return self.depth(self.branch(inner), residual, beta)


class StreamNorm(nn.Cell):
    """√D · x / |x| · (1 + gamma), of which this holds what multiplies the features."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = dim**0.5
        self.gamma = Parameter(Tensor(np.zeros(dim, np.float32)))

    def weighed(self, matrix: Tensor) -> Tensor:
        """A matrix (D, ·) that normalized features are multiplied by, with the norm's own factors in its rows."""
        return matrix * ((self.gamma + 1) * self.scale).expand_dims(-1)
