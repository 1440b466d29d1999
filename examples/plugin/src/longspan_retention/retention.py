"""Retention (Sun et al., 2023): linear attention whose state decays by a fixed factor per token."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longspan import Mechanism, State

CHUNK = 64


@dataclass
class RetentionState(State):
    """The decayed sum of k vᵀ, and the sum of log α over its tokens."""

    s: Tensor  # (B, Hkv, D, E)
    log_decay: Tensor  # (B, Hkv)

    def _merge(self, later):
        s = later.log_decay.exp()[..., None, None] * self.s + later.s
        return replace(self, s=s, log_decay=self.log_decay + later.log_decay)


class Retention(Mechanism):
    """S_t = α S_{t−1} + k_t v_tᵀ, o_t = S_tᵀ q_t / √D with α = 1 − 2^(−5−h) for key/value head h: O(n·D·E) time."""

    state_type = RetentionState
    supports_cross = False
    heads_alike = False

    def _new_state(self, batch_size, start, like, max_length, transition):
        like = like.to(torch.promote_types(like.dtype, torch.float32))
        s = like.new_zeros(batch_size, self.num_kv_heads, self.head_dim, self.value_dim)
        return RetentionState.empty(batch_size, start, like.device, s=s, log_decay=s.new_zeros(s.shape[:2]))

    def _attend(self, q, k, v, *, gates, key_mask):
        c = self._log_alphas(k, gates, key_mask).cumsum(1)
        weights = torch.exp(-(c[:, :, None] - c[:, None]).abs())  # (B, T, S, Hkv): both ways, so O(n²)
        scores = torch.einsum("bthgd,bshd,btsh->bthgs", self._queries(q, c.dtype), k.to(c.dtype), weights)
        return torch.einsum("bthgs,bshe->bthge", scores, v.to(c.dtype)).flatten(2, 3).to(q.dtype)

    def _extend(self, state, q, k, v, *, gates, lengths):
        slots = torch.arange(k.shape[1], device=k.device)
        visible = None if lengths is None else slots < lengths[:, None]
        log_alpha, query = self._log_alphas(k, gates, visible), self._queries(q, state.s.dtype)
        s, outs = state.s, []
        for i in range(0, k.shape[1], CHUNK):
            qc, kc, vc, c = (x[:, i : i + CHUNK].to(s.dtype) for x in (query, k, v, log_alpha))
            c = c.cumsum(1)  # (B, C, Hkv): products of decays are differences of sums of logs
            later = torch.ones(c.shape[1], c.shape[1], dtype=torch.bool, device=k.device).triu(1)[..., None]
            weights = (c[:, :, None] - c[:, None]).masked_fill(later, float("-inf")).exp()
            scores = torch.einsum("bthgd,bshd,btsh->bthgs", qc, kc, weights)
            before = torch.einsum("bthgd,bhde,bth->bthge", qc, s, c.exp())
            outs.append(before + torch.einsum("bthgs,bshe->bthge", scores, vc))
            new = torch.einsum("bshd,bshe,bsh->bhde", kc, vc, (c[:, -1:] - c).exp())
            s = c[:, -1].exp()[..., None, None] * s + new
        length = state.length + (k.shape[1] if lengths is None else lengths)
        after = replace(state, length=length, s=s, log_decay=state.log_decay + log_alpha.sum(1))
        return torch.cat(outs, 1).flatten(2, 3).to(q.dtype), after

    def _write(self, state, k, v, *, gates, lengths):
        q = k.new_zeros(*k.shape[:2], self.num_heads, self.head_dim)
        return self._extend(state, q, k, v, gates=gates, lengths=lengths)[1]

    def _read(self, state, q):
        query = self._queries(q, state.s.dtype)
        return torch.einsum("bthgd,bhde->bthge", query, state.s).flatten(2, 3).to(q.dtype)

    def _queries(self, q, dtype):
        return q.to(dtype).unflatten(2, (self.num_kv_heads, -1)) * self.head_dim**-0.5

    def _log_alphas(self, k, gates, visible):
        head = torch.arange(k.shape[2], device=k.device, dtype=torch.promote_types(k.dtype, torch.float32))
        log_alpha = torch.log1p(-torch.exp2(-5 - head)).expand(k.shape[:3])
        return log_alpha if visible is None else log_alpha.masked_fill(~visible[..., None], 0)
