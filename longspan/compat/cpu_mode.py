"""Run scripts that use CUDA on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class CudaToCpuMode(TorchFunctionMode):
    """While active, `.cuda()`, `.to("cuda")` and `device="cuda"` use the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to or "device" in kwargs:
            args = tuple(_cuda_to_cpu(arg) for arg in args)
            kwargs = {name: _cuda_to_cpu(value) if name == "device" else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _cuda_to_cpu(value: Any) -> Any:
    """Replace a CUDA device or its name by the CPU; return any other value unchanged."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return value
