"""Pairs of layers of one's own, one after the other or reversibly, as several of the older libraries offer them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from longspan.models.reversible import run_reversible

# For each argument of forward: whether the first and the second layer of each pair are given it.
Routes = Mapping[str, Sequence[tuple[bool, bool]]]


class _Pairs(nn.Module):
    def __init__(self, number: int, args_route: Routes, layer_dropout: float) -> None:
        super().__init__()
        wrong = {name: len(route) for name, route in args_route.items() if len(route) != number}
        if wrong:
            raise ValueError(f"args_route must have one entry for each of {number} pairs of layers, got {wrong}")
        self.args_route, self.layer_dropout = args_route, layer_dropout

    def _calls(self, pairs: Iterable[Sequence[nn.Module]], given: Mapping[str, Any]) -> Iterator[_Call]:
        """The layers in turn with what each is given; with layer_dropout some pairs are left out in training."""
        if unknown := sorted(set(given) - set(self.args_route)):
            raise TypeError(
                f"args_route does not say where {', '.join(unknown)} goes; it has {sorted(self.args_route)}"
            )
        numbered = list(enumerate(pairs))
        if self.training and self.layer_dropout > 0:
            kept = (torch.rand(len(numbered)) >= self.layer_dropout).tolist()
            numbered = [pair for pair, keep in zip(numbered, kept, strict=True) if keep] or numbered[:1]
        for i, pair in numbered:
            for second, layer in enumerate(pair):
                yield _Call(layer, {name: x for name, x in given.items() if self.args_route[name][i][second]})


class _Call:
    """A layer and its arguments, in the shape of a branch."""

    weight = None

    def __init__(self, layer: nn.Module, arguments: dict[str, Any]) -> None:
        self.layer, self.arguments = layer, arguments

    def __call__(self, x: Tensor, rows: Any = None, context: Tensor | None = None, context_rows: Any = None) -> Tensor:
        # The context comes from outside, so that its gradient is summed over the layers and handed on.
        return self.layer(x, **{**self.arguments, **({"context": context} if "context" in self.arguments else {})})

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.layer.parameters()


class SequentialSequence(_Pairs):
    """x ← x + f(x), then x ← x + g(x), for each pair of layers."""

    def __init__(self, layers: nn.ModuleList, args_route: Routes | None = None, layer_dropout: float = 0.0) -> None:
        super().__init__(len(layers), args_route or {}, layer_dropout)
        self.layers = layers

    def forward(self, x: Tensor, **arguments: Any) -> Tensor:
        """x: (B, T, dim); the arguments go where args_route says."""
        for call in self._calls([list(pair.children()) for pair in self.layers], arguments):
            x = x + call(x, context=arguments.get("context"))
        return x


class ReversibleSequence(_Pairs):
    """Two streams, the answer their mean, or their sum if `summed`; activations are rebuilt in the backward pass."""

    summed: ClassVar[bool] = False

    def __init__(
        self, blocks: Iterable[Sequence[nn.Module]], args_route: Routes | None = None, layer_dropout: float = 0.0
    ) -> None:
        pairs = [(f, g) for f, g in blocks]
        super().__init__(len(pairs), args_route or {}, layer_dropout)

        def held(layer: nn.Module) -> nn.ModuleDict:
            return nn.ModuleDict({"net": layer})

        self.blocks = nn.ModuleList(nn.ModuleDict({"f": held(f), "g": held(g)}) for f, g in pairs)

    def forward(self, x: Tensor, **arguments: Any) -> Tensor:
        """x: (B, T, dim); the arguments go where args_route says. Among them gradients reach `context` only."""
        pairs = [[block[name]["net"] for name in "fg"] for block in self.blocks]  # type: ignore[index]
        calls = list(self._calls(pairs, arguments))
        first, second = run_reversible(calls, x, None, arguments.get("context"), None)
        return first + second if self.summed else (first + second) / 2
