"""The Triton kernels of one token's step under Triton's interpreter, on the CPU; and the plain path they replace."""

from __future__ import annotations

import pytest
import torch
from interpreter import inside, run_under_the_interpreter
from step_cases import CASES, D, compare, inputs, mechanism, turn

from longspan.mechanisms import linear, linformer, local
from longspan.mechanisms import write_buffer as late
from longspan.ops import decode as step
from longspan.ops.common import dispatch
from longspan.ops.rotary import cos_sin
from longspan.protocol import Mechanism

by_name = pytest.mark.parametrize("name", CASES)


@pytest.fixture
def kernels_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (step, linear, local, linformer):
        monkeypatch.setattr(module, "why_not_triton", lambda *_: None)
    monkeypatch.setattr(dispatch, "why_not_triton_window", lambda *_, **__: None)


def test_under_the_interpreter() -> None:
    run_under_the_interpreter(__file__)


@inside
@by_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("kernels_on_the_cpu")
def test_kernels(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    real = dispatch.step_kernels()
    monkeypatch.setattr(dispatch, "step_kernels", lambda: used.append(1) or real)
    # Prompts are read by the plain path.
    monkeypatch.setattr(local.LocalAttention, "_windowed", _plain_windowed)
    # From 12 and 9 tokens on: far enough for few slots to be added up in both rows, and for one that is not.
    monkeypatch.setattr(linear, "LATE_SUMS", 4)
    monkeypatch.setattr(late, "LATE_ROWS", 16)  # as few as a product takes
    steps = {"local": 4, "linformer": 8}.get(CASES[name][0], 5)
    compare(name, dtype, "cpu", steps)
    assert len(used) == steps


def _plain_windowed(self, q, k, v, window, **how):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "why_not_triton_window", lambda *_, **__: "asked to")
        how.pop("bounds", None)
        return local.windowed(q, k, v, window, scale=self.scale, **how)


@by_name
@pytest.mark.parametrize("B", [1, 2])
@pytest.mark.parametrize("begun", [2, 9])
def test_a_plain_step_is_writing_and_then_reading(name: str, B: int, begun: int) -> None:
    """`decode_step` in float64, rotary positions included, is `step` of queries and keys that were turned before."""
    built = mechanism(name).double()
    with torch.no_grad():
        state = built.extend(built.new_state(B, dtype=torch.float64), *inputs(name, B, begun, torch.float64, "cpu"))[1]
        ours = state.clone()
        for i in range(4):
            q, k, v = inputs(name, B, 1, torch.float64, "cpu")
            angles = turn(ours.length, i % 3)
            out, ours = built.decode_step(ours, q, k, v, angles)
            ours.length.add_(1)
            expected, state = built.step(state, *((q, k) if angles is None else (angles(q), angles(k))), v)
            torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
            for found, exact in zip(ours.tensors().values(), state.tensors().values(), strict=True):
                torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-9)


def test_a_state_that_grows_is_given_back_grown() -> None:
    built = mechanism("linear")
    assert type(built).decode_step is not Mechanism.decode_step
    from longspan import build_mechanism

    softmax = build_mechanism("softmax", 2, D)
    q, k, v = (torch.randn(1, 1, 2, D) for _ in range(3))
    with torch.no_grad():
        _, state = softmax.decode_step(softmax.new_state(1), q, k, v)
    assert state.k.shape[2] == 1
    assert state.length.tolist() == [0]


@pytest.mark.usefixtures("kernels_on_the_cpu")
def test_queries_turned_further_take_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan import build_mechanism

    monkeypatch.setattr(dispatch, "step_kernels", lambda: pytest.fail("the kernel knows no query_offset"))
    built = build_mechanism("local", 2, D, window=5, query_offset=3).eval()
    with torch.no_grad():
        q, k, v = (torch.randn(1, 1, 2, D) for _ in range(3))
        state = built.step(built.new_state(1), q, k, v)[1]
        expected = built.step(state.clone(), q, 2 * k, -v)[0]
        assert torch.equal(built.decode_step(state, q, 2 * k, -v)[0], expected)


def test_angles_of_a_loop_turn_as_others_do() -> None:
    """`cos_sin_at`, which has them twice as wide for fewer operations, and `Turn` of plain ones."""
    length, x = torch.tensor([3, 1_000_003]), torch.randn(2, 1, 3, D, dtype=torch.float64)
    ours = step.cos_sin_at(length, (D, 100.0), torch.float64)
    assert ours.wide is not None
    for interleaved in (False, True):
        plain = step.Turn(*cos_sin(length[:, None], D, 100.0, torch.float64), interleaved)
        torch.testing.assert_close(ours._replace(interleaved=interleaved)(x), plain(x), rtol=1e-12, atol=1e-12)
    # In another dtype than that of the angles x comes back as it came.
    assert ours(x.float()).dtype == torch.float32


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, 1, 2, 4)
    assert "CUDA" in str(step.why_not_triton(x, x, x))
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    for version, reason in (("3.3.1", "triton 3.3.1 is older than 3.4: install torch 2.8 or newer"), ("3.10.0", None)):
        monkeypatch.setattr(triton, "__version__", version)
        assert dispatch._look(torch.device("cuda")) == reason
