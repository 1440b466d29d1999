"""Muon: momentum whose steps are orthogonalized, for the matrices of the layers, beside AdamW for everything else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.adamw import adamw

from longspan.models.layers import Attention, FeedForward

# The quintic of Jordan et al. (2024), steepest at zero: singular values come out between 0.7 and 1.2.
_COEFFICIENTS, _ITERATIONS, _EPSILON = (3.4445, -4.7750, 2.0315), 5, 1e-7


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the groups with `muon=True`, of matrices (m, n), and fused AdamW for the others.

    Muon keeps a mean of gradients, m ← μ m + (1 − μ) g with μ = 0.95, and steps along the orthogonal factor of
    (1 − μ) g + μ m, by Newton–Schulz iterations in bfloat16. Steps are scaled by 0.2 √max(m, n), so that their size is
    that of AdamW's for the same learning rate (Liu et al., 2025); weight decay is decoupled.

    Matrices of one shape are orthogonalized together. A sharded matrix is gathered for that on every rank.

    Args:
        groups: Parameter groups; `muon` is false unless given.
        lr: Learning rate.
        betas: AdamW's.
        momentum: μ.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], momentum: float = 0.95
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "momentum": momentum, "weight_decay": 0.0, "muon": False}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = [(g, [p for p in g["params"] if p.grad is not None]) for g in self.param_groups]
        trained = [(group, parameters) for group, parameters in trained if parameters]
        for group, parameters in trained:
            if group["muon"]:
                self._step_matrices(group, parameters)
            else:
                self._step_adamw(group, parameters)
        return loss

    def _step_adamw(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        means, squares, steps = (
            [self.state[p][name] for p in parameters] for name in ("exp_avg", "exp_avg_sq", "step")
        )
        beta1, beta2 = group["betas"]
        adamw(
            *(parameters, [p.grad for p in parameters if p.grad is not None], means, squares, [], steps),
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            beta1=beta1,
            beta2=beta2,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            fused=True,
        )

    def _directions(self, group: dict[str, Any], parameters: list[Tensor]) -> list[Tensor]:
        """Update the momentum and return what is to be orthogonalized."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        return list(torch._foreach_lerp(gradients, buffers, group["momentum"]))

    def _step_matrices(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        directions = self._directions(group, parameters)
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, _orthogonal_steps(directions), alpha=-group["lr"])


def _orthogonal_steps(directions: Sequence[Tensor]) -> list[Tensor]:
    """Return the orthogonal factors of matrices as large as AdamW's steps, sharded as the matrices are."""
    steps: dict[int, Tensor] = {}
    by_shape: dict[Any, list[int]] = {}
    for i, direction in enumerate(directions):
        by_shape.setdefault((*sorted(direction.shape), direction.device), []).append(i)
    for (_, longest, _), members in by_shape.items():
        wide, tall = ([i for i in members if _is_tall(directions[i]) == tall] for tall in (False, True))
        whole = [x.full_tensor() if isinstance(x, DTensor) else x for x in (directions[i] for i in (*wide, *tall))]
        found = orthogonalize(torch.stack([x.mT if _is_tall(x) else x for x in whole]))
        for part, own in ((found[: len(wide)], wide), (found[len(wide) :].mT, tall)):
            # Contiguous as the parameters are: otherwise each of them would be updated by a kernel of its own.
            scaled = part.to(whole[0].dtype, memory_format=torch.contiguous_format).mul_(0.2 * longest**0.5)
            steps |= dict(zip(own, scaled.unbind(), strict=True))
    return [_sharded_as(steps[i], direction) for i, direction in enumerate(directions)]


def _is_tall(matrix: Tensor) -> bool:
    return matrix.shape[0] > matrix.shape[1]


def _sharded_as(x: Tensor, other: Tensor) -> Tensor:
    if not isinstance(other, DTensor):
        return x
    return distribute_tensor(x, other.device_mesh, other.placements, src_data_rank=None)


def orthogonalize(matrices: Tensor) -> Tensor:
    """Return about U Vᵀ of each matrix U S Vᵀ (N, m, n), in bfloat16."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.to(torch.bfloat16)
    x = x.mT if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_EPSILON)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def layer_matrices(module: nn.Module) -> list[Tensor]:
    """Return the weights of the linear layers of attention and feed-forward layers that map vectors to vectors.

    Those that compute a number for each head, and gates of a mechanism, are left out.
    """
    found: list[Tensor] = []
    for layer in module.modules():
        if isinstance(layer, Attention | FeedForward):
            gates = [getattr(layer, name, None) for name in ("to_gates", "to_mechanism_gates")]
            found += [x.weight for x in layer.children() if isinstance(x, nn.Linear) and x not in gates]
    return list(dict.fromkeys(found))
