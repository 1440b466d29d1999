"""How layers run. Topology, the residual streams, is architecture; keeping, recomputing or reversing is execution, and
changes neither outputs nor gradients.

A stack is a list of branches (attention, feed-forward, …). Streams x:

    single   x ← x + f(x)
    double   x₁ ← x₁ + f(x₂), then x₂ ← x₂ + g(x₁), in turn; the answer is their mean, or their sum. Each step can be
             undone, so activations need not be kept: `reverse` rebuilds them, at the cost of a second forward pass.
    hyper    n streams mixed by learned weights before and after each branch (Zhu et al., 2024)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longspan.layout import Packing, TokenLayout
from longspan.models.config import Execution, NormPosition, Residual
from longspan.models.layers import NORMS, Attention, CenteredNorm, FeedForward, latest_tokens, shift_token, shift_tokens
from longspan.models.positions import with_rotary
from longspan.models.reversible import run_reversible
from longspan.ops.decode import RotaryCache
from longspan.protocol import Index, State
from longspan.utils import choose

S = TypeVar("S", bound=State)


@dataclass
class BranchState(State):
    """A branch's memory: the tokens a token shift still needs, and its attention's state, `stride` rows a sequence."""

    recent: Tensor | None = None  # (B, max offset, dim)
    inner: tuple[State, ...] = ()
    stride: int = 1

    def select(self, index: Index) -> BranchState:
        own = State.select(replace(self, inner=()), index)
        return replace(own, inner=tuple(state.select(self._rows(index)) for state in self.inner))

    def put(self, index: Index, rows: BranchState) -> BranchState:
        own = State.put(replace(self, inner=()), index, replace(rows, inner=()))
        pairs = zip(self.inner, rows.inner, strict=True)
        return replace(own, inner=tuple(state.put(self._rows(index), other) for state, other in pairs))

    def _rows(self, index: Index) -> Index:
        if self.stride == 1:
            return index
        index = index if isinstance(index, slice) else torch.as_tensor(index, device=self.length.device)
        first = torch.arange(len(self.length), device=self.length.device)[index] * self.stride
        return (first[:, None] + torch.arange(self.stride, device=first.device)).flatten()


@dataclass
class StackState(State):
    """The branches' states, in order."""

    branches: tuple[BranchState, ...] = ()

    def select(self, index: Index) -> StackState:
        length = State(self.length).select(index).length
        return StackState(length, tuple(branch.select(index) for branch in self.branches))

    def put(self, index: Index, rows: StackState) -> StackState:
        if not isinstance(rows, StackState):
            raise ValueError(f"rows must be a StackState like the state they go into, got a {type(rows).__name__}")
        length = State(self.length).put(index, State(rows.length)).length
        pairs = zip(self.branches, rows.branches, strict=True)
        return StackState(length, tuple(branch.put(index, other) for branch, other in pairs))


