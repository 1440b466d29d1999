"""Maps, angles and the choice of a token in Triton under its interpreter, on the CPU."""

from __future__ import annotations

import pytest
import torch
from interpreter import inside, run_under_the_interpreter
from token_cases import MAPS, SAMPLINGS, compare_choices, compare_maps, compare_turns
from torch import nn

from longspan.ops import decode as step
from longspan.ops.common import dispatch


@pytest.fixture
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "why_not_triton", lambda *_: None)


def test_under_the_interpreter() -> None:
    run_under_the_interpreter(__file__)


@inside
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.usefixtures("kernels_on_the_cpu")
def test_maps(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("wide") and dtype == torch.float32:
        pytest.skip("blocks are wider for halves only")
    used, real = [], dispatch.step_kernels()
    monkeypatch.setattr(dispatch, "step_kernels", lambda: used.append(1) or real)
    compare_maps(name, dtype, "cpu")
    assert used


@inside
@pytest.mark.usefixtures("kernels_on_the_cpu")
def test_angles() -> None:
    compare_turns("cpu")


@inside
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_choices(name: str) -> None:
    compare_choices(name, "cpu")


@pytest.mark.usefixtures("kernels_on_the_cpu")
def test_what_no_kernel_knows_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other modules, modules with hooks, other dtypes and weights that do not lie row by row."""
    monkeypatch.setattr(dispatch, "step_kernels", lambda: pytest.fail("called a kernel"))
    x = torch.randn(1, 1, 6)

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    doubled, hooked = Doubled(6, 5), nn.Linear(6, 5)
    assert torch.equal(step.project(x, doubled)[0], doubled(x))
    hooked.register_forward_hook(lambda *_: torch.zeros(1, 1, 5))
    assert torch.equal(step.project(x, hooked)[0], torch.zeros(1, 1, 5))
    norm = nn.LayerNorm(6)
    norm.register_forward_pre_hook(lambda _, given: (given[0] * 0,))
    assert torch.equal(step.project(x, nn.Linear(6, 5, bias=False), norm=norm)[0], torch.zeros(1, 1, 5))
    turned = torch.randn(6, 5).T
    assert torch.equal(step.project(x, turned)[0], x @ turned.T)
    wide = nn.Linear(6, 5, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="dtype"):
        step.project(x, wide)
