"""Eager calls on a GPU that look their plan up once: the same bits as the custom operations."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from longspan.mechanisms.decay import DecayAttention
from longspan.mechanisms.delta import DeltaAttention
from longspan.mechanisms.linear import LinearAttention
from longspan.mechanisms.local import LocalAttention
from longspan.mechanisms.performer import PerformerAttention
from longspan.ops.common import autograd, dispatch
from longspan.protocol import Mechanism

H, HKV, D = 4, 2, 64
MECHANISMS: dict[str, Callable[[], Mechanism]] = {
    "linear": lambda: LinearAttention(H, D, num_kv_heads=HKV),
    "softmax": lambda: LinearAttention(H, D, num_kv_heads=HKV, feature_map="softmax"),
    "performer": lambda: PerformerAttention(H, D, num_kv_heads=HKV, num_features=256),
    "local": lambda: LocalAttention(H, D, num_kv_heads=HKV, window=67),
    "decay": lambda: DecayAttention(H, D, num_kv_heads=HKV),
    "channel": lambda: DecayAttention(H, D, num_kv_heads=HKV, gate="channel"),
    "delta": lambda: DeltaAttention(H, D, num_kv_heads=HKV),
}


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Collects the plans that were run."""
    found: list[object] = []
    apply = autograd._apply_planned
    monkeypatch.setattr(autograd, "_apply_planned", lambda plan, *x: (found.append(plan), apply(plan, *x))[1])
    return found


def inputs(T: int) -> list[Tensor]:
    torch.manual_seed(T)
    made = (torch.randn(2, T, heads, D, device="cuda", dtype=torch.bfloat16) for heads in (H, HKV, HKV))
    return [x.requires_grad_() for x in made]


def forward(mechanism: Mechanism, leaves: list[Tensor]) -> Tensor:
    shape = *leaves[1].shape[:3], mechanism.num_gates
    gates = torch.linspace(-1, 1, math.prod(shape), device="cuda").view(shape).bfloat16() if shape[3] else None
    return mechanism(*leaves, gates=gates, causal=True)


def results(mechanism: Mechanism, leaves: list[Tensor], d_out: Tensor) -> list[Tensor]:
    out = forward(mechanism, leaves)
    return [out, *torch.autograd.grad(out, leaves, d_out)]


@pytest.mark.parametrize("T", [65, 256, 512, 1031])
@pytest.mark.parametrize("name", MECHANISMS)
def test_the_same_bits_as_the_custom_operation(
    name: str, T: int, planned: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism, leaves = MECHANISMS[name]().cuda(), inputs(T)
    wide = torch.randn(2, T, H, D + 8, device="cuda", dtype=torch.bfloat16)
    gradients = wide[..., :D].contiguous(), wide[..., :D], wide[..., :1].expand(2, T, H, D)
    with monkeypatch.context() as patched:
        patched.setattr(dispatch, "eager_untraced", lambda q: False)
        traced = [results(mechanism, leaves, d_out) for d_out in gradients]
    assert not planned
    for _ in range(2):  # The first call compiles, the second launches what was compiled.
        for d_out, expected in zip(gradients, traced, strict=True):
            for ours, theirs in zip(results(mechanism, leaves, d_out), expected, strict=True):
                assert torch.equal(ours, theirs)
    assert len(set(planned)) == 1
    with torch.no_grad():
        assert torch.equal(forward(mechanism, leaves), traced[0][0])


@pytest.mark.parametrize("name", MECHANISMS)
def test_in_a_captured_graph_and_on_another_stream(name: str) -> None:
    mechanism, leaves = MECHANISMS[name]().cuda(), inputs(193)
    d_out = torch.randn_like(leaves[0])
    expected = results(mechanism, leaves, d_out)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        there = results(mechanism, leaves, d_out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(mechanism, leaves, d_out)
    for x in captured:
        x.detach().zero_()
    graph.replay()
    for ours, replayed, theirs in zip(there, captured, expected, strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(replayed, theirs)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("T", [193, 2111])
def test_a_projection_in_bfloat16(T: int, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of short and of long sequences take it as it is: it holds the projection exactly."""
    monkeypatch.setattr(dispatch, "eager_untraced", dispatch.eager_untraced if eager else lambda q: False)
    mechanism, leaves = MECHANISMS["performer"]().cuda(), inputs(T)
    d_out = torch.randn_like(leaves[0])
    expected = results(mechanism, leaves, d_out)
    for ours, theirs in zip(results(mechanism.bfloat16(), leaves, d_out), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_redrawn_projection_is_read() -> None:
    mechanism, leaves = MECHANISMS["performer"]().cuda(), inputs(193)
    assert isinstance(mechanism, PerformerAttention)
    before = mechanism(*leaves, causal=True)
    mechanism.redraw()
    after = mechanism(*leaves, causal=True)
    assert not torch.equal(before, after)
    fresh = PerformerAttention(H, D, num_kv_heads=HKV, num_features=256).cuda()
    fresh.load_state_dict(mechanism.state_dict())
    assert torch.equal(fresh(*leaves, causal=True), after)
