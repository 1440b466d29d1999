"""Containers for pairs of user-defined layers, sequential or reversible, as in several older libraries."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from longspan.models.residual import run_reversible

# For each keyword argument of forward: whether the first and the second layer of each pair receive it.
Routes = Mapping[str, Sequence[tuple[bool, bool]]]


def branch_prefix(index: int, *, reversible: bool) -> str:
    """Return the state-dict prefix of a layer in a container, counting the layers of all pairs."""
    pair, second = divmod(index, 2)
    return f"blocks.{pair}.{'fg'[second]}.net." if reversible else f"layers.{pair}.{second}."


class _LayerPairs(nn.Module):
    def __init__(self, num_pairs: int, args_route: Routes, layer_dropout: float) -> None:
        super().__init__()
        wrong = {name: len(route) for name, route in args_route.items() if len(route) != num_pairs}
        if wrong:
            raise ValueError(f"args_route must have one entry for each of {num_pairs} pairs of layers, got {wrong}")
        self.args_route, self.layer_dropout = args_route, layer_dropout

    def _calls(self, pairs: Iterable[Sequence[nn.Module]], arguments: Mapping[str, Any]) -> Iterator[_LayerCall]:
        """Yield each layer with its arguments; in training, layer_dropout skips random pairs."""
        if unknown := sorted(set(arguments) - set(self.args_route)):
            raise TypeError(f"args_route has no entry for {', '.join(unknown)}; it has {sorted(self.args_route)}")
        numbered = list(enumerate(pairs))
        if self.training and self.layer_dropout > 0:
            keep = (torch.rand(len(numbered)) >= self.layer_dropout).tolist()
            numbered = list(itertools.compress(numbered, keep)) or numbered[:1]
        for i, pair in numbered:
            for second, layer in enumerate(pair):
                yield _LayerCall(layer, {name: x for name, x in arguments.items() if self.args_route[name][i][second]})


class _LayerCall:
    """A layer with its arguments, callable as a residual branch."""

    weight = None

    def __init__(self, layer: nn.Module, arguments: dict[str, Any]) -> None:
        self.layer, self.arguments = layer, arguments

    def __call__(
        self, x: Tensor, layout: Any = None, context: Tensor | None = None, context_layout: Any = None
    ) -> Tensor:
        # The caller passes the context, so that its gradient is summed over the layers.
        return self.layer(x, **{**self.arguments, **({"context": context} if "context" in self.arguments else {})})

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.layer.parameters()


class SequentialSequence(_LayerPairs):
    """Apply x ← x + f(x), then x ← x + g(x), for each pair of layers."""

    def __init__(self, layers: nn.ModuleList, args_route: Routes | None = None, layer_dropout: float = 0.0) -> None:
        super().__init__(len(layers), args_route or {}, layer_dropout)
        self.layers = layers

    def forward(self, x: Tensor, **arguments: Any) -> Tensor:
        """Map x (B, T, dim) to (B, T, dim); args_route selects the layers that receive each argument."""
        for call in self._calls([list(pair.children()) for pair in self.layers], arguments):
            x = x + call(x, context=arguments.get("context"))
        return x


class ReversibleSequence(_LayerPairs):
    """Apply pairs of layers to two residual streams, whose activations are recomputed in the backward pass.

    The output is the mean of the streams, or their sum if `sum_streams`.
    """

    sum_streams: ClassVar[bool] = False

    def __init__(
        self, blocks: Iterable[Sequence[nn.Module]], args_route: Routes | None = None, layer_dropout: float = 0.0
    ) -> None:
        blocks = list(blocks)
        super().__init__(len(blocks), args_route or {}, layer_dropout)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.ModuleDict({"net": layer}) for name, layer in zip("fg", pair, strict=True)})
            for pair in blocks
        )

    def forward(self, x: Tensor, **arguments: Any) -> Tensor:
        """Map x (B, T, dim) to (B, T, dim); of the arguments, only `context` receives gradients."""
        pairs = [[block[name]["net"] for name in "fg"] for block in self.blocks]  # type: ignore[index]
        calls = list(self._calls(pairs, arguments))
        first, second = run_reversible(calls, x, None, arguments.get("context"), None)
        return first + second if self.sum_streams else (first + second) / 2
