"""Containers for pairs of layers, sequential or reversible, as in several older libraries."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

T = TypeVar("T")
Arguments = dict[str, Any]
# For each keyword argument of forward: whether the first and the second layer of each pair receive it.
Routes = Mapping[str, Sequence[Sequence[bool]]]


def branch_prefix(index: int, *, reversible: bool) -> str:
    """Return the state-dict prefix of a layer in a container, counting the layers of all pairs."""
    pair, second = divmod(index, 2)
    return f"blocks.{pair}.{'fg'[second]}.net." if reversible else f"layers.{pair}.{second}."


def route_args(router: Routes, args: Mapping[str, Any], depth: int) -> list[tuple[Arguments, Arguments]]:
    """Return the arguments of the first and the second layer of each of `depth` pairs; others are left out."""

    def of_layer(pair: int, second: int) -> Arguments:
        return {name: value for name, value in args.items() if name in router and router[name][pair][second]}

    return [(of_layer(i, 0), of_layer(i, 1)) for i in range(depth)]


def layer_drop(layers: Sequence[T], prob: float) -> list[T]:
    """Return the layers that remain after dropping each with a probability: the first if none does."""
    keep = (torch.rand(len(layers)) >= prob).tolist()
    return list(itertools.compress(layers, keep)) or list(layers[:1])


class Deterministic(nn.Module):
    """Runs a layer, and can run it again with the random numbers of the call that was recorded last."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.cpu_state: Tensor | None = None
        self.cuda_in_fwd = False
        self.gpu_devices: Sequence[int] = ()
        self.gpu_states: Sequence[Tensor] = ()

    def record_rng(self, *args: Any) -> None:
        """Record the random state of the CPU and of the devices of args."""
        self.cpu_state, self.cuda_in_fwd = torch.get_rng_state(), torch.cuda.is_initialized()
        if self.cuda_in_fwd:
            self.gpu_devices, self.gpu_states = get_device_states(*args)

    def forward(self, *args: Any, record_rng: bool = False, set_rng: bool = False, **kwargs: Any) -> Any:
        """Call the layer. set_rng: Use the recorded random state."""
        if record_rng:
            self.record_rng(*args)
        if not set_rng:
            return self.net(*args, **kwargs)
        if self.cpu_state is None:
            raise ValueError("set_rng needs a random state: call the layer with record_rng=True first")
        with torch.random.fork_rng(devices=self.gpu_devices):
            torch.set_rng_state(self.cpu_state)
            if self.cuda_in_fwd:
                set_device_states(self.gpu_devices, self.gpu_states)
            return self.net(*args, **kwargs)

    @property
    def recorded(self) -> tuple[Tensor | None, bool, Sequence[int], Sequence[Tensor]]:
        """What `record_rng` recorded."""
        return self.cpu_state, self.cuda_in_fwd, self.gpu_devices, self.gpu_states

    @recorded.setter
    def recorded(self, state: tuple[Tensor | None, bool, Sequence[int], Sequence[Tensor]]) -> None:
        self.cpu_state, self.cuda_in_fwd, self.gpu_devices, self.gpu_states = state


