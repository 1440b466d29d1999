"""The base class of `decay` and `delta`, gated memories, and their state."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.layout import lengths_to_mask
from longspan.ops.common import dispatch
from longspan.ops.decode import (
    CosSin,
    CurrentToken,
    DecodeFunction,
    GateActivation,
    RotaryKind,
    StepInputs,
    apply_rotary,
    copy_out,
    gated_decode_step,
    why_not_triton,
)
from longspan.ops.decode.torch import gated_step
from longspan.ops.gated import LOG_UNDERFLOW, GatedInputs, choose_algorithm, gated_linear, gated_linear_out
from longspan.ops.gates import activate_gates
from longspan.ops.gates import why_not_triton as why_not_activated
from longspan.ops.linear import sum_dtype
from longspan.protocol import Mechanism, Rotation, State


class Gates(NamedTuple):
    """Activated gates in the dtype of the sums: log α (B, S, Hkv, 1 or D) and β (B, S, Hkv), or None for 0 and 1."""

    log_decay: Tensor | None
    beta: Tensor | None


@dataclass
class GatedState(State):
    """The memory S, and how it would transform what an earlier state holds.

    Attributes:
        kv: (B, Hkv, D, E).
        log_decay: (B, Hkv, 1 or D), Σ log α; None with the delta rule.
        transition: (B, Hkv, D, D), Π (I − β k kᵀ) Diag(α), with the delta rule and `new_state(transition=True)`.
    """

    kv: Tensor
    log_decay: Tensor | None = None
    transition: Tensor | None = None

    def _merge(self, later: GatedState) -> GatedState:
        if self.log_decay is not None and later.log_decay is not None:
            kv = later.log_decay.exp()[..., None] * self.kv + later.kv
            return replace(self, kv=kv, log_decay=self.log_decay + later.log_decay)
        if later.transition is None:
            raise ValueError(
                "merging needs the later state's transition: make it with new_state(batch_size, start=..., "
                "transition=True)"
            )
        transition = None if self.transition is None else later.transition @ self.transition
        return replace(self, kv=later.transition @ self.kv + later.kv, transition=transition)


class GatedMechanism(Mechanism):
    """S_t = Diag(α_t) S_{t−1} + k_t u_tᵀ, o_t = S_tᵀ q_t / √D; subclasses define the gates and what is written.

    Attributes:
        delta: Whether the write follows the delta rule.
        decay_width: D if α differs between the channels of a head, else 1.
    """

    state_type = GatedState
    supports_cross = False
    heads_alike = False
    sums_directions = True
    delta: bool = False
    decay_width: int = 1

    @abstractmethod
    def _gates(self, gates: Tensor | None, k: Tensor) -> Gates:
        """Activate raw gates."""

    @abstractmethod
    def _gate_activation(self) -> GateActivation:
        """Return what `_gates` computes, as the kernel of a decode step takes it."""

    def _keys(self, x: Tensor) -> Tensor:
        """Return queries or keys as the memory takes them."""
        return x

    def _queries_and_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return `_keys` of both, in one launch where there is a kernel."""
        return q, k

    def check_state(self, state: State, batch_size: int, dtype: torch.dtype | None = None) -> None:
        """Raise ValueError unless the state is one of this mechanism: `decay` and `delta` have one class of states."""
        super().check_state(state, batch_size, dtype)
        assert isinstance(state, GatedState)
        shape, delta = (self.num_kv_heads, self.head_dim, self.value_dim), state.log_decay is None
        if state.kv.shape[1:] != shape or delta != self.delta:
            raise ValueError(
                f"{type(self).__name__} with states (Hkv, D, E) = {shape} got one of {'delta' if delta else 'decay'} "
                f"with {tuple(state.kv.shape[1:])}: use states from its own new_state()"
            )

    def _new_state(
        self, batch_size: int, start: Tensor | None, like: Tensor, max_length: int | None, transition: bool
    ) -> GatedState:
        like = like.to(sum_dtype(like))
        shape = (batch_size, self.num_kv_heads)
        contents = {"kv": like.new_zeros(*shape, self.head_dim, self.value_dim)}
        if not self.delta:
            contents["log_decay"] = like.new_zeros(*shape, self.decay_width)
        elif transition:
            identity = torch.eye(self.head_dim, dtype=like.dtype, device=like.device)
            contents["transition"] = identity.expand(*shape, -1, -1).clone()
        return GatedState.empty(batch_size, start, like.device, **contents)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, key_mask: Tensor | None) -> Tensor:
        log_decay, beta = self._visible_gates(gates, k, key_mask)
        (q, k), dtype = self._queries_and_keys(q, k), v.dtype
        inputs = GatedInputs(q, k, v, log_decay, beta, None)
        if dtype != torch.bfloat16 or choose_algorithm(inputs, self.delta) == "torch":
            # In float32: the parts of a sum may overflow where the sum does not.
            q, k, v = (x.to(sum_dtype(x)) for x in (q, k, v))
        out = gated_linear_out(q, k, v, log_decay=log_decay, beta=beta, delta=self.delta, scale=self._scale)
        q, k, v = (x.flip(1) for x in (q, k, v))
        log_decay, beta = (None if x is None else x.flip(1) for x in (log_decay, beta))
        back = gated_linear_out(q, k, v, log_decay=log_decay, beta=beta, delta=self.delta, scale=self._scale)
        if not self.delta:
            back = back - self._diagonal(q, k, v, beta)
        return (out.to(sum_dtype(out)) + back.flip(1)).to(dtype)

    def _attend_causal(
        self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> Tensor:
        if q.shape[1] == 1:
            return super()._attend_causal(q, k, v, gates=gates, lengths=lengths)
        # Without a state: zeros need not be filled, read and differentiated.
        log_decay, beta = self._visible_gates(gates, k, _visible(lengths, k))
        q, k = self._queries_and_keys(q, k)
        return gated_linear_out(q, k, v, log_decay=log_decay, beta=beta, delta=self.delta, scale=self._scale)

    def _diagonal(self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None) -> Tensor:
        """Return what each token reads of itself (B, T, H, E), which both directions without the delta rule include."""
        group = q.shape[2] // k.shape[2]
        if group > 1:
            k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
            beta = None if beta is None else beta.repeat_interleave(group, 2)
        own = (q * k).sum(-1, dtype=sum_dtype(k), keepdim=True) * self._scale
        return (own if beta is None else own * beta[..., None]) * v

    def _defer(
        self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None, start: Tensor | None
    ) -> Callable[[State], Tensor]:
        out, queries = self._from_empty_state(
            *self._queries_and_keys(q, k), v, *self._visible_gates(gates, k, _visible(lengths, k))
        )
        return lambda past: (out + self._read_memory(past, queries)).to(v.dtype)

    def _defer_bidirectional(
        self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, key_mask: Tensor | None
    ) -> Callable[[State, State], Tensor]:
        found, dtype = self._visible_gates(gates, k, key_mask), v.dtype
        q, k, v = (x.to(sum_dtype(x)) for x in (*self._queries_and_keys(q, k), v))
        out, queries = self._from_empty_state(q, k, v, *found)
        flipped = (None if x is None else x.flip(1) for x in found)
        back, back_queries = self._from_empty_state(q.flip(1), k.flip(1), v.flip(1), *flipped)
        diagonal = 0 if self.delta else self._diagonal(q, k, v, found.beta)

        def finish(before: State, after: State) -> Tensor:
            ahead = (back + self._read_memory(after, back_queries)).flip(1)
            return (out + self._read_memory(before, queries) + ahead - diagonal).to(dtype)

        return finish

    def _from_empty_state(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs after an empty memory, and queries (B, T, H, D) that read what a state before adds."""
        B, T, H, D = q.shape
        dtype = sum_dtype(k)
        if self.delta:
            # The identity, as further columns of the memory, becomes the transition up to each token.
            memory = torch.cat([v.new_zeros(D, self.value_dim), torch.eye(D, device=v.device)], 1).to(dtype)
            memory = memory.expand(B, k.shape[2], -1, -1)
            values = F.pad(v.to(dtype), (0, D))
            out, _ = gated_linear(
                q, k, values, log_decay=log_decay, beta=beta, delta=True, scale=self._scale, state=memory
            )
            return out[..., : self.value_dim], out[..., self.value_dim :]
        out = gated_linear_out(q, k, v, log_decay=log_decay, beta=beta, scale=self._scale)
        assert log_decay is not None
        faded = log_decay.double().cumsum(1).exp().to(dtype).repeat_interleave(H // k.shape[2], 2)
        return out.to(dtype), q.to(dtype) * faded * self._scale

    def _read_memory(self, state: State, queries: Tensor) -> Tensor:
        assert isinstance(state, GatedState)
        rows = queries.to(state.kv.dtype).unflatten(2, (self.num_kv_heads, -1))
        return torch.einsum("bthgd,bhde->bthge", rows, state.kv).flatten(2, 3)

    def _extend(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, GatedState]:
        if q.shape[1] == 1:
            state = self._write(state, k, v, gates=gates, lengths=lengths)
            return self._read(state, q), state
        return self._run(state, *self._queries_and_keys(q, k), v, gates, lengths)

    def _write(self, state: State, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None) -> GatedState:
        if k.shape[1] > 1:
            key = self._keys(k)
            return self._run(state, key, key, v, gates, lengths)[1]
        assert isinstance(state, GatedState)
        log_decay, beta = self._visible_gates(gates, k, _visible(lengths, k))
        memory, v = self._with_transition(state, v.to(state.kv.dtype))
        key, u = self._keys(k)[:, 0].to(memory.dtype), v[:, 0]
        if log_decay is not None:
            memory = log_decay[:, 0].exp()[..., None] * memory
        if self.delta:
            u = u - (key[:, :, None] @ memory)[:, :, 0]
        u = u if beta is None else beta[:, 0, :, None] * u
        return self._updated(state, memory + key[..., None] * u[:, :, None], log_decay, k, lengths)

    def _read(self, state: State, q: Tensor) -> Tensor:
        assert isinstance(state, GatedState)
        query = (self._keys(q).to(state.kv.dtype) * self._scale).unflatten(2, (self.num_kv_heads, -1))
        return torch.einsum("bthgd,bhde->bthge", query, state.kv).flatten(2, 3).to(q.dtype)

    def _decode_step(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, rotary: Rotation, out: Tensor | None
    ) -> tuple[Tensor, State]:
        assert isinstance(state, GatedState)
        assert rotary is None or isinstance(rotary, CosSin)
        if state.transition is not None:
            return super()._decode_step(state, q, k, v, gates, rotary, out)
        options: dict[str, Any] = {"delta": self.delta, "scale": self._scale}
        large = max(self.head_dim, self.value_dim) > dispatch.LARGEST
        if large and dispatch.recording is not None:
            dispatch.record("decode step", dispatch.TORCH, f"a dimension over {dispatch.LARGEST}")
        if not large and why_not_triton(q, k, v, state.kv) is None:
            memory, how = (state.kv, state.log_decay), self._gate_activation()
            return gated_decode_step(StepInputs(q, k, v, rotary, out), gates, memory, how, **options), state
        q, k = apply_rotary(rotary, q, k)
        log_decay, beta = self._visible_gates(gates, k, None)
        # Queries and keys in one tensor, for half the calls.
        q, k = self._keys(torch.cat([q, k], 2)).split_with_sizes([q.shape[2], k.shape[2]], 2) if self.delta else (q, k)
        log_decay, beta = (None if x is None else x.squeeze(1) for x in (log_decay, beta))
        found = gated_step(q.squeeze(1), k.squeeze(1), v.squeeze(1), log_decay, beta, state.kv, **options)
        if state.log_decay is not None and log_decay is not None:
            state.log_decay.add_(log_decay)
        return copy_out(found.to(v.dtype).unsqueeze(1), out), state

    def decode_function(self, state: State, rotary: Sequence[RotaryKind | None]) -> DecodeFunction | None:
        """Return `decode_step` of one sequence on a CPU; see `Mechanism.decode_function`."""
        assert isinstance(state, GatedState)
        if state.transition is not None:
            return None
        kv, total, delta, scale, heads = state.kv, state.log_decay, self.delta, self._scale, self.num_heads
        kind, sizes, activate, keys = rotary[0], [heads, self.num_kv_heads], self._visible_gates, self._keys

        def step(q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, token: CurrentToken) -> Tensor:
            q, k = token.rotate(kind, q, k)
            log_decay, beta = activate(gates, k, None)
            if delta:
                q, k = keys(torch.cat([q, k], 1)).split_with_sizes(sizes, 1)
            if total is not None and log_decay is not None:
                total.add_(log_decay)
            return gated_step(q, k, v, log_decay, beta, kv, delta=delta, scale=scale)

        return step

    def _run(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, GatedState]:
        """Run the kernels or chunks. q, k: What `_queries_and_keys` returns."""
        assert isinstance(state, GatedState)
        log_decay, beta = self._visible_gates(gates, k, _visible(lengths, k))
        memory, values = self._with_transition(state, v)
        out, memory = gated_linear(
            *(q, k, values),
            log_decay=log_decay,
            beta=beta,
            delta=self.delta,
            scale=self._scale,
            state=memory,
        )
        return out[..., : v.shape[3]], self._updated(state, memory, log_decay, k, lengths)

    def _with_transition(self, state: GatedState, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the memory and v; the transition is a memory of further columns, into which nothing is written."""
        if state.transition is None:
            return state.kv, v
        return torch.cat([state.kv, state.transition], -1), F.pad(v, (0, self.head_dim))

    def _updated(
        self, state: GatedState, memory: Tensor, log_decay: Tensor | None, k: Tensor, lengths: Tensor | None
    ) -> GatedState:
        length = state.length + (k.shape[1] if lengths is None else lengths)
        total = None if state.log_decay is None or log_decay is None else state.log_decay + log_decay.sum(1)
        if state.transition is None:
            return replace(state, length=length, kv=memory, log_decay=total)
        kv, transition = memory.split([self.value_dim, self.head_dim], -1)
        return replace(state, length=length, kv=kv, log_decay=total, transition=transition)

    def _visible_gates(self, gates: Tensor | None, k: Tensor, visible: Tensor | None) -> Gates:
        """Activate gates; hidden tokens (B, S) neither fade the memory nor write."""
        if gates is not None and (gates.is_cuda or dispatch.recording is not None):
            why = why_not_activated(gates, k)
            if dispatch.recording is not None:
                dispatch.record("gate activation", "gates", why)
            if why is None:
                return Gates(*activate_gates(gates, self._gate_activation(), visible))
        found = self._gates(gates, k)
        log_decay = None if found.log_decay is None else found.log_decay.clamp(min=LOG_UNDERFLOW[sum_dtype(k)])
        if visible is None:
            return Gates(log_decay, found.beta)
        hidden = ~visible[:, :, None]
        return Gates(
            None if log_decay is None else log_decay.masked_fill(hidden[..., None], 0),
            None if found.beta is None else found.beta.masked_fill(hidden, 0),
        )

    @property
    def _scale(self) -> float:
        return self.head_dim**-0.5


class TimeStep(nn.Module):
    """The time step and decay of Mamba-2: Δ = softplus(x + dt_bias), log α = −exp(A_log) Δ.

    Args:
        num_heads: One A_log each.
        channels: dt_bias per head; 1, or D for a decay per channel.
    """

    def __init__(self, num_heads: int, channels: int = 1) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(num_heads).uniform_(1, 16).log())
        # softplus(dt_bias) is log-uniform from 0.001 to 0.1.
        step = torch.empty(num_heads, channels).uniform_(math.log(1e-3), math.log(1e-1)).exp()
        self.dt_bias = nn.Parameter(step + (-(-step).expm1()).log())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map raw gates (B, S, Hkv, channels) in the dtype of the sums to Δ and log α."""
        step = F.softplus(x + self.dt_bias.to(x.dtype))
        return step, -self.A_log.to(x.dtype).exp()[:, None] * step


def _visible(lengths: Tensor | None, k: Tensor) -> Tensor | None:
    return None if lengths is None else lengths_to_mask(lengths, k.shape[1])
