"""Residual streams and how layers run on them.

The topology of the streams is architecture; whether activations are kept, recomputed or reversed is execution, which
changes neither outputs nor gradients. A stack is a list of branches (attention, feed-forward, …) on streams x:

    single   x ← x + f(x)
    parallel x ← x + f(x) + g(x), f attention and g its feed-forward layer (GPT-J, GPT-NeoX, PaLM)
    double   x₁ ← x₁ + f(x₂), then x₂ ← x₂ + g(x₁), in turn; the output is their mean, or their sum. Each step can be
             inverted, so activations need not be stored: `reverse` recomputes them in a second forward pass.
    hyper    n streams mixed by learned weights before and after each branch (Zhu et al., 2024)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.layout import Packing, TokenLayout
from longspan.models.config import Execution, NormPosition, Residual
from longspan.models.layers import (
    NORMS,
    Attention,
    CenteredNorm,
    FeedForward,
    ResidualFunction,
    compiled_for_gpu,
    has_hooks,
    is_plain,
    latest_tokens,
    merge_latest,
    shift_function,
    shift_token,
    shift_tokens,
)
from longspan.models.positions import with_rotary
from longspan.ops import residual_norm as fused_norm
from longspan.ops.common.autograd import once_differentiable, recompute
from longspan.ops.common.torch_private import forward_ad_level, functorch_active
from longspan.ops.decode import CurrentToken, RotaryCache, TokenShift, module_function, why_not_triton
from longspan.protocol import Mechanism, State, StateOptions, start_positions
from longspan.utils import choose

if TYPE_CHECKING:
    from typing_extensions import Unpack

S = TypeVar("S", bound=State)


@dataclass
class BranchState(State):
    """The state of a branch: the tokens that a token shift still needs, and its attention's state.

    With a stride the attention's state has `stride` rows for each sequence. The state of cross-attention holds a
    context, which does not grow.
    """

    recent: Tensor | None = None  # (B, max offset, dim)
    inner: tuple[State, ...] = ()
    stride: int = 1
    cross: bool = False

    def _nested_rows(self, where: Tensor) -> Tensor:
        if self.stride == 1:
            return where
        return (where[:, None] * self.stride + torch.arange(self.stride, device=where.device)).flatten()

    def _merge(self, later: BranchState) -> BranchState:
        merged = self
        if self.recent is not None and later.recent is not None:
            merged = replace(self, recent=merge_latest(self.recent, later.recent, later.length))
        if self.cross:
            return merged
        inner = zip(self.inner, later.inner, strict=True)
        return replace(merged, inner=tuple(state.merge(other) for state, other in inner))


@dataclass
class StackState(State):
    """The states of the branches, in order, and the codes of the tokens that n-grams still need."""

    branches: tuple[BranchState, ...] = ()
    recent: Tensor | None = None  # (B, s, 1) int64

    def _merge(self, later: StackState) -> StackState:
        pairs = zip(self.branches, later.branches, strict=True)
        merged = replace(self, branches=tuple(branch.merge(other) for branch, other in pairs))
        if self.recent is None or later.recent is None:
            return merged
        return replace(merged, recent=merge_latest(self.recent, later.recent, later.length))


class ResidualBranch(nn.Module):
    """One residual branch: norm, token shift, axial folding, and the layer itself.

    Args:
        layer: Attention, a feed-forward layer, or any module of (B, T, dim).
        dim: Width of the input.
        norm: "layer", "rms" or "scale".
        norm_position: "pre" x + f(norm(x)); "post" norm(x + f(x)); "rezero" x + a·f(x), a learned from 0.
        token_shift: Offsets over equal parts of the features; see `shift_tokens`.
        stride: Attention along every stride-th token only (axial folding).
        out_features: Width of the layer's output. Where it is not dim, x itself is left out of the sum.
        resample: Whether x is then mapped to the new width by a learned linear layer instead.
    """

    def __init__(
        self,
        layer: nn.Module,
        dim: int,
        *,
        norm: str = "layer",
        norm_position: str = "pre",
        token_shift: tuple[int, ...] = (),
        stride: int = 1,
        out_features: int | None = None,
        resample: bool = False,
    ) -> None:
        super().__init__()
        choose("norm_position", norm_position, get_args(NormPosition))
        self.layer, self.dim, self.norm_position, self.stride = layer, dim, norm_position, stride
        self.residual = out_features in (None, dim)
        self.resample = nn.Linear(dim, out_features) if resample and out_features and not self.residual else None
        self.token_shift = tuple(token_shift)
        width = dim if norm_position == "pre" else out_features or dim
        self.norm = None if norm_position == "rezero" else NORMS[choose("norm", norm, NORMS)](width)
        self.weight = nn.Parameter(torch.zeros(())) if norm_position == "rezero" else None

    def forward(
        self, x: Tensor, layout: TokenLayout, context: Tensor | None, context_layout: TokenLayout | None
    ) -> Tensor:
        """Compute f(x), to be merged with x by `merge`."""
        x = self._shift(self._normalize(x, layout), layout, None)
        return self.apply_layer(x, layout, context, context_layout)

    def apply_layer(
        self, x: Tensor, layout: TokenLayout, context: Tensor | None, context_layout: TokenLayout | None
    ) -> Tensor:
        """Compute the layer of x, normalized and shifted."""
        if not isinstance(self.layer, Attention):
            return self.layer(x)
        if self.stride > 1 and x.shape[1] > 0:
            fold = AxialFold.of(layout, self.stride, *x.shape[:2])
            return fold.back(self.layer(fold(x), _layouts=(fold.layout, None)))
        return self.layer(x, context=context, _layouts=(layout, context_layout))

    def extend(self, x: Tensor, layout: TokenLayout, state: BranchState) -> tuple[Tensor, BranchState]:
        """Compute f of new tokens, right-padded if masked."""
        normed = self._normalize(x, layout)
        prepared = self._shift(normed, layout, state.recent)
        if state.recent is not None:
            state = replace(state, recent=latest_tokens(state.recent, normed, layout))
        if not isinstance(self.layer, Attention):
            return self.layer(prepared), state
        if self.stride > 1:
            out, inner = self._extend_folded(prepared, layout, state.inner[0])
        else:
            out, inner = self.layer.extend(prepared, state.inner[0], _layout=layout)
        return out, replace(state, inner=(inner,))

    def decode_step(
        self,
        x: Tensor,
        state: BranchState,
        rotary: RotaryCache,
        add: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> tuple[Tensor, BranchState]:
        """Extend by one token in eval mode; see `Attention.decode_step`. add: a residual added to the output."""
        layer, norm, shift = self.layer, self.norm if self.norm_position == "pre" else None, None
        if state.recent is not None:
            if state.recent.shape[1] > max(self.token_shift):
                shift = TokenShift(state.recent, state.length, self.token_shift)
            else:
                x, norm = shift_token(self.apply_norm(x), self.token_shift, state.recent), None
        if isinstance(layer, Attention):
            out, inner = layer.decode_step(x, state.inner[0], rotary, norm=norm, add=add, shift=shift, tokens=tokens)
            return out, state if inner is state.inner[0] else replace(state, inner=(inner,))
        if isinstance(layer, FeedForward):
            return layer.decode_step(x, norm=norm, add=add, shift=shift), state
        y = layer(x if norm is None else norm(x))
        return y if add is None else add + y, state

    def decode_function(self, state: BranchState) -> ResidualFunction | None:
        """Return add + f(norm(x)) of one token x and a residual (1, dim); see `Mechanism.decode_function`."""
        if not self.is_pre_norm or self.norm is None:
            return None
        norm = prepare = module_function(self.norm)
        if state.recent is not None:
            shift = shift_function(self.token_shift, state.recent)
            if shift is None:
                return None
            prepare = _in_turn(norm, shift)
        if isinstance(self.layer, Attention):
            return self.layer.decode_function(state.inner[0], prepare)
        return self.layer.decode_function(prepare) if isinstance(self.layer, FeedForward) else None

    def takes_ring(self, recent: Tensor) -> bool:
        """Whether a decode step shifts tokens inside the kernel of a linear layer, with a `TokenShift` ring buffer."""
        own = isinstance(self.layer, Attention | FeedForward) and max(self.token_shift) > 0
        return own and why_not_triton(recent) is None

    def apply_norm(self, x: Tensor) -> Tensor:
        """Normalize x where the norm comes before the layer."""
        return self.norm(x) if self.norm is not None and self.norm_position == "pre" else x

    @property
    def is_pre_norm(self) -> bool:
        """Whether the branch is x + f(norm(x))."""
        return self.residual and self.norm_position == "pre"

    def merge(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x after the branch, given its output y."""
        if self.weight is not None:
            y = y * self.weight
        x = x if self.resample is None else self.resample(x)
        total = x + y if self.residual or self.resample is not None else y
        return total if self.norm is None or self.norm_position == "pre" else self.norm(total)

    def add_and_normalize(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return x + y, and that normalized and shifted, where one kernel computes both; no token is hidden."""
        norm, shift = self.norm, self.token_shift
        if not self.is_pre_norm or has_hooks(self) or norm is None or not is_plain(norm, nn.RMSNorm):
            return None
        assert isinstance(norm, nn.RMSNorm)
        if norm.eps is None or fused_norm.why_not_triton(x, y, self.dim, shift) is not None:
            return None
        return fused_norm.residual_norm(x, y, norm.weight, norm.eps, bool(shift))

    def new_state(self, batch_size: int, **options: Unpack[StateOptions]) -> BranchState:
        """Return an empty state for `batch_size` sequences; see `Mechanism.new_state`."""
        like = torch.empty(0, device=options.get("device"), dtype=options.get("dtype"))
        start = start_positions(batch_size, options.get("start"), like.device)
        state = BranchState.empty(batch_size, start, like.device, stride=self.stride)
        if self.token_shift:
            state = replace(state, recent=like.new_zeros(batch_size, max(self.token_shift), self.dim))
        if not isinstance(self.layer, Attention):
            return state
        if self.layer.cross:  # max_length and start count this model's tokens, not those of a context.
            options |= {"max_length": None, "start": None}
        elif self.stride > 1:
            longest, columns = options.get("max_length"), torch.arange(self.stride, device=like.device)
            options["max_length"] = None if longest is None else -(-longest // self.stride)
            if start is not None:  # The number of positions before it in each of the stride's columns.
                options["start"] = -((columns - start[:, None]) // self.stride).flatten()
        inner = self.layer.new_state(batch_size * self.stride, **options)
        return replace(state, inner=(inner,), cross=self.layer.cross)

    def _normalize(self, x: Tensor, layout: TokenLayout) -> Tensor:
        """Return x normalized; hidden tokens are zero where tokens are shifted."""
        x = self.apply_norm(layout.zero_fill(x))
        return layout.zero_fill(x) if self.token_shift else x

    def _shift(self, x: Tensor, layout: TokenLayout, recent: Tensor | None) -> Tensor:
        return shift_tokens(x, self.token_shift, layout, recent) if self.token_shift else x

    def _extend_folded(self, x: Tensor, layout: TokenLayout, state: State) -> tuple[Tensor, State]:
        """Extend the `stride` rows of each sequence; a single token extends one of them."""
        assert isinstance(self.layer, Attention)
        s, (B, T) = self.stride, x.shape[:2]
        if T == 0:
            return x, state
        if T == 1 and layout.key_mask is None:
            index = torch.arange(B, device=x.device) * s + layout.position[:, 0] % s
            out, row = self.layer.extend(x, state.select(index))
            return out, _replace_rows(state, index, row)
        fold = AxialFold.of(layout, s, B, T)
        out, state = self.layer.extend(fold(x), state, _layout=fold.layout)
        return fold.back(out), state


def _in_turn(first: Callable[[Tensor], Tensor], second: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: second(first(x))


@dataclass(frozen=True)
class AxialFold:
    """Every stride-th token as a row of its own: the token at position p goes to row p mod stride of its sequence."""

    source: Tensor  # (rows, L) the index of each folded slot's token in x flattened over batch and time
    target: Tensor  # (B · T,) the index of each token in the folded rows
    layout: TokenLayout
    shape: tuple[int, int]

    @classmethod
    def of(cls, layout: TokenLayout, stride: int, B: int, T: int) -> AxialFold:
        return cls._packed(layout, stride, T) if layout.packing is not None else cls._padded(layout, stride, B, T)

    @classmethod
    def _padded(cls, layout: TokenLayout, stride: int, B: int, T: int) -> AxialFold:
        device = layout.position.device
        position = layout.position.expand(B, T)
        seen = torch.ones_like(position, dtype=torch.bool) if layout.key_mask is None else layout.key_mask
        L = -(-T // stride)
        start = seen.int().argmax(1, keepdim=True)  # (B, 1) first real slot, and its position
        first = position.gather(1, start)
        # A row whose mask has holes counts slots, and so starts at slot 0 whatever is hidden there.
        slots = (position == torch.arange(T, device=device)).all(1, keepdim=True)
        start, first = start.masked_fill(slots, 0), first.masked_fill(slots, 0)
        begin = start + (torch.arange(stride, device=device) - first) % stride  # (B, stride)
        slots = begin[:, :, None] + stride * torch.arange(L, device=device)  # (B, stride, L)
        inside, clamped = (slots < T).flatten(1), slots.clamp(max=T - 1).flatten(1)
        mask = (inside & seen.gather(1, clamped)).view(B * stride, L)
        folded = (position.gather(1, clamped) // stride).view(B * stride, L)
        last = (folded * mask).amax(1, keepdim=True).expand_as(folded)
        column = position % stride
        index = (torch.arange(T, device=device) - begin.gather(1, column)) // stride
        batch = torch.arange(B, device=device)[:, None]
        target = (batch * stride + column) * L + index.clamp(0, L - 1)
        rows = TokenLayout(folded, last, None if layout.key_mask is None and T % stride == 0 else mask)
        return cls((batch * T + clamped).view(B * stride, L), target.flatten(), rows, (B, T))

    @classmethod
    def _packed(cls, layout: TokenLayout, stride: int, T: int) -> AxialFold:
        assert layout.packing is not None
        offsets, position = layout.packing.offsets.long(), layout.position[0]
        sequence = torch.searchsorted(offsets[1:], torch.arange(T, device=offsets.device), right=True)
        column = sequence * stride + position % stride
        counts = torch.zeros((len(offsets) - 1) * stride, dtype=torch.int64, device=offsets.device)
        counts = counts.index_add(0, column, torch.ones_like(column))
        order = torch.argsort(column, stable=True)
        packing = Packing(F.pad(counts.cumsum(0), (1, 0)).to(torch.int32), -(-layout.packing.max_length // stride))
        folded = (position // stride)[order][None]
        return cls(order[None], torch.argsort(order), TokenLayout(folded, folded, None, packing), (1, T))

    def __call__(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[self.source]

    def back(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[self.target].unflatten(0, self.shape)


class HyperConnection(nn.Module):
    """Learned mixing of n residual streams around one branch (Zhu et al., 2024, dynamic form)."""

    def __init__(self, num_streams: int, dim: int, index: int) -> None:
        super().__init__()
        mix = torch.cat(
            [F.one_hot(torch.tensor([index % num_streams]), num_streams).T.float(), torch.eye(num_streams)], 1
        )
        self.norm = CenteredNorm(dim)
        self.static_mix = nn.Parameter(mix)  # (n, 1 + n): into the branch, and into each stream
        self.dynamic_mix = nn.Parameter(torch.zeros(dim, num_streams + 1))
        self.mix_scale = nn.Parameter(torch.tensor(0.01))
        self.static_out = nn.Parameter(torch.ones(num_streams))
        self.dynamic_out = nn.Parameter(torch.zeros(dim))
        self.out_scale = nn.Parameter(torch.tensor(0.01))

    def before(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mix streams (B, T, n, dim): return the branch's input (B, T, dim), the streams, and weights (B, T, n)."""
        normed = self.norm(streams)
        mix = (normed @ self.dynamic_mix).tanh() * self.mix_scale + self.static_mix  # (B, T, n, 1 + n)
        share = (normed @ self.dynamic_out).tanh() * self.out_scale + self.static_out
        mixed = mix.mT @ streams
        return mixed[:, :, 0], mixed[:, :, 1:], share

    def after(self, streams: Tensor, share: Tensor, y: Tensor) -> Tensor:
        """Add the branch's output y (B, T, dim) to each stream by its weight."""
        return streams + share[..., None] * y[:, :, None]


class Stack(nn.Module):
    """Branches on residual streams.

    Args:
        branches: In the order in which they run.
        dim: Width of the streams.
        topology: "single", "parallel", "double" or "hyper".
        num_streams: Number of hyper-connected streams.
        sum_streams: Whether double streams end as their sum, and not as their mean.
        execution: "keep", "recompute", "recompute_heads" or "reverse"; may be changed at any time.
    """

    def __init__(
        self,
        branches: list[ResidualBranch],
        dim: int,
        *,
        topology: str = "single",
        num_streams: int = 4,
        sum_streams: bool = False,
        execution: str = "keep",
    ) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)
        self.topology, self.num_streams = choose("residual", topology, get_args(Residual)), num_streams
        self.sum_streams = sum_streams
        posts = [b for b in branches if b.norm_position == "post"]
        widths = [b for b in branches if not b.residual]
        if topology != "single" and (posts or widths):
            what = "post-norm" if posts else "a changing width"
            raise ValueError(f'{what} needs residual="single": {topology} streams cannot pass through it')
        if topology == "parallel" and len(branches) % 2:
            raise ValueError(f'residual="parallel" needs pairs of branches, got {len(branches)}')
        if topology == "hyper" and num_streams < 1:
            raise ValueError(f"num_streams must be at least 1, got {num_streams}")
        count = len(branches) if topology == "hyper" else 0
        self.connections = nn.ModuleList(HyperConnection(num_streams, dim, i) for i in range(count))
        self.execution = execution

    @property
    def execution(self) -> str:
        return self._execution

    @execution.setter
    def execution(self, name: str) -> None:
        choose("execution", name, get_args(Execution))
        if name == "reverse" and self.topology != "double":
            raise ValueError(f'execution="reverse" needs residual="double", got residual="{self.topology}"')
        for _, layer in self.attention_layers():
            layer.set_head_groups(name == "recompute_heads")
        self._execution = name

    def forward(
        self, x: Tensor, layout: TokenLayout, context: Tensor | None = None, context_layout: TokenLayout | None = None
    ) -> Tensor:
        """Run x (B, T, dim) through every branch."""
        x = x if layout.key_mask is None else layout.zero_fill(x)
        layout = self._with_rotary(layout, x)
        if self.execution == "reverse" and torch.is_grad_enabled():
            return self._combine(run_reversible(self._branches(), x, layout, context, context_layout))

        if compiled_for_gpu(x) and self.execution == "keep" and self.topology == "single":
            return self._run_fused(x, layout, context, context_layout)

        def apply(i: int, x: Tensor) -> Tensor:
            branch = self._branches()[i]
            if self.execution == "keep" or not torch.is_grad_enabled():
                return branch(x, layout, context, context_layout)
            return recompute(branch, x, layout, context, context_layout)

        return self._run(x, apply)

    def extend(self, x: Tensor, layout: TokenLayout, state: StackState) -> tuple[Tensor, StackState]:
        """Run new tokens, right-padded if masked, through every branch, each with its own state."""
        after, layout = list(state.branches), self._with_rotary(layout, x)

        def apply(i: int, x: Tensor) -> Tensor:
            y, after[i] = self._branches()[i].extend(x, layout, after[i])
            return y

        out = self._run(x, apply)
        length = state.length + layout.count()
        branches = tuple(replace(branch, length=length) for branch in after)
        return out, replace(state, length=length, branches=branches)

    def decode_step(self, x: Tensor, state: StackState, tokens: Tensor | None = None) -> tuple[Tensor, StackState]:
        """Extend by one token x (B, 1, dim) of a decode loop; lengths are not advanced. See `Attention.decode_step`."""
        branches, after = self._branches(), list(state.branches)
        rotary = RotaryCache(state.length, _full_precision(x))
        if self.topology in ("single", "parallel") and all(branch.is_pre_norm for branch in branches):
            total = x
            for i, branch in enumerate(branches):
                x = total if self._reads_sum(i) else x
                total, after[i] = branch.decode_step(x, after[i], rotary, total, tokens)
            return total, replace(state, branches=tuple(after))

        def apply(i: int, x: Tensor) -> Tensor:
            y, after[i] = branches[i].decode_step(x, after[i], rotary, None, tokens)
            return y

        return self._run(x, apply), replace(state, branches=tuple(after))

    def decode_function(self, state: StackState) -> Callable[[Tensor, CurrentToken], Tensor] | None:
        """Return `decode_step` of one token x (1, dim) of one sequence on a CPU; see `Mechanism.decode_function`."""
        if self.topology not in ("single", "parallel") or len(state.length) != 1 or state.length.is_cuda:
            return None
        found = [branch.decode_function(held) for branch, held in zip(self._branches(), state.branches, strict=True)]
        functions = [function for function in found if function is not None]
        if len(functions) < len(found):
            return None

        steps = [(function, self._reads_sum(i)) for i, function in enumerate(functions)]

        def step(x: Tensor, token: CurrentToken) -> Tensor:
            total = x
            for function, reads_sum in steps:
                x = total if reads_sum else x
                total = function(x, total, token)
            return total

        return step

    def share_length(self, state: StackState) -> StackState:
        """Return the state in contiguous tensors with one length tensor for all layers, as `decode_step` takes it."""
        branches = []
        state = state._map(Tensor.contiguous)
        for held in state.branches:
            if not held.cross:
                held = replace(held, inner=tuple(_with_length(inner, state.length) for inner in held.inner))
            branches.append(replace(held, length=state.length))
        return replace(state, branches=tuple(branches))

    def decode_state(self, state: StackState, dtype: torch.dtype) -> StackState:
        """Return the state in the layout of `decode_step`; see `Mechanism.decode_state`."""
        state = self._map_mechanisms(self.share_length(state), lambda m, inner: m.decode_state(inner, dtype))
        return self._map_recent(state, lambda branch, held: branch.takes_ring(held), TokenShift.ring)

    def finish_decode(self, state: StackState) -> StackState:
        """Return a state of `decode_state` in the ordinary layout."""
        state = self._map_mechanisms(state, lambda m, inner: m.finish_decode(inner))
        return self._map_recent(state, lambda branch, held: held.shape[1] > max(branch.token_shift), TokenShift.latest)

    def attention_layers(self) -> list[tuple[int, Attention]]:
        """Return the index and the layer of every attention branch."""
        layers = [(i, branch.layer) for i, branch in enumerate(self._branches())]
        return [(i, layer) for i, layer in layers if isinstance(layer, Attention)]

    def _map_recent(
        self,
        state: StackState,
        chosen: Callable[[ResidualBranch, Tensor], bool],
        change: Callable[[Tensor, Tensor], Tensor],
    ) -> StackState:
        """Apply a function to the last tokens and lengths of the chosen branches with token shift."""
        branches = list(state.branches)
        for i, (branch, held) in enumerate(zip(self._branches(), state.branches, strict=True)):
            if held.recent is not None and chosen(branch, held.recent):
                branches[i] = replace(held, recent=change(held.recent, held.length))
        return replace(state, branches=tuple(branches))

    def _map_mechanisms(self, state: StackState, change: Callable[[Mechanism, State], State]) -> StackState:
        """Apply a function to the state of every self-attention mechanism."""
        branches = list(state.branches)
        for i, layer in self.attention_layers():
            if not branches[i].cross:
                (held,) = branches[i].inner
                inner = change(layer.mechanism, layer.mechanism_state(held))
                branches[i] = replace(branches[i], inner=(layer.with_mechanism_state(held, inner),))
        return replace(state, branches=tuple(branches))

    @property
    def supports_decode(self) -> bool:
        """Whether `decode_step` supports all branches; it needs states that start at position 0."""
        return all(branch.stride == 1 for branch in self._branches())

    def new_state(self, batch_size: int, **options: Unpack[StateOptions]) -> StackState:
        """Return an empty state for `batch_size` sequences; see `Mechanism.new_state`."""
        branches = tuple(branch.new_state(batch_size, **options) for branch in self._branches())
        first = branches[0]
        return StackState(first.length, branches, start=first.start)

    def _run_fused(
        self, x: Tensor, layout: TokenLayout, context: Tensor | None, context_layout: TokenLayout | None
    ) -> Tensor:
        """Run x through every branch; where a kernel can, it adds a branch and normalizes the sum for the next."""
        first, *others = self._branches()
        whole = layout.key_mask is None and layout.packing is None and layout.shard is None
        last, y = first, first(x, layout, context, context_layout)
        for branch in others:
            found = branch.add_and_normalize(x, y) if whole and last.is_pre_norm else None
            if found is None:
                x = last.merge(x, y)
                y = branch(x, layout, context, context_layout)
            else:
                x, normed = found
                y = branch.apply_layer(normed, layout, context, context_layout)
            last = branch
        return last.merge(x, y)

    def _run(self, x: Tensor, apply: Callable[[int, Tensor], Tensor]) -> Tensor:
        branches = self._branches()
        if self.topology in ("single", "parallel"):
            total = x
            for i, branch in enumerate(branches):
                x = total if self._reads_sum(i) else x
                total = branch.merge(total, apply(i, x))
            return total
        if self.topology == "double":
            streams = [x, x]
            for i, branch in enumerate(branches):
                streams[i % 2] = branch.merge(streams[i % 2], apply(i, streams[1 - i % 2]))
            return self._combine(streams)
        many = x[:, :, None].expand(-1, -1, self.num_streams, -1)
        for i, (branch, connection) in enumerate(zip(branches, self.connections, strict=True)):
            assert isinstance(connection, HyperConnection)
            into, many, share = connection.before(many)
            y = apply(i, into)
            many = connection.after(many, share, y if branch.weight is None else y * branch.weight)
        return many.sum(2)

    def _reads_sum(self, i: int) -> bool:
        """Whether branch i of one stream reads all branches before it; otherwise what the one before it read."""
        return self.topology == "single" or i % 2 == 0

    def _with_rotary(self, layout: TokenLayout, x: Tensor) -> TokenLayout:
        """Compute the cos and sin of rotary embedding once for all layers."""
        layers = [branch.layer for branch in self._branches() if branch.stride == 1]
        rotated = [layer for layer in layers if isinstance(layer, Attention) and len(layer.rotary)]
        if not rotated:
            return layout
        kinds = dict.fromkeys(kind for layer in rotated for kind in layer.rotary_kinds)
        return with_rotary(layout, kinds, _full_precision(x))

    def _combine(self, streams: list[Tensor]) -> Tensor:
        total = streams[0] + streams[1]
        return total if self.sum_streams else total / 2

    def _branches(self) -> list[ResidualBranch]:
        return [branch for branch in self.branches if isinstance(branch, ResidualBranch)]


