"""Causal linear attention in plain PyTorch: a few chunks at a time, so that everything they need stays in cache.

Inside a chunk of C tokens all pairs are weighed; between chunks only sums travel. The sums S_n before chunk n of a
group follow from those before the group and from each chunk's own, all at once: S = P · (S₀, Δ₀, Δ₁, …) with P[n, m] =
exp(s_m − s_n) for m ≤ n, s_n being the row reference at the chunk's start. The backward pass is the same with Pᵀ.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.ops.linear.feature_maps import MAPS

# Stands for "no key yet": exp(FLOOR − anything real) is 0, and FLOOR − FLOOR is 0 where −inf would give NaN.
FLOOR = -1e30
CHUNK = 64
GROUP = 8


class Arguments(NamedTuple):
    """What `longspan::causal_linear` is given; see `ops.linear.causal_linear`."""

    q: Tensor
    k: Tensor
    v: Tensor
    weight: Tensor | None
    log_scale: Tensor | None
    lengths: Tensor | None
    kv: Tensor
    shift: Tensor
    feature_map: str
    normalize: bool
    bucket: int


def forward(given: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """out (B, T, H, E), den (B, T, H), the sums and their shift after the last token, and both before each span."""
    q, v, kv = given.q, given.v, given.kv
    (B, T, H, _), map = q.shape, MAPS[given.feature_map]
    out = v.new_empty(B, T, H, v.shape[3])
    den = kv.new_empty(B, T, H if given.normalize else 0)
    kv, c = kv.flatten(0, 1), given.shift.flatten()
    starts, references = new_starts(given)
    for i, span in enumerate(_spans(given)):
        starts[i], references[i] = kv, c
        group = _Group.of(given, span, c)
        query = map.query(_rows(q, span, given), given.weight)[0]
        before, kv = group.sums(kv)
        read = group.towards_start(query @ before)
        if group.pair is not None:
            read = torch.baddbmm(read, group.weigh(query, group.f), group.v)
        if given.normalize:
            _put(den[..., None], read[..., -1:], span, given)
            read = read[..., :-1] * _inverse(read[..., -1:])
        _put(out, read, span, given)
        c = group.last
    return out, den, kv.reshape(B, -1, *kv.shape[1:]).clone(), c.reshape(B, -1).clone(), starts, references


def new_starts(given: Arguments) -> tuple[Tensor, Tensor]:
    """Room for the sums (B Hkv, M, E) and references (B Hkv,) before each span, of which there may be fewer."""
    most = given.k.shape[1] // (_chunk(given.bucket) * GROUP) + 2
    starts = given.kv.new_zeros(most, given.kv.shape[0] * given.kv.shape[1], *given.kv.shape[2:])
    return starts, starts.new_zeros(starts.shape[:2])


def backward(
    d_out: Tensor,
    d_kv: Tensor,
    out: Tensor,
    den: Tensor,
    starts: Tensor,
    references: Tensor,
    given: Arguments,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and of the sums before."""
    q, k, v, weight = given.q, given.k, given.v, given.weight
    map = MAPS[given.feature_map]
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    d_kv = d_kv.flatten(0, 1)
    for i, span in reversed(list(enumerate(_spans(given)))):
        group = _Group.of(given, span, references[i])
        x = _rows(q, span, given)
        query = map.query(x, weight)[0]
        d_num, scaled, inverse = _rows(d_out, span, given, extra=given.normalize), query, None
        if given.normalize:
            # 1/den goes to the features: with them it makes weights of at most one, with gradients it may overflow.
            d_den = (d_out[:, span.tokens].to(den.dtype) * out[:, span.tokens]).sum(-1, keepdim=True)
            d_num[..., -1:] = -_rows(d_den, _Span(slice(0, None), span.size), given)
            inverse = _inverse(_rows(den[..., None], span, given))
            scaled = query * inverse
        row = group.towards_start(d_num)
        d_query = row @ group.sums(starts[i])[0].mT
        d_kv, d_own = group.sums_grad(scaled.mT @ row, d_kv)
        d_f, d_v = group.towards_end(group.v @ d_own.mT), group.towards_end(group.f) @ d_own
        if group.pair is not None:
            d_scores = group.weigh(d_num, group.v)
            d_query = torch.baddbmm(d_query, d_scores, group.f)
            d_f = torch.baddbmm(d_f, d_scores.mT, scaled)
            d_v = torch.baddbmm(d_v, group.weigh(scaled, group.f).mT, d_num)
        d_query = d_query if inverse is None else d_query * inverse
        d_f = d_f if group.hidden is None else d_f.masked_fill(group.hidden[..., None], 0)
        _put(dq, map.query_grad(d_query, x, query, weight), span, given)
        _put(dk, map.key_grad(d_f, group.x, group.f, weight), span, given)
        _put(dv, d_v[..., : v.shape[3]], span, given)
    return dq, dk, dv, d_kv.reshape(given.kv.shape).clone()


