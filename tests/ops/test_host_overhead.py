"""What a call costs the host: launches, PyTorch operations and Python functions, with launches that do nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed: pip install 'longspan[triton]'")

import longspan
from longspan.mechanisms.decay import DecayAttention
from longspan.mechanisms.linear import LinearAttention
from longspan.mechanisms.local import LocalAttention
from longspan.mechanisms.performer import PerformerAttention
from longspan.ops.common import dispatch, launch, plans
from longspan.protocol import Mechanism

PACKAGE = str(Path(longspan.__file__).parent)


class Operations(TorchDispatchMode):
    """Counts PyTorch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **kwargs or {})


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the launched kernels; CPU tensors pass for CUDA tensors, and nothing is computed."""
    names: list[str] = []

    class Compiled:
        function, packed_metadata = "function", "metadata"

        def __init__(self, kernel: Any) -> None:
            self.run = lambda *_: names.append(kernel.fn.__name__)

    monkeypatch.setattr(launch, "_compile", lambda kernel, *_: Compiled(kernel))
    monkeypatch.setattr(launch, "_DIRECT", True)
    monkeypatch.setattr(launch, "current_stream", lambda device: 0)
    monkeypatch.setattr(dispatch, "unavailable", lambda q: None)
    monkeypatch.setattr(dispatch, "eager_untraced", lambda q: True)
    plans.clear()
    yield names
    plans.clear()


def python_calls(call: Callable[[], object]) -> int:
    """Number of Python functions of the package that a call enters."""
    count = 0

    def entered(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


# Launches, PyTorch operations, and at most this many Python functions, of the forward and of the backward pass.
Costs = tuple[int, int, int]
CASES: dict[str, tuple[Mechanism, bool, Costs, Costs]] = {
    "linear": (LinearAttention(2, 64), True, (1, 3, 24), (1, 4, 18)),
    "linear softmax": (LinearAttention(2, 64, feature_map="softmax"), True, (1, 3, 24), (2, 5, 23)),
    "linear bidirectional": (LinearAttention(2, 64), False, (3, 3, 47), (3, 4, 36)),
    "performer": (PerformerAttention(2, 64, num_features=256), True, (3, 4, 31), (2, 5, 23)),
    "performer in bfloat16": (PerformerAttention(2, 64, num_features=256).bfloat16(), True, (3, 4, 31), (2, 5, 23)),
    "local": (LocalAttention(2, 64, window=33), True, (1, 3, 23), (2, 5, 17)),
    "local bidirectional": (LocalAttention(2, 64, window=33), False, (1, 3, 23), (2, 5, 17)),
    "decay": (DecayAttention(2, 64, gate="fixed"), True, (3, 11, 44), (6, 5, 42)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_call(name: str, launches: list[str]) -> None:
    mechanism, causal, *expected = CASES[name]
    q, k, v = (torch.randn(1, 128, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    d_out = torch.randn_like(q)

    def forward() -> torch.Tensor:
        return mechanism(q, k, v, causal=causal)

    def backward() -> None:
        torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)

    out = forward()
    backward()
    for call, (number, operations, functions) in zip((forward, backward), expected, strict=True):
        launches.clear()
        with Operations() as counted:
            call()
        assert len(launches) == number, launches
        assert sum(counted.counts.values()) == operations, counted.counts
        assert python_calls(call) <= functions
