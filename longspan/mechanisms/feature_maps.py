"""Feature maps φ for `linear` and `performer`; any other `FeatureMap` works as well."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from longspan.ops.hedgehog import hedgehog_features
from longspan.ops.linear.torch import FAVOR_LARGEST, MAPS, favor_projection
from longspan.protocol import FeatureMap


class FusedMap(FeatureMap):
    """A map with a derivative in `ops.linear.torch`, so that features are computed chunk by chunk."""

    kind: ClassVar[str]
    weight: Tensor | None = None  # the projection (M, D), where there is one

    def num_features(self, head_dim: int) -> int:
        return head_dim

    def query(self, q: Tensor) -> Tensor:
        return MAPS[self.kind].query(q, self._weight_like(q))[0]

    def key(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        return MAPS[self.kind].key(k, self._weight_like(k))

    def _weight_like(self, x: Tensor) -> Tensor | None:
        return None if self.weight is None else self.weight.to(x.dtype)


class Elu(FusedMap):
    """elu(x) + 1 (Katharopoulos et al., 2020): x + 1 for positive x, exp(x) for negative x."""

    kind = "elu"
    positive = True


class Relu(FusedMap):
    """relu(x) + 0.001: the constant makes every query's normalizer positive."""

    kind = "relu"
    positive = True


class Identity(FusedMap):
    """x itself: for inputs that are features already, or unnormalized attention."""

    kind = "identity"


class Softmax(FusedMap):
    """softmax(q) over features, exp(k) (Shen et al., 2021); stable for any k, whose magnitude is its log scale."""

    kind = "softmax"
    unbounded = True
    positive = True

    def shares(self, k: Tensor, visible: Tensor | None) -> Tensor:
        return softmax_over_keys(k, visible)


class RandomFeatures(FeatureMap):
    """A map with a random projection (M, D), orthogonal in blocks, which is saved with the model."""

    projection: Tensor | None

    def __init__(self, head_dim: int, num_features: int | None, row_norms: str) -> None:
        super().__init__()
        drawn = None
        if num_features is not None:
            drawn = orthogonal_rows(num_features, head_dim, unit=row_norms == "unit").to(torch.get_default_dtype())
        self.register_buffer("projection", drawn)

    def num_features(self, head_dim: int) -> int:
        return head_dim if self.projection is None else len(self.projection)


def softmax_over_keys(logits: Tensor, visible: Tensor | None) -> Tensor:
    """Return the softmax of (B, S, Hkv, M) over the visible keys (B, S) of each feature, exact for any range."""
    if visible is None:
        return logits.softmax(1)
    nothing = ~visible.any(1)[:, None]  # Softmax over no key is NaN: compute it over all, and return zeros.
    logits = logits.masked_fill(~(visible | nothing)[:, :, None, None], float("-inf"))
    return logits.softmax(1).masked_fill(nothing[:, :, None, None], 0)


