"""Causal linear attention in PyTorch, for any device: a few chunks at a time, so that their tensors stay in cache.

Inside a chunk of C tokens all pairs are computed; between chunks only sums are passed. The sums before a chunk are
those before the chunk before it, times exp(s_n − s_{n+1}), plus that chunk's own, s_n being the row reference at the
start of chunk n; the backward pass adds in the other direction. Sums are transposed, (E, M) with M features: products
whose number of columns is a multiple of 16 are faster, and E is not with the normalizer as one more column.

The built-in feature maps and their derivatives are at the end. A key's features are f · exp(β), with f of order one and
β the log scale; None means β ≡ 0. `weight` is the projection (M, D) of FAVOR+, None for maps without one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.ops.common.parts import Part, parts_in_cache
from longspan.ops.common.torch_private import is_exporting

if TYPE_CHECKING:
    from longspan.ops.linear import LinearInputs, LinearProblem, LinearSaved

# The log scale of no key: exp(FLOOR − x) is 0 for any real x, and FLOOR − FLOOR is 0 where −inf would give NaN.
FLOOR = -1e30
# Tokens in a chunk and in a group. Shorter chunks compute less, and launch more, which costs a GPU more.
CHUNK, CPU_CHUNK, GROUP = 64, 32, 512
# Logarithm of the largest feature of a query or key of FAVOR+, a whole number. Products of queries and keys that share
# no large feature, e^−100 for inputs of order 10, are then representable in float32, and so are sums over 10^6 keys.
FAVOR_LARGEST = 30.0
# relu(x) + RELU_EPSILON makes every normalizer positive.
RELU_EPSILON = 1e-3


def forward(x: LinearInputs, problem: LinearProblem) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return out (B, T, H, E), the sums and their shift after the last token, den (B, T, H), and the sums and
    references before each span, for `backward`.
    """
    q, v = x.q, x.v
    assert x.kv is not None
    assert x.shift is not None
    (B, T, H, _), feature_map = q.shape, _map(problem)
    out = v.new_empty(B, T, H, v.shape[3])
    den = x.kv.new_empty(B, T, H if problem.normalize else 0)
    kv, c, total = _transposed(x.kv.flatten(0, 1)), x.shift.flatten().clone(), _total(x).clone()
    M = kv.shape[2]
    starts, references = new_starts(x, problem)
    for span in _spans(x, problem):
        i, here = span.group, span.part.sequences
        starts[i, here, :, :M], references[i, here] = kv[here], c[here]
        group = _Group.of(x, problem, span, c[here])
        query = feature_map.query(_rows(q, span, x), x.weight)[0]
        before, kv[here] = group.sums(kv[here])
        read = group.towards_start(torch.bmm(query, before.mT))
        if group.inside:
            read.baddbmm_(group.weigh(query, group.f), group.v)
        if problem.epsilon:
            starts[i, here, :, M] = total[here]
            prefix, total[here] = _running_sums(group.v, total[here])
            mass = problem.epsilon * query.sum(-1, keepdim=True)
            _by_head(read, span).addcmul_(_by_head(mass, span), prefix[:, None])
        if problem.normalize:
            _put(den[..., None], read[..., -1:], span, x)
            _put_product(out, read[..., :-1], _inverse(read[..., -1:], feature_map.log_largest), span, x)
        else:
            _put(out, read, span, x)
        c[here] = group.last
    return out, _transposed(kv).view(x.kv.shape), c.view(B, -1), den, starts, references


def new_starts(x: LinearInputs, problem: LinearProblem) -> tuple[Tensor, Tensor]:
    """Return buffers for the sums (B Hkv, E, M) and references (B Hkv,) before each span, possibly too many.

    With an epsilon, Σ[v, 1] is one more feature.
    """
    assert x.kv is not None
    size, number = _group_size(x, problem)
    most = x.k.shape[1] // (size * number) + 2
    starts = x.kv.new_zeros(most, x.kv.shape[0] * x.kv.shape[1], x.kv.shape[3], x.kv.shape[2] + bool(problem.epsilon))
    return starts, starts.new_zeros(starts.shape[:2])


