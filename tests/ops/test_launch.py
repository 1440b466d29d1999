"""Launches, workspaces and plans on the host, without a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install 'longspan[triton]'")

from triton.runtime.errors import OutOfResources

from longspan.ops.common import launch
from longspan.ops.common.launch import Launch, Plan, Signature, Workspace, signature

Calls = list[tuple[Any, ...]]


class Compiled:
    """What Triton makes of a kernel."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def run(self, *given: Any) -> None:
        self.calls.append(("run", *given))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *given: self.calls.append(("with hooks", grid, *given))


class Kernel:
    arg_names = ("p_x", "p_y", "T", "stride", "D", "KEY")
    __name__ = "kernel"

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_and_run(*given: Any, **constants: Any) -> Compiled:
            self.calls.append(("compile", grid, given, constants))
            return Compiled(self.calls)

        return compile_and_run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    monkeypatch.setattr(launch, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(launch, "_DIRECT", True)
    return []


def test_a_kernel_is_compiled_once(calls: Calls) -> None:
    constants = {"KEY": True, "D": 64, "other kernels'": 1, "num_warps": 4}
    read = Launch(3, Kernel(calls), (7, 5, 1), (11, 13), constants)
    x = torch.zeros(1)
    read(x, None)
    assert calls.pop() == ("compile", (7, 5, 1), (x, None, 11, 13), {"KEY": True, "D": 64, "num_warps": 4})
    read(17, None)
    # Constants in the kernel's order, and nothing of what is Triton's own.
    assert calls == [
        ("run", 7, 5, 1, "stream of 3", "function", "metadata", None, None, None, 17, None, 11, 13, 64, True)
    ]


def test_tritons_launcher_is_skipped_where_its_arguments_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Launcher:
        global_scratch_size = profile_scratch_size = 0
        launch_cooperative_grid, launch_pdl = False, True
        launch = len  # any function written in C

    compiled = SimpleNamespace(run=Launcher(), function="function", packed_metadata="metadata")
    through = "function", "metadata", None, None, None
    monkeypatch.setattr(launch, "_VERSION", (3, 6))
    assert launch._launcher(compiled) == (len, ("function", False, True, None, None, "metadata", None, None, None))
    monkeypatch.setattr(Launcher, "global_scratch_size", 8)  # Only Triton's launcher allocates it.
    assert launch._launcher(compiled) == (compiled.run, through)
    monkeypatch.delattr(Launcher, "global_scratch_size")  # as on AMD, whose launcher takes other arguments
    assert launch._launcher(compiled) == (compiled.run, through)
    monkeypatch.setattr(Launcher, "global_scratch_size", 0, raising=False)
    monkeypatch.setattr(launch, "_VERSION", (3, 7))
    assert launch._launcher(compiled) == (compiled.run, through)


@pytest.mark.parametrize("stages", ["STAGES", "num_stages"])
def test_fewer_stages_with_less_shared_memory(calls: Calls, stages: str) -> None:
    class Large(Kernel):
        arg_names = (*Kernel.arg_names, "STAGES")

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def compile_and_run(*given: Any, **constants: Any) -> Any:
                calls.append((constants[stages],))
                if constants[stages] > least:
                    raise OutOfResources(100 * constants[stages], 150, "shared memory")
                return Compiled(calls)

            return compile_and_run

    least = 1
    read = Launch(3, Large(calls), (7, 1, 1), (11, 13), {"D": 64, "KEY": False, stages: 3})
    read(torch.zeros(1), None)
    assert calls == [(3,), (2,), (1,)]
    calls.clear()
    read(17, None)
    assert calls[0][-1] == (1 if stages == "STAGES" else False)
    least = 0
    with pytest.raises(RuntimeError, match="kernel needs 100 of shared memory, this device has 150: use bfloat16"):
        Launch(3, Large(calls), (7, 1, 1), (), {stages: 2})(torch.zeros(1))


def test_hooks_are_called(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    read = Launch(3, Kernel(calls), (7, 1, 1), (11, 13), {"D": 64, "KEY": False})
    read(torch.zeros(1), None)
    calls.clear()
    monkeypatch.setattr(triton.knobs.runtime.launch_exit_hook, "calls", [print])
    read(17, None)
    assert calls == [("with hooks", (7, 1, 1), 17, None, 11, 13, 64, False)]


def test_addresses_are_those_of_the_tensors() -> None:
    parts = (3, torch.float32), (130, torch.bfloat16), (0, torch.float32), (65, torch.float32), (1, torch.bfloat16)
    workspace = Workspace(*parts)
    buffer = workspace.allocate(torch.empty(0))
    tensors, addresses = workspace.views(buffer), Plan(-1).pointers(workspace, buffer)  # of a plan without launches
    for (number, dtype), tensor, address in zip(parts, tensors, addresses, strict=True):
        assert (tensor.shape, tensor.dtype) == ((number,), dtype)
        assert not number or tensor.data_ptr() == address
        assert (address - buffer.data_ptr()) % 256 == 0
    for i, tensor in enumerate(tensors):
        tensor.fill_(i)
    for i, tensor in enumerate(tensors):
        assert (tensor == i).all()  # The buffers do not overlap.
    assert not workspace.allocate(buffer, zeroed=True).any()


def test_signature() -> None:
    x = torch.zeros(7, 8, dtype=torch.bfloat16)
    assert signature(x, None) == signature(x.clone(), None)
    others = x[1:], x.float(), x[:, :7], x.t(), x.view(-1)[4:]
    assert len({signature(x), signature(None), *(signature(other) for other in others)}) == 7


class Doubled(Plan):
    """A plan that counts how often it is made."""

    made = 0

    def __init__(self, device: int, key: Signature, factor: int) -> None:
        super().__init__(device)
        type(self).made += 1
        self.factor, self.kernels = factor, [self.launch(Kernel([]), (7,), (11, 13), {"D": 64, "KEY": True})]


def test_plans_are_cached_per_signature_and_options() -> None:
    x = torch.zeros(7, 8)
    first = Doubled.of((x, None), 2)
    assert Doubled.of((x.clone(), None), 2) is first
    assert Doubled.of((x, None), 3).factor == 3
    assert Doubled.of((x, x), 2) is not first
    assert Doubled.made == 3
    assert first.kernels[0].grid == (7, 1, 1)


def test_a_plan_is_compiled_once_all_its_kernels_are(calls: Calls) -> None:
    plan = Doubled.of((torch.zeros(3),), 5)
    workspace = Workspace((3, torch.float32))
    buffer = workspace.allocate(torch.empty(0))
    assert not plan.compiled
    assert isinstance(plan.pointers(workspace, buffer)[0], torch.Tensor)
    plan.kernels[0](buffer, None)
    assert plan.compiled
    assert plan.pointers(workspace, buffer) == [buffer.data_ptr()]
