"""Marks and fixtures of all tests: one seed, fresh memory full of NaN, float32 products in full precision."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from longspan.ops.common import parts
from longspan.ops.gated import torch as gated_chunks
from longspan.ops.linear import torch as chunks


def pytest_configure() -> None:
    # The tensors are small: threads would only wait for one another.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # NaN in fresh memory comes with deterministic algorithms; an op that has none warns, and may run.
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore:.*deterministic:UserWarning"))
        # PyTorch's own, emitted once a process, where its compiler or forward-mode gradients are first used.
        item.add_marker(pytest.mark.filterwarnings("ignore:.torch.jit.script.* is deprecated:DeprecationWarning"))
        if item.path.parent.name == "gpu":
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(20260731)


@pytest.fixture(autouse=True)
def fresh_memory_is_nan() -> Iterator[None]:
    """`torch.empty` and its kin return NaN, and the largest integer: reading what was never written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    matmul, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = cudnn


@pytest.fixture
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks in a short sequence, few sequences at once, unless a test asks for the real ones."""
    if "real_chunks" not in request.fixturenames:
        for module in (chunks, gated_chunks):
            monkeypatch.setattr(module, "CPU_CHUNK", 4)
            monkeypatch.setattr(module, "GROUP", 12)
        monkeypatch.setattr(parts, "CACHED", 200)


@pytest.fixture
def real_chunks() -> None:
    pass


@pytest.fixture(params=[True, False], ids=["grad", "no_grad"])
def grad(request: pytest.FixtureRequest) -> Iterator[bool]:
    with torch.set_grad_enabled(request.param):
        yield request.param