def _transposed(sums: Tensor) -> Tensor:
    return sums.mT.clone(memory_format=torch.contiguous_format)


def _total(x: LinearInputs) -> Tensor:
    """Σ[v, 1] before the first token (B Hkv, E + 1)."""
    assert x.kv is not None
    return (x.kv.new_zeros(x.kv.shape[0], *x.kv.shape[1::2]) if x.total is None else x.total).flatten(0, 1)


def backward(
    saved: LinearSaved, x: LinearInputs, problem: LinearProblem
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and of the sums and the total before."""
    d_out, d_kv, out, den, starts, references = saved
    q, k, v, weight, E = x.q, x.k, x.v, x.weight, x.v.shape[3]
    assert x.kv is not None
    assert starts is not None
    assert references is not None
    feature_map = _map(problem)
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    d_kv = _transposed((torch.zeros_like(x.kv) if d_kv is None else d_kv).flatten(0, 1))
    M, d_total = d_kv.shape[2], torch.zeros_like(_total(x))
    inverse = _inverse(den, feature_map.log_largest)[..., None] if problem.normalize else None
    for span in reversed(_spans(x, problem)):
        i, here = span.group, span.part.sequences
        group = _Group.of(x, problem, span, references[i, here])
        rows = _rows(q, span, x)
        query = feature_map.query(rows, weight)[0]
        d_num, scaled, factor = _rows(d_out, span, x, extra=problem.normalize), query, None
        if inverse is not None:
            # 1/den multiplies the features: the weights are then at most one, while gradients could overflow.
            assert out is not None
            d_den = (_by_chunks(d_out, span, x).to(den.dtype) * _by_chunks(out, span, x)).sum(-1)
            d_num[..., -1] = -d_den.reshape(d_num.shape[:2])
            factor = _rows(inverse, span, x)
            scaled = query * factor
        row = group.towards_start(d_num)
        d_query = torch.bmm(row, group.sums(starts[i, here, :, :M])[0])
        d_kv[here], d_own = group.sums_grad(row, scaled, d_kv[here])
        d_f = group.towards_end(torch.bmm(group.v, d_own))
        d_v = torch.bmm(group.f_end, d_own[:, :E].mT)
        if group.inside:
            d_scores = group.weigh(d_num, group.v)
            d_query.baddbmm_(d_scores, group.f)
            d_f.baddbmm_(d_scores.mT, scaled)
            # Not of `scaled`: a key without weight may have a feature whose product with it overflows.
            weights = group.weigh(query, group.f)
            d_v.baddbmm_((weights if factor is None else weights.mul_(factor)).mT, d_num[..., :E])
        if problem.epsilon:
            prefix = _running_sums(group.v, starts[i, here, :, M])[0]
            d_mass = (_by_head(d_num, span) * prefix[:, None]).sum(-1, keepdim=True).flatten(1, 2)
            d_query += problem.epsilon * d_mass
            mass = problem.epsilon * scaled.sum(-1, keepdim=True)
            given = _by_head(d_num * mass, span).sum(1)
            suffix, d_total[here] = _running_sums(given, d_total[here], reverse=True)
            d_v += suffix[..., :E]
        d_query = d_query if factor is None else d_query.mul_(factor)
        if group.hidden is not None:
            d_f, d_v = (d.masked_fill_(group.hidden[..., None], 0) for d in (d_f, d_v))
        _put(dq, feature_map.query_grad(d_query, rows, query, weight), span, x)
        _put(dk, feature_map.key_grad(d_f, group.k, group.f, weight), span, x)
        _put(dv, d_v, span, x)
    return dq, dk, dv, _transposed(d_kv).view(x.kv.shape), None if x.total is None else d_total.reshape(x.total.shape)


def safe_divide(x: Tensor, z: Tensor, log_largest: float = 0.0) -> Tensor:
    """Return x / z, broadcast; 0 where z `is_zero`.

    Not x · (1/z), whose gradient squares 1/z.
    """
    zero = is_zero(z, log_largest)
    return (x / z.masked_fill(zero, 1)).masked_fill(zero, 0)


def _inverse(z: Tensor, log_largest: float) -> Tensor:
    return z.reciprocal().masked_fill_(is_zero(z, log_largest), 0)


def is_zero(z: Tensor, log_largest: float = 0.0) -> Tensor:
    """Return where a normalizer counts as zero: gradients, features up to exp(log_largest) over z, would overflow."""
    return z.abs() < smallest_normalizer(z.dtype, log_largest)


def smallest_normalizer(dtype: torch.dtype, log_largest: float = 0.0) -> float:
    """Return the smallest normalizer that does not count as zero."""
    return 1e6 * math.exp(log_largest) * torch.finfo(dtype).tiny


class _Span(NamedTuple):
    """Tokens of some sequences that are processed together, in chunks of one size."""

    group: int
    tokens: slice
    size: int
    part: Part


def _spans(x: LinearInputs, problem: LinearProblem) -> list[_Span]:
    """Groups of full chunks, and the remainder as one smaller chunk. A chunk is a multiple of a bucket.

    Tokens of a sequence follow one another.
    """
    T, (size, number) = x.k.shape[1], _group_size(x, problem)
    found: list[tuple[int, slice, int]] = []
    start = 0
    while start < T:
        width = min((T - start) // size, number) * size or T - start
        found.append((len(found), slice(start, start + width), min(size, width)))
        start += width
    assert x.kv is not None
    numbers = min(T, size * number) * max(x.kv.shape[2], x.v.shape[3])
    return [_Span(*group, part) for part in parts_in_cache(x.q, x.k, numbers) for group in found]


def _group_size(x: LinearInputs, problem: LinearProblem) -> tuple[int, int]:
    """Return the tokens in a chunk and the chunks in a group."""
    chunk = CPU_CHUNK if x.k.device.type == "cpu" else CHUNK
    size = problem.bucket * max(1, chunk // problem.bucket)
    return size, max(1, GROUP // size)


def _rows(tensor: Tensor, span: _Span, x: LinearInputs, *, extra: bool = False) -> Tensor:
    """(B, T, heads, ·) -> (N B Hkv, G C, ·): the span's N chunks, with the G query heads of a key head as rows.

    extra: append a column of ones.
    """
    assert x.kv is not None
    source = _by_chunks(tensor, span, x)
    rows = torch.empty(*source.shape[:5], source.shape[5] + extra, dtype=x.kv.dtype, device=tensor.device)
    rows[..., : source.shape[5]] = source
    if extra:
        rows[..., -1] = 1
    return rows.view(-1, source.shape[3] * span.size, rows.shape[5])


def _put(into: Tensor, rows: Tensor, span: _Span, x: LinearInputs) -> None:
    """Inverse of `_rows`: copy rows (N B Hkv, G C, ·) into (B, T, heads, ·)."""
    target = _by_chunks(into, span, x)
    target.copy_(rows.reshape(target.shape))


def _put_product(into: Tensor, rows: Tensor, factor: Tensor, span: _Span, x: LinearInputs) -> None:
    target = _by_chunks(into, span, x)
    torch.mul(rows.unflatten(1, target.shape[3:5]).view(target.shape), factor.view(*target.shape[:5], 1), out=target)


def _by_chunks(tensor: Tensor, span: _Span, x: LinearInputs) -> Tensor:
    """View (N, B, Hkv, G, C, ·) of a span of (B, T, heads, ·)."""
    chunks = tensor[span.part.rows, span.tokens].unflatten(1, (-1, span.size)).unflatten(3, (x.k.shape[2], -1))
    return chunks[:, :, :, span.part.heads].permute(1, 0, 3, 4, 2, 5)


class _Group(NamedTuple):
    """The keys of N chunks per sequence, Y = N B Hkv chunks in all, and the factors exp(β_j − c_i) between scales."""

    k: Tensor  # (Y, C, D)
    f: Tensor  # (Y, C, M)
    f_end: Tensor  # (Y, C, M) at the scale of the chunk's end
    v: Tensor  # (Y, C, E), with a column of ones if normalized
    hidden: Tensor | None  # (Y, C)
    inside: bool  # whether a token sees tokens of its chunk
    pair: Tensor | None  # (Y, C, C); this and the next two are None if all are 1
    start: Tensor | None  # (Y, C, 1) to the chunk's start
    end: Tensor | None  # (Y, C, 1) to the chunk's end
    through: Sequence[Tensor] | None  # N times (B Hkv, 1, 1), from a chunk's start to its end
    last: Tensor  # (B Hkv,) the reference at the group's end
    bucket: int  # tokens that do not see each other

    @classmethod
    def of(cls, x: LinearInputs, problem: LinearProblem, span: _Span, c: Tensor) -> _Group:
        k, v = _rows(x.k, span, x), _rows(x.v, span, x, extra=problem.normalize)
        f, beta = _map(problem).key(k, x.weight)
        if x.log_scale is not None:
            beta = _rows(x.log_scale[..., None], span, x)[..., 0]
        hidden = None
        if x.lengths is not None:
            slot = torch.arange(span.tokens.start, span.tokens.stop, device=k.device)
            heads = len(range(x.k.shape[2])[span.part.heads])
            hidden = (slot >= x.lengths[span.part.rows, None]).repeat_interleave(heads, 0)
            hidden = hidden.unflatten(1, (-1, span.size)).transpose(0, 1).reshape(-1, span.size)
            f, v = (y.masked_fill(hidden[..., None], 0) for y in (f, v))
            beta = None if beta is None else beta.masked_fill(hidden, FLOOR)
        size, bucket = span.size, problem.bucket
        inside = bucket == 1 or size > bucket
        if beta is None:
            return cls(k, f, f, v, hidden, inside, None, None, None, None, c, bucket)
        by_row = beta.view(-1, len(c), size).transpose(0, 1)  # (B Hkv, N, C)
        reference = torch.maximum(running_max(by_row.flatten(1)), c[:, None]).view(by_row.shape).transpose(0, 1)
        bounds = torch.cat([c[None], reference[:, :, -1]])  # (N + 1, B Hkv)
        rows = reference.reshape(-1, size)
        before, after = bounds[:-1].reshape(-1, 1), bounds[1:].reshape(-1, 1)
        end = _factor(beta - after)[..., None]
        return cls(
            k,
            f,
            f * end,
            v,
            hidden,
            inside,
            _factor(beta[:, None] - rows[:, :, None]) if inside else None,
            _factor(before - rows)[..., None],
            end,
            _factor(bounds[:-1] - bounds[1:])[..., None, None].unbind(),
            bounds[-1],
            bucket,
        )

    def sums(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums before each chunk (Y, E, M) and after the last (B Hkv, E, M), from those before the first."""
        sums = kv.new_empty(len(self.f) // len(kv) + 1, *kv.shape)
        sums[0] = kv
        torch.bmm(self.v.mT, self.f_end, out=sums[1:].flatten(0, 1))
        _scan(sums.unbind(), self.through)
        return sums[:-1].flatten(0, 1), sums[-1]

    def sums_grad(self, d_read: Tensor, query: Tensor, d_last: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the sums before the first chunk, and of each chunk's own (Y, E, M)."""
        d_sums = d_last.new_empty(len(self.f) // len(d_last) + 1, *d_last.shape)
        d_sums[-1] = d_last
        torch.bmm(d_read.mT, query, out=d_sums[:-1].flatten(0, 1))
        _scan(d_sums.unbind()[::-1], self.through and self.through[::-1])
        return d_sums[0], d_sums[1:].flatten(0, 1)

    def weigh(self, rows: Tensor, keys: Tensor) -> Tensor:
        """(Y, G C, C): the products of rows (Y, G C, ·) and keys (Y, C, ·), weighted."""
        products = torch.bmm(rows, keys.mT)
        by_head = products.unflatten(1, (-1, keys.shape[1]))
        # Filled, not multiplied: a product with a later key may overflow. `tril_` writes the upper triangle alone.
        if self.bucket == 1:
            by_head.tril_()
        else:
            slot = torch.arange(keys.shape[1], device=keys.device) // self.bucket
            by_head.masked_fill_(slot[:, None] <= slot, 0)
        if self.pair is not None:
            by_head.mul_(self.pair[:, None])
        return products

    def towards_start(self, rows: Tensor) -> Tensor:
        if self.start is None:
            return rows
        return (rows.unflatten(1, (-1, self.start.shape[1])) * self.start[:, None]).flatten(1, 2)

    def towards_end(self, keys: Tensor) -> Tensor:
        return keys if self.end is None else keys * self.end


def _scan(sums: Sequence[Tensor], factors: Sequence[Tensor] | None) -> None:
    """Add to each of the sums the one before it, times a factor."""
    for i in range(1, len(sums)):
        if factors is None:
            sums[i].add_(sums[i - 1])
        else:
            sums[i].addcmul_(sums[i - 1], factors[i - 1])


def _by_head(rows: Tensor, span: _Span) -> Tensor:
    """(Y, G C, ·) -> (Y, G, C, ·)."""
    return rows.unflatten(1, (-1, span.size))


def _running_sums(x: Tensor, before: Tensor, *, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """Return sums of x (Y, C, E) up to each token from `before` (B Hkv, E) on, and the last; reverse: of later ones."""
    own = x.sum(1).view(-1, *before.shape)
    sums = torch.cat([before[None], own.flip(0) if reverse else own]).cumsum(0)
    starts = sums[:-1].flip(0) if reverse else sums[:-1]
    ones = x.new_ones(x.shape[1], x.shape[1])
    triangle = (ones.triu() if reverse else ones.tril()).expand(len(x), -1, -1)
    return torch.baddbmm(starts.reshape(len(x), 1, -1), triangle, x), sums[-1]


def running_max(x: Tensor) -> Tensor:
    """Return the largest value up to each one along the second dimension."""
    if not is_exporting():
        return x.cummax(1).values
    shift = 1  # By doubling: other runtimes than PyTorch have no cummax.
    while shift < x.shape[1]:
        x = torch.cat([x[:, :shift], torch.maximum(x[:, shift:], x[:, :-shift])], 1)
        shift *= 2
    return x


def _factor(x: Tensor) -> Tensor:
    """Return exp(x), in place, with x clamped above 0, where the pair is masked.

    Not clamped below: a product of features of FAVOR+ may be e^60, so that the smallest normal number times it counts.
    """
    return x.clamp_(max=0.0).exp_()


# (x (..., D), weight) -> features (..., M) and their log scale (...).
Apply = Callable[[Tensor, Any], tuple[Tensor, Tensor | None]]
# (d features (..., M), x, features, weight) -> d x (..., D), maybe in place; log scales are constants.
Differentiate = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


class Map(NamedTuple):
    """φ for queries and keys. A query's log scale cancels in normalized attention and is omitted.

    log_largest: Logarithm of the largest feature of maps with a log scale.
    """

    query: Apply
    key: Apply
    query_grad: Differentiate
    key_grad: Differentiate
    log_largest: float = 0.0


def favor_projection(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """w·x (..., M) and ‖x‖²/2 (..., 1) of x scaled by D^−¼: exp of their difference is FAVOR+'s feature."""
    x = x * x.shape[-1] ** -0.25
    return x @ weight.T, x.square().sum(-1, keepdim=True) / 2


def _identity(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return x, None


def _identity_grad(g: Tensor, x: Tensor, f: Tensor, weight: Tensor | None) -> Tensor:
    return g


def _elu(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    # Not elu(x) + 1, which cancels where x is negative.
    return F.relu(x) + x.clamp(max=0).exp_(), None


def _elu_grad(g: Tensor, x: Tensor, f: Tensor, weight: Tensor | None) -> Tensor:
    return f.clamp(max=1).mul_(g)


def _relu(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return F.relu(x) + RELU_EPSILON, None


def _relu_grad(g: Tensor, x: Tensor, f: Tensor, weight: Tensor | None) -> Tensor:
    return g * (x > 0)


def _softmax_query(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return x.softmax(-1), None


def _softmax_query_grad(g: Tensor, x: Tensor, f: Tensor, weight: Tensor | None) -> Tensor:
    return g.sub_((g * f).sum(-1, keepdim=True)).mul_(f)


def _exp(x: Tensor, weight: Tensor | None, log_largest: float = 0.0) -> tuple[Tensor, Tensor | None]:
    largest = x.detach().amax(-1)
    if not log_largest:
        return (x - largest[..., None]).exp_(), largest
    # A square: small features do not underflow before they are scaled, and autograd multiplies no gradient by
    # exp(log_largest) alone. A whole number as scale makes its differences exact.
    center = largest.round()
    root = ((x - center[..., None]) / 2).exp_() * math.exp(log_largest / 2)
    return root.square(), center - log_largest


def _exp_grad(g: Tensor, x: Tensor, f: Tensor, weight: Tensor | None) -> Tensor:
    return g.mul_(f)


def _favor_query(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    return _exp(favor_projection(x, weight)[0], None, FAVOR_LARGEST)[0], None


def _favor_query_grad(g: Tensor, x: Tensor, f: Tensor, weight: Tensor) -> Tensor:
    return (g * f) @ (weight * x.shape[-1] ** -0.25)


def _favor_key(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    projected, half_norm = favor_projection(x, weight)
    return _exp(projected - half_norm, None, FAVOR_LARGEST)


def _favor_key_grad(g: Tensor, x: Tensor, f: Tensor, weight: Tensor) -> Tensor:
    g = g * f
    return g @ (weight * x.shape[-1] ** -0.25) - x * (g.sum(-1, keepdim=True) * x.shape[-1] ** -0.5)


MAPS = {
    "identity": Map(_identity, _identity, _identity_grad, _identity_grad),
    "elu": Map(_elu, _elu, _elu_grad, _elu_grad),
    "relu": Map(_relu, _relu, _relu_grad, _relu_grad),
    "softmax": Map(_softmax_query, _exp, _softmax_query_grad, _exp_grad),
    "favor": Map(_favor_query, _favor_key, _favor_query_grad, _favor_key_grad, FAVOR_LARGEST),
}
# The scale of a query's features is part of the result if it is not normalized.
_PLAIN_FAVOR = Map(
    lambda x, weight: (_exp(favor_projection(x, weight)[0], None)[0], None),
    lambda x, weight: _exp(torch.sub(*favor_projection(x, weight)), None),
    _favor_query_grad,
    _favor_key_grad,
)


def _favor_with(epsilon: float) -> Map:
    """performer-pytorch's map: relative to the largest w·x, with an epsilon, which keys get in `forward`."""

    def query(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        f, _ = key(x, weight)
        return f.add_(epsilon), None

    def key(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        projected, half_norm = favor_projection(x, weight)
        largest = projected.amax(-1)
        return projected.sub_(half_norm + largest[..., None]).exp_(), largest

    return Map(query, key, lambda g, x, f, weight: _favor_key_grad(g, x, f - epsilon, weight), _favor_key_grad)


def _map(problem: LinearProblem) -> Map:
    if problem.epsilon:
        return _favor_with(problem.epsilon)
    favor = problem.feature_map == "favor" and not problem.normalize
    return _PLAIN_FAVOR if favor else MAPS[problem.feature_map]
