"""The delta rule: a memory that replaces what it holds for a key. DeltaNet, Gated DeltaNet, Kimi Delta Attention."""

from __future__ import annotations

from torch import Tensor

from longspan.mechanisms.gated import GatedMechanism, Gates, TimeStep
from longspan.ops.decode import GateActivation
from longspan.ops.l2_norm import l2_normalize, l2_normalize_torch
from longspan.ops.linear import sum_dtype
from longspan.utils import choose


class DeltaAttention(GatedMechanism):
    """S_t = (I − β_t k_t k_tᵀ) Diag(α_t) S_{t−1} + β_t k_t v_tᵀ, o_t = S_tᵀ q_t / √D: a state of D·E numbers per head.

    q and k are normalized to length 1. Bidirectional attention is the sum of both directions.

    Args:
        num_heads: H.
        head_dim: D.
        num_kv_heads: Hkv, shared by groups of query heads; H unless given.
        value_dim: E; D unless given.
        gate: "none": α = 1 (DeltaNet). "head": log α = −exp(A_log) softplus(gate + dt_bias) (Gated DeltaNet).
            "channel": the same for each of the D channels (Kimi Delta Attention).
        negative_eigenvalues: Whether β = 2 σ(gate) reaches 2 instead of 1: I − β k kᵀ then can reflect, and a state
            can alternate, as parity needs.
    """

    delta = True

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        value_dim: int | None = None,
        gate: str = "head",
        negative_eigenvalues: bool = False,
    ) -> None:
        super().__init__(num_heads, head_dim, num_kv_heads=num_kv_heads, value_dim=value_dim)
        self.gate, self.negative_eigenvalues = choose("gate", gate, ("none", "head", "channel")), negative_eigenvalues
        channels = {"none": 0, "head": 1, "channel": head_dim}[gate]
        self.num_gates = 1 + channels
        self.heads_alike = gate == "none"
        if channels:
            self.time_step = TimeStep(self.num_kv_heads, channels)

    def _gates(self, gates: Tensor | None, k: Tensor) -> Gates:
        assert gates is not None
        gates = gates.to(sum_dtype(k))
        beta = gates[..., 0].sigmoid()
        beta = 2 * beta if self.negative_eigenvalues else beta
        return Gates(self.time_step(gates[..., 1:])[1] if self.gate != "none" else None, beta)

    def _gate_activation(self) -> GateActivation:
        strength = 2.0 if self.negative_eigenvalues else 1.0
        if self.gate == "none":
            return GateActivation("none", "sigmoid", strength=strength)
        return GateActivation("time_step", "sigmoid", self.time_step.A_log, self.time_step.dt_bias, strength)

    def _keys(self, x: Tensor) -> Tensor:
        return l2_normalize_torch(x)

    def _queries_and_keys(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return l2_normalize(q, k)
