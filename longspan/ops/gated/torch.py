"""Gated linear attention and the gated delta rule in PyTorch, for any device: a few chunks at a time.

Inside a chunk of C tokens, with G_i = Σ_{s ≤ i} log α_s taken from its start and S the state before it,

    u_i + β_i Σ_{j < i} A^kk_ij u_j = β_i (v_i − (e^{G_i} k_i)ᵀ S)        (delta rule; else u_i = β_i v_i)
    o_i = (e^{G_i} q_i)ᵀ S + Σ_{j ≤ i} A^qk_ij u_j
    S'  = Diag(e^{G_C}) S + Σ_j (e^{G_C − G_j} k_j) u_jᵀ,      A^ab_ij = Σ_d a_id b_jd e^{G_id − G_jd}.

Only the products with S are sequential. The exponents G_i − G_j ≤ 0 are differences of float64 sums, or sums, so that
a token that forgets everything (log α = −104) costs no accuracy after it. README.md derives the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.ops.common.parts import Part, parts_in_cache
from longspan.ops.common.torch_private import is_exporting

if TYPE_CHECKING:
    from longspan.ops.gated import GatedInputs, GatedProblem, GatedSaved

# Tokens in a chunk and in a group. Shorter chunks compute less, and launch more, which costs a GPU more.
CHUNK, CPU_CHUNK, GROUP = 64, 32, 512
# exp of less than this is 0 in float32 and float64.
LOG_UNDERFLOW = {torch.float32: -104.0, torch.float64: -746.0}


def forward(x: GatedInputs, problem: GatedProblem) -> tuple[Tensor, Tensor, Tensor]:
    """Return out (B, T, H, E), the state after the last token, and the states before each span, for `backward`."""
    out = x.v.new_empty(*x.q.shape[:3], x.v.shape[3])
    S = _first_state(x)
    starts = new_starts(x)
    for span in _spans(x):
        here = span.part.sequences
        starts[span.group, here] = S[here]
        chunks = _Chunks.of(x, problem, span)
        states = chunks.scan(S[here])
        S[here] = states[-1]
        read = torch.bmm(chunks.q_in, states[:-1].flatten(0, 1)).baddbmm_(chunks.pair, chunks.u)
        _put(out, read.mul_(problem.scale), span, x)
    return out, S.view(*_heads(x), *S.shape[1:]), starts


def backward(
    saved: GatedSaved, x: GatedInputs, problem: GatedProblem
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """Return the gradients of q, k, v, log_decay, beta and of the state before the first token."""
    d_out, d_state, starts = saved
    dq, dk, dv = torch.empty_like(x.q), torch.empty_like(x.k), torch.empty_like(x.v)
    d_decay = None if x.log_decay is None else torch.empty_like(x.log_decay)
    d_beta = None if x.beta is None else torch.empty_like(x.beta)
    dS = torch.zeros_like(starts[0])
    if d_state is not None:
        dS.copy_(d_state.flatten(0, 1))
    for span in reversed(_spans(x)):
        here = span.part.sequences
        chunks = _Chunks.of(x, problem, span)
        d_rows = _rows(span, x, d_out, more=problem.delta).mul_(problem.scale)
        d, dS[here] = chunks.gradients(starts[span.group, here], d_rows, dS[here])
        for into, rows in ((dq, d.q), (dk, d.k), (dv, d.v), (d_decay, d.g), (d_beta, d.beta)):
            if into is not None and rows is not None:
                _put(into if into.ndim == 4 else into[..., None], rows, span, x)
    return dq, dk, dv, d_decay, d_beta, dS.view(*_heads(x), *dS.shape[1:])


def new_starts(x: GatedInputs) -> Tensor:
    """Return a buffer for the states (B Hkv, D, E) before each span, possibly too many."""
    B, Hkv = _heads(x)
    return x.k.new_zeros(x.k.shape[1] // GROUP + 2, B * Hkv, x.k.shape[3], x.v.shape[3], dtype=state_dtype(x))


class _Grads(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None


class _Chunks(NamedTuple):
    """The chunks of a span, Y in all: N of each sequence. R query heads of a key head are rows, (Y, R C, ·)."""

    rows: Tensor  # (Y, R C, D) q; by the delta rule (Y, (R + 1) C, D): keys are read like queries
    k: Tensor  # (Y, C, D)
    v: Tensor  # (Y, C, E)
    beta: Tensor | None  # (Y, C, 1)
    decay: _Decay
    rows_in: Tensor  # e^{G_i} rows_i
    q_in: Tensor  # those of q
    k_out: Tensor  # e^{G_C − G_j} k_j
    pair: Tensor  # (Y, R C, C) A^qk, zero above the diagonal
    kk: Tensor | None  # (Y, C, C) A^kk
    lower: Tensor | None  # (Y, C, C) the triangular matrix of the delta rule, with something on its diagonal
    u: Tensor  # (Y, C, E) what an empty state would have written, and after `scan` what is written
    w: Tensor | None  # (Y, C, D): u − w S is written, by the delta rule

    @classmethod
    def of(cls, x: GatedInputs, problem: GatedProblem, span: _ChunkSpan) -> _Chunks:
        v, C = _rows(span, x, x.v), span.size
        beta = None if x.beta is None else _rows(span, x, x.beta[..., None])
        decay = _Decay.of(None if x.log_decay is None else _rows(span, x, x.log_decay))
        rows = _rows(span, x, x.q, x.k) if problem.delta else _rows(span, x, x.q)
        k = rows[:, -C:] if problem.delta else _rows(span, x, x.k)
        u, w, lower, kk = v if beta is None else beta * v, None, None, None
        rows_in, pair = decay.from_start(rows), decay.pairs(rows, k)
        q_in = rows_in
        if problem.delta:
            (q_in, k_in), (pair, kk) = (y.split([y.shape[1] - C, C], 1) for y in (rows_in, pair))
            # The system is solved in place.
            lower, w = (y.clone() if beta is None else beta * y for y in (kk, k_in))
            u = _solve_unit_lower(lower, u.clone() if beta is None else u)
            w = _solve_unit_lower(lower, w)
        return cls(rows, k, v, beta, decay, rows_in, q_in, decay.to_end(k), pair, kk, lower, u, w)

    def scan(self, S: Tensor) -> Tensor:
        """Return the states before each chunk and after the last (N + 1, ·, D, E), and make `u` what is written."""
        number = len(self.u) // len(S)
        states = S.new_empty(number + 1, *S.shape)
        states[0] = S
        if self.w is None:
            torch.bmm(self.k_out.mT, self.u, out=states[1:].flatten(0, 1))
        before, after = states[:-1].unbind(), states[1:].unbind()
        u, w, k_out, last = (_by_chunk(y, number) for y in (self.u, self.w, self.k_out, self.decay.last))
        for n in range(number):
            if self.w is not None:
                u[n].baddbmm_(w[n], before[n], alpha=-1)
                torch.bmm(k_out[n].mT, u[n], out=after[n])
            _add_product(after[n], before[n], last[n])
        return states

    def scan_backward(self, d_read: Tensor, dS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the states, as of `scan`, and of `u`, given those of what queries read."""
        number = len(self.u) // len(dS)
        d_states = dS.new_empty(number + 1, *dS.shape)
        d_states[-1] = dS
        torch.bmm(self.q_in.mT, d_read, out=d_states[:-1].flatten(0, 1))
        d_u = torch.bmm(self.pair.mT, d_read)
        before, after = d_states[:-1].unbind(), d_states[1:].unbind()
        du, w, k_out, last = (_by_chunk(y, number) for y in (d_u, self.w, self.k_out, self.decay.last))
        for n in reversed(range(number)):
            _add_product(before[n], after[n], last[n])
            if self.w is not None:
                du[n].baddbmm_(k_out[n], after[n])
                before[n].baddbmm_(w[n].mT, du[n], alpha=-1)
        if self.w is None:
            d_u.baddbmm_(self.k_out, d_states[1:].flatten(0, 1))
        return d_states, d_u

    def gradients(self, S: Tensor, d_read: Tensor, dS: Tensor) -> tuple[_Grads, Tensor]:
        """Return the gradients of the inputs (Y, ·, ·) and of the state before.

        Args:
            S: The state before.
            d_read: The gradients of what `rows` read; those of keys are found here.
            dS: The gradient of the state after.
        """
        states, C = self.scan(S), self.k.shape[1]
        d_states, d_u = self.scan_backward(d_read[:, : self.q_in.shape[1]], dS)
        if self.lower is not None:
            d_u = _solve_unit_lower(self.lower, d_u, transposed=True)
            torch.neg(d_u, out=d_read[:, -C:])
        d_pairs = torch.bmm(d_read, self.u.mT)
        d_rows = torch.bmm(d_read, states[:-1].flatten(0, 1).mT)
        if self.kk is not None:
            d_pairs[:, -C:].tril_(-1)
        d_beta = None
        if self.beta is not None:
            d_beta = (d_u * self.v).sum(-1, keepdim=True)
            if self.kk is not None:
                d_lower, d_in = d_pairs[:, -C:], d_rows[:, -C:]
                d_beta += (d_lower * self.kk).sum(-1, keepdim=True)
                d_beta += (d_in * self.rows_in[:, -C:]).sum(-1, keepdim=True)
                d_lower.mul_(self.beta)
                d_in.mul_(self.beta)
        d_rows = self.decay.from_start(d_rows)
        d_k = self.decay.to_end(torch.bmm(self.u, d_states[1:].flatten(0, 1).mT))
        d_rows, d_k = self.decay.add_pairs_grad(d_pairs, self.rows, self.k, d_rows, d_k)
        d_g = None
        if self.decay.start is not None:
            d_sums = self.decay.products(self.rows, d_rows).unflatten(1, (-1, C)).sum(1)
            d_sums -= self.decay.products(self.k, d_k)
            last = d_states[1:].mul_(states[1:]).flatten(0, 1).sum(-1)
            d_sums[:, -1] += last if d_sums.shape[2] > 1 else last.sum(-1, keepdim=True)
            d_g = d_sums.flip(1).cumsum(1).flip(1)
        d_q = d_rows
        if self.kk is not None:
            d_q, d_k = d_rows[:, :-C], d_k + d_rows[:, -C:]
        return _Grads(d_q, d_k, d_u if self.beta is None else d_u * self.beta, d_g, d_beta), d_states[0]