def run_reversible(
    branches: Sequence[Any], x: Tensor, layout: Any, context: Tensor | None, context_layout: Any
) -> list[Tensor]:
    """Return two streams that both start as x (B, T, dim) after all branches, without storing activations.

    The backward pass visits the branches from the last to the first: it inverts each addition, runs the branch again
    with the random state and autocast of the first time, and takes its gradients. Parameters are inputs of the
    function, so that they get gradients whether or not x needs one; the context's gradient is summed here.

    Under torch.compile the branches are recomputed instead, as are those that FSDP shards, whose parameters are others
    while they run; torch.func stores their activations.
    """
    sharded = any(hasattr(branch, "unshard") for branch in branches)
    if sharded or torch.compiler.is_compiling() or functorch_active() or forward_ad_level() >= 0:
        streams = [x, x]
        for i, branch in enumerate(branches):
            y = recompute(branch, streams[1 - i % 2], layout, context, context_layout)
            streams[i % 2] = branch.merge(streams[i % 2], y)
        return streams
    unique = list(dict.fromkeys(p for branch in branches for p in branch.parameters() if p.requires_grad))
    first, second = _Reversible.apply(  # type: ignore[no-untyped-call]
        branches, layout, context_layout, unique, x, context, *unique
    )
    return [first, second]


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        branches: Sequence[Any],
        layout: Any,
        context_layout: Any,
        unique: list[nn.Parameter],
        x: Tensor,
        context: Tensor | None,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.branches, ctx.layout, ctx.context_layout, ctx.unique = branches, layout, context_layout, unique
        ctx.autocast = _autocast_state(x.device.type)
        ctx.random = []
        streams = [x, x]
        for i, branch in enumerate(branches):
            ctx.random.append(_random_state(x))
            y = branch(streams[1 - i % 2], layout, context, context_layout)
            streams[i % 2] = branch.merge(streams[i % 2], y)
        if ctx.autocast[1]:
            torch.clear_autocast_cache()  # PyTorch 2.10 would use these casts, which have no gradients, again.
        first, second = (stream.clone() if stream is x else stream for stream in streams)
        ctx.save_for_backward(first, second, context)
        return first, second

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        *saved, context = ctx.saved_tensors
        streams, d_streams = [stream.detach() for stream in saved], list(grads)
        d_parameters: dict[int, Tensor] = {}
        d_context = None
        device = streams[0].device
        wants_context = context is not None and ctx.needs_input_grad[5]
        for i in reversed(range(len(ctx.branches))):
            branch, mine, other = ctx.branches[i], i % 2, 1 - i % 2
            with torch.enable_grad(), _replay(ctx.random[i], ctx.autocast, device):
                x = streams[other].detach().requires_grad_()
                c = None if context is None else context.detach().requires_grad_(wants_context)
                y = branch(x, ctx.layout, c, ctx.context_layout)
                y = y if branch.weight is None else y * branch.weight
            inputs = [x, *([c] if wants_context else [])]
            parameters = [p for p in dict.fromkeys(branch.parameters()) if p.requires_grad]
            found = torch.autograd.grad(y, [*inputs, *parameters], d_streams[mine].to(y.dtype), allow_unused=True)
            streams[mine] = streams[mine] - y.detach()
            if found[0] is not None:
                d_streams[other] = d_streams[other] + found[0]
            if wants_context and found[1] is not None:
                d_context = found[1] if d_context is None else d_context + found[1]
            for p, g in zip(parameters, found[len(inputs) :], strict=True):
                if g is not None:
                    d_parameters[id(p)] = d_parameters[id(p)] + g if id(p) in d_parameters else g
        d_x = d_streams[0] + d_streams[1] if ctx.needs_input_grad[4] else None
        return None, None, None, None, d_x, d_context, *(d_parameters.get(id(p)) for p in ctx.unique)


