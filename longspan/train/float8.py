"""Training with FP8 products: --precision fp8."""

from __future__ import annotations

import torch
from torch import nn

from longspan.ops.float8 import MULTIPLE, Float8Linear
from longspan.train.muon import layer_matrices

CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


def why_not_float8(device: torch.device) -> str | None:
    """Return why a device has no FP8 products; None if it has."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{'this build of PyTorch' if device.type == 'cuda' else device.type} has none"
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has compute capability {found[0]}.{found[1]}"
    return None


def convert_to_float8_training(model: nn.Module) -> int:
    """Make the linear layers of attention and feed-forward layers compute FP8 products; their parameters stay.

    Layers with a width that is not a multiple of 16 stay as they are, as do those that compute a number for each head.

    Returns:
        The number of layers converted.

    Raises:
        ValueError: There are none.
    """
    matrices = {id(weight) for weight in layer_matrices(model)}
    found = [x for x in model.modules() if type(x) is nn.Linear and id(x.weight) in matrices]
    wide = [x for x in found if not x.in_features % MULTIPLE and not x.out_features % MULTIPLE]
    if not wide:
        raise ValueError(
            f"--precision fp8 needs layers whose widths are multiples of {MULTIPLE}, and this model has none: use "
            "--precision bf16, or another --model.dim"
        )
    for layer in wide:
        layer.__class__ = Float8Linear
    return len(wide)
