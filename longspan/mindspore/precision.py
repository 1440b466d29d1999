"""Work around the low precision of MindSpore's float32 functions on the CPU."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor


def on_cpu() -> bool:
    """Return whether the device is the CPU; call it in constructors, since a graph cannot read the context."""
    return ms.get_context("device_target") == "CPU"


def cast_for_exp(x: Tensor, cpu: bool) -> Tensor:
    """Cast the argument of exp, softmax, tanh, sigmoid or GELU to float64 on the CPU.

    The CPU's float32 exp and softmax have errors of 6e-6, tanh of 1e-4, which show in gradients; its float64 functions
    are exact. Other devices do not support float64 and have accurate float32 functions.
    """
    return x.astype(ms.float64) if cpu else x
