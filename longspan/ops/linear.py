"""Linear attention by chunks: prefix sums of outer products, in time and memory linear in the sequence.

    num_i = Σ_{j ≤ i} (φ(q_i) · f_j) exp(β_j − c_i) v_j,      c_i = max_{j ≤ i} β_j,      φ(k_j) = f_j exp(β_j)

Keys carry their size as a log scale β, so `exp` never sees a positive argument, and the row reference c_i depends on
the past alone, so the future moves no bit of it. The normaliser is the same sum over v ≡ 1; c_i cancels in the ratio.
Feature maps are applied chunk by chunk: φ(q) and φ(k) are never whole in memory, and only q, k, v and the result are
kept for the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspan.ops import backend
from longspan.ops.features import MAPS, Map

# Stands for "no key yet": exp(FLOOR − anything real) is 0, and FLOOR − FLOOR is 0 where −inf would give NaN.
FLOOR = -1e30
CHUNK = 128


class Sums(NamedTuple):
    """What linear attention remembers: kv = Σ φ(k)vᵀ (B, Hkv, M, E) and z = Σ φ(k) (B, Hkv, M), both divided by
    exp(shift), with shift (B, Hkv) the largest log scale so far.
    """

    kv: Tensor
    z: Tensor
    shift: Tensor


def no_sums(batch_size: int, num_heads: int, num_features: int, value_dim: int, like: Tensor) -> Sums:
    """The sums of no keys at all."""
    kv = like.new_zeros(batch_size, num_heads, num_features, value_dim)
    return Sums(kv, kv.new_zeros(kv.shape[:3]), kv.new_full(kv.shape[:2], FLOOR))


def accumulate(sums: Sums, f: Tensor, v: Tensor, log_scale: Tensor | None) -> Sums:
    """The sums after key features f (B, S, Hkv, M) of log scale (B, S, Hkv) and values v (B, S, Hkv, E)."""
    if log_scale is None:
        return Sums(sums.kv + torch.einsum("bshm,bshe->bhme", f, v), sums.z + f.sum(1), sums.shift)
    shift = torch.maximum(sums.shift, log_scale.amax(1))
    f = f * (log_scale - shift[:, None]).exp()[..., None]
    decay = (sums.shift - shift).exp()[..., None]
    kv = decay[..., None] * sums.kv + torch.einsum("bshm,bshe->bhme", f, v)
    return Sums(kv, decay * sums.z + f.sum(1), shift)


def causal_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    feature_map: str = "identity",
    weight: Tensor | None = None,
    log_scale: Tensor | None = None,
    lengths: Tensor | None = None,
    sums: Sums | None = None,
    normalise: bool = True,
    bucket: int = 1,
) -> tuple[Tensor, Sums]:
    """Causal linear attention (B, T, H, E) in q's dtype, num_i / den_i or num_i alone, and the sums after it.

    q: (B, T, H, D), k: (B, T, Hkv, D), v: (B, T, Hkv, E). feature_map: one of `features.MAPS`, with its weight.
    log_scale: (B, T, Hkv) for keys that are features already. lengths: (B,) tokens in each row, the rest is padding.
    sums: what came before. bucket: more than 1 hides from a query its own bucket of that size and all after it.
    """
    before = sums
    if before is None:
        M = k.shape[3] if weight is None else len(weight)
        before = no_sums(q.shape[0], k.shape[2], M, v.shape[3], k.new_empty(0, dtype=sum_dtype(k)))
    kv = torch.cat([before.kv, before.z[..., None]], -1) if normalise else before.kv
    out, _, kv, shift = _causal_linear(
        q, k, v, weight, log_scale, lengths, kv, before.shift, feature_map, normalise, bucket
    )
    return out, Sums(kv[..., :-1], kv[..., -1], shift) if normalise else Sums(kv, before.z, shift)


def attend_sums(query: Tensor, sums: Sums, normalise: str, constant: Tensor | None = None) -> Tensor:
    """Attention of query features (B, T, H, M), each after everything the sums hold: (B, T, H, E).

    constant: (B, Hkv, E + 1) epsilon·[Σv, count], where every key has a constant added to its features.
    """
    q = query.unflatten(2, (sums.kv.shape[1], -1))  # (B, T, Hkv, G, M)
    if normalise == "none":
        return torch.einsum("bthgm,bhme->bthge", q, sums.kv).flatten(2, 3)
    if normalise == "feature":
        return torch.einsum("bthgm,bhme->bthge", q, over(sums.kv, sums.z[..., None])).flatten(2, 3)
    out = torch.einsum("bthgm,bhme->bthge", q, torch.cat([sums.kv, sums.z[..., None]], -1))
    if constant is not None:
        out = out + q.sum(-1, keepdim=True) * constant[:, None, :, None]
    return divide(out[..., :-1], out[..., -1]).flatten(2, 3)


def attend_prefixes(
    query: Tensor,
    f: Tensor,
    v: Tensor,
    log_scale: Tensor | None,
    sums: Sums,
    normalise: str,
    *,
    constant: Tensor | None = None,
    bucket: int = 1,
    pending: Sums | None = None,
) -> Tensor:
    """As `attend_sums`, each query after its own prefix; features are given whole. Any map and any normaliser.

    constant: (B, T, Hkv, E + 1), one for each token. pending: sums at the shift of `sums` that later buckets see, but
    not the first.
    """

    def prefixes(query: Tensor, f: Tensor, v: Tensor, kv: Tensor, late: Tensor | None) -> Tensor:
        before = Sums(kv, kv[..., 0], sums.shift)
        out, _ = causal_linear(query, f, v, log_scale=log_scale, sums=before, normalise=False, bucket=bucket)
        if late is None:
            return out
        read = attend_sums(query[:, bucket:], Sums(late, late[..., 0], sums.shift), "none")
        if log_scale is not None:
            reference = torch.maximum(log_scale.cummax(1).values, sums.shift[:, None])[:, bucket:]
            factor = (sums.shift[:, None] - reference).exp().repeat_interleave(query.shape[2] // f.shape[2], 2)
            read = read * factor[..., None]
        return torch.cat([out[:, :bucket], out[:, bucket:] + read], 1)

    late = pending
    if normalise == "none":
        return prefixes(query, f, v, sums.kv, None if late is None else late.kv)
    if normalise == "feature":
        ones = f.new_ones(*f.shape[:3], 1)
        z = prefixes(ones, ones, f, sums.z[:, :, None], None if late is None else late.z[:, :, None])
        z = z.repeat_interleave(query.shape[2] // f.shape[2], 2)
        # In two parts, the second of them z/z = 1: a gradient with z² below it would overflow.
        unit = z.detach()
        query = over(query, unit) / (over(z, unit) + _is_nothing(unit))
        return prefixes(query, f, v, sums.kv, None if late is None else late.kv)
    v = torch.cat([v, v.new_ones(*v.shape[:3], 1)], -1)
    with_z = [None if s is None else torch.cat([s.kv, s.z[..., None]], -1) for s in (sums, late)]
    assert with_z[0] is not None
    out = prefixes(query, f, v, with_z[0], with_z[1])
    if constant is not None:
        group = query.shape[2] // f.shape[2]
        out = out + query.sum(-1, keepdim=True) * constant.repeat_interleave(group, 2)
    return divide(out[..., :-1], out[..., -1])


def sum_dtype(x: Tensor) -> torch.dtype:
    """Sums over a sequence are float32 whatever the inputs, and float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def divide(num: Tensor, den: Tensor) -> Tensor:
    """num (..., E) / den (...); where den is 0, nothing was seen and the answer is 0."""
    return over(num, den[..., None])


