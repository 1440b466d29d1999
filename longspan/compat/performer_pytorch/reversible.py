"""Pairs of layers of one's own on one residual stream, or on two whose activations are rebuilt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from longspan.reversible import run_reversible

Routes = Mapping[str, Sequence[tuple[bool, bool]]]  # for each argument and pair, whether its first and second get it


class SequentialSequence(nn.Module):
    """x ← x + f(x), x ← x + g(x) for each pair (f, g). args_route: which of them gets which argument."""

    def __init__(self, layers: nn.ModuleList, args_route: Routes | None = None) -> None:
        super().__init__()
        self.layers, self.args_route = layers, args_route or {}
        _check(self.args_route, len(layers))

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        routed = _routed(self.args_route, kwargs, len(self.layers))
        for layer, arguments in zip((layer for pair in self.layers for layer in pair), routed, strict=True):  # type: ignore[attr-defined]
            x = x + layer(x, **arguments)
        return x


class ReversibleSequence(nn.Module):
    """Two streams, x₁ ← x₁ + f(x₂) and x₂ ← x₂ + g(x₁) for each pair (f, g); their sum."""

    def __init__(self, blocks: Iterable[Sequence[nn.Module]], args_route: Routes | None = None) -> None:
        super().__init__()
        pairs = [(_Branch(f, 2 * i), _Branch(g, 2 * i + 1)) for i, (f, g) in enumerate(blocks)]
        self.blocks = nn.ModuleList(nn.ModuleDict({"f": f, "g": g}) for f, g in pairs)
        self.args_route = args_route or {}
        _check(self.args_route, len(self.blocks))

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        routed = _routed(self.args_route, kwargs, len(self.blocks))
        branches = [block[key] for block in self.blocks for key in "fg"]  # type: ignore[index]
        first, second = run_reversible(branches, x, routed, kwargs.get("context"), None)
        return first + second


class _Branch(nn.Module):
    weight = None  # what a learned weight of the branch would be

    def __init__(self, net: nn.Module, index: int) -> None:
        super().__init__()
        self.net, self.index = net, index

    def forward(self, x: Tensor, rows: list[dict[str, Any]], context: Tensor | None, _: None) -> Tensor:
        arguments = rows[self.index]
        return self.net(x, **(arguments | {"context": context} if "context" in arguments else arguments))


def _routed(routes: Routes, given: Mapping[str, Any], pairs: int) -> list[dict[str, Any]]:
    """The arguments of each layer."""
    unknown = [name for name in given if name not in routes]
    if unknown:
        raise TypeError(f"no layer takes {', '.join(unknown)}; args_route has {', '.join(routes) or 'nothing'}")
    return [
        {name: value for name, value in given.items() if routes[name][i][place]}
        for i in range(pairs)
        for place in (0, 1)
    ]


def _check(routes: Routes, pairs: int) -> None:
    for name, route in routes.items():
        if len(route) != pairs:
            raise ValueError(f"the route of {name} has {len(route)} entries for {pairs} pairs of layers")
