"""The memory of gated linear attention with its backward pass, counted from allocations, and passes for some rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gated_cases import Case, arguments, by_kernels
from interpreter import interpreted
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longspan.ops import gated
from longspan.ops.common import plans

pytest.importorskip("triton", reason="triton is not installed: pip install 'longspan[triton]'")

from longspan.ops.common.launch import Launch
from longspan.ops.gated.triton import channel, decay, delta, slices

MODULES = channel, decay, delta


@pytest.fixture(autouse=True)
def no_plans() -> Iterator[None]:
    plans.clear()
    yield
    plans.clear()


class PeakBytes(TorchDispatchMode):
    """The most bytes of tensors that were alive at once."""

    def __init__(self, given: list[Tensor]) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0
        self._count(given)

    def _count(self, tensors: list[Any]) -> None:
        for storage in (x.untyped_storage() for x in tensors if isinstance(x, Tensor)):
            self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: found for key, found in self._alive.items() if not found[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._count(tree_leaves(result))
        return result


def peak_ratio(delta_rule: bool, gate: str | None, D: int, *, state: bool, beta: bool, B: int = 4) -> float:
    """The peak of forward and backward beside inputs, outputs and gradients, in bfloat16 on a GPU."""

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, device="meta", dtype=dtype, requires_grad=True)

    H, T = 8, 8192
    q, k, v = (new(B, T, H, D, dtype=torch.bfloat16) for _ in range(3))
    gates = {} if gate is None else {"log_decay": new(B, T, H, 1 if gate == "head" else D)}
    gates |= {"beta": new(B, T, H)} if beta else {}
    gates |= {"state": new(B, H, D, D)} if state else {}
    inputs, d_out = [q, k, v, *gates.values()], torch.empty_like(v, requires_grad=False)
    with PeakBytes([*inputs, d_out]) as memory:
        outputs = gated.gated_linear(q, k, v, **gates, delta=delta_rule)
        if state:
            torch.autograd.backward(outputs, (d_out, torch.empty_like(gates["state"])))
        else:
            outputs[0].backward(d_out)
    return memory.peak / sum(2 * x.nbytes for x in (*inputs, d_out))


@pytest.fixture
def h200(on_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on tensors without data allocate what they would on an H200, and launch nothing."""
    monkeypatch.setattr(gated, "choose_algorithm", gated.triton_algorithm)
    monkeypatch.setattr(Launch, "__call__", lambda self, *pointers: None)
    for module in MODULES:
        monkeypatch.setattr(module, "processors", lambda device: 132)


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(
    ("rule", "gate"), [(True, "channel"), (True, "head"), (True, None), (False, "channel"), (False, "head")]
)
def test_peak_memory(rule: bool, gate: str | None, D: int, state: bool) -> None:
    assert 1 <= peak_ratio(rule, gate, D, state=state, beta=rule) <= 1.6


@pytest.mark.usefixtures("h200")
def test_one_sequence_needs_all_of_its_workspace() -> None:
    assert 1.8 < peak_ratio(True, "channel", 256, state=False, beta=True, B=1) < 1.9


@pytest.mark.usefixtures("h200")
def test_the_gradient_of_beta_is_not_a_part_of_the_workspace() -> None:
    q = torch.empty(1, 64, 2, 64, device="meta", dtype=torch.bfloat16)
    decay, beta = torch.empty(1, 64, 2, 64, device="meta"), torch.empty(1, 64, 2, device="meta", requires_grad=True)
    gated.gated_linear(q, q, q, log_decay=decay, beta=beta)[0].sum().backward()
    assert beta.grad is not None
    assert beta.grad.untyped_storage().nbytes() == beta.nbytes


def test_rows_at_once() -> None:
    key: Any = [(torch.Size([4, 125]), (125, 1), torch.float32, True)]  # 2,000 bytes: a workspace may take 2,200.
    assert slices.rows_at_once(4, 256, 132, 2200, key) == 4
    assert slices.rows_at_once(4, 256, 132, 4400, key) == 2
    assert slices.rows_at_once(4, 256, 132, 8800, key) == 2  # One row would fit, and half of the device.
    assert slices.rows_at_once(4, 528, 132, 8800, key) == 1
    assert slices.rows_at_once(4, 256, 256, 8800, key) == 4
    assert slices.rows_at_once(1, 256, 132, 8800, key) == 1


CASES = [
    (Case(T=T, B=3, H=H, Hkv=H if state else 1, delta=rule, decay=gate, state=state), dtype)
    for rule, gate, T in ((True, "channel", 33), (False, "channel", 33), (True, "head", 33), (False, "head", 131))
    for H, state, dtype in ((1, True, torch.float32), (2, False, torch.float16))
]


@interpreted
@pytest.mark.parametrize(("case", "dtype"), CASES, ids=str)
def test_two_rows_at_once(case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    given = arguments(case, dtype, "cpu")
    expected = by_kernels(case, given)
    plans.clear()
    sizes: list[tuple[int, int]] = []

    def recorded(write: Any) -> Any:
        return lambda plan, *tensors: (sizes.append((plan.B, getattr(plan, "segments", 1))), write(plan, *tensors))

    for module in MODULES:
        monkeypatch.setattr(module, "rows_at_once", lambda rows, *_: min(rows, 2))
    for plan in (channel._ChannelBackward, decay._DecayBackward, delta._DeltaBackward):
        monkeypatch.setattr(plan, "write_gradients", recorded(plan.write_gradients))
    found = by_kernels(case, given)
    segments = 2 if case.T == 131 and dtype == torch.float16 else 1
    assert sizes == [(2, segments), (1, segments)]
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)