class ReversibleBlock(nn.Module):
    """Maps two streams, concatenated to (B, T, 2·dim): y₁ = x₁ + f(x₂), y₂ = x₂ + g(y₁)."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f, self.g = Deterministic(f), Deterministic(g)

    def forward(
        self,
        x: Tensor,
        f_args: Mapping[str, Any] | None = None,
        g_args: Mapping[str, Any] | None = None,
        *,
        record_rng: bool | None = None,
    ) -> Tensor:
        """Apply both layers. record_rng: Record random states for `backward_pass`, by default in training."""
        record = self.training and not torch.compiler.is_compiling() if record_rng is None else record_rng
        x1, x2 = x.chunk(2, -1)
        y1 = x1 + self.f(x2, record_rng=record, **(f_args or {}))
        y2 = x2 + self.g(y1, record_rng=record, **(g_args or {}))
        return torch.cat([y1, y2], -1)

    def backward_pass(
        self,
        y: Tensor,
        dy: Tensor,
        f_args: Mapping[str, Any] | None = None,
        g_args: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the input and its gradient, given the output and its gradient; parameters accumulate theirs."""
        x, dx, gradients = self.invert(y, dy, f_args or {}, g_args or {}, [])
        for parameter, gradient in gradients:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return x, dx

    def invert(
        self, y: Tensor, dy: Tensor, f_args: Mapping[str, Any], g_args: Mapping[str, Any], leaves: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """Compute the backward pass without storing activations: run each layer again and subtract its output.

        Returns:
            The input, its gradient, and (tensor, gradient) for parameters and for `leaves`, tensors in the arguments.
        """
        streams, d_streams = list(y.chunk(2, -1)), list(dy.chunk(2, -1))
        gradients: list[tuple[Tensor, Tensor]] = []
        for layer, mine, arguments in ((self.g, 1, g_args), (self.f, 0, f_args)):
            with torch.enable_grad():
                x = streams[1 - mine].detach().requires_grad_()
                out = layer(x, set_rng=layer.cpu_state is not None, **arguments)
            wanted = [*leaves, *(p for p in layer.parameters() if p.requires_grad)]
            found = torch.autograd.grad(out, [x, *wanted], d_streams[mine].to(out.dtype), allow_unused=True)
            streams[mine] = streams[mine] - out.detach()
            if found[0] is not None:
                d_streams[1 - mine] = d_streams[1 - mine] + found[0]
            gradients += [(w, g) for w, g in zip(wanted, found[1:], strict=True) if g is not None]
        return torch.cat(streams, -1), torch.cat(d_streams, -1), gradients


class _ReversibleFunction(torch.autograd.Function):
    """Run reversible blocks and store only the last output.

    Parameters and tensors in the arguments are inputs, so that they get gradients whether or not x needs one, and each
    once, whatever the number of blocks that use it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        blocks: Sequence[ReversibleBlock],
        args: Sequence[Mapping[str, Mapping[str, Any]]],
        *inputs: Tensor,
    ) -> Tensor:
        ctx.blocks, ctx.args, ctx.inputs, ctx.random = blocks, args, inputs, []
        kind = x.device.type
        ctx.autocast = {
            "device_type": kind,
            "dtype": torch.get_autocast_dtype(kind),
            "enabled": torch.is_autocast_enabled(kind),
        }
        for block, arguments in zip(blocks, args, strict=True):
            x = block(x, **arguments, record_rng=True)
            ctx.random.append((block.f.recorded, block.g.recorded))
        ctx.save_for_backward(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (y,) = ctx.saved_tensors
        passed = {id(x) for args in ctx.args for part in args.values() for x in part.values()}
        leaves = {id(x): x.detach().requires_grad_() for x in ctx.inputs if id(x) in passed}
        owner = {id(leaf): key for key, leaf in leaves.items()}
        total: dict[int, Tensor] = {}
        for block, args, random in zip(ctx.blocks[::-1], ctx.args[::-1], ctx.random[::-1], strict=True):
            block.f.recorded, block.g.recorded = random
            detached = [
                {name: leaves.get(id(x), x) for name, x in args.get(key, {}).items()} for key in ("f_args", "g_args")
            ]
            with torch.autocast(**ctx.autocast):
                y, dy, gradients = block.invert(y, dy, *detached, list(leaves.values()))
            for tensor, gradient in gradients:
                key = owner.get(id(tensor), id(tensor))
                total[key] = total[key] + gradient if key in total else gradient
        d_inputs = (total.get(id(x)) for x in ctx.inputs)
        return dy if ctx.needs_input_grad[0] else None, None, None, *d_inputs


class _LayerPairs(nn.Module):
    def __init__(self, num_pairs: int, args_route: Routes | None, layer_dropout: float) -> None:
        super().__init__()
        self.args_route, self.layer_dropout = args_route or {}, layer_dropout
        wrong = {name: len(route) for name, route in self.args_route.items() if len(route) != num_pairs}
        if wrong:
            raise ValueError(f"args_route must have one entry for each of {num_pairs} pairs of layers, got {wrong}")

    def _with_arguments(
        self, layers: Iterable[Any], arguments: Mapping[str, Any]
    ) -> list[tuple[Any, tuple[Arguments, Arguments]]]:
        """Return each pair with its arguments; in training, layer_dropout removes random pairs."""
        if unknown := sorted(set(arguments) - set(self.args_route)):
            raise TypeError(f"args_route has no entry for {', '.join(unknown)}; it has {sorted(self.args_route)}")
        layers = list(layers)
        pairs = list(zip(layers, route_args(self.args_route, arguments, len(layers)), strict=True))
        return layer_drop(pairs, self.layer_dropout) if self.training and self.layer_dropout > 0 else pairs


class SequentialSequence(_LayerPairs):
    """Apply x ← x + f(x), then x ← x + g(x), for each pair of layers."""

    def __init__(self, layers: nn.ModuleList, args_route: Routes | None = None, layer_dropout: float = 0.0) -> None:
        super().__init__(len(layers), args_route, layer_dropout)
        self.layers = layers

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Map x (B, T, dim) to (B, T, dim); args_route selects the layers that receive each argument."""
        for (f, g), (f_args, g_args) in self._with_arguments(self.layers, kwargs):
            x = x + f(x, **f_args)
            x = x + g(x, **g_args)
        return x


class ReversibleSequence(_LayerPairs):
    """Apply pairs of layers to two residual streams, whose activations are recomputed in the backward pass.

    The output is the mean of the streams, or their sum if `sum_streams`. If a block was replaced or has a forward hook,
    which may change what cannot be inverted, activations are kept.
    """

    sum_streams: ClassVar[bool] = False

    def __init__(self, blocks: Iterable[Any], args_route: Routes | None = None, layer_dropout: float = 0.0) -> None:
        made = [ReversibleBlock(f, g) for f, g in blocks]
        super().__init__(len(made), args_route, layer_dropout)
        self.blocks = nn.ModuleList(made)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """Map x (B, T, dim) to (B, T, dim); args_route selects the layers that receive each argument."""
        x = torch.cat([x, x], -1)
        pairs = self._with_arguments(self.blocks, kwargs)
        args = [{"f_args": f_args, "g_args": g_args} for _, (f_args, g_args) in pairs]
        blocks = [block for block, _ in pairs]
        invertible = blocks and all(_is_plain(block) for block in blocks)
        if invertible and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            tensors = [*kwargs.values(), *(p for block in blocks for p in block.parameters())]
            inputs = dict.fromkeys(t for t in tensors if isinstance(t, Tensor) and t.requires_grad)
            x = _ReversibleFunction.apply(x, blocks, args, *inputs)  # type: ignore[no-untyped-call]
        else:
            for block, arguments in zip(blocks, args, strict=True):
                x = block(x, **arguments)
        first, second = x.chunk(2, -1)
        return first + second if self.sum_streams else (first + second) / 2


def _is_plain(block: nn.Module) -> bool:
    """Whether the output of a block is what its two layers make of its input."""
    return type(block) is ReversibleBlock and not (block._forward_hooks or block._forward_pre_hooks)