def over(x: Tensor, z: Tensor) -> Tensor:
    """x / z, broadcast; 0 where z is 0, or so small that a gradient divided by it would overflow.

    Not x · (1/z), whose gradient squares 1/z.
    """
    nothing = _is_nothing(z)
    return (x / z.masked_fill(nothing, 1)).masked_fill(nothing, 0)


def _is_nothing(z: Tensor) -> Tensor:
    return z.abs() < 1e6 * torch.finfo(z.dtype).tiny


@torch.library.custom_op("longspan::causal_linear", mutates_args=())
def _causal_linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    log_scale: Tensor | None,
    lengths: Tensor | None,
    kv: Tensor,
    shift: Tensor,
    feature_map: str,
    normalise: bool,
    bucket: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if backend.why_plain(q, k, v, weight, log_scale, kv, feature_map, bucket) is None:
        return backend.linear_kernels().causal_linear(
            q, k, v, weight, log_scale, lengths, kv, shift, feature_map, normalise
        )
    B, T, H, _ = q.shape
    out = v.new_empty(B, T, H, v.shape[3])
    den = kv.new_empty(B, T, H if normalise else 0)
    walk = _Walk(MAPS[feature_map], weight, k, v, log_scale, lengths, kv.dtype, normalise, bucket)
    kv, c = kv.flatten(0, 1), shift.flatten()
    for chunk in walk.chunks():
        keys = walk.keys(chunk, c)
        query = walk.map.query(walk.rows(q, chunk), weight)[0]
        read = keys.towards_start(query @ kv)
        if keys.pair is not None:
            read = torch.baddbmm(read, keys.weigh(query, keys.f), keys.v)
        if normalise:
            den[:, chunk] = walk.unrows(read[..., -1:], H)[..., 0]
            read = divide(read[..., :-1], read[..., -1])
        out[:, chunk] = walk.unrows(read, H)
        kv, c = keys.write(kv), keys.last
    return out, den, kv.reshape(B, -1, *kv.shape[1:]).clone(), c.reshape(B, -1).clone()