def over(x: Tensor, z: Tensor) -> Tensor:
    """x / z, broadcast; 0 where z is 0, or so small that a gradient divided by it would overflow.

    Not x · (1/z), whose gradient squares 1/z.
    """
    nothing = is_nothing(z)
    return (x / z.masked_fill(nothing, 1)).masked_fill(nothing, 0)


def _inverse(z: Tensor) -> Tensor:
    return over(torch.ones_like(z), z)


def is_nothing(z: Tensor) -> Tensor:
    """Where a normalizer counts as zero."""
    return z.abs() < 1e6 * torch.finfo(z.dtype).tiny


class _Span(NamedTuple):
    """Tokens that are walked together, in chunks of one size."""

    tokens: slice
    size: int

    @property
    def number(self) -> int:
        return (self.tokens.stop - self.tokens.start) // self.size


def _spans(given: Arguments) -> list[_Span]:
    """Groups of whole chunks, and what is left at the end as one smaller chunk. A chunk holds whole buckets."""
    T, size = given.k.shape[1], _chunk(given.bucket)
    found, start = [], 0
    while start < T:
        width = min((T - start) // size, GROUP) * size or T - start
        found.append(_Span(slice(start, start + width), min(size, width)))
        start += width
    return found


def _chunk(bucket: int) -> int:
    return bucket * max(1, CHUNK // bucket)


def _rows(x: Tensor, span: _Span, given: Arguments, *, extra: bool = False) -> Tensor:
    """(B, T, heads, ·) -> (B Hkv N, G C, ·): the span's N chunks, with the G query heads of a key head as rows.

    extra: one more column, of ones.
    """
    x = x[:, span.tokens].unflatten(1, (-1, span.size)).unflatten(3, (given.k.shape[2], -1)).permute(0, 3, 1, 4, 2, 5)
    rows = torch.empty(*x.shape[:5], x.shape[5] + extra, dtype=given.kv.dtype, device=x.device)
    rows[..., : x.shape[5]] = x
    if extra:
        rows[..., -1] = 1
    return rows.view(-1, x.shape[3] * span.size, rows.shape[5])


def _put(into: Tensor, rows: Tensor, span: _Span, given: Arguments) -> None:
    """The way back: rows (B Hkv N, G C, ·) to their places in (B, T, heads, ·)."""
    places = into[:, span.tokens].unflatten(1, (-1, span.size)).unflatten(3, (given.k.shape[2], -1))
    places = places.permute(0, 3, 1, 4, 2, 5)
    places.copy_(rows.reshape(places.shape))


class _Group(NamedTuple):
    """The keys of N chunks, Y = B Hkv N of them in all, and the factors exp(β_j − c_i) between what they touch."""

    x: Tensor  # (Y, C, D) before the feature map
    f: Tensor  # (Y, C, M)
    v: Tensor  # (Y, C, E), with a column of ones if normalized
    hidden: Tensor | None  # (Y, C)
    pair: Tensor | None  # (Y or 1, C, C), zero where j is hidden from i; None: no token sees another of its chunk
    start: Tensor | None  # (Y, C, 1) to the chunk's start; this and the next are None where all are 1
    end: Tensor | None  # (Y, C, 1) to the chunk's end
    passing: Tensor  # (B Hkv, N + 1, N + 1) P
    last: Tensor  # (B Hkv,) the reference at the group's end

    @classmethod
    def of(cls, given: Arguments, span: _Span, c: Tensor) -> _Group:
        x, v = _rows(given.k, span, given), _rows(given.v, span, given, extra=given.normalize)
        f, beta = MAPS[given.feature_map].key(x, given.weight)
        if given.log_scale is not None:
            beta = _rows(given.log_scale[..., None], span, given)[..., 0]
        hidden = None
        if given.lengths is not None:
            slot = torch.arange(span.tokens.start, span.tokens.stop, device=x.device)
            hidden = (slot >= given.lengths[:, None]).repeat_interleave(given.k.shape[2], 0).view(len(x), -1)
            f = f.masked_fill(hidden[..., None], 0)
            beta = None if beta is None else beta.masked_fill(hidden, FLOOR)
        size, N, bucket = span.size, span.number, given.bucket
        slot = torch.arange(size, device=x.device) // bucket
        seen = (slot[:, None] >= slot if bucket == 1 else slot[:, None] > slot).to(f.dtype)
        wanted = bucket == 1 or size > bucket
        earlier = torch.ones(N + 1, N + 1, dtype=f.dtype, device=x.device).tril()
        if beta is None:
            passing = earlier.expand(len(c), -1, -1)
            return cls(x, f, v, hidden, seen[None] if wanted else None, None, None, passing, c)
        reference = torch.maximum(beta.view(len(c), -1).cummax(1).values, c[:, None])  # (B Hkv, N C)
        ends = torch.cat([c[:, None], reference[:, size - 1 :: size]], 1)  # (B Hkv, N + 1)
        rows = reference.view(-1, size)
        before, after = ends[:, :-1].reshape(-1, 1), ends[:, 1:].reshape(-1, 1)
        return cls(
            x,
            f,
            v,
            hidden,
            _factor(beta[:, None] - rows[:, :, None]).mul_(seen) if wanted else None,
            _factor(before - rows)[..., None],
            _factor(beta - after)[..., None],
            _factor(ends[:, None] - ends[:, :, None]).mul_(earlier),
            ends[:, -1],
        )

    def sums(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """The sums before each chunk (Y, M, E) and after the last (B Hkv, M, E), given those before the first."""
        own = (self.towards_end(self.f).mT @ self.v).view(len(kv), -1, *kv.shape[1:])
        passed = (self.passing @ torch.cat([kv[:, None], own], 1).flatten(2)).view(len(kv), -1, *kv.shape[1:])
        return passed[:, :-1].flatten(0, 1), passed[:, -1]

    def sums_grad(self, d_starts: Tensor, d_last: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the sums before the first chunk, and of each chunk's own (Y, M, E)."""
        d_passed = torch.cat([d_starts.view(len(d_last), -1, *d_last.shape[1:]), d_last[:, None]], 1)
        d = (self.passing.mT @ d_passed.flatten(2)).view(d_passed.shape)
        return d[:, 0], d[:, 1:].flatten(0, 1)

    def weigh(self, rows: Tensor, keys: Tensor) -> Tensor:
        """(Y, G C, C): the products of rows (Y, G C, ·) and keys (Y, C, ·), weighted."""
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


def _factor(x: Tensor) -> Tensor:
    """exp(x) of fresh x: 1 above 0, where the pair is hidden anyway, and the smallest normal number far below it,
    where nothing is left to add and `exp` would be slow.
    """
    return x.clamp_(min=math.log(torch.finfo(x.dtype).tiny), max=0).exp_()
