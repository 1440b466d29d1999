"""Every launch gets tensors of one signature: a plan is cached under a key that says which optional tensors there are.

Triton compiles a kernel for the tensors of its first launch. If the key of a plan left out an optional tensor, a call
with it would run what was compiled without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed: pip install 'longspan[triton]'")

from longspan.ops.common import plans
from longspan.ops.common.launch import Launch

B, T, H, D = 1, 150, 2, 16


def described(x: Any) -> Any:
    if isinstance(x, tuple | list):
        return tuple(map(described, x))
    return None if x is None else (x.dtype, x.data_ptr() % 16 == 0)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Launch, Any]]:
    """Compare instead of launching."""
    found: dict[Launch, Any] = {}

    def call(self: Launch, *pointers: Any) -> None:
        given = described(pointers)
        assert found.setdefault(self, given) == given, self.kernel.__name__

    monkeypatch.setattr(Launch, "__call__", call)
    plans.clear()
    yield found
    plans.clear()


def rows(heads: int = H, size: int = D) -> Tensor:
    return torch.randn(B, T, heads, size).bfloat16()


def when(given: bool, *shape: int) -> Tensor | None:
    return torch.randn(shape) if given else None


def features(state: bool, d_lse: bool, d_state: bool) -> None:
    from longspan.ops.features import FeatureInputs, FeatureProblem, FeatureSaved
    from longspan.ops.features.triton import features as kernels

    x = FeatureInputs(rows(), rows(), rows(), when(state, B, H, D, D), when(state, B, H, D))
    problem = FeatureProblem(3)
    out, lse, _, _, states, z = kernels.forward(x, problem)
    sums = when(d_state, B, H, D, D), when(d_state, B, H, D)
    saved = FeatureSaved(rows(), torch.randn_like(lse) if d_lse else None, *sums, out, lse, states, z)
    kernels.backward(saved, x, problem)


def hedgehog(wide: bool) -> None:
    from longspan.ops.hedgehog.triton import features as kernels

    size = 80 if wide else 16
    x, weight = rows(size=size), torch.randn(H, size, size)
    kernels.backward(kernels.forward(x, weight), x, weight)


def merge(sink: bool) -> None:
    from longspan.ops.merge import MergeInputs, MergeSaved
    from longspan.ops.merge import triton as kernels

    lse, scores = torch.randn(B, T, H), 2 if sink else 1
    learned = torch.randn(scores, H, D), torch.randn(scores, H), when(sink, H, D)
    x = MergeInputs(rows(), lse, rows(), lse, rows(), *learned)
    kernels.backward(MergeSaved(rows(), kernels.forward(x)), x)


def linformer(state: bool, d_state: bool) -> None:
    from longspan.ops.compressed import CausalInputs, CausalSaved
    from longspan.ops.compressed.triton import causal as kernels

    R = 5
    start = when(state, B, H, R, D), when(state, B, H, R, D)
    x = CausalInputs(rows(), rows(), rows(), torch.randn(B, T, H, R), torch.randn(B, T, H, R), *start)
    out, _, _, lse, keys, values, pairs = kernels.forward(x)
    ends = when(d_state, B, H, R, D), when(d_state, B, H, R, D)
    given = {"d_out": rows(), "d_end_k": ends[0], "d_end_v": ends[1], "out": out, "lse": lse}
    kernels.backward(CausalSaved(**given, keys=keys, values=values, pairs=pairs), x)


def gates(visible: bool, aligned: bool) -> None:
    from longspan.ops.gates import GateInputs, GateOptions
    from longspan.ops.gates import triton as kernels

    mask = torch.ones(B, T, dtype=torch.bool) if visible else None
    x = GateInputs(rows(1, 2), torch.randn(1), torch.randn(1, 1), mask)
    options = GateOptions("time_step", "sigmoid", 1.0)
    log_decay, beta = kernels.forward(x, options)
    d_beta = torch.randn(1 + beta.numel())[0 if aligned else 1 :][: beta.numel()].view(beta.shape)
    kernels.backward(torch.randn_like(log_decay), d_beta, x, options)


def norm(gated: bool) -> None:
    from longspan.ops.rms_norm.triton import rms_norm_heads

    rms_norm_heads(rows(), torch.randn(D), rows() if gated else None, 1e-6, "silu")


def window(mask: bool, d_lse: bool, bias: bool, start: bool) -> None:
    from longspan.ops.window import Window, WindowProblem, WindowSaved
    from longspan.ops.window.triton import window as kernels

    visible = torch.ones(B, T, dtype=torch.bool) if mask else None
    first = torch.zeros(B, dtype=torch.int64) if start else None
    seen, added = Window(0, 63, 0, True, False), torch.randn(H, 64, 128) if bias else None
    x = WindowProblem(rows(), rows(), rows(), visible, first, None, None, added, *seen, 0.25, 0.0, bias)
    out, lse = kernels.forward(x)
    kernels.backward(WindowSaved(rows(), torch.randn_like(lse) if d_lse else None, out, lse), x)


def gated(gate: bool, beta: bool, state: bool, d_state: bool, delta: bool) -> None:
    from longspan.ops.gated import GatedInputs, GatedProblem, GatedSaved
    from longspan.ops.gated.triton import decay
    from longspan.ops.gated.triton import delta as delta_kernels

    kernels: Any = delta_kernels if delta else decay
    log_decay, write = (-torch.rand(B, T, H, 1) if gate else None), (torch.rand(B, T, H) if beta else None)
    x = GatedInputs(rows(), rows(), rows(), log_decay, write, when(state, B, H, D, D))
    problem = GatedProblem(delta, 0.25, "delta" if delta else "decay")
    _, _, saved = kernels.forward(x, problem)
    kernels.backward(GatedSaved(rows(), when(d_state, B, H, D, D), saved), x, problem)


def linear(lengths: bool, state: bool, d_state: bool, module: str) -> None:
    from longspan.ops.linear import LinearInputs, LinearProblem, LinearSaved

    kernels = import_module(f"longspan.ops.linear.triton.{module}")
    favor = module == "favor"
    M = 19 if favor else D
    kv, d_kv = (when(given, B, H, M, D + 1) for given in (state, d_state))
    shift = when(state and favor, B, H)
    weight = torch.randn(M, D) if favor else None
    x = LinearInputs(rows(), rows(), rows(), weight, None, torch.full((B,), T) if lengths else None, kv, shift)
    problem = LinearProblem("favor" if favor else "elu", True, 1, state or d_state, module, 0.0)
    out, _, _, den, starts = kernels.forward(x, problem)
    kernels.backward(LinearSaved(rows(), d_kv, out, den, starts, None), x, problem)


CALLS: list[tuple[Callable[..., None], int]] = [
    (features, 3),
    (hedgehog, 1),
    (merge, 1),
    (linformer, 2),
    (gates, 2),
    (norm, 1),
    (window, 4),
    (gated, 5),
    *[(partial(linear, module=module), 3) for module in ("chunk", "fused_chunk", "tiled_chunk", "favor")],
]


@pytest.mark.parametrize(("call", "options"), CALLS, ids=range(len(CALLS)))
def test_optional_tensors_are_in_the_key(call: Callable[..., None], options: int, launches: dict[Launch, Any]) -> None:
    for given in product([False, True], repeat=options):
        call(*given)
    assert launches
