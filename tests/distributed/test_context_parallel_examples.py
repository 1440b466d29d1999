"""The examples of FSDP2 with context parallelism: the losses of one process."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import spawn
from torch.distributed.device_mesh import init_device_mesh

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one_process(example: Any) -> list[float]:
    model, losses = example.build(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=example.RATE)
    shape = example.STEPS, example.BATCH, example.CONTEXT
    for batch in torch.randint(256, shape, generator=torch.Generator().manual_seed(1)):
        loss = model.loss(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def run(rank: int, ranks: int, name: str) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)}
    example = load(name)
    if name == "context_parallel":
        losses = example.train(init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "cp")))
    else:
        losses = example.train(ranks)
    expected = one_process(example)
    error = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    assert error < 1e-5, f"{losses} are not {expected}"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_fsdp_in_a_loop_of_your_own(ranks: int) -> None:
    spawn(run, ranks, "context_parallel")


@pytest.mark.slow
def test_accelerate_s_configuration() -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    spawn(run, 4, "accelerate_context_parallel")
