"""Gated linear attention and the gated delta rule in PyTorch, for any device: a few chunks at a time.

Inside a chunk of C tokens, with G_i = Σ_{s ≤ i} log α_s taken from its start and S the state before it,

    u_i + β_i Σ_{j < i} A^kk_ij u_j = β_i (v_i − (e^{G_i} k_i)ᵀ S)        (delta rule; else u_i = β_i v_i)
    o_i = (e^{G_i} q_i)ᵀ S + Σ_{j ≤ i} A^qk_ij u_j
    S'  = Diag(e^{G_C}) S + Σ_j (e^{G_C − G_j} k_j) u_jᵀ,      A^ab_ij = Σ_d a_id b_jd e^{G_id − G_jd}.

Only the products with S are sequential. The exponents are differences G_i − G_j ≤ 0 of sums in float64, so that a token
that forgets everything (log α = −104) costs no accuracy after it. README.md derives the backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.ops.common.torch_private import is_exporting

if TYPE_CHECKING:
    from longspan.ops.gated import GatedInputs, GatedProblem, GatedSaved

CHUNK = 64
GROUP = 8
# exp of less than this is 0 in float32 and float64.
LOG_UNDERFLOW = {torch.float32: -104.0, torch.float64: -746.0}
BLOCK = 16  # Tokens in the smallest products where the decay differs between channels.


def forward(x: GatedInputs, problem: GatedProblem) -> tuple[Tensor, Tensor, Tensor]:
    """Return out (B, T, H, E), the state after the last token, and the states before each span, for `backward`."""
    out = x.v.new_empty(*x.q.shape[:3], x.v.shape[3])
    S = _first_state(x)
    starts = new_starts(x)
    for i, span in enumerate(_spans(x)):
        starts[i] = S
        chunks = _Chunks.of(x, problem, span)
        rows = []
        for n in range(span.number):
            u = chunks.writes(n, S)
            rows.append(torch.baddbmm(chunks.pair[:, n] @ u, chunks.q_in[:, n], S))
            S = chunks.passed(n, S, u)
        _put(out, torch.stack(rows, 1), span, x)
    return out, S.reshape(*_heads(x), *S.shape[1:]).clone(), starts


def backward(
    saved: GatedSaved, x: GatedInputs, problem: GatedProblem
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """Return the gradients of q, k, v, log_decay, beta and of the state before the first token."""
    d_out, d_state, starts = saved
    dq, dk, dv = torch.empty_like(x.q), torch.empty_like(x.k), torch.empty_like(x.v)
    d_decay = None if x.log_decay is None else torch.empty_like(x.log_decay)
    d_beta = None if x.beta is None else torch.empty_like(x.beta)
    dS = torch.zeros_like(starts[0]) if d_state is None else d_state.flatten(0, 1).to(starts.dtype)
    for i, span in reversed(list(enumerate(_spans(x)))):
        chunks = _Chunks.of(x, problem, span)
        grads, dS = _scan_backward(chunks, _rows(d_out, span, x), starts[i], dS)
        d = chunks.gradients(grads)
        for into, rows in ((dq, d.q), (dk, d.k), (dv, d.v), (d_decay, d.g), (d_beta, d.beta)):
            if into is not None and rows is not None:
                _put(into if into.ndim == 4 else into[..., None], rows, span, x)
    return dq, dk, dv, d_decay, d_beta, dS.reshape(*_heads(x), *dS.shape[1:]).clone()


def new_starts(x: GatedInputs) -> Tensor:
    """Return a buffer for the states (B Hkv, D, E) before each span, possibly too many."""
    B, Hkv = _heads(x)
    most = x.k.shape[1] // (CHUNK * GROUP) + 2
    return x.k.new_zeros(most, B * Hkv, x.k.shape[3], x.v.shape[3], dtype=state_dtype(x))


class _ScanGrads(NamedTuple):
    """Gradients of what the scan over chunks reads, (Y, N, …)."""

    q_in: Tensor
    pair: Tensor
    k_out: Tensor
    last: Tensor
    u: Tensor
    k_in: Tensor | None


class _Grads(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None


def _scan_backward(chunks: _Chunks, d_out: Tensor, S: Tensor, dS: Tensor) -> tuple[_ScanGrads, Tensor]:
    """Run the chunks of a span again from S and backwards from dS; return also the gradient of S."""
    states, writes = [], []
    for n in range(chunks.pair.shape[1]):
        states.append(S)
        writes.append(chunks.writes(n, S))
        S = chunks.passed(n, S, writes[n])
    found = []
    for n in reversed(range(len(states))):
        S, u, d_o = states[n], writes[n], d_out[:, n]
        d_u = torch.baddbmm(chunks.k_out[:, n] @ dS, chunks.pair[:, n].mT, d_o)
        found.append((d_o @ S.mT, d_o @ u.mT, u @ dS.mT, (dS * S).sum(-1), d_u, S))
        dS = dS if chunks.last is None else dS * chunks.last[:, n]
        dS = torch.baddbmm(dS, chunks.q_in[:, n].mT, d_o)
        if chunks.w is not None:
            dS = torch.baddbmm(dS, chunks.w[:, n].mT, d_u, alpha=-1)
    q_in, pair, k_out, last, u, before = (torch.stack(parts[::-1], 1) for parts in zip(*found, strict=True))
    return _ScanGrads(q_in, pair, k_out, last, u, None if chunks.w is None else -(u @ before.mT)), dS


class _Chunks(NamedTuple):
    """N chunks of each of Y = B Hkv sequences; R query heads of a key head are rows, (Y, N, R C, ·)."""

    q: Tensor  # (Y, N, R C, D), scaled
    k: Tensor  # (Y, N, C, D)
    v: Tensor  # (Y, N, C, E)
    beta: Tensor | None  # (Y, N, C, 1)
    decay: _Decay
    pair: Tensor  # (Y, N, R C, C) A^qk, zero above the diagonal
    u: Tensor  # (Y, N, C, E) what an empty state would have written
    w: Tensor | None  # (Y, N, C, D): u − w S is written, by the delta rule
    lower: Tensor | None  # (Y, N, C, C) the triangular matrix of the delta rule
    kk: Tensor | None  # (Y, N, C, C) A^kk below the diagonal
    q_in: Tensor  # e^{G_i} q_i
    k_out: Tensor  # e^{G_C − G_j} k_j
    last: Tensor | None  # (Y, N, 1 or D, 1) e^{G_C}
    scale: float

    @classmethod
    def of(cls, x: GatedInputs, problem: GatedProblem, span: _ChunkSpan) -> _Chunks:
        q, k, v = _rows(x.q, span, x) * problem.scale, _rows(x.k, span, x), _rows(x.v, span, x)
        beta = None if x.beta is None else _rows(x.beta[..., None], span, x)
        decay = _Decay.of(None if x.log_decay is None else _rows(x.log_decay, span, x), span.size)
        pair = decay.pairs(torch.cat([q, k], 2) if problem.delta else q, k)
        u, w, lower, kk = v if beta is None else beta * v, None, None, None
        if problem.delta:
            pair, kk = pair.split([q.shape[2], k.shape[2]], 2)
            kk = kk.tril(-1)
            lower = kk if beta is None else beta * kk
            k_in = decay.from_start(k)
            both = torch.cat([u, k_in if beta is None else beta * k_in], -1)
            solved = _solve_unit_lower(lower, both)
            u, w = solved.split([v.shape[3], k.shape[3]], -1)
        q_in, k_out = decay.from_start(q), decay.to_end(k)
        return cls(q, k, v, beta, decay, pair, u, w, lower, kk, q_in, k_out, decay.last(), problem.scale)

    def writes(self, n: int, S: Tensor) -> Tensor:
        """Return u (Y, C, E) of chunk n after state S."""
        return self.u[:, n] if self.w is None else torch.baddbmm(self.u[:, n], self.w[:, n], S, alpha=-1)

    def passed(self, n: int, S: Tensor, u: Tensor) -> Tensor:
        """Return the state after chunk n."""
        S = S if self.last is None else S * self.last[:, n]
        return torch.baddbmm(S, self.k_out[:, n].mT, u)

    def gradients(self, d: _ScanGrads) -> _Grads:
        """Return the gradients of the inputs (Y, N, …)."""
        decay, number = self.decay, [self.q.shape[2], self.k.shape[2]]
        d_rows, y, d_beta = None, d.u, None
        if self.w is None:
            d_q, d_k = decay.pairs_grad(d.pair, self.q, self.k)
        else:
            assert self.lower is not None
            assert self.kk is not None
            assert d.k_in is not None
            both = torch.cat([d.u, d.k_in], -1)
            y, z = torch.linalg.solve_triangular(self.lower.mT, both, upper=True, unitriangular=True).split(
                [d.u.shape[-1], d.k_in.shape[-1]], -1
            )
            d_lower = -(y @ self.u.mT + z @ self.w.mT).tril(-1)
            d_kk = d_lower if self.beta is None else self.beta * d_lower
            d_pairs, rows = torch.cat([d.pair, d_kk], 2), torch.cat([self.q, self.k], 2)
            d_rows, d_k = decay.pairs_grad(d_pairs, rows, self.k)
            d_q, d_rows = d_rows.split(number, 2)
            d_rows = d_rows + decay.from_start(z if self.beta is None else self.beta * z)
            if self.beta is not None:
                d_beta = (z * decay.from_start(self.k)).sum(-1, keepdim=True)
                d_beta = d_beta + (d_lower * self.kk).sum(-1, keepdim=True)
        d_q = d_q + decay.from_start(d.q_in)
        d_end = decay.to_end(d.k_out)
        d_k = d_k + d_end
        if self.beta is not None:
            own = (y * self.v).sum(-1, keepdim=True)
            d_beta = own if d_beta is None else d_beta + own
        d_g = None
        if decay.sums is not None:
            d_sums = _sum_groups(self.q * d_q, self.k.shape[2]) - self.k * d_k
            if d_rows is not None:
                d_sums = d_sums + self.k * d_rows
            assert self.last is not None
            d_sums[:, :, -1] += (self.k * d_end).sum(2) + self.last[..., 0] * d.last
            d_sums = d_sums.sum(-1, keepdim=True) if decay.sums.shape[-1] == 1 else d_sums
            d_g = d_sums.flip(2).cumsum(2).flip(2)
        d_k = d_k if d_rows is None else d_k + d_rows
        return _Grads(d_q * self.scale, d_k, y if self.beta is None else self.beta * y, d_g, d_beta)


class _Decay(NamedTuple):
    """Products of decays between tokens of a chunk."""

    sums: Tensor | None  # (Y, N, C, 1 or D) float64: G, from the chunk's start
    start: Tensor | None  # e^{G_i}
    end: Tensor | None  # e^{G_C − G_i}
    between: Tensor | None  # (Y, N, C, C) e^{G_i − G_j} for j ≤ i, for one decay per head
    levels: list[tuple[int, Tensor]]  # of `_levels`, for one decay per channel
    size: int

    @classmethod
    def of(cls, g: Tensor | None, size: int) -> _Decay:
        if g is None:
            return cls(None, None, None, None, [], size)
        # A sum with −1e30 would have no digits left for the tokens behind it.
        sums = g.clamp(min=LOG_UNDERFLOW[g.dtype]).double().cumsum(2)
        start, end = sums.to(g.dtype).exp(), (sums[:, :, -1:] - sums).to(g.dtype).exp()
        if g.shape[-1] > 1:
            return cls(sums, start, end, None, _levels(sums, g.dtype), size)
        between = (sums - sums.mT).clamp_(max=0).to(g.dtype).exp_()
        return cls(sums, start, end, between, [], size)

    def last(self) -> Tensor | None:
        return None if self.start is None else self.start[:, :, -1, :, None]

    def from_start(self, rows: Tensor) -> Tensor:
        return rows if self.start is None else _times(rows, self.start)

    def to_end(self, rows: Tensor) -> Tensor:
        return rows if self.end is None else rows * self.end

    def pairs(self, a: Tensor, b: Tensor) -> Tensor:
        """Return A^ab (Y, N, R C, C), zero above the diagonal, of a (Y, N, R C, D) and b (Y, N, C, D)."""
        if self.sums is None or self.between is not None:
            return self._weigh(a @ b.mT)
        a, b = self._padded(a.unflatten(2, (-1, self.size))), self._padded(b[:, :, None])
        own = (a * b).sum(-1).unflatten(-1, (-1, BLOCK))[..., None]
        inner = torch.where(torch.eye(BLOCK, dtype=torch.bool, device=a.device), own, 0)
        A = a.new_zeros(*a.shape[:4], a.shape[3])
        for half, x in self.levels:
            rows, columns = _blocks(a, half), _blocks(b, half)
            if half < BLOCK:
                inner = inner + ((rows * x) @ (columns * x).mT).masked_fill_(_beyond_level(half, a), 0)
                continue
            first, second = x.split(half, -2)
            found = (rows[..., half:, :] * second) @ (columns[..., :half, :] * first).mT
            for n, i in enumerate(range(0, a.shape[3], 2 * half)):
                A[..., i + half : i + 2 * half, i : i + half] = found[..., n, :, :]
        for n, i in enumerate(range(0, a.shape[3], BLOCK)):
            A[..., i : i + BLOCK, i : i + BLOCK] = inner[..., n, :, :]
        return A[:, :, :, : self.size, : self.size].flatten(2, 3)

    def pairs_grad(self, d: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of a and b, given that of A^ab; what it has above the diagonal is ignored."""
        if self.sums is None or self.between is not None:
            d = self._weigh(d)
            return d @ b, d.mT @ a
        d = self._padded(self._padded(d.unflatten(2, (-1, self.size))).mT).mT
        a, b = self._padded(a.unflatten(2, (-1, self.size))), self._padded(b[:, :, None])
        inner = torch.stack([d[..., i : i + BLOCK, i : i + BLOCK] for i in range(0, d.shape[3], BLOCK)], -3)
        own = inner.diagonal(dim1=-2, dim2=-1).flatten(-2)[..., None]
        d_a, d_b = own * b, own * a
        for half, x in self.levels:
            rows, columns, d_rows, d_columns = (_blocks(y, half) for y in (a, b, d_a, d_b))
            if half < BLOCK:
                pairs, first, second = inner.masked_fill(_beyond_level(half, d), 0), x, x
            else:
                starts, (first, second) = range(0, d.shape[3], 2 * half), x.split(half, -2)
                pairs = torch.stack([d[..., i + half : i + 2 * half, i : i + half] for i in starts], -3)
                rows, d_rows = rows[..., half:, :], d_rows[..., half:, :]
                columns, d_columns = columns[..., :half, :], d_columns[..., :half, :]
            d_rows.addcmul_(pairs @ (columns * first), second)
            d_columns.addcmul_(pairs.mT @ (rows * second), first)
        return d_a[:, :, :, : self.size].flatten(2, 3), d_b[:, :, :, : self.size].sum(2)

    def _padded(self, rows: Tensor) -> Tensor:
        """Pad the tokens (..., C, ·) of a chunk to those of `levels`."""
        more = _padded_size(self.size) - rows.shape[-2]
        return F.pad(rows, (0, 0, 0, more)) if more else rows

    def _weigh(self, products: Tensor) -> Tensor:
        """Multiply products (Y, N, R C, C) by the decay between the tokens; zero above the diagonal."""
        groups = products.unflatten(2, (-1, self.size))
        groups = groups.tril() if self.between is None else (groups * self.between[:, :, None]).tril_()
        return groups.flatten(2, 3)


