"""Cross-entropy of a linear layer's logits, which are never whole in memory, nor in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IGNORED = -100
# Logits made at a time: a byte model's are small beside its vectors, a large vocabulary's are not.
LOGITS = 2**25


def cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    """The mean over labels (N,) that are not −100 of −log softmax(hidden Wᵀ + b)[label]; 0 where there are none.

    hidden: (N, dim), weight: (V, dim). Softmax and sums are float32 whatever the inputs. More than LOGITS logits are
    made in pieces, and again in the backward pass: memory for one piece, at the cost of one more product.
    """
    rows = max(1, LOGITS // len(weight))
    count = (labels != IGNORED).sum()
    if len(labels) <= rows:
        return _total(hidden, weight, bias, labels) / count.clamp(min=1)
    pieces = zip(hidden.split(rows), labels.split(rows), strict=True)
    if torch.is_grad_enabled():
        totals = [checkpoint(_total, h, weight, bias, y, use_reentrant=False) for h, y in pieces]
    else:
        totals = [_total(h, weight, bias, y) for h, y in pieces]
    return torch.stack(totals).sum() / count.clamp(min=1)


def _total(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    # Compiled, the wide copy stays in registers.
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, labels, ignore_index=IGNORED, reduction="sum")