class Favor(RandomFeatures, FusedMap):
    """FAVOR+: exp(w·x − ‖x‖²/2) with x scaled by D^−¼, an unbiased estimate of softmax attention's kernel.

    Args:
        head_dim: D.
        num_features: M.
        row_norms: "sampled" or "unit", see `orthogonal_rows`.
        epsilon: Added to both features after stabilizing, as performer-pytorch does; it biases the estimate towards the
            mean of the values.
    """

    kind = "favor"
    unbounded = True
    wide = True
    projection: Tensor

    def __init__(self, head_dim: int, num_features: int, *, row_norms: str, epsilon: float) -> None:
        super().__init__(head_dim, num_features, row_norms)
        self.epsilon, self.log_largest = epsilon, 0.0 if epsilon else FAVOR_LARGEST

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The projection (M, D)."""
        return self.projection

    def query(self, q: Tensor) -> Tensor:
        projected, half_norm = favor_projection(q, self.projection.to(q.dtype))
        if not self.epsilon:
            # Divided by their sum, so that the weights of a query sum to one if features are normalized.
            return projected.softmax(-1)
        return (projected - half_norm - projected.detach().amax(-1, keepdim=True)).exp() + self.epsilon

    def scaled_query(self, q: Tensor) -> Tensor:
        return self.query(q) if self.epsilon else super().query(q)

    def key(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        if not self.epsilon:
            return super().key(k)
        # The epsilon is relative to the largest w·k, not to the largest feature: old checkpoints rely on it.
        projected, half_norm = favor_projection(k, self.projection.to(k.dtype))
        largest = projected.detach().amax(-1)
        return (projected - half_norm - largest[..., None]).exp(), largest

    def shares(self, k: Tensor, visible: Tensor | None) -> Tensor:
        projected, half_norm = favor_projection(k, self.projection.to(k.dtype))
        return softmax_over_keys(projected - half_norm, visible)


POSITIVE = (torch.relu, nn.functional.relu, torch.sigmoid, nn.functional.sigmoid, nn.functional.softplus)
POSITIVE_MODULES = (nn.ReLU, nn.Sigmoid, nn.Softplus)


class Generalized(RandomFeatures):
    """activation(w·x) + epsilon, with the projection of `Favor`, or activation(x) + epsilon without one."""

    def __init__(
        self,
        activation: Callable[[Tensor], Tensor],
        head_dim: int,
        num_features: int | None,
        *,
        row_norms: str,
        epsilon: float,
    ) -> None:
        super().__init__(head_dim, num_features, row_norms)
        self.activation, self.floor = activation, epsilon
        self.positive = activation in POSITIVE or isinstance(activation, POSITIVE_MODULES)

    def query(self, q: Tensor) -> Tensor:
        return self.activation(self._projected(q)) + self.floor

    def key(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.query(k), None

    def _projected(self, x: Tensor) -> Tensor:
        x = x * x.shape[-1] ** -0.25
        return x if self.projection is None else x @ self.projection.to(x.dtype).T


class GeneralizedExp(Generalized):
    """`Generalized` with the activation exp, whose keys carry their magnitude as a log scale.

    Args:
        head_dim: D.
        num_features: M, or None without a projection.
        row_norms: "sampled" or "unit", see `orthogonal_rows`.
        epsilon: Added to the exponentials.
    """

    unbounded = True
    wide = True

    def __init__(self, head_dim: int, num_features: int | None, *, row_norms: str, epsilon: float) -> None:
        super().__init__(torch.exp, head_dim, num_features, row_norms=row_norms, epsilon=epsilon)

    def scaled_query(self, q: Tensor) -> Tensor:
        return self.key(q)[0]

    def key(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        projected = self._projected(k)
        # At least 0, so that the epsilon, divided by exp of it, is bounded too.
        scale = projected.detach().amax(-1).clamp(min=0)
        return (projected - scale[..., None]).exp() + self.floor * (-scale).exp()[..., None], scale

    def shares(self, k: Tensor, visible: Tensor | None) -> Tensor:
        logits = self._projected(k)
        return softmax_over_keys(torch.logaddexp(logits, torch.full_like(logits[:1], self.floor).log()), visible)


class Hedgehog(FeatureMap):
    """[softmax(Wx), softmax(−Wx)] with a learned W per head (Zhang et al., 2024), which starts as the identity.

    Args:
        num_heads: Query heads, each with a W of its own.
        num_kv_heads: Key heads, likewise.
        head_dim: D; a token has 2·D features.
    """

    positive = True

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        identity = torch.eye(head_dim)
        self.query_weight = nn.Parameter(identity.repeat(num_heads, 1, 1))
        self.key_weight = nn.Parameter(identity.repeat(num_kv_heads, 1, 1))

    def num_features(self, head_dim: int) -> int:
        return 2 * head_dim

    def query(self, q: Tensor) -> Tensor:
        return hedgehog_features(q, self.query_weight)

    def key(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        return hedgehog_features(k, self.key_weight), None


FEATURE_MAPS: dict[str, type[FusedMap]] = {"elu": Elu, "relu": Relu, "identity": Identity, "softmax": Softmax}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": nn.functional.relu,
    "elu": nn.functional.elu,
    "gelu": nn.functional.gelu,
    "silu": nn.functional.silu,
    "sigmoid": torch.sigmoid,
    "softplus": nn.functional.softplus,
    "exp": torch.exp,
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
