"""Containers for pairs of layers, sequential or reversible, as in several older libraries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from longspan.models.residual import run_reversible

# For each keyword argument of forward: whether the first and the second layer of each pair receive it.
Routes = Mapping[str, Sequence[tuple[bool, bool]]]
Arguments = dict[str, Any]
Layer = TypeVar("Layer")


def branch_prefix(index: int, *, reversible: bool) -> str:
    """Return the state-dict prefix of a layer in a container, counting the layers of all pairs."""
    pair, second = divmod(index, 2)
    return f"blocks.{pair}.{'fg'[second]}.net." if reversible else f"layers.{pair}.{second}."


def route_args(router: Routes, args: Mapping[str, Any], depth: int) -> list[tuple[Arguments, Arguments]]:
    """Return the keyword arguments of the two layers of each of `depth` pairs; those without a route are left out."""
    routed: list[tuple[Arguments, Arguments]] = [({}, {}) for _ in range(depth)]
    for name in args:
        for arguments, receives in zip(routed, router.get(name, ()), strict=False):
            for layer_arguments, received in zip(arguments, receives, strict=True):
                if received:
                    layer_arguments[name] = args[name]
    return routed


def layer_drop(layers: Sequence[Layer], prob: float) -> Sequence[Layer]:
    """Drop each layer with probability `prob`; at least the first is kept."""
    kept = [layer for layer, drawn in zip(layers, torch.rand(len(layers)).tolist(), strict=True) if drawn >= prob]
    return kept or layers[:1]


class Deterministic(nn.Module):
    """A layer that can run again with the random numbers of an earlier call."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.cpu_state: Tensor | None = None
        self.gpu_devices: list[int] = []
        self.gpu_states: list[Tensor] = []

    def record_rng(self, *args: Any) -> None:
        """Save the random state of the CPU, and of the devices of the arguments."""
        self.cpu_state = torch.get_rng_state()
        self.gpu_devices, self.gpu_states = get_device_states(*args)

    def forward(self, *args: Any, record_rng: bool = False, set_rng: bool = False, **kwargs: Any) -> Any:
        """Call the layer.

        Args:
            *args: Of the layer.
            record_rng: Whether to save the random state first.
            set_rng: Whether to use the saved random state.
            **kwargs: Of the layer.
        """
        if record_rng:
            self.record_rng(*args)
        if not set_rng:
            return self.net(*args, **kwargs)
        if self.cpu_state is None:
            raise ValueError("set_rng needs a random state: call the layer with record_rng=True first")
        with torch.random.fork_rng(self.gpu_devices):
            torch.set_rng_state(self.cpu_state)
            set_device_states(self.gpu_devices, self.gpu_states)
            return self.net(*args, **kwargs)


class ReversibleBlock(nn.Module):
    """y₁ = x₁ + f(x₂), y₂ = x₂ + g(y₁), on two streams concatenated along the features: (B, T, 2·dim)."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f, self.g = Deterministic(f), Deterministic(g)

    def forward(self, x: Tensor, f_args: Arguments | None = None, g_args: Arguments | None = None) -> Tensor:
        """Map both streams; f_args and g_args are keyword arguments of the layers."""
        first, second = x.chunk(2, 2)
        record = self.training and torch.is_grad_enabled()
        first = first + self.f(second, record_rng=record, **f_args or {})
        second = second + self.g(first, record_rng=record, **g_args or {})
        return torch.cat([first, second], 2)

    def backward_pass(
        self, y: Tensor, dy: Tensor, f_args: Arguments | None = None, g_args: Arguments | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the input from the output y, and its gradient from dy; gradients of parameters are accumulated."""
        streams, gradients = list(y.chunk(2, 2)), list(dy.chunk(2, 2))
        for changed, layer, arguments in ((1, self.g, g_args), (0, self.f, f_args)):
            with torch.enable_grad():
                x = streams[1 - changed].detach().requires_grad_()
                out = layer(x, set_rng=layer.cpu_state is not None, **arguments or {})
            torch.autograd.backward(out, gradients[changed])
            streams[changed] = streams[changed] - out.detach()
            if x.grad is not None:
                gradients[1 - changed] = gradients[1 - changed] + x.grad
        return torch.cat(streams, 2), torch.cat(gradients, 2)


class _LayerPairs(nn.Module):
    def __init__(self, num_pairs: int, args_route: Routes, layer_dropout: float) -> None:
        super().__init__()
        wrong = {name: len(route) for name, route in args_route.items() if len(route) != num_pairs}
        if wrong:
            raise ValueError(f"args_route must have one entry for each of {num_pairs} pairs of layers, got {wrong}")
        self.args_route, self.layer_dropout = args_route, layer_dropout

    def _routed(self, pairs: nn.ModuleList, arguments: Arguments) -> Sequence[tuple[Any, tuple[Arguments, Arguments]]]:
        """Return each pair with the arguments of its layers; in training, layer_dropout skips random pairs."""
        if unknown := sorted(set(arguments) - set(self.args_route)):
            raise TypeError(f"args_route has no entry for {', '.join(unknown)}; it has {sorted(self.args_route)}")
        routed = list(zip(pairs, route_args(self.args_route, arguments, len(pairs)), strict=True))
        return layer_drop(routed, self.layer_dropout) if self.training and self.layer_dropout > 0 else routed


class _LayerCall:
    """A layer with its arguments, callable as a residual branch."""

    weight = None

    def __init__(self, layer: nn.Module, arguments: Arguments) -> None:
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
        for (f, g), (f_args, g_args) in self._routed(self.layers, arguments):
            x = x + f(x, **f_args)
            x = x + g(x, **g_args)
        return x


class ReversibleSequence(_LayerPairs):
    """Apply pairs of layers to two residual streams, whose activations are recomputed in the backward pass.

    The output is the mean of the streams, or their sum if `sum_streams`. A block that was replaced, or that has a
    forward hook, is called as a whole; activations are then kept.
    """

    sum_streams: ClassVar[bool] = False

    def __init__(
        self, blocks: Iterable[Iterable[nn.Module]], args_route: Routes | None = None, layer_dropout: float = 0.0
    ) -> None:
        pairs = [tuple(pair) for pair in blocks]
        super().__init__(len(pairs), args_route or {}, layer_dropout)
        self.blocks = nn.ModuleList(ReversibleBlock(f, g) for f, g in pairs)

    def forward(self, x: Tensor, **arguments: Any) -> Tensor:
        """Map x (B, T, dim) to (B, T, dim); of the arguments, only `context` receives gradients."""
        routed = self._routed(self.blocks, arguments)
        if all(_is_plain(block) for block, _ in routed):
            calls = [_LayerCall(*call) for block, args in routed for call in zip((block.f, block.g), args, strict=True)]
            first, second = run_reversible(calls, x, None, arguments.get("context"), None)
        else:
            streams = torch.cat([x, x], 2)
            for block, (f_args, g_args) in routed:
                streams = block(streams, f_args=f_args, g_args=g_args)
            first, second = streams.chunk(2, 2)
        return first + second if self.sum_streams else (first + second) / 2


def _is_plain(block: nn.Module) -> bool:
    """Whether the two layers of a block can be called in its place."""
    return type(block) is ReversibleBlock and not (block._forward_hooks or block._forward_pre_hooks)
