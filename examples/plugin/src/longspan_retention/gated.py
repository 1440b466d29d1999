"""Gated retention: the decay of each token and head is computed from the input (Mamba-2, gated linear attention)."""

import torch
import torch.nn.functional as F

from longspan_retention.retention import Retention


class GatedRetention(Retention):
    """S_t = α_t S_{t−1} + k_t v_tᵀ with α_t = σ(g_t)^(1/temperature); g_t is projected from x by the layer.

    Args:
        num_heads: H.
        head_dim: D.
        num_kv_heads: Hkv; H unless given.
        value_dim: E; D unless given.
        temperature: The larger, the slower the decay.
    """

    num_gates = 1
    heads_alike = True

    def __init__(self, num_heads, head_dim, *, num_kv_heads=None, value_dim=None, temperature=16.0):
        super().__init__(num_heads, head_dim, num_kv_heads=num_kv_heads, value_dim=value_dim)
        if temperature <= 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.temperature = temperature

    def _log_alphas(self, k, gates, visible):
        gate = gates[..., 0].to(torch.promote_types(gates.dtype, torch.float32))  # (B, T, Hkv), raw
        log_alpha = F.logsigmoid(gate) / self.temperature
        # A hidden token must not decay the state: its raw gate is zero, and its α must be one.
        return log_alpha if visible is None else log_alpha.masked_fill(~visible[..., None], 0)
