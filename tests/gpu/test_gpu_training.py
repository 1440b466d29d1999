"""Kernels of compiled training steps on a GPU, and what a step must not wait for."""

from __future__ import annotations

from typing import Any

import heads_cases
import pytest
import residual_norm_cases
import torch

from longspan.train import muon
from longspan.train.trainer import HostCopy

dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
HEADS: list[Any] = [
    (2, 2048, (4, 4), 64, (True, False)),
    (1, 1000, (6, 6), 64, (False, True)),
    (2, 3, (2,), 256, (True,)),
]


@dtypes
@pytest.mark.parametrize("case", [*heads_cases.CASES, *HEADS], ids=str)
def test_divided_heads(case: Any, dtype: torch.dtype) -> None:
    heads_cases.check(case, dtype, "cuda")


@dtypes
@pytest.mark.parametrize("case", [*residual_norm_cases.CASES, (2, 2048, 512, True), (3, 700, 768, False)], ids=str)
def test_residual_norms(case: Any, dtype: torch.dtype) -> None:
    residual_norm_cases.check(case, dtype, "cuda")


def test_reading_a_loss_does_not_wait_for_later_work() -> None:
    x = torch.full((), 3.5, device="cuda")
    HostCopy(x).value()  # loads what has to be loaded
    torch.cuda.synchronize()
    copy = HostCopy(x * 2)
    torch.cuda._sleep(400_000_000)
    later = torch.cuda.Event()
    later.record()
    assert copy.value() == 7.0
    assert not later.query()


def test_muon_on_a_gpu_is_that_of_the_cpu() -> None:
    found = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        own = [torch.nn.Parameter(torch.randn(shape).to(device)) for shape in ((32, 16), (16, 32), (16, 16), (67,))]
        groups = [{"params": own[:3], "muon": True}, {"params": own[3:]}]
        optimizer = muon.MuonAdamW(groups, lr=0.01, betas=(0.9, 0.95))
        for _ in range(3):
            for parameter in own:
                parameter.grad = torch.randn(parameter.shape).to(device)
            optimizer.step()
        found.append([parameter.detach().cpu() for parameter in own])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)