def _random_state(x: Tensor) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(x.device) if x.is_cuda else None


def _autocast_state(device: str) -> tuple[str, bool, torch.dtype]:
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


@contextmanager
def _replay(
    random: tuple[Tensor, Tensor | None], autocast: tuple[str, bool, torch.dtype], device: torch.device
) -> Iterator[None]:
    kind, enabled, dtype = autocast
    with ExitStack() as stack:
        # Only this device: forking the generators of all of them would synchronize with each.
        stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
        stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        torch.set_rng_state(random[0])
        if random[1] is not None:
            torch.cuda.set_rng_state(random[1], device)
        yield


def _full_precision(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _with_length(state: S, length: Tensor) -> S:
    """Return a state, and the states in it, with this length."""
    changed: dict[str, Any] = {"length": length}
    for field in fields(state):
        value = getattr(state, field.name)
        if isinstance(value, tuple):
            changed[field.name] = tuple(_with_length(part, length) for part in value)
    return replace(state, **changed)


def _replace_rows(state: State, index: Tensor, rows: State) -> State:
    """Replace rows as `State.put` does; without gradients in place, so that the other rows are not copied."""
    old, new = state.tensors(), rows.tensors()
    if torch.is_grad_enabled() or any(x.shape[1:] != new[name].shape[1:] for name, x in old.items()):
        return state.put(index, rows)
    for name, x in old.items():
        x.index_copy_(0, index, new[name])
    return state
