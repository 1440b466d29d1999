"""MindSpore's float32 functions on the CPU, where they are not those of PyTorch."""

from __future__ import annotations

import mindspore as ms
from mindspore import Tensor


def on_cpu() -> bool:
    """For constructors: a graph cannot ask."""
    return ms.get_context("device_target") == "CPU"


def exact(x: Tensor, cpu: bool) -> Tensor:
    """x as exp and what is made of it should see it: float64 on the CPU.

    In float32 exp and softmax are 6e-6 off there, tanh 1e-4, and gradients show it; in float64 they are exact. Other
    devices have no float64, and better functions.
    """
    return x.astype(ms.float64) if cpu else x
