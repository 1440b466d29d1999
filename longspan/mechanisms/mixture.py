"""A window and a memory in every head: softmax over the last keys, a state of constant size for all before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longspan.layout import lengths_to_mask, zero_fill
from longspan.mechanisms.feature_maps import FusedMap, Hedgehog
from longspan.mechanisms.gated import GatedMechanism, GatedState
from longspan.mechanisms.linear import LinearAttention, LinearState
from longspan.mechanisms.local import LocalAttention, LocalState
from longspan.mechanisms.split import SplitState
from longspan.ops import features as feature_kernels
from longspan.ops import merge as merge_kernels
from longspan.ops.common import dispatch
from longspan.ops.decode import (
    CosSin,
    CurrentToken,
    DecodeFunction,
    RotaryKind,
    StepInputs,
    apply_rotary,
    copy_out,
    mixture_decode_step,
    why_not_triton,
)
from longspan.ops.features import feature_attention
from longspan.ops.gated import gated_linear
from longspan.ops.linear import Sums, accumulate, attend_sums, causal_linear, sum_dtype
from longspan.ops.linear.torch import safe_divide
from longspan.ops.merge import merge_attention
from longspan.ops.window import BLIND, Window, window_attention_with_lse
from longspan.protocol import Mechanism, Rotation, State

HEDGEHOG = {"mechanism": "linear", "feature_map": "hedgehog"}
LARGEST = 128  # dimension of a head in the kernel of a decode step, which holds a memory in registers


class Tokens(NamedTuple):
    """Keys, values and raw gates, of which `visible` (B, S) are real."""

    k: Tensor
    v: Tensor
    gates: Tensor | None
    visible: Tensor | None


@dataclass
class MixtureState(SplitState):
    """The states of the window, which also stores gates, and of the memory of the tokens before it.

    Attributes:
        mechanism: The mechanism, which writes the tokens that leave the window when states are merged.
    """

    mechanism: MixtureAttention = field(repr=False)

    def _merge(self, later: SplitState) -> MixtureState:
        (local, memory), (later_local, later_memory) = _parts(self), _parts(later)
        slot = torch.arange(self.mechanism.window, device=later.length.device)
        visible = self.mechanism._filled(local) & (slot < later.length[:, None])
        memory = self.mechanism._remember(memory, self.mechanism._ordered(local)._replace(visible=visible))
        return replace(self, parts=(local.merge(later_local), memory.merge(later_memory)))


class MixtureAttention(Mechanism):
    """Softmax over the last W keys, with a memory of all keys before them as one more key of the softmax.

        out_i = (Σ_{i−W < j ≤ i} exp(s_ij) v_j + exp(m_i) r_i) / (Σ_{i−W < j ≤ i} exp(s_ij) + exp(m_i))

    r_i is what the memory of the keys j ≤ i − W returns. m_i is the logarithm of its normalizer where it has one
    (`linear`), plus a learned function of the query: mix_weight·q_i + mix_bias. With the map "hedgehog" this is the
    attention of LoLCATs (Zhang et al., 2024). The first W tokens see softmax attention alone. What memories without a
    normalizer return (`decay`, `delta`) is normalized (RMS norm with a learned scale). Bidirectional attention has a
    memory of the tokens before the window and one of those after it.

    Pretrained transformers attend to their first token where there is nothing to read (attention sinks, Xiao et al.,
    2023). A learned sink is a key and a value for each head that takes its place once it has left the window: its score
    is sink_weight·q_i + sink_bias.

    Args:
        num_heads: H.
        head_dim: D.
        num_kv_heads: Hkv, shared by groups of query heads; H unless given.
        value_dim: E; D unless given.
        window: W keys including the query's own.
        memory: {"mechanism": "linear", "decay" or "delta", **options}. Feature maps of `linear` whose keys have a log
            scale ("softmax") are not supported, nor are blind spots.
        scale: Of the scores, 1/√D unless given.
        sink: Whether there is a learned sink beside each memory.
    """

    state_type = MixtureState
    supports_cross = False
    heads_alike = False

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        value_dim: int | None = None,
        window: int = 64,
        memory: str | Mapping[str, Any] = HEDGEHOG,
        scale: float | None = None,
        sink: bool = False,
    ) -> None:
        from longspan.mechanisms import build_mechanism

        super().__init__(num_heads, head_dim, num_kv_heads=num_kv_heads, value_dim=value_dim)
        if not isinstance(window, int) or window < 1:
            raise ValueError(f"window counts the query's own key and must be at least 1, got {window!r}")
        self.window, self.scale = window, scale
        options: dict[str, Any] = {"mechanism": memory} if isinstance(memory, str) else dict(memory)
        if "mechanism" not in options:
            raise ValueError(f'memory is a name or {{"mechanism": name, **options}}, got {memory!r}')
        shape = {"num_kv_heads": self.num_kv_heads, "value_dim": self.value_dim}
        built = build_mechanism(options.pop("mechanism"), num_heads, head_dim, **shape, **options)
        self._check_memory(built)
        self.memory, self.num_gates = built, built.num_gates
        # The ring buffer of the window stores gates beside the values.
        width = self.value_dim + self.num_gates
        self.local = LocalAttention(num_heads, head_dim, num_kv_heads=num_kv_heads, value_dim=width, window=window)
        self.mix_weight = nn.Parameter(torch.zeros(num_heads, head_dim))
        self.mix_bias = nn.Parameter(torch.zeros(num_heads))
        self.sink = sink
        if sink:
            self.sink_weight = nn.Parameter(torch.zeros(num_heads, head_dim))
            self.sink_bias = nn.Parameter(torch.zeros(num_heads))
            self.sink_value = nn.Parameter(torch.zeros(num_heads, self.value_dim))
        if isinstance(built, GatedMechanism):
            self.memory_norm = nn.Parameter(torch.ones(num_heads, self.value_dim))

    @property
    def _scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @staticmethod
    def _check_memory(memory: Mechanism) -> None:
        if isinstance(memory, GatedMechanism):
            return
        if not isinstance(memory, LinearAttention):
            raise ValueError(f"the memory must be linear, decay or delta, got {type(memory).__name__}")
        plain = memory.normalize == "query" and memory.output_scale == 1 and memory.blind_spot == 1
        if not plain or memory.phantom or memory.feature_map.unbounded or memory.feature_map.epsilon:
            raise ValueError(
                'a linear memory needs normalize="query", no output_scale, blind_spot or phantom, and a feature map '
                "without log scale or epsilon: elu, relu or hedgehog"
            )

    def _new_state(
        self, batch_size: int, start: Tensor | None, like: Tensor, max_length: int | None, transition: bool
    ) -> MixtureState:
        options: dict[str, Any] = {"start": start, "device": like.device, "dtype": like.dtype}
        local = self.local.new_state(batch_size, **options)
        memory = self.memory.new_state(batch_size, transition=transition, **options)
        return MixtureState.empty(batch_size, start, like.device, parts=(local, memory), mechanism=self)

    def check_state(self, state: State, batch_size: int, dtype: torch.dtype | None = None) -> None:
        """Raise ValueError unless window and memory can continue from their states."""
        super().check_state(state, batch_size, dtype)
        for part, held in zip((self.local, self.memory), _parts(state), strict=True):
            part.check_state(held, batch_size)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, key_mask: Tensor | None) -> Tensor:
        parts = [self._attend_window(q, k, v, key_mask, causal=False)]
        if self._uses_memory(q):
            parts.append(self._attend_memory(q, Tokens(k, v, gates, key_mask)))
            flipped = Tokens(*(None if x is None else x.flip(1) for x in (k, v, gates, key_mask)))  # type: ignore[arg-type]
            parts.append(tuple(x.flip(1) for x in self._attend_memory(q.flip(1), flipped)))  # type: ignore[arg-type]
        return _join(parts).to(q.dtype)

    def _attend_causal(
        self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> Tensor:
        window = self._attend_window(q, k, v, None, causal=True)
        if not self._uses_memory(q):
            return window[0].to(q.dtype)
        visible = None if lengths is None else lengths_to_mask(lengths, q.shape[1])
        tokens = Tokens(k, v, gates, visible)
        found = None if q.shape[1] <= self.window else self._read_features(q, tokens, None, self.window)
        if found is not None:
            return self._join_features(q, window, found[:2])
        return _join([window, self._attend_memory(q, tokens)]).to(q.dtype)

    def _extend(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, MixtureState]:
        local, memory = _parts(state)
        joined = self._joined(local, k, v, gates, q.dtype)
        leaving = self._leaving(joined, q.shape[1], lengths)
        window = self._attend_window(q, joined.k, joined.v, joined.visible, causal=True)
        found = self._read_features(q, leaving, memory, 0)
        if found is None:
            read, score, memory = self._scan(memory, q, leaving, remembers=state.length > self.window)
            out = _join([window, (read, score)]).to(q.dtype)
        else:
            assert isinstance(memory, LinearState)
            out, memory = self._join_features(q, window, found[:2]), replace(memory, kv=found[2], z=found[3])
        return out, self._updated(state, self._write_local(local, k, v, gates, lengths), memory)

    def _write(
        self, state: State, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> MixtureState:
        local, memory = _parts(state)
        joined = self._joined(local, k, v, gates, local.k.dtype)
        memory = self._remember(memory, self._leaving(joined, k.shape[1], lengths))
        return self._updated(state, self._write_local(local, k, v, gates, lengths), memory)

    def _read(self, state: State, q: Tensor) -> Tensor:
        local, memory = _parts(state)
        held, dtype = self._ordered(local), sum_dtype(q)
        queries = (q.to(dtype) * self._scale).unflatten(2, (self.num_kv_heads, -1))
        hidden = ~self._filled(local)[:, None, None, None]
        scores = torch.einsum("bthgd,bshd->bthgs", queries, held.k.to(dtype)).masked_fill(hidden, BLIND)
        weights = scores.softmax(-1).masked_fill(hidden, 0)
        out = torch.einsum("bthgs,bshe->bthge", weights, held.v.to(dtype)).flatten(2, 3)
        empty = (state.length == 0)[:, None, None]
        window = out, scores.logsumexp(-1).flatten(2, 3).masked_fill(empty, BLIND)
        score, seen = self._score(q, self.mix_weight, self.mix_bias), (state.length > self.window)[:, None, None]
        if isinstance(memory, LinearState):
            assert isinstance(self.memory, LinearAttention)
            query = self.memory._query(q.to(memory.kv.dtype))
            read = attend_sums(query, memory.sums, "query")
            mass = torch.einsum("bthgm,bhm->bthg", query.unflatten(2, (self.num_kv_heads, -1)), memory.z).flatten(2)
            score, seen = score + _log(mass), seen & (mass > 0)
        else:
            read = self._normalized(self.memory._read(memory, q.to(sum_dtype(q))))
        return _join([window, self._with_sink(q, read, score, ~seen)]).to(q.dtype)

    def _decode_step(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, rotary: Rotation, out: Tensor | None
    ) -> tuple[Tensor, State]:
        assert rotary is None or isinstance(rotary, CosSin)
        local, memory = _parts(state)
        if not isinstance(memory, LinearState) or not self._fused_step(q, k, v, local, memory):
            alike = q.dtype == local.k.dtype == memory.kv.dtype if isinstance(memory, LinearState) else False
            if not alike or len(q) > 1 or q.device.type != "cpu" or dispatch.recording is not None:
                return super()._decode_step(state, q, k, v, gates, rotary, out)
            q, k = apply_rotary(rotary, q, k)
            found = self._step_one(state, int(state.length), *(x.squeeze(1) for x in (q, k, v)))
            return copy_out(found.unsqueeze(1), out), state
        assert isinstance(self.memory, LinearAttention)
        phi = self.memory.feature_map
        learned = (phi.query_weight, phi.key_weight) if isinstance(phi, Hedgehog) else (None, None)
        out = mixture_decode_step(
            StepInputs(q, k, v, rotary, out),
            (local.k, local.v),
            (memory.kv, memory.z),
            feature_map=phi.kind if isinstance(phi, FusedMap) else "hedgehog",
            weights=learned,
            mix=(self.mix_weight, self.mix_bias),
            sink=(self.sink_weight, self.sink_bias, self.sink_value) if self.sink else None,
            length=state.length,
            scale=self._scale,
        )
        return out, state

    def decode_function(self, state: State, rotary: Sequence[RotaryKind | None]) -> DecodeFunction | None:
        """Return `decode_step` of one sequence on a CPU; see `Mechanism.decode_function`."""
        kind = rotary[0]
        if not isinstance(_parts(state)[1], LinearState):
            return None

        def step(q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, token: CurrentToken) -> Tensor:
            q, k = token.rotate(kind, q, k)
            return self._step_one(state, token.position, q, k, v)

        return step

    def _step_one(self, state: State, position: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the token of one sequence at a position, in place, and read with its query (1, H, D): (1, H, E)."""
        local, memory = _parts(state)
        assert isinstance(memory, LinearState)
        assert isinstance(self.memory, LinearAttention)
        keys, values, kv, z = local.k[0], local.v[0], memory.kv[0], memory.z[0]
        slot, groups = position % self.window, (self.num_kv_heads, self.num_heads // self.num_kv_heads, -1)
        if position >= self.window:  # The token in this slot leaves the window.
            f = self.memory.feature_map.key(keys[None, None, :, slot])[0].view(self.num_kv_heads, -1)
            kv.addcmul_(f.unsqueeze(2), values.narrow(1, slot, 1))
            z.add_(f)
        keys[:, slot].copy_(k[0])
        values[:, slot].copy_(v[0])
        if position < self.window - 1:
            keys, values = keys.narrow(1, 0, slot + 1), values.narrow(1, 0, slot + 1)
        scores = torch.matmul((q * self._scale).view(groups), keys.mT)  # (Hkv, G, W)
        if position < self.window:
            return torch.matmul(scores.softmax(-1), values).view(1, self.num_heads, -1)
        features = self.memory._query(q.unsqueeze(1)).view(groups)
        mass = torch.matmul(features, z.unsqueeze(2))
        hidden = mass <= 0
        read = [safe_divide(torch.matmul(features, kv), mass)]
        learned = [self._score(q, self.mix_weight, self.mix_bias).view(groups) + _log(mass)]
        if self.sink:
            read.append(self.sink_value.view(groups))
            learned.append(self._score(q, self.sink_weight, self.sink_bias).view(groups))
        weights = torch.cat([scores, *(x.masked_fill(hidden, BLIND) for x in learned)], 2).softmax(2)
        window, *others = weights.split_with_sizes([self.window, *(1 for _ in read)], 2)
        out = torch.matmul(window, values)
        for weight, x in zip(others, read, strict=True):
            out.addcmul_(weight, x)
        return out.view(1, self.num_heads, -1)

    def _fused_step(self, q: Tensor, k: Tensor, v: Tensor, local: LocalState, memory: LinearState) -> bool:
        """Whether the kernel computes a decode step."""
        assert isinstance(self.memory, LinearAttention)
        fits = self._why_no_fused_step(memory) is None
        return fits and why_not_triton(q, k, v, local.k, local.v, memory.kv, memory.z) is None

    def _why_no_fused_step(self, memory: State) -> str | None:
        """Return what the kernel of a decode step lacks; None if nothing."""
        if not isinstance(memory, LinearState):
            return f"the memory {type(self.memory).__name__}; the kernel takes LinearAttention"
        assert isinstance(self.memory, LinearAttention)
        phi = self.memory.feature_map
        if not isinstance(phi, Hedgehog | FusedMap):
            return f"the feature map {type(phi).__name__}, which is not one of the kernels'"
        if max(self.head_dim, self.value_dim) > LARGEST or memory.kv.dtype == torch.float64:
            sizes = f"a head of {self.head_dim} × {self.value_dim} in {memory.kv.dtype}"
            return f"{sizes}; the kernel takes {LARGEST} × {LARGEST} at most in float32"
        return None

    def _why_no_decode_kernel(self, state: State, q: Tensor, k: Tensor, v: Tensor) -> str:
        local, memory = _parts(state)
        why = self._why_no_fused_step(memory) or why_not_triton(q, k, v, local.k, local.v)
        return why or super()._why_no_decode_kernel(state, q, k, v)

    def _attend_window(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, *, causal: bool
    ) -> tuple[Tensor, Tensor]:
        window = Window(0, self.window - 1, 0 if causal else self.window - 1, causal, False)
        return window_attention_with_lse(q, k, v, window, key_mask=visible, scale=self._scale)

    def _uses_memory(self, q: Tensor) -> bool:
        """Whether tokens leave the window, or gradients of the memory's parameters are wanted, which are then zero.

        Without gradients, processes that train on sequences of other lengths would wait for them.
        """
        return q.shape[1] > self.window or (torch.is_grad_enabled() and self.mix_weight.requires_grad)

    def _attend_memory(self, q: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Return what each query (B, T, H, D) reads of the tokens before its window, and its score."""
        T, W = q.shape[1], min(q.shape[1], self.window)
        found = None if T == W else self._read_features(q, tokens, None, W)
        if found is not None:
            return self._scored(q, *found[:2])
        memory = self.memory.new_state(len(q), device=q.device, dtype=q.dtype)
        leaving = Tokens(*(None if x is None else x[:, : T - W] for x in tokens))  # type: ignore[arg-type]
        read, score, _ = self._scan(memory, q[:, W:], leaving, remembers=None)
        early = read.new_zeros(len(q), W, *read.shape[2:])
        return torch.cat([early, read], 1), torch.cat([torch.full_like(early[..., 0], BLIND), score], 1)

    def _scan(self, memory: State, q: Tensor, tokens: Tokens, remembers: Tensor | None) -> tuple[Tensor, Tensor, State]:
        """Read after every token: what query t (B, T, H, D) reads of the memory and tokens 0 … t, and its score.

        Args:
            memory: The memory before them.
            q: The queries, as many as tokens.
            tokens: The tokens that leave the window.
            remembers: (B,) whether the memory holds a token; None: it is empty.

        Returns:
            (B, T, H, E) and (B, T, H) in the dtype of the sums, and the memory after the tokens.
        """
        k, v, gates, visible = tokens
        score, dtype = self._score(q, self.mix_weight, self.mix_bias), sum_dtype(q)
        if isinstance(memory, LinearState):
            assert isinstance(self.memory, LinearAttention)
            narrow = _kernel_dtype(q)
            query = self.memory._query(q.to(narrow))
            f, _, v = self.memory._keys(k, v, visible, narrow)
            # A last column of ones, whose result is the normalizer.
            before = Sums(torch.cat([memory.kv, memory.z[..., None]], -1), memory.z, memory.shift)
            v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
            out, sums = causal_linear(query, f, v, sums=before, normalize=False)
            out = out.to(dtype)
            mass = out[..., -1]
            read = safe_divide(out[..., :-1], mass[..., None])
            memory = replace(memory, kv=sums.kv[..., :-1], z=sums.kv[..., -1], shift=sums.shift)
            return *self._with_sink(q, read, score + _log(mass), mass <= 0), memory
        seen = torch.ones_like(k[:, :, 0, 0], dtype=torch.bool) if visible is None else visible
        seen = seen.cumsum(1) > 0
        seen = seen if remembers is None else seen | remembers[:, None]
        out, memory = self._write_gated(memory, q, tokens)
        return *self._with_sink(q, self._normalized(out.to(dtype)), score, ~seen[:, :, None]), memory

    def _read_features(
        self, q: Tensor, tokens: Tokens, memory: State | None, delay: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Read a linear memory after every token by the kernels, or return None where they do not apply.

        Args:
            q: The queries, as many as tokens.
            tokens: The tokens that are remembered.
            memory: The memory before them; None is empty.
            delay: Tokens up to its own that a query does not see.

        Returns:
            What each query reads (B, T, H, E), the logarithm of its normalizer (B, T, H), and the sums after all.
        """
        if not isinstance(self.memory, LinearAttention) or not isinstance(memory, LinearState | None):
            return None
        phi = self.memory.feature_map
        if not phi.positive or feature_kernels.why_not_triton(q, tokens.v, self.memory.num_features) is not None:
            return None
        f, _, v = self.memory._keys(tokens.k, tokens.v, tokens.visible, q.dtype)
        start = (None, None) if memory is None else (memory.kv, memory.z)
        read, mass, kv, z = feature_attention(self.memory._query(q), f, v, *start, delay=delay)
        return read, mass.transpose(1, 2), kv, z

    def _join_features(self, q: Tensor, window: tuple[Tensor, Tensor], read: tuple[Tensor, Tensor]) -> Tensor:
        """Join a window and what `_read_features` returns."""
        if merge_kernels.why_not_triton(q, window[0]) is not None:
            return _join([window, self._scored(q, *read)]).to(q.dtype)
        weight, bias, value = self.mix_weight[None], self.mix_bias[None], None
        if self.sink:
            weight, bias = torch.cat([weight, self.sink_weight[None]]), torch.cat([bias, self.sink_bias[None]])
            value = self.sink_value
        return merge_attention(*window, *read, q, weight, bias, value)

    def _scored(self, q: Tensor, read: Tensor, mass: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a linear memory returns, and its score, for the logarithm of its normalizer (B, T, H)."""
        hidden = mass == BLIND
        score = self._score(q, self.mix_weight, self.mix_bias) + mass.masked_fill(hidden, 0)
        return self._with_sink(q, read.to(sum_dtype(q)), score, hidden)

    def _remember(self, memory: State, tokens: Tokens) -> State:
        """Return the memory after these tokens."""
        k, v, gates, visible = tokens
        if isinstance(memory, LinearState):
            assert isinstance(self.memory, LinearAttention)
            f, _, v = self.memory._keys(k, v, visible, memory.kv.dtype)
            sums = accumulate(memory.sums, f, v, None)
            return replace(memory, kv=sums.kv, z=sums.z)
        return self._write_gated(memory, k, tokens)[1]

    def _write_gated(self, memory: State, q: Tensor, tokens: Tokens) -> tuple[Tensor, State]:
        """Return what `q` reads after each token of a memory with decay, and the memory after all."""
        assert isinstance(memory, GatedState)
        assert isinstance(self.memory, GatedMechanism)
        k, v, gates, visible = tokens
        if visible is not None:
            k, v = zero_fill(~visible, k, v)
        log_decay, beta = self.memory._visible_gates(gates, k, visible)
        contents, values = self.memory._with_transition(memory, v)
        dtype = _kernel_dtype(q)
        keys = self.memory._keys(k)
        queries = self.memory._keys(q) if q.shape[2] == self.num_heads else keys
        out, contents = gated_linear(
            *(x.to(dtype) for x in (queries, keys, values)),
            log_decay=log_decay,
            beta=beta,
            delta=self.memory.delta,
            scale=self.memory._scale,
            state=contents,
        )
        memory = replace(self.memory._updated(memory, contents, log_decay, k, None), length=memory.length)
        return out[..., : self.value_dim], memory

    def _normalized(self, x: Tensor) -> Tensor:
        """Apply the RMS norm to what a memory without a normalizer returns (B, T, H, E)."""
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.memory_norm.to(x.dtype)

    def _score(self, q: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return weight·q + bias (B, T, H) in the dtype of the sums."""
        dtype = sum_dtype(q)
        return (q.to(dtype) * weight.to(dtype)).sum(-1) + bias.to(dtype)

    def _with_sink(self, q: Tensor, read: Tensor, score: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a memory and the sink beside it return together, and their score, BLIND where hidden."""
        if self.sink:
            scores = torch.stack([score, self._score(q, self.sink_weight, self.sink_bias)])
            weights, score = scores.softmax(0)[..., None], scores.logsumexp(0)
            read = weights[0] * read + weights[1] * self.sink_value.to(read.dtype)
        return read, score.masked_fill(hidden, BLIND)

    def _ordered(self, local: LocalState) -> Tokens:
        """Return the tokens of the window in order (B, W, ·), the last in the last slot."""
        k, v = local.ordered()
        v, gates = v.split([self.value_dim, self.num_gates], -1)
        return Tokens(k, v, gates if self.num_gates else None, None)

    def _joined(self, local: LocalState, k: Tensor, v: Tensor, gates: Tensor | None, dtype: torch.dtype) -> Tokens:
        """Return the tokens of the window and T new ones, W + T in all; slot t leaves the window of new token t."""
        held = self._ordered(local)
        k, v = (torch.cat([x.to(dtype), new.to(dtype)], 1) for x, new in ((held.k, k), (held.v, v)))
        if gates is not None and held.gates is not None:
            gates = torch.cat([held.gates.to(dtype), gates.to(dtype)], 1)
        visible = torch.arange(k.shape[1], device=k.device) >= self.window - local.length[:, None]
        return Tokens(k, v, gates, visible)

    def _leaving(self, joined: Tokens, T: int, lengths: Tensor | None) -> Tokens:
        """Return the tokens that leave the window of T new ones, of which row b has lengths[b]."""
        first = Tokens(*(None if x is None else x[:, :T] for x in joined))  # type: ignore[arg-type]
        assert first.visible is not None
        return first if lengths is None else first._replace(visible=first.visible & lengths_to_mask(lengths, T))

    def _filled(self, local: LocalState) -> Tensor:
        """Return (B, W), which slots of `_ordered` hold a token."""
        return torch.arange(self.window, device=local.end.device) >= self.window - local.length[:, None]

    def _write_local(
        self, local: LocalState, k: Tensor, v: Tensor, gates: Tensor | None, lengths: Tensor | None
    ) -> LocalState:
        v = v if gates is None else torch.cat([v, gates], -1)
        return self.local._write(local, k, v, gates=None, lengths=lengths)

    def _updated(self, state: State, local: LocalState, memory: State) -> MixtureState:
        assert isinstance(state, MixtureState)
        return replace(state, length=local.length, parts=(local, replace(memory, length=local.length)))


def _parts(state: State) -> tuple[LocalState, State]:
    assert isinstance(state, MixtureState)
    local, memory = state.parts
    assert isinstance(local, LocalState)
    return local, memory


def _join(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the mean of outputs (B, T, H, E), weighted by exp of their scores (B, T, H); zero if all are `BLIND`."""
    weights = torch.stack([score for _, score in parts]).softmax(0)
    return (weights[..., None] * torch.stack([out for out, _ in parts])).sum(0)


def _kernel_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype for the kernels, fastest in bfloat16; float16 has too small a range before normalizing."""
    return torch.bfloat16 if x.is_cuda and x.dtype == torch.bfloat16 else sum_dtype(x)


def _log(mass: Tensor) -> Tensor:
    """Return the logarithm, finite where the mass is 0."""
    return mass.masked_fill(mass <= 0, 1).log()