def _by_chunk(rows: Tensor | None, number: int) -> Sequence[Any]:
    """(N ·, ·, ·) -> N times (·, ·, ·), or None."""
    return [None] * number if rows is None else rows.unflatten(0, (number, -1)).unbind()


def _add_product(into: Tensor, x: Tensor, factor: Tensor | None) -> None:
    """Add x times a factor, or 1, to a tensor."""
    if factor is None:
        into.add_(x)
    else:
        into.addcmul_(x, factor)


class _Decay(NamedTuple):
    """Products of decays between tokens of a chunk; None where there are none."""

    start: Tensor | None  # (Y, C, 1 or D) e^{G_i}
    end: Tensor | None  # e^{G_C − G_i}
    last: Tensor | None  # (Y, 1 or D, 1) e^{G_C}
    between: Tensor | None  # (Y, C, C) e^{G_i − G_j} for j ≤ i, for one decay per head
    levels: list[_DecayLevel] | None  # for one decay per channel

    @classmethod
    def of(cls, g: Tensor | None) -> _Decay:
        if g is None:
            return cls(None, None, None, None, None)
        # A sum with −1e30 would have no digits left for the tokens behind it.
        g, C = g.clamp(min=LOG_UNDERFLOW[g.dtype]), g.shape[1]
        if g.shape[2] == 1:
            sums = g.double().cumsum(1)
            start, end = _exp(sums, g.dtype), _exp(sums[:, -1:] - sums, g.dtype)
            return cls(start, end, start[:, -1:], _exp(sums - sums.mT, g.dtype), None)
        found, before, after = _levels(_padded(g))
        start, end = _exp(before[:, :C], g.dtype), _exp(after[:, :C], g.dtype)
        return cls(start, end, start[:, -1, :, None], None, found)

    def from_start(self, rows: Tensor) -> Tensor:
        return rows if self.start is None else _times(rows, self.start)

    def to_end(self, rows: Tensor) -> Tensor:
        return rows if self.end is None else rows * self.end

    def products(self, a: Tensor, b: Tensor) -> Tensor:
        """Return a times b (·, ·, D), summed over the channels that share a decay."""
        return a * b if self.levels is not None else (a * b).sum(-1, keepdim=True)

    def pairs(self, a: Tensor, b: Tensor) -> Tensor:
        """Return A^ab (Y, R C, C), zero above the diagonal, of a (Y, R C, D) and b (Y, C, D)."""
        if self.levels is None:
            return self._weigh(torch.bmm(a, b.mT), b.shape[1])
        C = b.shape[1]
        a, b = _padded(a.unflatten(1, (-1, C))), _padded(b)
        A = torch.diag_embed((a * b[:, None]).sum(-1))
        for level in self.levels:
            half = level.half
            found = (level.rows(a) @ level.columns(b).mT).unflatten(2, (-1, half))
            for n, i in enumerate(range(0, A.shape[3], 2 * half)):
                A[:, :, i + half : i + 2 * half, i : i + half] = found[:, n]
        return A[:, :, :C, :C].flatten(1, 2)

    def add_pairs_grad(self, d: Tensor, a: Tensor, b: Tensor, d_a: Tensor, d_b: Tensor) -> tuple[Tensor, Tensor]:
        """Add the gradients of a and b, given that of A^ab; what it has above the diagonal is ignored."""
        C = b.shape[1]
        if self.levels is None:
            d = self._weigh(d, C)
            return d_a.baddbmm_(d, b), d_b.baddbmm_(d.mT, a)
        d = _padded(_padded(d.unflatten(1, (-1, C))).mT).mT
        a, d_a = (_padded(y.unflatten(1, (-1, C))) for y in (a, d_a))
        b, d_b = _padded(b), _padded(d_b)
        own = d.diagonal(dim1=-2, dim2=-1)[..., None]
        d_a.addcmul_(own, b[:, None])
        d_b += (own * a).sum(1)
        for level in self.levels:
            pairs = _level_pairs(d, level.half).flatten(2, 3)
            first, second = level.first, level.second[:, :, None]
            d_rows = _small_product(pairs, level.columns(b)).unflatten(2, (-1, level.half))
            _second(d_a, level.half).addcmul_(d_rows, second)
            _first(d_b, level.half).addcmul_(_small_product(pairs.mT, level.rows(a)), first)
        return d_a[:, :, :C].flatten(1, 2), d_b[:, :C]

    def _weigh(self, products: Tensor, size: int) -> Tensor:
        """Multiply products (Y, R C, C) by the decay between the tokens, in place; zero above the diagonal."""
        groups = products.unflatten(1, (-1, size))
        if self.between is not None:
            groups.mul_(self.between[:, None])
        groups.tril_()
        return products


