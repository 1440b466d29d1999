"""int8 weights on a CPU, and what weights and states of fewer bits cost in bits per token."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.models.transformer import LanguageModel
from longspan.serve.state_codec import StateCodec

_TINY = torch.finfo(torch.float32).tiny


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, one scale per output, whose inputs are rounded to int8 with a scale per row.

    Products are summed in integers, so that a row's output depends neither on the others nor on their number.

    Args:
        linear: The layer to quantize.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(1) / 127).clamp(min=_TINY)
        # Buffers, because the dtype of a model's parameters is that of its inputs.
        self.weight: Tensor
        self.scale: Tensor
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale / 127)
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (…, in_features) to (…, out_features)."""
        rows = x.reshape(-1, x.shape[-1]).float()
        largest = torch.linalg.vector_norm(rows, math.inf, 1, keepdim=True).clamp_(min=_TINY)
        rounded = (rows * (127 / largest)).round_().to(torch.int8)
        out = torch._int_mm(rounded, self.weight.T) * largest
        out = out.mul_(self.scale) if self.bias is None else torch.addcmul(self.bias, out, self.scale)
        return out.to(x.dtype).view(*x.shape[:-1], -1)


def quantize_weights(model: LanguageModel) -> LanguageModel:
    """Return a copy of a model on a CPU whose linear layers have int8 weights. It is for inference only.

    Raises:
        ValueError: If the model is not on a CPU.
    """
    device = next(model.parameters()).device
    if device.type != "cpu":
        raise ValueError(f"int8 weights are for a CPU, and this model is on {device}: use bfloat16 there")
    quantized = copy.deepcopy(model).eval()
    for parent in list(quantized.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                setattr(parent, name, Int8Linear(child))
    return quantized


@torch.inference_mode()
def bits_per_token(model: LanguageModel, tokens: Tensor, *, chunk: int = 64, state_dtype: str = "exact") -> float:
    """Return the mean bits that a model needs for each token of a text after the first, read as the engine reads it.

    Args:
        model: A causal language model.
        tokens: (T,) int64, at least two.
        chunk: Tokens per chunk.
        state_dtype: How states are rounded at the end of each chunk; see `Engine`.
    """
    codec, state, total = StateCodec(state_dtype), model.new_state(1, max_length=len(tokens)), 0.0
    tokens = tokens.to(state.length.device)
    for start in range(0, len(tokens) - 1, chunk):
        piece = tokens[None, start : min(start + chunk, len(tokens) - 1)]
        logits, state = model.extend(piece, state)
        codec.round(state)
        labels = tokens[start + 1 : start + 1 + piece.shape[1]]
        total += float(F.cross_entropy(logits[0].double(), labels, reduction="sum"))
    return total / math.log(2) / (len(tokens) - 1)
