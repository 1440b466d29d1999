"""Cross-entropy of a linear layer's logits in chunks, so that all logits are never in memory at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.ops.common.autograd import recompute

IGNORE_INDEX = -100
MAX_LOGITS = 2**25  # per chunk


def cap_logits(logits: Tensor, softcap: float | None) -> Tensor:
    """Return softcap · tanh(logits / softcap); the logits themselves without a softcap."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, softcap: float | None = None
) -> Tensor:
    """Return the mean of −log softmax(hidden Wᵀ + b)[label] over labels that are not IGNORE_INDEX; 0 if there are none.

    Softmax and sums are float32 whatever the inputs. More than MAX_LOGITS logits are computed in chunks, and again in
    the backward pass: the memory of one chunk for one more matrix product.

    Args:
        hidden: Output vectors (N, dim).
        weight: (V, dim).
        bias: (V,).
        labels: (N,) integers, −100 where there is none.
        softcap: The limit of the logits; see `cap_logits`.
    """
    rows, labels = max(1, MAX_LOGITS // len(weight)), labels.long()
    count = (labels != IGNORE_INDEX).sum()
    if len(labels) <= rows:
        return _sum(hidden, weight, bias, labels, softcap) / count.clamp(min=1)
    chunks = zip(hidden.split(rows), labels.split(rows), strict=True)
    if torch.is_grad_enabled():
        sums = [recompute(_sum, h, weight, bias, y, softcap) for h, y in chunks]
    else:
        sums = [_sum(h, weight, bias, y, softcap) for h, y in chunks]
    return torch.stack(sums).sum() / count.clamp(min=1)


def _sum(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, softcap: float | None) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    # When compiled, the float32 copy stays in registers.
    logits = cap_logits(logits.to(torch.promote_types(logits.dtype, torch.float32)), softcap)
    return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
