"""What several laws are stated with."""

from __future__ import annotations

import torch
from helpers import require_gradients
from torch import Tensor

from longspan import Mechanism, State


def by_steps(m: Mechanism, state: State, *qkv: Tensor) -> tuple[Tensor, State]:
    outs = []
    for t in range(qkv[0].shape[1]):
        out, state = m.step(state, *(x[:, t : t + 1] for x in qkv))
        outs.append(out)
    return torch.cat(outs, 1), state


def snapshot(state: State) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in state.tensors().items()}


def assert_unchanged(state: State, before: dict[str, Tensor]) -> None:
    for name, x in state.tensors().items():
        assert torch.equal(x, before[name]), f"{name} has changed"


def poisoned(mask: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
    return require_gradients(*(x.detach().masked_fill(~mask[:, :, None, None], float("nan")) for x in xs))