def _levels(sums: Tensor, dtype: torch.dtype) -> list[tuple[int, Tensor]]:
    """Return for each half size h = 1, 2, 4, … the factors (Y, N, 1, ·, ·, D) of `_blocks`.

    In a block of 2h tokens, a decay between a token of the second half and one of the first is the product of those
    from the middle to the one and from the other to the middle: neither is above 1.
    """
    Y, N, C, D = sums.shape
    size = _padded_size(C)
    if size > C:
        sums = torch.cat([sums, sums[:, :, -1:].expand(-1, -1, size - C, -1)], 2)
    found, half = [], 1
    while half < size:
        blocks = sums.unflatten(2, (-1, 2 * half))
        exponents = blocks - blocks[:, :, :, half - 1 : half]
        exponents[:, :, :, :half].neg_()
        found.append((half, _blocks(exponents.to(dtype).exp_().view(Y, N, 1, size, D), half)))
        half *= 2
    return found


def _padded_size(size: int) -> int:
    """Tokens of a chunk as `_levels` takes them: a power of two, at least BLOCK."""
    return max(BLOCK, 1 << (size - 1).bit_length())


def _blocks(rows: Tensor, half: int) -> Tensor:
    """View rows (..., C, D) as blocks (..., ·, 2 half, D), or of BLOCK tokens where that is more."""
    return rows.unflatten(-2, (-1, max(2 * half, BLOCK)))


