"""Linformer: softmax attention over R compressed keys and values; the causal form is two passes of linear attention.

    K̃_t = b + Σ_{i ≤ t} e_i k_iᵀ,   Ṽ_t = b' + Σ_{i ≤ t} f_i v_iᵀ,   out_t = softmax(q_t K̃_tᵀ / √D) Ṽ_t

These are prefix sums, so q_t K̃_tᵀ is unnormalized causal linear attention with keys k and values e, and the product
with Ṽ_t another one with queries p, keys f and values v. Bidirectional attention is the case t = n for every query.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.layout import close_holes, lengths_to_mask, zero_fill
from longspan.mechanisms.projection import Projection as Projection
from longspan.mechanisms.write_buffer import PendingTokens
from longspan.ops import compressed
from longspan.ops.common import dispatch
from longspan.ops.compressed import (
    CompressedProblem,
    causal_linformer,
    compressed_attention,
    linformer_attention,
    linformer_layer,
    why_not_triton_causal,
)
from longspan.ops.decode import (
    CosSin,
    CurrentToken,
    DecodeFunction,
    RotaryKind,
    StepInputs,
    compressed_decode_step,
    compressed_step,
    why_not_triton,
)
from longspan.ops.linear import Sums, causal_linear, sum_dtype
from longspan.ops.softmax import attend
from longspan.protocol import AttentionLayer, Mechanism, Rotation, State


@dataclass
class LinformerState(State):
    """The compressed keys and values so far, without their biases."""

    k: Tensor  # (B, Hkv, R, D)
    v: Tensor  # (B, Hkv, R, E)
    pending: tuple[PendingTokens, ...] = ()  # the write buffer of a decode loop, see `decode_state`

    def _merge(self, later: LinformerState) -> LinformerState:
        if self.pending or later.pending:
            raise ValueError("states of a decode loop cannot be merged: call finish_decode first")
        return replace(self, k=self.k + later.k, v=self.v + later.v)


class _Scores(NamedTuple):
    """Causal scores on compressed prefixes."""

    query: Tensor  # (B, T, H, D), scaled
    scores: Tensor  # (B, T, H, R)
    sums: Tensor  # (B, Hkv, D, R) the compressed keys after the last token


class LinformerAttention(Mechanism):
    """Wang et al., 2020, and its causal form: O(n·R) time, a state of R·(D + E) numbers per head.

    Args:
        num_heads: H.
        head_dim: D.
        num_kv_heads: Hkv, shared by groups of query heads; H unless given.
        value_dim: E; D unless given.
        rank: R.
        max_length: Number of tokens the projection covers.
        projection: "learned", "convolution", "random", or a `Projection` to share with other layers.
        share_projection: Whether keys and values have one projection.
        per_head: Whether each head has a projection of its own.
        whole_stretches: See `Projection`.
        periodic: See `Projection`.
        bias: See `Projection`.
        dropout: On the weights over the R compressed keys, in training.
        keep_slots: Whether the positions of a masked bidirectional or written sequence are its slots. By default
            visible tokens are numbered in order, however a sequence is padded. Only older checkpoints need it.
    """

    state_type = LinformerState

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        value_dim: int | None = None,
        rank: int = 256,
        max_length: int = 4096,
        projection: str | Projection = "learned",
        share_projection: bool = False,
        per_head: bool = False,
        whole_stretches: bool = False,
        periodic: bool = False,
        bias: bool = False,
        dropout: float = 0.0,
        keep_slots: bool = False,
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads=num_kv_heads, value_dim=value_dim)
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout}")
        self.dropout, self.keep_slots = dropout, keep_slots
        if isinstance(projection, Projection):
            if projection.num_heads not in (None, self.num_kv_heads):
                raise ValueError(
                    f"the projection has tables for {projection.num_heads} heads, this mechanism {self.num_kv_heads}"
                )
            if projection.kind == "convolution" and {head_dim, self.value_dim} != {projection.kernel.shape[-1]}:
                raise ValueError(
                    f"the projection's convolution takes dim {projection.kernel.shape[-1]}, "
                    f"got head_dim {head_dim} and value_dim {self.value_dim}"
                )
            asked = {"rank": rank, "max_length": max_length, "per_head": per_head, "periodic": periodic, "bias": bias}
            _check_agrees(projection, asked | {"whole_stretches": whole_stretches})
            self.keys = self.values = projection
            self.heads_alike = projection.num_heads is None
            return
        if share_projection and projection == "convolution" and self.value_dim != head_dim:
            raise ValueError(f"a shared convolution needs value_dim ({self.value_dim}) = head_dim ({head_dim})")

        def build(dim: int) -> Projection:
            return Projection(
                rank,
                max_length,
                kind=projection,
                num_heads=self.num_kv_heads if per_head else None,
                dim=dim if projection == "convolution" else None,
                whole_stretches=whole_stretches,
                periodic=periodic,
                bias=bias,
            )

        self.keys = build(head_dim)
        self.values = self.keys if share_projection else build(self.value_dim)
        self.heads_alike = not per_head

    @property
    def rank(self) -> int:
        """R; for a convolution the number of its windows, which may be less than the rank given."""
        return self.keys.rank

    def _new_state(
        self, batch_size: int, start: Tensor | None, like: Tensor, max_length: int | None, transition: bool
    ) -> LinformerState:
        like = like.to(sum_dtype(like))
        dims = self.head_dim, self.value_dim
        k, v = (like.new_zeros(batch_size, self.num_kv_heads, self.rank, dim) for dim in dims)
        return LinformerState.empty(batch_size, start, like.device, k=k, v=v)

    def check_length(self, length: int) -> None:
        """Raise ValueError if the projection does not cover `length` tokens."""
        self.keys.check_length(length)

    def attend_layer(
        self, layer: AttentionLayer, x: Tensor, source: Tensor, *, key_mask: Tensor | None
    ) -> Tensor | None:
        """Compute a whole layer in one kernel, or compress the source before projecting it, where that saves work."""
        if not layer.plain_keys or 0 in (*x.shape[:2], source.shape[1]):
            return None
        if layer.plain_output and source is x and key_mask is None:
            out = self._fused_layer(layer, x)
            if out is not None:
                return out
        weight = layer.to_kv.weight
        if not self.compresses_first(source.shape[2], len(weight)):
            return None
        q = layer.project_queries(x)
        return layer.project_output(
            x, self.attend_source(q, source, weight, shared_kv=layer.shared_kv, key_mask=key_mask)
        )

    def attend_source(
        self, q: Tensor, x: Tensor, weight: Tensor, *, shared_kv: bool = False, key_mask: Tensor | None = None
    ) -> Tensor:
        """Compute bidirectional attention with keys and values x Wᵀ, compressing x first: Eᵀ(x Wᵀ) = (Eᵀ x) Wᵀ.

        Args:
            q: (B, T, H, D) queries.
            x: (B, S, dim), hidden tokens zero.
            weight: W (Hkv·(D + E), dim), or (Hkv·D, dim) with shared_kv.
            shared_kv: Whether values are the keys.
            key_mask: (B, S) bool, True = keep.
        """
        self._check_query(q)
        self.check_length(x.shape[1])
        with torch.autocast(x.device.type, enabled=False):
            source, width = x.to(q.dtype)[:, :, None], self.num_kv_heads * self.head_dim
            key_mask, source = self._number_tokens(key_mask, source)
            short = self.keys.compress(source).squeeze(1)  # (B, R, dim)
            other = short if self.values is self.keys else self.values.compress(source).squeeze(1)
            weight = weight.to(short.dtype)
            if other is not short:
                k, v = F.linear(short, weight[:width]), F.linear(other, weight[:width] if shared_kv else weight[width:])
            elif shared_kv:
                k = v = F.linear(short, weight)
            else:
                k, v = F.linear(short, weight).split([width, len(weight) - width], 2)
            keys = k.unflatten(2, (self.num_kv_heads, -1)).transpose(1, 2)
            values = keys if k is v else v.unflatten(2, (self.num_kv_heads, -1)).transpose(1, 2)
            return self._attend_compressed(q, keys, values, x.shape[1], key_mask)

    def _fused_layer(self, layer: AttentionLayer, x: Tensor) -> Tensor | None:
        """Compute a self-attention layer of plain projections in one kernel, or return None where it does not apply."""
        table = self.keys
        if table is not self.values or self._why_no_table_product() is not None:
            return None
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        queries, keys, out = (map.weight for map in (layer.to_q, layer.to_kv, layer.to_out))
        problem = self._problem(layer.shared_kv)
        if compressed.why_not_triton(x, dtype, problem) is not None or self.compresses_first(x.shape[2], len(keys)):
            return None
        self.check_length(x.shape[1])
        return linformer_layer(x, queries, keys, table.table, out, layer.to_out.bias, problem, dtype)

    def _why_no_table_product(self) -> str | None:
        """Return the options that make compression more than products with tables; None without them."""
        keys = self.keys
        options = {
            "a convolution": not (keys.is_table and self.values.is_table),
            "a bias": keys.bias is not None,
            "a periodic table": keys.periodic,
            "dropout": self.training and self.dropout > 0,
        }
        return ", ".join(name for name, given in options.items() if given) or None

    def _problem(self, shared_kv: bool = False) -> CompressedProblem:
        dims = self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim
        return CompressedProblem(*dims, self.rank, shared_kv)

    def compresses_first(self, dim: int, width: int) -> bool:
        """Whether `attend_source` costs less, for tokens `dim` wide and keys and values `width` wide in all."""
        keys, values = self.keys, self.values
        if not (keys.is_table and values.is_table):
            return False
        return (1 if keys is values else 2) * keys.rank * dim <= (keys.rank + dim) * width

    def compressed_weights(self, q: Tensor, k: Tensor, *, causal: bool, key_mask: Tensor | None) -> Tensor:
        """Return the weights of queries on the compressed keys: (B, H, T, R), detached."""
        # out = p (Ṽ + b) is p itself where values are zero and b is the identity.
        probe = copy.copy(self)
        probe._modules, probe.value_dim = dict(self._modules), self.rank
        with torch.random.fork_rng(devices=[]):
            probe.values = Projection(self.rank, 1, periodic=True, bias=True).to(q)
        probe.values.bias = nn.Parameter(torch.eye(self.rank, dtype=q.dtype, device=q.device))
        with torch.no_grad():
            values = q.new_zeros(*k.shape[:3], self.rank)
            return probe(q, k, values, causal=causal, key_mask=key_mask).transpose(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, key_mask: Tensor | None) -> Tensor:
        self.check_length(k.shape[1])
        why = "a mask" if key_mask is not None else self._why_no_table_product()
        if why is None and not q.dtype == k.dtype == v.dtype:
            why = "q, k and v of several dtypes"
        if why is not None and dispatch.recording is not None:
            dispatch.record("compression of keys and values", dispatch.TORCH, why)
        if why is None and compressed.why_not_triton(q, q.dtype, self._problem()) is None:
            return linformer_attention(q, k, v, self.keys.table, self.values.table)
        key_mask, k, v = self._number_tokens(key_mask, k, v)
        keys = self.keys.compress(k)
        # Keys that are their own values are compressed once.
        same = k is v and self.values is self.keys
        values = keys if same else self.values.compress(v)
        return self._attend_compressed(q, keys, values, k.shape[1], key_mask)

    def _number_tokens(self, key_mask: Tensor | None, *xs: Tensor) -> tuple[Any, ...]:
        """Return xs (B, S, ·, ·) with every token in the slot of its position, and the mask of these slots."""
        if key_mask is None or self.keep_slots:
            return key_mask, *xs
        lengths, *moved = close_holes(key_mask, *xs)
        return lengths_to_mask(lengths, key_mask.shape[1]), *moved

    def _take_visible(self, key_mask: Tensor, *xs: Tensor | None) -> tuple[Any, ...]:
        if not self.keep_slots:
            return super()._take_visible(key_mask, *xs)
        reach = _reach(key_mask)
        readable = not torch.compiler.is_compiling() and key_mask.device.type == "cpu"
        if readable and not torch.equal(self.keys.live(reach), self.keys.live_under(key_mask)):
            raise ValueError(
                f"with keep_slots=True a window of {self.keys.stride} tokens that are all hidden, before one that is "
                "not, cannot be written: pad on the right, or build the mechanism without keep_slots"
            )
        return reach, *zero_fill(~key_mask, *xs)

    def _attend_compressed(self, q: Tensor, k: Tensor, v: Tensor, length: int, key_mask: Tensor | None) -> Tensor:
        """Attend over keys (B, Hkv, R, D) and values (B, Hkv, R, E) compressed from `length` tokens under key_mask."""
        if key_mask is None and not self.keys.periodic and self.keys.kind != "convolution":
            return self._softmax_over(q, k, v, None, None)
        if key_mask is None:
            reach = torch.full_like(q[:, 0, 0, 0], length, dtype=torch.int64)
            return self._softmax_over(q, k, v, self.keys.live(reach), reach)
        return self._softmax_over(q, k, v, self.keys.live_under(key_mask), _reach(key_mask))

    def _decode_step(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, rotary: Rotation, out: Tensor | None
    ) -> tuple[Tensor, State]:
        assert isinstance(state, LinformerState)
        single = len(q) == 1 and self.keys.bias is None and (q.device.type, q.dtype) == ("cpu", state.k.dtype)
        if self._why_eager_steps() is not None or not (state.pending or single):
            return super()._decode_step(state, q, k, v, gates, rotary, out)
        assert rotary is None or isinstance(rotary, CosSin)
        if not state.pending:
            self.check_length(int(state.length) + 1)
        out = compressed_decode_step(
            StepInputs(q, k, v, rotary, out),
            (state.k, state.v),
            (self.keys.table, self.values.table),
            length=state.length,
            biases=(self.keys.bias, self.values.bias),
            periodic=self.keys.periodic,
            pending=next(((held.k, held.v, held.short_k, held.short_v) for held in state.pending), None),
        )
        return out, state

    def decode_function(self, state: State, rotary: Sequence[RotaryKind | None]) -> DecodeFunction | None:
        """Return `decode_step` of one sequence on a CPU; see `Mechanism.decode_function`."""
        assert isinstance(state, LinformerState)
        if self._why_eager_steps() is not None or self.keys.bias is not None:
            return None
        kind, held, check = rotary[0], (state.k, state.v), self.check_length
        tables = self.keys.table, self.values.table

        def step(q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, token: CurrentToken) -> Tensor:
            check(token.position + 1)
            q, k = token.rotate(kind, q, k)
            given = q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1)
            return compressed_step(*given, held, tables, token.position).squeeze(1)

        return step

    def _why_eager_steps(self) -> str | None:
        """Return what the kernels of a decode step lack; None if nothing."""
        if self.keys.kind == "convolution":
            return "a convolution"
        if self.training and self.dropout > 0:
            return "dropout"
        D, E, largest = self.head_dim, self.value_dim, dispatch.LARGEST
        return f"head or value dimension ({D}, {E}) is over {largest}" if max(D, E) > largest else None

    def _why_no_decode_kernel(self, state: State, q: Tensor, k: Tensor, v: Tensor) -> str:
        assert isinstance(state, LinformerState)
        why = self._why_eager_steps() or why_not_triton(state.k)
        return why or super()._why_no_decode_kernel(state, q, k, v)

    def decode_state(self, state: State, dtype: torch.dtype) -> State:
        """Return the state with a write buffer beside the compressed keys and values, where the kernels take it."""
        assert isinstance(state, LinformerState)
        if self._why_eager_steps() is not None or why_not_triton(state.k) is not None:
            return state
        state = replace(state, k=state.k.contiguous(), v=state.v.contiguous())
        return replace(state, pending=(PendingTokens.of(state.length, state.k, state.v, dtype),))

    def finish_decode(self, state: State) -> State:
        """Return the state with its pending tokens compressed."""
        assert isinstance(state, LinformerState)
        for buffer in state.pending:
            k, v, position = buffer.flush()
            k, v = self.keys.compress(k, position), self.values.compress(v, position)
            state = replace(state, k=state.k + k, v=state.v + v, pending=())
        return state

    def _read(self, state: State, q: Tensor) -> Tensor:
        assert isinstance(state, LinformerState)
        live = self.keys.live(state.length, state.start)
        return self._softmax_over(q, state.k, state.v, live, state.end)

    def _write(
        self, state: State, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> LinformerState:
        assert isinstance(state, LinformerState)
        self._check_end(state.end, k.shape[1], lengths)
        # Hidden keys and values are zero, and so are their outer products.
        keys = state.k + self.keys.compress(k, state.end)
        values = state.v + self.values.compress(v, state.end)
        return replace(state, length=state.length + (k.shape[1] if lengths is None else lengths), k=keys, v=values)

    def _attend_causal(
        self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> Tensor:
        self.check_length(k.shape[1])
        if self._fused_causal(q, k, v):
            return self._extend_fused(None, None, q, k, v)[0]
        state = self._new_state(len(q), None, q[:0], None, False)
        return self._from_prefixes(state, None, q, k, v)[0]

    def _extend(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, LinformerState]:
        assert isinstance(state, LinformerState)
        if q.shape[1] == 1:
            state = self._write(state, k, v, gates=None, lengths=lengths)
            return self._read(state, q), state
        self._check_end(state.end, k.shape[1], lengths)
        extend = self._extend_fused if self._fused_causal(q, k, v) else self._from_prefixes
        out, keys, values = extend(state, state.end, q, k, v)
        length = state.length + (k.shape[1] if lengths is None else lengths)
        return out, replace(state, length=length, k=keys, v=values)

    def _defer(
        self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None, start: Tensor | None
    ) -> Callable[[State], Tensor]:
        """Compute the scores of the new tokens; those of the past are added to them before the softmax."""
        begin = torch.zeros_like(q[:, 0, 0, 0], dtype=torch.int64) if start is None else start
        self._check_end(begin, k.shape[1], lengths)
        empty = self._new_state(len(q), None, q[:0], None, False)
        scored = self._scores(empty, begin, q, k)

        def finish(past: State) -> Tensor:
            assert isinstance(past, LinformerState)
            query = scored.query.unflatten(2, (self.num_kv_heads, -1)).to(past.k.dtype)
            more = torch.einsum("bthgd,bhrd->bthgr", query, past.k).flatten(2, 3)
            scores = scored._replace(scores=scored.scores + more.to(scored.scores.dtype))
            return self._weigh(past, begin, scores, v)[0].to(q.dtype)

        return finish

    def _fused_causal(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether the kernels compute causal attention without storing the scores."""
        why = why_not_triton_causal(q, k, v, self.rank)
        if self.keys.kind == "convolution":
            why = "a convolution"
        elif self.training and self.dropout > 0:
            why = "dropout"
        elif self.keys.periodic and self.keys.bias is not None:
            why = "a periodic table with a bias"
        if dispatch.recording is not None:
            dispatch.record("causal attention to compressed keys", "causal", why)
        return why is None

    def _extend_fused(
        self, state: LinformerState | None, position: Tensor | None, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`_from_prefixes` by the kernels; None is the state without tokens."""
        tables = [projection.table_from(k.shape[1], position) for projection in (self.keys, self.values)]
        starts: list[Tensor | None] = [None, None] if state is None else [state.k, state.v]
        biases = self.keys.bias, self.values.bias
        for i, projection in enumerate((self.keys, self.values)):
            if projection.bias is not None:
                bias = projection.constant(self.num_kv_heads, (self.head_dim, self.value_dim)[i]).to(sum_dtype(q))
                start = starts[i]
                starts[i] = bias.expand(len(q), -1, -1, -1) if start is None else start + bias
        wraps = self.keys.periodic and (position is not None or k.shape[1] > self.keys.max_length)
        query = self.keys.averaged(q, _periods(position, q)) if wraps else q
        out, *after = causal_linformer(query, k, v, *tables, *starts)
        out = self.values.averaged(out, _periods(position, v)) if wraps else out
        keys, values = (x if bias is None else x - bias.to(x.dtype) for x, bias in zip(after, biases, strict=True))
        return out, keys, values

    def _from_prefixes(
        self, state: LinformerState, position: Tensor | None, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend over each query's own compressed prefix; also return the keys and values after the last token.

        position: (B,) of the first new token; None is 0.
        """
        scored = self._scores(state, position, q, k)
        out, sums_v = self._weigh(state, position, scored, v)
        return out.to(q.dtype), scored.sums.mT, sums_v

    def _scores(self, state: LinformerState, position: Tensor | None, q: Tensor, k: Tensor) -> _Scores:
        """Compute the scores of queries on the compressed prefixes of k after those of a state."""
        # The kernels sum bfloat16 in float32 and round their results to bfloat16.
        dtype = q.dtype if q.is_cuda and q.dtype == torch.bfloat16 else state.k.dtype
        e, keys = self.keys.factors(k.to(dtype), position)
        e = e.expand(*k.shape[:3], -1)
        q = q.to(dtype) * self.head_dim**-0.5
        # Queries and outputs are narrower than the R scores, so the factors of tokens are applied to them.
        query = self.keys.averaged(q, _periods(position, q))
        scores, sums = _prefix_products(query, keys, e, state.k.mT)
        if self.keys.bias is not None:
            scores = scores + torch.einsum("bthd,hrd->bthr", q, self.keys.constant(q.shape[2], self.head_dim).to(dtype))
        return _Scores(query, scores, sums)

    def _weigh(
        self, state: LinformerState, position: Tensor | None, scored: _Scores, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Weigh the compressed prefixes of v after those of a state; also return the values after the last token."""
        scores, dtype = scored.scores, scored.query.dtype
        f, values = self.values.factors(v.to(dtype), position)
        f = f.expand(*v.shape[:3], -1)
        if self.keys.kind == "convolution":
            # A query sees at least itself, so one compressed key is live.
            length = state.length[:, None] + torch.arange(1, scores.shape[1] + 1, device=v.device)  # (B, T)
            start = None if state.start is None else state.start[:, None]
            scores = scores.masked_fill(~self.keys.live(length, start)[:, :, None], float("-inf"))
        p = F.dropout(scores.softmax(-1), self.dropout, self.training)
        out, sums = _prefix_products(p, f, values, state.v)
        out = self.values.averaged(out, _periods(position, v))
        if self.values.bias is not None:
            out = out + torch.einsum("bthr,hre->bthe", p, self.values.constant(p.shape[2], self.value_dim).to(dtype))
        return out, sums

    def _softmax_over(self, q: Tensor, k: Tensor, v: Tensor, live: Tensor | None, length: Tensor | None) -> Tensor:
        """Attend over compressed k (B, Hkv, R, D), v (B, Hkv, R, E), of which live (B, R) hold a token.

        length: (B,) tokens since position 0, None where nothing depends on it.
        """

        def finished(projection: Projection, x: Tensor) -> Tensor:
            if length is not None:
                x = projection.averaged(x, length[:, None, None, None])
            return x if projection.bias is None else x + projection.bias.to(x.dtype)

        keys = finished(self.keys, k)
        values = keys if k is v and self.keys is self.values else finished(self.values, v)
        if live is not None and self.keys.kind != "convolution":
            # With a table all are live or none: zero values are faster than a mask.
            values, live = values.masked_fill(~live[:, None, :, None], 0), None
        dropout = self.dropout if self.training else 0.0
        if live is None and not dropout and compressed.why_not_triton(q, q.dtype, self._problem()) is None:
            return compressed_attention(q, keys, values)
        shared, keys = values is keys, keys.to(q.dtype)
        values = keys if shared else values.to(q.dtype)
        mask, grouped = None if live is None else live[:, None, None], self.num_heads > self.num_kv_heads
        return attend(q.transpose(1, 2), keys, values, mask, grouped=grouped, dropout=dropout).transpose(1, 2)

    def _check_end(self, position: Tensor, tokens: int, lengths: Tensor | None) -> None:
        if torch.compiler.is_compiling() or position.device.type != "cpu" or position.numel() == 0:
            return  # Reading lengths would synchronize with the device; `new_state(max_length=…)` checks beforehand.
        self.check_length(int((position + (tokens if lengths is None else lengths)).max()))


def _periods(position: Tensor | None, x: Tensor) -> Tensor:
    """Return the number of positions up to each token of x (B, T, ·, ·), the first at `position` (B,): (B, T, 1, 1)."""
    length = torch.arange(1, x.shape[1] + 1, device=x.device)[None]
    return (length if position is None else position[:, None] + length)[:, :, None, None]


def _reach(key_mask: Tensor) -> Tensor:
    """Return the number of slots up to the last visible one of each row: (B,)."""
    return (torch.arange(1, key_mask.shape[1] + 1, device=key_mask.device) * key_mask).amax(1)


def _check_agrees(projection: Projection, asked: dict[str, int]) -> None:
    """Raise ValueError if an option contradicts the Projection that was given; repeating it is allowed."""
    has = {
        "rank": projection.rank,
        "max_length": projection.max_length,
        "per_head": projection.num_heads is not None,
        "whole_stretches": projection.whole_stretches,
        "periodic": projection.periodic,
        "bias": projection.bias is not None,
    }
    defaults = LinformerAttention.__init__.__kwdefaults__ or {}
    for option, value in asked.items():
        # A convolution may have fewer windows than the rank it was built with.
        if value not in (defaults[option], has[option], projection.asked_rank if option == "rank" else has[option]):
            raise ValueError(
                f"{option}={value} contradicts the projection, which has {option}={has[option]}; build it with that, "
                f"or leave {option} out"
            )


def _prefix_products(
    q: Tensor, k: Tensor, v: Tensor, before: Tensor, largest: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return Σ_{j ≤ i} (q_i·k_j) v_j (B, T, H, ·), given the sums Σ k vᵀ before, and the sums after the last token.

    largest: The number of columns that are computed at once; None is all, but on CUDA as many as kernels take.
    """
    most = largest or (dispatch.LARGEST if q.is_cuda else max(k.shape[3], v.shape[3]))
    if v.shape[3] > most:
        columns = zip(v.split(most, 3), before.split(most, 3), strict=True)
        outs, sums = zip(*(_prefix_products(q, k, x, held, most) for x, held in columns), strict=True)
        return torch.cat(outs, 3), torch.cat(sums, 3)
    if k.shape[3] > most:
        rows = zip(q.split(most, 3), k.split(most, 3), before.split(most, 2), strict=True)
        outs, sums = zip(*(_prefix_products(x, y, v, held, most) for x, y, held in rows), strict=True)
        return torch.stack(outs).sum(0), torch.cat(sums, 2)
    given = Sums(before, before[..., 0], before[:, :, 0, 0])
    out, after = causal_linear(q, k, v, sums=given, normalize=False)
    return out, after.kv
