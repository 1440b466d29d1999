"""Linear attention with decay: RetNet, Mamba-2 and gated linear attention (GLA)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.mechanisms.gated import GatedMechanism, Gates, TimeStep
from longspan.ops.decode import GateActivation
from longspan.ops.linear import sum_dtype
from longspan.utils import choose


class DecayAttention(GatedMechanism):
    """S_t = Diag(α_t) S_{t−1} + k_t v_tᵀ, o_t = S_tᵀ q_t / √D: O(n·D·E) time, a state of D·E numbers per head.

    Bidirectional attention is the sum of both directions, in which a token counts itself once.

    Args:
        num_heads: H.
        head_dim: D.
        num_kv_heads: Hkv, shared by groups of query heads; H unless given.
        value_dim: E; D unless given.
        gate: "fixed": α = 1 − 2^(−5−h) in head h (RetNet). "head": log α = −exp(A_log) Δ with Δ = softplus(gate +
            dt_bias), which also scales the write (Mamba-2). "channel": log α = log σ(gate + gate_bias) / 16 for each of
            the D channels (GLA).
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        value_dim: int | None = None,
        gate: str = "head",
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads=num_kv_heads, value_dim=value_dim)
        self.gate = choose("gate", gate, ("fixed", "head", "channel"))
        self.num_gates = {"fixed": 0, "head": 1, "channel": head_dim}[gate]
        if gate == "head":
            self.time_step = TimeStep(self.num_kv_heads)
        elif gate == "channel":
            self.decay_width = head_dim
            self.gate_bias = nn.Parameter(torch.zeros(self.num_kv_heads, head_dim))

    def _gates(self, gates: Tensor | None, k: Tensor) -> Gates:
        dtype = sum_dtype(k)
        if gates is None:
            exponent = torch.arange(-5, -5 - self.num_kv_heads, -1, dtype=dtype, device=k.device)
            return Gates((-exponent.exp2()).log1p()[:, None].expand(*k.shape[:-1], 1), None)
        if self.gate == "head":
            step, log_decay = self.time_step(gates.to(dtype))
            return Gates(log_decay, step[..., 0])
        return Gates(F.logsigmoid(gates.to(dtype) + self.gate_bias.to(dtype)) / 16, None)

    def _gate_activation(self) -> GateActivation:
        if self.gate == "head":
            return GateActivation("time_step", "time_step", self.time_step.A_log, self.time_step.dt_bias)
        return GateActivation("fixed") if self.gate == "fixed" else GateActivation("sigmoid", bias=self.gate_bias)