@_causal_linear.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, v, kv, shift, normalise = args[0], args[2], args[6], args[7], args[9]
    B, T, H, _ = q.shape
    den = kv.new_empty(B, T, H if normalise else 0)
    return v.new_empty(B, T, H, v.shape[3]), den, torch.empty_like(kv), torch.empty_like(shift)


@torch.library.custom_op("longspan::causal_linear_backward", mutates_args=())
def _causal_linear_backward(
    d_out: Tensor,
    d_kv: Tensor,
    out: Tensor,
    den: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weight: Tensor | None,
    log_scale: Tensor | None,
    lengths: Tensor | None,
    kv: Tensor,
    shift: Tensor,
    feature_map: str,
    normalise: bool,
    bucket: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if backend.why_plain(q, k, v, weight, log_scale, kv, feature_map, bucket) is None:
        return backend.linear_kernels().causal_linear_backward(
            d_out, d_kv, out, den, q, k, v, weight, log_scale, lengths, kv, shift, feature_map, normalise
        )
    B, T, H, _ = q.shape
    Hkv = k.shape[2]
    walk = _Walk(MAPS[feature_map], weight, k, v, log_scale, lengths, kv.dtype, normalise, bucket)
    # The sums at each chunk's start are made again rather than kept: a quarter of the work, none of the memory.
    starts, references = [kv.flatten(0, 1)], [shift.flatten()]
    chunks = list(walk.chunks())
    for chunk in chunks[:-1]:
        keys = walk.keys(chunk, references[-1], pairs=False)
        starts.append(keys.write(starts[-1]))
        references.append(keys.last)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    d_kv = d_kv.flatten(0, 1)
    for chunk, start, c in zip(reversed(chunks), reversed(starts), reversed(references), strict=True):
        keys = walk.keys(chunk, c)
        x = walk.rows(q, chunk)
        query = walk.map.query(x, weight)[0]
        d_num, scaled, inverse = walk.rows(d_out, chunk), query, None
        if normalise:
            # 1/den goes to the features: with them it makes weights of at most one, with gradients it may overflow.
            d_den = -(d_num * walk.rows(out, chunk)).sum(-1, keepdim=True)
            d_num, divisor = torch.cat([d_num, d_den], -1), walk.rows(den[..., None], chunk)
            inverse = over(torch.ones_like(divisor), divisor)
            scaled = query * inverse
        row = keys.towards_start(d_num)
        d_query, d_f, d_v = row @ start.mT, keys.towards_end(keys.v @ d_kv.mT), keys.towards_end(keys.f) @ d_kv
        if keys.pair is not None:
            d_scores = keys.weigh(d_num, keys.v)
            d_query = torch.baddbmm(d_query, d_scores, keys.f)
            d_f = torch.baddbmm(d_f, d_scores.mT, scaled)
            d_v = torch.baddbmm(d_v, keys.weigh(scaled, keys.f).mT, d_num)
        d_kv = torch.baddbmm(keys.carry(d_kv), scaled.mT, row)
        d_query = d_query if inverse is None else d_query * inverse
        dq[:, chunk] = walk.unrows(walk.map.query_grad(d_query, x, query, weight), H)
        dk[:, chunk] = walk.unrows(walk.map.key_grad(keys.hide(d_f), keys.x, keys.f, weight), Hkv)
        dv[:, chunk] = walk.unrows(d_v[..., : v.shape[3]], Hkv)
    return dq, dk, dv, d_kv.reshape(kv.shape).clone()


@_causal_linear_backward.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, kv = args[4], args[5], args[6], args[10]
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(kv)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.feature_map, ctx.normalise, ctx.bucket = inputs
    out, den = output[:2] if ctx.normalise else (None, output[1])
    ctx.save_for_backward(out, den, *tensors)


def _differentiate(ctx: Any, d_out: Tensor, d_den: Tensor, d_kv: Tensor, d_shift: Tensor) -> tuple[Tensor | None, ...]:
    out, den, *tensors = ctx.saved_tensors
    dq, dk, dv, d_start = _causal_linear_backward(
        d_out, d_kv, d_out if out is None else out, den, *tensors, ctx.feature_map, ctx.normalise, ctx.bucket
    )
    return dq, dk, dv, None, None, None, d_start, None, None, None, None


_causal_linear.register_autograd(_differentiate, setup_context=_save)


class _Walk:
    """A sequence taken chunk by chunk, heads first: (B, C, H, ·) -> (B Hkv, G C, ·), G query heads to a key head."""

    def __init__(
        self,
        map: Map,
        weight: Tensor | None,
        k: Tensor,
        v: Tensor,
        log_scale: Tensor | None,
        lengths: Tensor | None,
        dtype: torch.dtype,
        normalise: bool,
        bucket: int,
    ) -> None:
        self.map, self.weight, self.k, self.v, self.log_scale = map, weight, k, v, log_scale
        self.lengths, self.dtype, self.normalise = lengths, dtype, normalise
        self.size = min(bucket * max(1, CHUNK // bucket), k.shape[1])
        slot = torch.arange(self.size, device=k.device) // bucket
        self.seen = (slot[:, None] >= slot if bucket == 1 else slot[:, None] > slot).to(dtype)
        self.alone = bucket > 1 and self.size <= bucket  # No token sees another of its chunk.

    def chunks(self) -> Iterator[slice]:
        T = self.k.shape[1]
        return (slice(start, min(start + self.size, T)) for start in range(0, T, self.size))

    def rows(self, x: Tensor, chunk: slice) -> Tensor:
        B, _, H, dim = x.shape
        return x[:, chunk].to(self.dtype).transpose(1, 2).reshape(B * self.k.shape[2], -1, dim)

    def unrows(self, x: Tensor, heads: int) -> Tensor:
        return x.reshape(self.k.shape[0], heads, -1, x.shape[-1]).transpose(1, 2)

    def keys(self, chunk: slice, c: Tensor, *, pairs: bool = True) -> _Keys:
        x, v = self.rows(self.k, chunk), self.rows(self.v, chunk)
        if self.normalise:
            v = torch.cat([v, v.new_ones(*v.shape[:2], 1)], -1)
        f, beta = self.map.key(x, self.weight)
        if self.log_scale is not None:
            beta = self.rows(self.log_scale[..., None], chunk)[..., 0]
        hidden = None
        if self.lengths is not None:
            slot = torch.arange(chunk.start, chunk.stop, device=x.device)
            hidden = (slot >= self.lengths[:, None]).repeat_interleave(self.k.shape[2], 0)
            f = f.masked_fill(hidden[..., None], 0)
            beta = None if beta is None else beta.masked_fill(hidden, FLOOR)
        reference = None if beta is None else torch.maximum(beta.cummax(1).values, c[:, None])
        pair = self._pair(beta, reference, f.shape[1]) if pairs else None
        return _Keys.of(x, f, v, hidden, pair, beta, reference, c)

    def _pair(self, beta: Tensor | None, reference: Tensor | None, size: int) -> Tensor | None:
        if self.alone:
            return None
        seen = self.seen[None, :size, :size]
        if beta is None or reference is None:
            return seen
        return _factor(beta[:, None, :] - reference[:, :, None]).mul_(seen)


def _factor(x: Tensor) -> Tensor:
    """exp(x) of fresh x: 1 above 0, where the pair is hidden anyway, and the smallest normal number far below it,
    where nothing is left to add and `exp` would be slow.
    """
    return x.clamp_(min=math.log(torch.finfo(x.dtype).tiny), max=0).exp_()


class _Keys(NamedTuple):
    """The keys of one chunk and the factors exp(β_j − c_i) between them, the chunk's start and its end."""

    x: Tensor  # (X, C, D) before the feature map
    f: Tensor  # (X, C, M)
    v: Tensor  # (X, C, E), with a column of ones if normalised
    hidden: Tensor | None  # (X, C)
    pair: Tensor | None  # (X or 1, C, C), zero where j is hidden from i; None: no token sees another of its chunk
    start: Tensor | None  # (X, C, 1) exp(c₀ − c_i); this and the next two are None where all are 1
    end: Tensor | None  # (X, C, 1) exp(β_j − c_C)
    decay: Tensor | None  # (X, 1, 1) exp(c₀ − c_C)
    last: Tensor  # (X,) c_C

    @classmethod
    def of(
        cls,
        x: Tensor,
        f: Tensor,
        v: Tensor,
        hidden: Tensor | None,
        pair: Tensor | None,
        beta: Tensor | None,
        reference: Tensor | None,
        c: Tensor,
    ) -> _Keys:
        if beta is None or reference is None:
            return cls(x, f, v, hidden, pair, None, None, None, c)
        before, last = c[:, None, None], reference[:, -1]
        start, end = _factor(before - reference[..., None]), _factor((beta - last[:, None])[..., None])
        return cls(x, f, v, hidden, pair, start, end, _factor(before - last[:, None, None]), last)

    def weigh(self, rows: Tensor, keys: Tensor) -> Tensor:
        """(X, G C, C): the products of rows (X, G C, ·) and keys (X, C, ·), weighted."""
        assert self.pair is not None
        products = torch.bmm(rows, keys.mT)
        products.unflatten(1, (-1, self.pair.shape[1])).mul_(self.pair[:, None])
        return products

    def towards_start(self, rows: Tensor) -> Tensor:
        if self.start is None:
            return rows
        return (rows.unflatten(1, (-1, self.start.shape[1])) * self.start[:, None]).flatten(1, 2)

    def towards_end(self, keys: Tensor) -> Tensor:
        return keys if self.end is None else keys * self.end

    def carry(self, kv: Tensor) -> Tensor:
        return kv if self.decay is None else kv * self.decay

    def write(self, kv: Tensor) -> Tensor:
        return torch.baddbmm(self.carry(kv), self.towards_end(self.f).mT, self.v)

    def hide(self, d_f: Tensor) -> Tensor:
        return d_f if self.hidden is None else d_f.masked_fill(self.hidden[..., None], 0)
