"""Linear attention: φ(q)·Σφ(k)vᵀ, normalized; time linear in the sequence, memory of constant size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspan.layout import Packing, lengths_to_mask, zero_fill
from longspan.mechanisms.feature_maps import FEATURE_MAPS, Favor, FusedMap, Hedgehog
from longspan.mechanisms.write_buffer import FEATURE_SLOTS, PendingFeatures, pending_slots
from longspan.ops.common import dispatch
from longspan.ops.common.torch_private import functorch_active
from longspan.ops.decode import (
    CosSin,
    CurrentToken,
    DecodeFunction,
    RotaryKind,
    StepInputs,
    linear_decode_step,
    linear_step,
    why_not_triton,
)
from longspan.ops.features import feature_attention
from longspan.ops.features import why_not_triton as why_not_features
from longspan.ops.linear import (
    FLOOR,
    LinearInputs,
    Sums,
    accumulate,
    attend_prefixes,
    attend_sums,
    bidirectional_linear,
    causal_linear,
    causal_linear_buckets,
    causal_linear_out,
    choose_algorithm,
    no_sums,
    sum_dtype,
    sum_products,
    why_not_triton_bidirectional,
)
from longspan.ops.linear.torch import running_max, safe_divide
from longspan.ops.normalizer import normalized_features
from longspan.ops.normalizer import why_not_triton as why_not_normalizer
from longspan.ops.shift import shift_left, shift_right
from longspan.protocol import FeatureMap, Mechanism, Rotation, State
from longspan.utils import check_integer, choose

# Features of queries per span of tokens on a CPU, where tensors that leave the cache cost page faults as well; a span
# is a multiple of MIN_SPAN tokens. All but the last MAX_SAVED spans are recomputed in the backward pass.
MAX_FEATURES, MIN_SPAN, MAX_SAVED = 1 << 20, 512, 32
# Up to this many features and values the kernels of `causal_linear` hold the state of a head in registers.
FUSED_FEATURES = 128


@dataclass
class LinearState(State):
    """Σφ(k)vᵀ, Σφ(k) and their log scale; Σ[v, 1] for maps with an epsilon; sums of the last bucket of a blind spot."""

    kv: Tensor  # (B, Hkv, M, E)
    z: Tensor  # (B, Hkv, M)
    shift: Tensor  # (B, Hkv)
    total: Tensor | None = None  # (B, Hkv, E + 1): Σ[v, 1]
    open_kv: Tensor | None = None  # as kv and z, of the bucket that holds the last token; same shift
    open_z: Tensor | None = None
    bucket: int = 1  # tokens in a bucket of the blind spot
    pending: tuple[PendingFeatures, ...] = ()  # the write buffer of a decode loop, see `decode_state`

    @property
    def sums(self) -> Sums:
        return Sums(self.kv, self.z, self.shift)

    @property
    def open(self) -> Sums | None:
        return None if self.open_kv is None or self.open_z is None else Sums(self.open_kv, self.open_z, self.shift)

    def _merge(self, later: LinearState) -> LinearState:
        if self.pending or later.pending:
            raise ValueError("states of a decode loop cannot be merged: call finish_decode first")
        shift = torch.maximum(self.shift, later.shift)
        # A row without tokens may hold a phantom key, which the row after it, at position 0 too, then holds as well.
        used = self.length > 0
        mine, theirs = _rescaled(self.sums, shift, ~used), _rescaled(later.sums, shift)
        merged = replace(self, kv=mine.kv + theirs.kv, z=mine.z + theirs.z, shift=shift)
        if self.total is not None and later.total is not None:
            merged = replace(merged, total=self.total.masked_fill(~used[:, None, None], 0) + later.total)
        if self.open is None or later.open is None:
            return merged
        # The earlier open bucket is closed, or is also that of the later state's last token.
        last = (self.end + later.length - 1) // self.bucket
        closed = (self.end - 1) // self.bucket < last
        mine, theirs = _rescaled(self.open, shift), _rescaled(later.open, shift)
        sums, still_open = _add_rows(merged.sums, mine, closed), _add_rows(theirs, mine, ~closed)
        return replace(merged, kv=sums.kv, z=sums.z, open_kv=still_open.kv, open_z=still_open.z)


class LinearAttention(Mechanism):
    """out_i = φ(q_i)·Σφ(k_j)v_jᵀ / φ(q_i)·Σφ(k_j): O(n·M·E) time, a state of M·(E + 1) numbers per head.

    Args:
        num_heads: H.
        head_dim: D.
        num_kv_heads: Hkv, shared by groups of query heads; H unless given.
        value_dim: E; D unless given.
        feature_map: "elu", "softmax", "relu", "identity", "hedgehog" (learned, see `Hedgehog`) or a `FeatureMap`.
        normalize: "query" divides as above; "feature" makes each feature's weights over the keys sum to one (Efficient
            Attention); "none" does not divide.
        output_scale: Factor of the output.
        blind_spot: Bucket size: causal queries see complete buckets before their own only; 1 is no blind spot. With
            one, there is no cross-attention.
        first_bucket: What queries of the first bucket see: "causal", the tokens up to their own, or "zero", nothing.
        phantom: Each feature of a key at position −1 with a value of zero, which causal queries also see; 0 is none.
            performer-pytorch trained with one. With one, there is no cross-attention.
    """

    state_type = LinearState

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        value_dim: int | None = None,
        feature_map: str | FeatureMap = "elu",
        normalize: str = "query",
        output_scale: float = 1.0,
        blind_spot: int = 1,
        first_bucket: str = "causal",
        phantom: float = 0.0,
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads=num_kv_heads, value_dim=value_dim)
        if feature_map == "hedgehog":
            feature_map = Hedgehog(num_heads, self.num_kv_heads, head_dim)
            self.heads_alike = False
        elif not isinstance(feature_map, FeatureMap):
            feature_map = FEATURE_MAPS[choose("feature_map", feature_map, (*FEATURE_MAPS, "hedgehog"))]()
        self.feature_map = feature_map
        self.num_features = feature_map.num_features(head_dim)
        self.normalize = choose("normalize", normalize, ("query", "feature", "none"))
        self.output_scale = output_scale
        self.blind_spot = blind_spot
        self.first_bucket = choose("first_bucket", first_bucket, ("causal", "zero"))
        check_integer("blind_spot", blind_spot, 1)
        if feature_map.unbounded and normalize == "none":
            raise ValueError(
                f"{type(feature_map).__name__} features are exponentials, bounded only once divided: "
                'use normalize="query" or "feature"'
            )
        if feature_map.epsilon and (normalize != "query" or blind_spot > 1):
            raise ValueError('a feature map with an epsilon needs normalize="query" and blind_spot=1')
        self.phantom = phantom
        if phantom < 0 or (phantom and (normalize != "query" or blind_spot > 1)):
            raise ValueError(
                f'a phantom must not be negative, and needs normalize="query" and blind_spot=1, got {phantom}'
            )
        if phantom and isinstance(feature_map, Favor) and not feature_map.epsilon:
            raise ValueError(
                f"{type(feature_map).__name__} features without an epsilon have no fixed scale that a phantom of "
                f"{phantom} could have"
            )
        # Whether `linear_decode_step` computes a step, and `causal_linear` causal attention of many tokens.
        self._one_step = self._why_in_full() is None
        self._one_pass = self._one_step and normalize != "feature"
        # A bidirectional query sees neither, but one that reads what was written does.
        self.supports_cross = blind_spot == 1 and not phantom

    def _new_state(
        self, batch_size: int, start: Tensor | None, like: Tensor, max_length: int | None, transition: bool
    ) -> LinearState:
        wide = self.feature_map.wide and self.normalize == "feature"
        like = like.to(torch.float64 if wide else sum_dtype(like))
        sums = no_sums(batch_size, self.num_kv_heads, self.num_features, self.value_dim, like)
        contents: dict[str, Any] = {"bucket": self.blind_spot, **sums._asdict()}
        # The phantom key is at position −1: only states that start at 0 hold it, so that merging counts it once.
        phantom: Tensor | float = self.phantom
        if phantom and start is not None:
            phantom = like.new_tensor(self.phantom) * (start == 0)[:, None, None]
        if self.feature_map.epsilon:
            # Each key adds an epsilon: the phantom counts as a fraction of a key without features.
            total = contents["total"] = like.new_zeros(batch_size, self.num_kv_heads, self.value_dim + 1)
            total[..., -1:] = phantom / self.feature_map.epsilon
        elif self.phantom:
            contents["z"] = sums.z + phantom
            if self.feature_map.unbounded:
                contents["shift"] = torch.zeros_like(sums.shift)  # The phantom is a feature itself, not its logarithm.
        if self.blind_spot > 1:
            contents |= {"open_kv": sums.kv.clone(), "open_z": sums.z.clone()}
        return LinearState.empty(batch_size, start, like.device, **contents)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, key_mask: Tensor | None) -> Tensor:
        if self._fused(q, k, v):
            return self._attend_fused(q, k, v, key_mask=key_mask)
        if self._feature_kernels(q):
            query, key = self._features(q, k)
            if self._why_not_bidirectional(query, key, v) is None:
                options: dict[str, Any] = {"feature_map": "identity", "normalize": self.normalize}
                return self._scaled(bidirectional_linear(query, key, v, key_mask=key_mask, **options))
        if self.normalize == "feature":
            weights = self.feature_map.shares(k.to(sum_dtype(k)), key_mask)
            kv = sum_products(weights, v.to(weights.dtype))
            query = self.feature_map.query(q.to(weights.dtype))
            return self._scaled(attend_sums(query, Sums(kv, kv[..., 0], kv[..., 0, 0]), "none").to(q.dtype))
        f, scale, v = self._keys(k, v, key_mask, sum_dtype(k))
        sums = no_sums(q.shape[0], self.num_kv_heads, self.num_features, self.value_dim, f)
        total = self._with_count(v, key_mask).sum(1) if self.feature_map.epsilon else None
        return self._from_sums(q, accumulate(sums, f, v, scale), total)

    def _attend_ragged(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        gates: Tensor | None,
        causal: bool,
        key_mask: Tensor | None,
        packing: Packing | None,
        key_packing: Packing | None,
    ) -> Tensor | None:
        if causal or not self._fused(q, k, v):
            return None
        # The kernels read no hidden slot: nothing has to be zero-filled.
        offsets, key_offsets = (None if p is None else p.offsets for p in (packing, key_packing))
        return self._attend_fused(q, k, v, key_mask=key_mask, offsets=offsets, key_offsets=key_offsets)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether the kernels compute bidirectional attention, features included."""
        if self._feature_kernels(q):
            return False
        return self._why_not_bidirectional(q, k, v, self.feature_map) is None

    def _feature_kernels(self, q: Tensor) -> bool:
        """Whether the kernels of the sums take features that are computed first, in the dtype of the inputs."""
        phi = self.feature_map
        if isinstance(phi, FusedMap) or not q.is_cuda:
            return False
        few = self.num_features <= dispatch.LARGEST and q.dtype in (torch.bfloat16, torch.float16)
        return isinstance(phi, Hedgehog) or (few and phi.positive and not (phi.unbounded or self.phantom))

    def _takes_features(self, q: Tensor, v: Tensor) -> bool:
        """Whether kernels compute normalized causal attention with features that are computed first."""
        if self.normalize != "query" or self.blind_spot > 1 or not self._feature_kernels(q):
            return False
        if max(self.num_features, self.value_dim) <= FUSED_FEATURES:
            return False
        return why_not_features(q, v, self.num_features) is None

    def _features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return features in the dtype of the inputs; those without a kernel are computed in that of the sums."""
        if isinstance(self.feature_map, Hedgehog):
            return self._query(q), self.feature_map.key(k)[0]
        query, key = self._query(q.to(sum_dtype(q))), self.feature_map.key(k.to(sum_dtype(k)))[0]
        return query.to(q.dtype), key.to(k.dtype)

    def _rounds_keys(self, q: Tensor) -> bool:
        """Whether causal attention normalized by feature rounds keys to bfloat16: its kernels are many times faster."""
        phi, usual = self.feature_map, self.normalize == "feature" and self.blind_spot == 1
        return usual and phi.positive and not phi.wide and q.is_cuda and q.dtype == torch.bfloat16

    def _why_not_bidirectional(self, q: Tensor, k: Tensor, v: Tensor, phi: FeatureMap | None = None) -> str | None:
        """Return why the kernels do not compute bidirectional attention with a map, or with features q and k."""
        if phi is None:
            why = why_not_triton_bidirectional(q, k, v, None, "identity")
        elif isinstance(phi, FusedMap):
            why = why_not_triton_bidirectional(q, k, v, phi.weight, phi.kind, phi.epsilon)
        else:
            why = f"the feature map {type(phi).__name__}, which is not one of the kernels'"
        if dispatch.recording is not None and why is not None:
            dispatch.record("bidirectional linear attention", dispatch.TORCH, why)
        return why

    def _attend_fused(self, q: Tensor, k: Tensor, v: Tensor, **layout: Tensor | None) -> Tensor:
        phi = self.feature_map
        assert isinstance(phi, FusedMap)
        options: dict[str, Any] = {"normalize": self.normalize, "epsilon": phi.epsilon, **layout}
        return self._scaled(bidirectional_linear(q, k, v, feature_map=phi.kind, weight=phi.weight, **options))

    def _read(self, state: State, q: Tensor) -> Tensor:
        assert isinstance(state, LinearState)
        sums = state.sums
        if state.open is not None and self.first_bucket == "causal":
            # The last token's bucket is hidden from it, unless it is the first.
            sums = _add_rows(sums, state.open, state.end <= self.blind_spot)
        return self._from_sums(q, sums, state.total)

    def _write(
        self, state: State, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> LinearState:
        assert isinstance(state, LinearState)
        visible = None if lengths is None else lengths_to_mask(lengths, k.shape[1])
        return self._write_features(state, *self._keys(k, v, visible, state.kv.dtype), visible, lengths)

    def _write_features(
        self,
        state: LinearState,
        f: Tensor,
        scale: Tensor | None,
        v: Tensor,
        visible: Tensor | None,
        lengths: Tensor | None,
    ) -> LinearState:
        total = None if state.total is None else state.total + self._with_count(v, visible).sum(1)
        if state.open is None:
            return _updated(state, accumulate(state.sums, f, v, scale), total, v, lengths)
        # The bucket of the new last token stays open; it may be the one that is open already.
        position = state.end[:, None] + torch.arange(v.shape[1], device=v.device)
        last = (state.end + (v.shape[1] if lengths is None else lengths) - 1) // self.blind_spot
        in_last = (position // self.blind_spot == last[:, None])[:, :, None, None]
        closes = (state.end - 1) // self.blind_spot < last
        closed = accumulate(_add_rows(state.sums, state.open, closes), f.masked_fill(in_last, 0), v, scale)
        open_sums = accumulate(_drop_rows(state.open, closes), f.masked_fill(~in_last, 0), v, scale)
        return replace(_updated(state, closed, total, v, lengths), open_kv=open_sums.kv, open_z=open_sums.z)

    def _attend_causal(
        self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> Tensor:
        if self._one_pass and not self.phantom and q.shape[1] > 1:
            return self._scaled(causal_linear_out(q, k, v, lengths=lengths, **self._op_arguments()))
        if self.blind_spot > 1 and q.shape[1] > 1 and self._fused_buckets(q, k, v):
            return self._attend_buckets(q, k, v, lengths)
        if q.shape[1] > 1 and not self.phantom and self._takes_features(q, v):
            query, f = self._features(q, k)
            return self._scaled(feature_attention(query, _visible_features(f, lengths), v)[0])
        if q.shape[1] > 1 and self._normalizer_kernels(q, k, v):
            query, f, _, scale = self._normalized_features(q, k, None, lengths)
            if scale is None:
                return self._scaled(causal_linear_out(query, f, v, normalize=False))
            return self._scaled(causal_linear(query, f, v, log_scale=scale, normalize=False)[0])
        if not self._fused_epsilon(q, k, v):
            return super()._attend_causal(q, k, v, gates=None, lengths=lengths)
        total = None
        if self.phantom:
            total = q.new_zeros(q.shape[0], self.num_kv_heads, self.value_dim + 1, dtype=sum_dtype(q))
            total[..., -1] = self.phantom / self.feature_map.epsilon
        options = self._op_arguments() | {"epsilon": self.feature_map.epsilon, "total": total}
        return self._scaled(causal_linear_out(q, k, v, lengths=lengths, **options))

    def _normalizer_kernels(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether kernels divide the features of causal queries by the running sums of those of the keys."""
        phi = self.feature_map
        if self.normalize != "feature" or self.blind_spot > 1 or not phi.positive or v.dtype != q.dtype:
            return False
        if isinstance(phi, FusedMap):
            return why_not_normalizer(q, k, phi.kind) is None
        few = self.num_features <= dispatch.LARGEST and not phi.unbounded
        return few and why_not_normalizer(q, k, "identity") is None

    def _normalized_features(
        self, q: Tensor, k: Tensor, state: LinearState | None, lengths: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries' features over running sums after a state, keys' features, the last sums, and log scales."""
        phi = self.feature_map
        kind = phi.kind if isinstance(phi, FusedMap) else "identity"
        features = (q, k) if isinstance(phi, FusedMap) else self._features(q, k)
        before = (None, None) if state is None else (state.z, state.shift)
        return normalized_features(*features, *before, feature_map=kind, lengths=lengths)

    def _fused_buckets(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether `causal_linear` computes causal attention with this blind spot; on a GPU, whether its kernels do."""
        phi = self.feature_map
        if not isinstance(phi, FusedMap) or phi.weight is not None or self.normalize != "query":
            return False
        if q.device.type == "cpu":
            return True
        x = LinearInputs(q, k, v, None, None, None, None, None)
        return choose_algorithm(x, phi.kind, True, self.blind_spot) != "torch"

    def _attend_buckets(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None) -> Tensor:
        phi = self.feature_map
        assert isinstance(phi, FusedMap)
        attend = causal_linear_buckets if self.first_bucket == "causal" else causal_linear_out
        return self._scaled(attend(q, k, v, bucket=self.blind_spot, feature_map=phi.kind, lengths=lengths))

    def _defer(
        self, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None, start: Tensor | None
    ) -> Callable[[State], Tensor]:
        phi = self.feature_map
        # A map with negative features may have a normalizer near zero before the past is added to it.
        if not self._one_pass or self.phantom or (phi.kind == "identity" and self.normalize == "query"):
            return super()._defer(q, k, v, gates=None, lengths=lengths, start=start)
        out = self._attend_causal(q, k, v, gates=None, lengths=lengths).to(sum_dtype(q))
        if self.normalize == "none":
            return lambda past: (out + self._read(past, q)).to(q.dtype)
        query, mass, scale = self._masses(q, k, lengths)

        def finish(past: State) -> Tensor:
            # Normalized attention to two sets of keys is the mean of both, weighted by their normalizers.
            assert isinstance(past, LinearState)
            theirs = attend_sums(query.to(past.z.dtype), Sums(past.z[..., None], past.z, past.shift), "none")
            mine = mass
            if scale is not None:
                before = past.shift[:, None].repeat_interleave(q.shape[2] // k.shape[2], 2)[..., None]
                common = torch.maximum(scale, before)
                mine, theirs = mine * (scale - common).exp(), theirs * (before - common).exp()
            read = self._from_sums(q.to(past.kv.dtype), past.sums, None)
            weights = safe_divide(torch.cat([mine, theirs], -1), mine + theirs, phi.log_largest)
            return (weights[..., :1] * out + weights[..., 1:] * read).to(q.dtype)

        return finish

    def _masses(self, q: Tensor, k: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the queries' features, and their normalizers (B, T, H, 1) divided by exp of a scale, or 1 if None."""
        q, k = (x.to(sum_dtype(x)) for x in (q, k))
        ones = k.new_ones(*k.shape[:3], 1)
        query = self._query(q)
        if not self.feature_map.unbounded:
            options = self._op_arguments() | {"normalize": False}
            return query, causal_linear_out(q, k, ones, lengths=lengths, **options), None
        f, scale = self.feature_map.key(k)
        assert scale is not None
        mass, _ = causal_linear(query, f, ones, log_scale=scale, lengths=lengths, normalize=False)
        return query, mass, running_max(scale).repeat_interleave(q.shape[2] // k.shape[2], 2)[..., None]

    def _op_arguments(self) -> dict[str, Any]:
        """Return the options of `causal_linear` for a `FusedMap`."""
        phi: Any = self.feature_map  # Asking for its class takes longer than the rest.
        return {"feature_map": phi.kind, "weight": phi.weight, "normalize": self.normalize == "query"}

    def _extend(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, *, gates: Tensor | None, lengths: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        assert isinstance(state, LinearState)
        if q.shape[1] == 1:
            state = self._write(state, k, v, gates=None, lengths=lengths)
            return self._read(state, q), state
        if self._one_pass:
            out, sums = causal_linear(q, k, v, lengths=lengths, sums=state.sums, **self._op_arguments())
            return self._scaled(out), _updated(state, sums, None, k, lengths)
        span = self._span(q)
        if q.shape[1] <= span or self._fused_epsilon(q, k, v, state.kv):
            return self._extend_features(state, q, k, v, lengths)
        recomputed = -(-q.shape[1] // span) - MAX_SAVED if torch.is_grad_enabled() else 0
        outs, after = [], state
        for i, piece in enumerate(zip(*(x.split(span, 1) for x in (q, k, v)), strict=True)):
            inputs = after, *piece, None if lengths is None else (lengths - i * span).clamp(0, span)
            if i < recomputed:
                out, after = checkpoint(self._extend_span, *inputs, use_reentrant=False, preserve_rng_state=False)
            else:
                out, after = self._extend_span(*inputs)
            outs.append(out)
        return torch.cat(outs, 1), after

    def _span(self, q: Tensor) -> int:
        """Return how many tokens `_extend` processes at once by features in full."""
        if q.device.type != "cpu" or torch.compiler.is_compiling() or functorch_active():
            return q.shape[1]
        tokens = MAX_FEATURES // max(1, len(q) * self.num_heads * self.num_features)
        return max(1, tokens // MIN_SPAN) * MIN_SPAN

    def _extend_features(
        self, state: LinearState, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        """`_extend` for maps and normalizers that `causal_linear` does not take: by kernels, or features in full."""
        if state.total is not None and self._fused_epsilon(q, k, v, state.kv):
            options = self._op_arguments() | {"epsilon": self.feature_map.epsilon, "total": state.total}
            out, sums = causal_linear(q, k, v, lengths=lengths, sums=state.sums, **options)
            visible = None if lengths is None else lengths_to_mask(lengths, k.shape[1])
            total = state.total + self._with_count(v.to(state.kv.dtype), visible).sum(1)
            return self._scaled(out), _updated(state, sums, total, k, lengths)
        if self._feature_kernels(q) and self.normalize != "feature" and self.blind_spot == 1:
            query, f = self._features(q, k)
            f = _visible_features(f, lengths)
            if self._takes_features(q, v):
                out, _, kv, z = feature_attention(query, f, v, state.kv, state.z)
                return self._scaled(out), _updated(state, Sums(kv, z, state.shift), None, k, lengths)
            out, sums = causal_linear(query, f, v.to(f.dtype), sums=state.sums, normalize=self.normalize == "query")
            return self._scaled(out), _updated(state, sums, None, k, lengths)
        if self._normalizer_kernels(q, k, v):
            query, f, z, scale = self._normalized_features(q, k, state, lengths)
            out, sums = causal_linear(query, f, v, log_scale=scale, sums=state.sums, normalize=False)
            return self._scaled(out), _updated(state, sums._replace(z=z), None, k, lengths)
        return self._extend_span(state, q, k, v, lengths)

    def _extend_span(
        self, state: LinearState, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor | None
    ) -> tuple[Tensor, LinearState]:
        """`_extend` by features in full, computed once for the output and the state."""
        if dispatch.recording is not None:
            why = self._why_in_full() or "normalization by feature"
            dispatch.record("the feature map of causal linear attention", dispatch.TORCH, why)
        visible = None if lengths is None else lengths_to_mask(lengths, k.shape[1])
        f, scale, v = self._keys(k, v, visible, state.kv.dtype)
        keys, values = (x.to(q.dtype) if self._rounds_keys(q) else x for x in (f, v))
        out = self._from_prefixes(state, self._query(q.to(state.kv.dtype)), keys, scale, values)
        return self._scaled(out.to(q.dtype)), self._write_features(state, f, scale, v, visible, lengths)

    def _decode_step(
        self, state: State, q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, rotary: Rotation, out: Tensor | None
    ) -> tuple[Tensor, State]:
        assert isinstance(state, LinearState)
        assert rotary is None or isinstance(rotary, CosSin)
        phi = self.feature_map
        if not self._one_step:
            return super()._decode_step(state, q, k, v, gates, rotary, out)
        assert isinstance(phi, FusedMap)
        found = linear_decode_step(
            StepInputs(q, k, v, rotary, out),
            state.sums,
            feature_map=phi.kind,
            weight=phi.weight,
            normalize=self.normalize,
            pending=next(((held.length, held.f, held.v, held.scale) for held in state.pending), None),
        )
        return found if self.output_scale == 1 else found.mul_(self.output_scale), state

    def _why_no_decode_kernel(self, state: State, q: Tensor, k: Tensor, v: Tensor) -> str:
        return self._why_in_full() or super()._why_no_decode_kernel(state, q, k, v)

    def decode_function(self, state: State, rotary: Sequence[RotaryKind | None]) -> DecodeFunction | None:
        """Return `decode_step` of one sequence on a CPU; see `Mechanism.decode_function`."""
        assert isinstance(state, LinearState)
        phi, kind, normalize, scale = self.feature_map, rotary[0], self.normalize, self.output_scale
        if not self._one_step or not isinstance(phi, FusedMap):
            return None
        name, sums = phi.kind, state.sums

        def step(q: Tensor, k: Tensor, v: Tensor, gates: Tensor | None, token: CurrentToken) -> Tensor:
            q, k = token.rotate(kind, q, k)
            out = linear_step(q, k, v, sums, name, phi.weight, normalize)
            return out if scale == 1 else out.mul_(scale)

        return step

    def _fused_epsilon(self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor | None = None) -> bool:
        """Whether there is an epsilon, and `causal_linear` adds it to these inputs' features.

        On a GPU only its kernels do: where they do not, those of `attend_prefixes` are faster than eager PyTorch.
        """
        phi = self.feature_map
        if not isinstance(phi, Favor) or not phi.epsilon:
            return False
        if q.device.type == "cpu":
            return True
        x = LinearInputs(q, k, v, phi.weight, None, None, kv, None)
        return choose_algorithm(x, phi.kind, True, 1, phi.epsilon) != "torch"

    def _why_in_full(self) -> str | None:
        """Return why causal attention computes all features first, in eager PyTorch; None if the operations do."""
        phi = self.feature_map
        if not isinstance(phi, FusedMap):
            return f"the feature map {type(phi).__name__}, which is not one of the kernels'"
        if phi.epsilon:
            return f"an epsilon ({phi.epsilon}) added to the features"
        return f"a blind spot ({self.blind_spot})" if self.blind_spot > 1 else None

    def decode_state(self, state: State, dtype: torch.dtype) -> State:
        """Return the state with a write buffer beside its sums, where the kernels take it."""
        assert isinstance(state, LinearState)
        kv = state.kv
        large = max(self.head_dim, *kv.shape[2:]) > dispatch.LARGEST
        phi = self.feature_map
        if large or not self._one_step or not isinstance(phi, FusedMap) or kv.dtype == torch.float64:
            if dispatch.recording is not None and self._one_step:
                sizes = f"dimensions over {dispatch.LARGEST}" if large else "float64"
                dispatch.record("decode step", dispatch.TORCH, f"{sizes}; the kernels have no such step")
            return state
        if why_not_triton(kv, feature_map=phi.kind) is not None:
            return state
        f, v = (kv.new_zeros(*kv.shape[:2], FEATURE_SLOTS, dim) for dim in kv.shape[2:])
        buffer = PendingFeatures(state.length, f, v.to(dtype), kv.new_full(f.shape[:3], FLOOR))
        kv, z, shift = (x.contiguous() for x in state.sums)
        return replace(state, kv=kv, z=z, shift=shift, pending=(buffer,))

    def finish_decode(self, state: State) -> State:
        """Return the state with its pending tokens added to the sums."""
        assert isinstance(state, LinearState)
        for buffer in state.pending:
            here = pending_slots(state.length, FEATURE_SLOTS)[:, None]
            f, scale = buffer.f.masked_fill(~here[..., None], 0), buffer.scale.masked_fill(~here, FLOOR)
            scaled = None if not self.feature_map.unbounded else scale.transpose(1, 2)
            sums = accumulate(state.sums, f.transpose(1, 2), buffer.v.to(f.dtype).transpose(1, 2), scaled)
            state = replace(state, kv=sums.kv, z=sums.z, shift=sums.shift, pending=())
        return state

    def _from_sums(self, q: Tensor, sums: Sums, total: Tensor | None) -> Tensor:
        constant = None if total is None else self.feature_map.epsilon * total
        query = self._query(q.to(sums.kv.dtype))
        out = attend_sums(query, sums, self.normalize, constant, self.feature_map.log_largest)
        return self._scaled(out.to(q.dtype))

    def _from_prefixes(self, state: LinearState, query: Tensor, f: Tensor, scale: Tensor | None, v: Tensor) -> Tensor:
        attend = partial(attend_prefixes, normalize=self.normalize, log_largest=self.feature_map.log_largest)
        if state.open is None:
            constant = None
            if state.total is not None:
                constant = self.feature_map.epsilon * (state.total[:, None] + self._with_count(v, None).cumsum(1))
            return attend(query, f, v, scale, state.sums, constant=constant)
        # Shift tokens so that buckets begin at multiples of their size; then complete buckets are visible or hidden.
        bucket, T = self.blind_spot, query.shape[1]
        begun = state.end % bucket
        query, f, v = (shift_right(x, begun, bucket - 1) for x in (query, f, v))
        scale = None if scale is None else shift_right(scale, begun, bucket - 1, FLOOR)
        sums, open_sums = _add_rows(state.sums, state.open, begun == 0), _drop_rows(state.open, begun == 0)
        out = attend(query, f, v, scale, sums, bucket=bucket, pending=open_sums)
        if self.first_bucket == "causal":
            seen = _add_rows(sums, open_sums, begun > 0)
            head = None if scale is None else scale[:, :bucket]
            inside = attend(query[:, :bucket], f[:, :bucket], v[:, :bucket], head, seen)
            first = (state.end < bucket)[:, None, None, None]
            out = torch.cat([torch.where(first, inside, out[:, :bucket]), out[:, bucket:]], 1)
        return shift_left(out, begun, T)

    def _query(self, q: Tensor) -> Tensor:
        return self.feature_map.scaled_query(q) if self.normalize == "query" else self.feature_map.query(q)

    def _keys(
        self, k: Tensor, v: Tensor, visible: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return features, log scale and values in the dtype of the sums; hidden keys have no features."""
        f, scale = self.feature_map._visible_key(k.to(dtype), visible)
        return f, scale, v.to(f.dtype)

    def _with_count(self, v: Tensor, visible: Tensor | None) -> Tensor:
        """Append a column that counts the keys to values (B, S, Hkv, E)."""
        ones = torch.ones_like(v[..., :1])
        return torch.cat([v, ones if visible is None else ones * visible[:, :, None, None]], -1)

    def _scaled(self, out: Tensor) -> Tensor:
        return out if self.output_scale == 1 else out * self.output_scale


def _visible_features(f: Tensor, lengths: Tensor | None) -> Tensor:
    """Return features (B, S, Hkv, M), zero from the end of each row on."""
    return f if lengths is None else zero_fill(~lengths_to_mask(lengths, f.shape[1]), f)[0]


def _updated(
    state: LinearState, sums: Sums, total: Tensor | None, tokens: Tensor, lengths: Tensor | None
) -> LinearState:
    """Return the state after tokens (B, T, ...), given its sums then."""
    length = state.length + (tokens.shape[1] if lengths is None else lengths)
    return replace(state, length=length, kv=sums.kv, z=sums.z, shift=sums.shift, total=total)


def _add_rows(sums: Sums, more: Sums, rows: Tensor) -> Sums:
    """Add `more`, at the same shift, in the given rows (B,)."""
    more = _drop_rows(more, ~rows)
    return Sums(sums.kv + more.kv, sums.z + more.z, sums.shift)


def _drop_rows(sums: Sums, rows: Tensor) -> Sums:
    kv, z = sums.kv.masked_fill(rows[:, None, None, None], 0), sums.z.masked_fill(rows[:, None, None], 0)
    return Sums(kv, z, sums.shift)


def _rescaled(sums: Sums, shift: Tensor, dropped: Tensor | None = None) -> Sums:
    """Return the sums divided by exp of a larger shift, zero in the dropped rows (B,)."""
    sums = sums if dropped is None else _drop_rows(sums, dropped)
    factor = (sums.shift - shift).exp()[..., None]
    return Sums(sums.kv * factor[..., None], sums.z * factor, shift)