class _DecayLevel(NamedTuple):
    """Decays between the tokens of the first and the second half of each of n blocks of 2 h tokens.

    They are products of those to the middle and those from there: neither is above 1.
    """

    half: int
    first: Tensor  # (Y, n, h, D) from a token of the first half to the middle
    second: Tensor  # from there to a token of the second half

    def rows(self, a: Tensor) -> Tensor:
        """(Y, R, C, D) -> (Y, n, R h, D): the second halves, from the middle on."""
        return (_second(a, self.half) * self.second[:, :, None]).flatten(2, 3)

    def columns(self, b: Tensor) -> Tensor:
        """(Y, C, D) -> (Y, n, h, D): the first halves, to the middle."""
        return _first(b, self.half) * self.first


def _levels(g: Tensor) -> tuple[list[_DecayLevel], Tensor, Tensor]:
    """Return the levels h = 1, 2, 4, … of log decays (Y, C, D), and the sums up to and including a token and behind it.

    All are sums of g over some tokens: a difference would have no digits left behind a token that forgets everything.
    """
    before, after, found, half = g.clone(), torch.zeros_like(g), [], 1
    while half < g.shape[1]:
        first, second = _first(after, half), _second(before[:, None], half)[:, :, 0]
        found.append(_DecayLevel(half, _exp(first, g.dtype), _exp(second, g.dtype)))
        first += second[:, :, -1:]
        second += _first(before, half)[:, :, -1:]
        half *= 2
    return found, before, after