class ResidualBranch(nn.Module):
    """One residual branch: norm, token shift, axial folding, and the layer itself.

    norm_position: "pre" x + f(norm(x)); "post" norm(x + f(x)); "rezero" x + a·f(x), a learned from 0. Where the layer
    changes the width, x itself is left out, or with resample goes through a learned map to the new one.
    token_shift: see `shift_tokens`. stride: attention along every stride-th token only (axial folding).
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

    def forward(self, x: Tensor, rows: TokenLayout, context: Tensor | None, context_rows: TokenLayout | None) -> Tensor:
        """f(x), still to be merged with x."""
        x = self._prepared(x, rows, None)
        if not isinstance(self.layer, Attention):
            return self.layer(x)
        if self.stride > 1 and x.shape[1] > 0:
            fold = AxialFold.of(rows, self.stride, *x.shape[:2])
            return fold.back(self.layer(fold(x), fold.rows))
        return self.layer(x, rows, context, context_rows=context_rows)

    def extend(self, x: Tensor, rows: TokenLayout, state: BranchState) -> tuple[Tensor, BranchState]:
        """f of new tokens, right-padded if masked."""
        shifted = self._prepared(x, rows, state.recent)
        if state.recent is not None:
            normed = rows.hide(self.normed(x))
            state = replace(state, recent=latest_tokens(state.recent, normed, rows))
        if not isinstance(self.layer, Attention):
            return self.layer(shifted), state
        if self.stride > 1:
            out, inner = self._extend_folded(shifted, rows, state.inner[0])
        else:
            out, inner = self.layer.extend(shifted, state.inner[0], rows)
        return out, replace(state, inner=(inner,))

    def decode_step(
        self, x: Tensor, state: BranchState, turns: RotaryCache, add: Tensor | None = None
    ) -> tuple[Tensor, BranchState]:
        """One decode step, in eval mode; see `Mechanism.decode_step`. add: a residual added to the output."""
        layer, norm = self.layer, self.norm if self.norm_position == "pre" else None
        if state.recent is not None:
            x, norm = shift_token(self.normed(x), self.token_shift, state.recent), None
        if isinstance(layer, Attention):
            out, inner = layer.decode_step(x, state.inner[0], turns, norm=norm, add=add)
            return out, state if inner is state.inner[0] else replace(state, inner=(inner,))
        if isinstance(layer, FeedForward):
            return layer.decode_step(x, norm=norm, add=add), state
        y = layer(x if norm is None else norm(x))
        return y if add is None else add + y, state

    def normed(self, x: Tensor) -> Tensor:
        """What the layer takes: x after its norm, where that comes first."""
        return self.norm(x) if self.norm is not None and self.norm_position == "pre" else x

    @property
    def plain(self) -> bool:
        """Whether it is x + f(norm(x)) and no more."""
        return self.residual and self.norm_position == "pre"

    def merge(self, x: Tensor, y: Tensor) -> Tensor:
        """x after the branch whose answer was y."""
        if self.weight is not None:
            y = y * self.weight
        x = x if self.resample is None else self.resample(x)
        total = x + y if self.residual or self.resample is not None else y
        return total if self.norm is None or self.norm_position == "pre" else self.norm(total)

    def new_state(self, batch_size: int, *, max_length: int | None, device: Any, dtype: Any) -> BranchState:
        length = torch.zeros(batch_size, dtype=torch.int64, device=device)
        recent = None
        if self.token_shift:
            recent = torch.zeros(batch_size, max(self.token_shift), self.dim, device=device, dtype=dtype)
        inner: tuple[State, ...] = ()
        if isinstance(self.layer, Attention):
            # max_length counts this model's tokens, not those of a context.
            longest = None if max_length is None or self.layer.cross else -(-max_length // self.stride)
            rows = batch_size * self.stride
            inner = (self.layer.new_state(rows, max_length=longest, device=device, dtype=dtype),)
        return BranchState(length, recent, inner, self.stride)

    def _prepared(self, x: Tensor, rows: TokenLayout, recent: Tensor | None) -> Tensor:
        x = self.normed(rows.hide(x))
        return shift_tokens(rows.hide(x), self.token_shift, rows, recent) if self.token_shift else x

    def _extend_folded(self, x: Tensor, rows: TokenLayout, state: State) -> tuple[Tensor, State]:
        """Row b of the batch is `stride` rows of the state; one token touches one of them."""
        assert isinstance(self.layer, Attention)
        s, (B, T) = self.stride, x.shape[:2]
        if T == 0:
            return x, state
        if T == 1 and rows.key_mask is None:
            index = torch.arange(B, device=x.device) * s + rows.position[:, 0] % s
            out, row = self.layer.extend(x, state.select(index))
            return out, _put(state, index, row)
        fold = AxialFold.of(rows, s, B, T)
        out, state = self.layer.extend(fold(x), state, fold.rows)
        return fold.back(out), state


@dataclass(frozen=True)
class AxialFold:
    """Every stride-th token a row of its own: token of position p goes to row p mod stride of its sequence's rows."""

    there: Tensor  # (rows, L) where each folded slot comes from, in x flattened over batch and time
    home: Tensor  # (B · T,) where each token went
    rows: TokenLayout
    shape: tuple[int, int]

    @classmethod
    def of(cls, rows: TokenLayout, stride: int, B: int, T: int) -> AxialFold:
        return cls._packed(rows, stride, T) if rows.packing is not None else cls._padded(rows, stride, B, T)

    @classmethod
    def _padded(cls, rows: TokenLayout, stride: int, B: int, T: int) -> AxialFold:
        device = rows.position.device
        position = rows.position.expand(B, T)
        seen = torch.ones_like(position, dtype=torch.bool) if rows.key_mask is None else rows.key_mask
        L = -(-T // stride)
        start = seen.int().argmax(1, keepdim=True)  # (B, 1) first real slot, and its position
        first = position.gather(1, start)
        # A row whose mask has holes counts slots, and so starts at slot 0 whatever is hidden there.
        slots = (position == torch.arange(T, device=device)).all(1, keepdim=True)
        start, first = start.masked_fill(slots, 0), first.masked_fill(slots, 0)
        begin = start + (torch.arange(stride, device=device) - first) % stride  # (B, stride)
        source = begin[:, :, None] + stride * torch.arange(L, device=device)  # (B, stride, L)
        inside, clamped = (source < T).flatten(1), source.clamp(max=T - 1).flatten(1)
        mask = (inside & seen.gather(1, clamped)).view(B * stride, L)
        folded = (position.gather(1, clamped) // stride).view(B * stride, L)
        last = (folded * mask).amax(1, keepdim=True).expand_as(folded)
        column = position % stride
        index = (torch.arange(T, device=device) - begin.gather(1, column)) // stride
        batch = torch.arange(B, device=device)[:, None]
        home = (batch * stride + column) * L + index.clamp(0, L - 1)
        layout = TokenLayout(folded, last, None if rows.key_mask is None and T % stride == 0 else mask)
        return cls((batch * T + clamped).view(B * stride, L), home.flatten(), layout, (B, T))

    @classmethod
    def _packed(cls, rows: TokenLayout, stride: int, T: int) -> AxialFold:
        assert rows.packing is not None
        offsets, position = rows.packing.offsets.long(), rows.position[0]
        sequence = torch.searchsorted(offsets[1:], torch.arange(T, device=offsets.device), right=True)
        column = sequence * stride + position % stride
        counts = torch.zeros((len(offsets) - 1) * stride, dtype=torch.int64, device=offsets.device)
        counts = counts.index_add(0, column, torch.ones_like(column))
        order = torch.argsort(column, stable=True)
        packing = Packing(F.pad(counts.cumsum(0), (1, 0)).to(torch.int32), -(-rows.packing.max_length // stride))
        folded = (position // stride)[order][None]
        return cls(order[None], torch.argsort(order), TokenLayout(folded, folded, None, packing), (1, T))

    def __call__(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[self.there]

    def back(self, x: Tensor) -> Tensor:
        return x.flatten(0, 1)[self.home].unflatten(0, self.shape)


class HyperConnection(nn.Module):
    """Learned mixing of n residual streams around one branch (Zhu et al., 2024, dynamic form).

    before(streams (B, T, n, dim)) gives the branch's input and the mixed streams; after adds its answer to each.
    """

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
        """The branch's input (B, T, dim), the mixed streams, and each one's share (B, T, n) of the answer."""
        normed = self.norm(streams)
        mix = (normed @ self.dynamic_mix).tanh() * self.mix_scale + self.static_mix  # (B, T, n, 1 + n)
        share = (normed @ self.dynamic_out).tanh() * self.out_scale + self.static_out
        mixed = mix.mT @ streams
        return mixed[:, :, 0], mixed[:, :, 1:], share

    def after(self, streams: Tensor, share: Tensor, y: Tensor) -> Tensor:
        return streams + share[..., None] * y[:, :, None]


class Stack(nn.Module):
    """Branches on residual streams. execution: how they run, any of `Execution`; may be changed at any time."""

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
        for branch in self._branches():
            if isinstance(branch.layer, Attention):
                branch.layer.set_head_groups(name == "recompute_heads")
        self._execution = name

    def forward(
        self, x: Tensor, rows: TokenLayout, context: Tensor | None = None, context_rows: TokenLayout | None = None
    ) -> Tensor:
        """x: (B, T, dim) through every branch."""
        x, rows = rows.hide(x), self._with_rotary(rows, x)
        if self.execution == "reverse" and torch.is_grad_enabled():
            return self._joined(run_reversible(self._branches(), x, rows, context, context_rows))

        def apply(i: int, x: Tensor) -> Tensor:
            branch = self._branches()[i]
            if self.execution == "keep" or not torch.is_grad_enabled():
                return branch(x, rows, context, context_rows)
            return checkpoint(branch, x, rows, context, context_rows, use_reentrant=False)

        return self._run(x, apply)

    def extend(self, x: Tensor, rows: TokenLayout, state: StackState) -> tuple[Tensor, StackState]:
        """New tokens through every branch, each with its own memory. rows: right-padded if masked."""
        after, rows = list(state.branches), self._with_rotary(rows, x)

        def apply(i: int, x: Tensor) -> Tensor:
            y, after[i] = self._branches()[i].extend(x, rows, after[i])
            return y

        out = self._run(x, apply)
        length = state.length + (x.shape[1] if rows.key_mask is None else rows.key_mask.sum(1))
        after = [replace(branch, length=length) for branch in after]
        return out, StackState(length, tuple(after))

    def decode_step(self, x: Tensor, state: StackState) -> tuple[Tensor, StackState]:
        """As `extend` by one token x (B, 1, dim) of a loop; lengths stay as they were. See `Mechanism.decode_step`."""
        branches, after = self._branches(), list(state.branches)
        turns = RotaryCache(state.length, _wide(x))
        if self.topology == "single" and all(branch.plain for branch in branches):
            for i, branch in enumerate(branches):
                x, after[i] = branch.decode_step(x, after[i], turns, add=x)
            return x, replace(state, branches=tuple(after))

        def apply(i: int, x: Tensor) -> Tensor:
            y, after[i] = branches[i].decode_step(x, after[i], turns)
            return y

        return self._run(x, apply), replace(state, branches=tuple(after))

    def share_length(self, state: StackState) -> StackState:
        """The same state with one length for all that grows with the tokens, laid out as `decode_step` takes it."""
        branches = []
        state = state._map(Tensor.contiguous)
        for branch, held in zip(self._branches(), state.branches, strict=True):
            if not (isinstance(branch.layer, Attention) and branch.layer.cross):
                held = replace(held, inner=tuple(_with_length(inner, state.length) for inner in held.inner))
            branches.append(replace(held, length=state.length))
        return StackState(state.length, tuple(branches))

    @property
    def supports_decode(self) -> bool:
        """Whether `decode_step` does all that these branches do."""
        return all(branch.stride == 1 for branch in self._branches())

    def new_state(self, batch_size: int, *, max_length: int | None, device: Any, dtype: Any) -> StackState:
        branches = tuple(
            branch.new_state(batch_size, max_length=max_length, device=device, dtype=dtype)
            for branch in self._branches()
        )
        return StackState(torch.zeros(batch_size, dtype=torch.int64, device=device), branches)

    def _run(self, x: Tensor, apply: Callable[[int, Tensor], Tensor]) -> Tensor:
        branches = self._branches()
        if self.topology == "single":
            for i, branch in enumerate(branches):
                x = branch.merge(x, apply(i, x))
            return x
        if self.topology == "double":
            streams = [x, x]
            for i, branch in enumerate(branches):
                streams[i % 2] = branch.merge(streams[i % 2], apply(i, streams[1 - i % 2]))
            return self._joined(streams)
        many = x[:, :, None].expand(-1, -1, self.num_streams, -1)
        for i, (branch, connection) in enumerate(zip(branches, self.connections, strict=True)):
            assert isinstance(connection, HyperConnection)
            into, many, share = connection.before(many)
            y = apply(i, into)
            many = connection.after(many, share, y if branch.weight is None else y * branch.weight)
        return many.sum(2)

    def _with_rotary(self, rows: TokenLayout, x: Tensor) -> TokenLayout:
        """Compute the rotary cos and sin once for all layers."""
        return with_rotary(rows, self._kinds(), _wide(x))

    def _kinds(self) -> list[tuple[int, float]]:
        """The kinds of rotary positions that layers take."""
        layers = [branch.layer for branch in self._branches() if branch.stride == 1]
        return sorted({kind for layer in layers if isinstance(layer, Attention) for kind in layer.turns})

    def _joined(self, streams: list[Tensor]) -> Tensor:
        total = streams[0] + streams[1]
        return total if self.sum_streams else total / 2

    def _branches(self) -> list[ResidualBranch]:
        return [branch for branch in self.branches if isinstance(branch, ResidualBranch)]


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _with_length(state: S, length: Tensor) -> S:
    """A state, and the states in it, with this length."""
    changed: dict[str, Any] = {"length": length}
    for field in fields(state):
        value = getattr(state, field.name)
        if isinstance(value, tuple):
            changed[field.name] = tuple(_with_length(part, length) for part in value)
    return replace(state, **changed)


def _put(state: State, index: Tensor, rows: State) -> State:
    """As `state.put`; without gradients the state is consumed, so that its other rows are not copied."""
    old, new = state.tensors(), rows.tensors()
    if torch.is_grad_enabled() or any(x.shape[1:] != new[name].shape[1:] for name, x in old.items()):
        return state.put(index, rows)
    for name, x in old.items():
        x.index_copy_(0, index, new[name])
    return state