def _beyond_level(half: int, like: Tensor) -> Tensor:
    """Mask pairs (BLOCK, BLOCK) other than those of the second and the first half of a block of 2 half tokens."""
    i = torch.arange(BLOCK, device=like.device) // half
    return (i[:, None] != i + 1) | (i % 2 == 1)


def _times(rows: Tensor, factor: Tensor) -> Tensor:
    """Multiply rows (Y, N, R C, ·) by (Y, N, C, ·)."""
    return (rows.unflatten(2, (-1, factor.shape[2])) * factor[:, :, None]).flatten(2, 3)


def _sum_groups(rows: Tensor, size: int) -> Tensor:
    """Sum rows (Y, N, R C, ·) over the query heads of a key head: (Y, N, C, ·)."""
    return rows.unflatten(2, (-1, size)).sum(2)


class _ChunkSpan(NamedTuple):
    """Tokens that are processed together, in chunks of one size."""

    tokens: slice
    size: int
    number: int


def _spans(x: GatedInputs) -> list[_ChunkSpan]:
    """Groups of full chunks, and the remainder as one smaller chunk."""
    T, found, start = x.k.shape[1], [], 0
    while start < T:
        width = min((T - start) // CHUNK, GROUP) * CHUNK or T - start
        size = min(CHUNK, width)
        found.append(_ChunkSpan(slice(start, start + width), size, width // size))
        start += width
    return found


def _rows(tensor: Tensor, span: _ChunkSpan, x: GatedInputs) -> Tensor:
    """(B, T, heads, ·) -> (B Hkv, N, R C, ·): the span's N chunks, with the R query heads of a key head as rows."""
    source = _by_chunks(tensor, span, x)
    return source.to(state_dtype(x)).reshape(source.shape[0] * source.shape[1], span.number, -1, source.shape[5])


def _put(into: Tensor, rows: Tensor, span: _ChunkSpan, x: GatedInputs) -> None:
    """Inverse of `_rows`: copy rows (B Hkv, N, R C, ·) into (B, T, heads, ·)."""
    target = _by_chunks(into, span, x)
    target.copy_(rows.reshape(target.shape))


def _by_chunks(tensor: Tensor, span: _ChunkSpan, x: GatedInputs) -> Tensor:
    """View (B, Hkv, N, R, C, ·) of a span of (B, T, heads, ·)."""
    chunks = tensor[:, span.tokens].unflatten(1, (-1, span.size)).unflatten(3, (x.k.shape[2], -1))
    return chunks.permute(0, 3, 1, 4, 2, 5)


def _first_state(x: GatedInputs) -> Tensor:
    if x.state is not None:
        return x.state.flatten(0, 1)
    B, Hkv = _heads(x)
    return x.k.new_zeros(B * Hkv, x.k.shape[3], x.v.shape[3], dtype=state_dtype(x))


def _heads(x: GatedInputs) -> tuple[int, int]:
    return x.k.shape[0], x.k.shape[2]


def state_dtype(x: GatedInputs) -> torch.dtype:
    """Return the dtype of states and sums: that of a given state, which may be wider than the inputs."""
    wide = x.k.dtype == torch.float64 or (x.state is not None and x.state.dtype == torch.float64)
    return torch.float64 if wide else torch.float32


def _solve_unit_lower(lower: Tensor, x: Tensor) -> Tensor:
    """Solve (1 + lower) y = x for a strictly lower triangular matrix."""
    if not is_exporting():
        return torch.linalg.solve_triangular(lower, x, upper=False, unitriangular=True)
    # By products, which other runtimes know: forward substitution by halves.
    half = lower.shape[-1] // 2
    if not half:
        return x
    first = _solve_unit_lower(lower[..., :half, :half], x[..., :half, :])
    rest = x[..., half:, :] - lower[..., half:, :half] @ first
    return torch.cat([first, _solve_unit_lower(lower[..., half:, half:], rest)], -2)