def _first(rows: Tensor, half: int) -> Tensor:
    """View (Y, n, h, D) of the first halves of blocks of 2 h tokens of (Y, C, D)."""
    return rows.unflatten(1, (-1, 2, half))[:, :, 0]


def _second(rows: Tensor, half: int) -> Tensor:
    """View (Y, n, R, h, D) of the second halves of (Y, R, C, D)."""
    return rows.unflatten(2, (-1, 2, half))[:, :, :, 1].transpose(1, 2)


def _level_pairs(A: Tensor, half: int) -> Tensor:
    """View (Y, n, R, h, h) of the pairs of second and first halves in (Y, R, C, C)."""
    blocks = A.unflatten(3, (-1, 2, half)).unflatten(2, (-1, 2, half))
    return blocks[:, :, :, 1, :, :, 0].diagonal(dim1=2, dim2=4).permute(0, 4, 1, 2, 3)


def _small_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, without a call of BLAS for each of many tiny ones."""
    return a @ b if a.shape[-1] > 2 else (a[..., None] * b[..., None, :, :]).sum(-2)


def _padded(rows: Tensor) -> Tensor:
    """Pad tokens (..., C, ·) to a power of two."""
    C = rows.shape[-2]
    more = (1 << (C - 1).bit_length()) - C
    return F.pad(rows, (0, 0, 0, more)) if more else rows


def _exp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exp(x), or 1 where x is above 0 and a pair is masked; 0 for results below the smallest normal number, for
    which `exp` is slow.
    """
    tiny = torch.finfo(dtype).tiny
    return torch.threshold_(x.to(dtype).clamp(min=math.log(tiny), max=0.0).exp_(), 2 * tiny, 0.0)


