"""Scripts that ask for CUDA, on a machine without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class OnCPU(TorchFunctionMode):
    """`.cuda()`, `.to("cuda")` and `device="cuda"` mean the CPU while this is active."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to or "device" in kwargs:
            args = tuple(_placed(arg) for arg in args)
            kwargs = {name: _placed(value) if name == "device" else value for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _placed(value: Any) -> Any:
    """A CUDA device, given as itself or by name, becomes the CPU; anything else stays."""
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    return value