def _times(rows: Tensor, factor: Tensor) -> Tensor:
    """Multiply rows (Y, R C, ·) by (Y, C, ·)."""
    return (rows.unflatten(1, (-1, factor.shape[1])) * factor[:, None]).flatten(1, 2)


class _ChunkSpan(NamedTuple):
    """Tokens of some sequences that are processed together, in chunks of one size."""

    group: int
    tokens: slice
    size: int
    part: Part


def _spans(x: GatedInputs) -> list[_ChunkSpan]:
    """Groups of full chunks, and the remainder as one smaller chunk. Tokens of a sequence follow one another."""
    T, size = x.k.shape[1], CPU_CHUNK if x.k.device.type == "cpu" else CHUNK
    found: list[tuple[int, slice, int]] = []
    start = 0
    while start < T:
        width = min((T - start) // size * size, GROUP) or T - start
        found.append((len(found), slice(start, start + width), min(size, width)))
        start += width
    numbers = min(T, GROUP) * max(x.k.shape[3], x.v.shape[3])
    return [_ChunkSpan(*group, part) for part in parts_in_cache(x.q, x.k, numbers) for group in found]


def _rows(span: _ChunkSpan, x: GatedInputs, *tensors: Tensor, more: bool = False) -> Tensor:
    """(B, T, heads, ·) -> (Y, R C, ·): the span's chunks, with the heads of each tensor of a key head as rows.

    more: leave space for another head.
    """
    sources = [_by_chunks(tensor, span, x) for tensor in tensors]
    heads, shape = sum(source.shape[3] for source in sources) + more, sources[0].shape
    rows, start = tensors[0].new_empty(*shape[:3], heads, *shape[4:], dtype=state_dtype(x)), 0
    for source in sources:
        rows[:, :, :, start : start + source.shape[3]] = source
        start += source.shape[3]
    return rows.flatten(0, 2).flatten(1, 2)


def _put(into: Tensor, rows: Tensor, span: _ChunkSpan, x: GatedInputs) -> None:
    """Inverse of `_rows`: copy rows (Y, R C, ·) into (B, T, heads, ·)."""
    target = _by_chunks(into, span, x)
    target.copy_(rows.reshape(target.shape))


def _by_chunks(tensor: Tensor, span: _ChunkSpan, x: GatedInputs) -> Tensor:
    """View (N, B, Hkv, R, C, ·) of a span of (B, T, heads, ·)."""
    chunks = tensor[span.part.rows, span.tokens].unflatten(1, (-1, span.size)).unflatten(3, (x.k.shape[2], -1))
    return chunks[:, :, :, span.part.heads].permute(1, 0, 3, 4, 2, 5)


def _first_state(x: GatedInputs) -> Tensor:
    if x.state is not None:
        return x.state.flatten(0, 1).clone(memory_format=torch.contiguous_format)
    B, Hkv = _heads(x)
    return x.k.new_zeros(B * Hkv, x.k.shape[3], x.v.shape[3], dtype=state_dtype(x))


def _heads(x: GatedInputs) -> tuple[int, int]:
    return x.k.shape[0], x.k.shape[2]


def state_dtype(x: GatedInputs) -> torch.dtype:
    """Return the dtype of states and sums: that of a given state, which may be wider than the inputs."""
    wide = x.k.dtype == torch.float64 or (x.state is not None and x.state.dtype == torch.float64)
    return torch.float64 if wide else torch.float32


def _solve_unit_lower(lower: Tensor, x: Tensor, *, transposed: bool = False) -> Tensor:
    """Solve (1 + lower) y = x, or with its transpose, of a strictly lower triangular matrix, in place.

    What `lower` has elsewhere is ignored.
    """
    if not is_exporting():
        matrix = lower.mT if transposed else lower
        return torch.linalg.solve_triangular(matrix, x, upper=transposed, unitriangular=True, out=x)
    assert not transposed
    # By products, which other runtimes know: forward substitution by halves.
    half = lower.shape[-1] // 2
    if not half:
        return x
    first = _solve_unit_lower(lower[..., :half, :half], x[..., :half, :])
    rest = x[..., half:, :] - lower[..., half:, :half] @ first
    return torch.cat([first, _solve_unit_lower(lower[..., half:, half:], rest)], -2)
