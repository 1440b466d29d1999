"""Eager calls that look their plan up once, under Triton's interpreter: the results of the custom operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from interpreter import interpreted
from torch import Tensor

from longspan.mechanisms.decay import DecayAttention
from longspan.mechanisms.delta import DeltaAttention
from longspan.mechanisms.linear import LinearAttention
from longspan.mechanisms.local import LocalAttention
from longspan.mechanisms.performer import PerformerAttention
from longspan.ops.common import autograd, dispatch, plans
from longspan.protocol import Mechanism

MECHANISMS: dict[str, Callable[[], Mechanism]] = {
    "linear": lambda: LinearAttention(2, 16, num_kv_heads=1),
    "softmax": lambda: LinearAttention(2, 16, num_kv_heads=1, feature_map="softmax"),
    "performer": lambda: PerformerAttention(2, 16, num_kv_heads=1, num_features=19),
    "local": lambda: LocalAttention(2, 16, num_kv_heads=1, window=3, scale=0.3),
    "decay": lambda: DecayAttention(2, 16, num_kv_heads=1, gate="fixed"),
    "channel": lambda: DecayAttention(2, 16, num_kv_heads=1, gate="channel"),
    "delta": lambda: DeltaAttention(2, 16, num_kv_heads=1),
}


def inputs(T: int = 5, *, strided: bool = False) -> list[Tensor]:
    torch.manual_seed(T)
    last = 19 if strided else 16
    made = [torch.randn(1, T, heads, last).bfloat16()[..., :16] for heads in (2, 1, 1)]
    return [x.detach().requires_grad_() for x in made]


def gates_of(mechanism: Mechanism, T: int) -> Tensor | None:
    number = mechanism.num_gates
    return torch.linspace(-1, 1, T * number).reshape(1, T, 1, number).bfloat16() if number else None


def forward(mechanism: Mechanism, leaves: list[Tensor]) -> Tensor:
    return mechanism(*leaves, gates=gates_of(mechanism, leaves[0].shape[1]), causal=True)


def results(mechanism: Mechanism, leaves: list[Tensor], d_out: Tensor) -> list[Tensor]:
    out = forward(mechanism, leaves)
    return [out, *torch.autograd.grad(out, leaves, d_out)]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """CPU tensors run on the kernels; collects the plans that were run."""
    found: list[object] = []
    apply = autograd._apply_planned
    monkeypatch.setattr(dispatch, "unavailable", lambda q: None)
    monkeypatch.setattr(autograd, "_apply_planned", lambda plan, *x: (found.append(plan), apply(plan, *x))[1])
    plans.clear()
    return found


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("name", MECHANISMS)
def test_the_same_results_as_the_custom_operation(
    name: str, planned: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    mechanism, leaves = MECHANISMS[name](), inputs()
    wide = torch.randn(1, 5, 2, 19).bfloat16()
    gradients = wide[..., :16], wide[..., :1].expand(1, 5, 2, 16)  # the second is made contiguous
    traced = [results(mechanism, leaves, d_out) for d_out in gradients]
    assert not planned
    monkeypatch.setattr(dispatch, "eager_untraced", lambda q: True)
    eager = [results(mechanism, leaves, d_out) for d_out in gradients]
    for found, expected in zip(eager, traced, strict=True):
        for ours, theirs in zip(found, expected, strict=True):
            if name == "performer":  # fewer launches, whose values are rounded elsewhere
                torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.02)
            else:
                assert torch.equal(ours, theirs)
    assert len(planned) == 2
    assert len(set(planned)) == 1
    with torch.no_grad():
        assert torch.equal(forward(mechanism, leaves), eager[0][0])


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("name", ["linear", "local", "delta"])
def test_other_signatures_have_other_plans(name: str, planned: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    mechanism = MECHANISMS[name]()
    cases = [inputs(), inputs(7), inputs(7, strided=True)]
    expected = [forward(mechanism, leaves) for leaves in cases]
    monkeypatch.setattr(dispatch, "eager_untraced", lambda q: True)
    for leaves, theirs in zip(cases, expected, strict=True):
        assert torch.equal(forward(mechanism, leaves), theirs)
    assert len(set(planned)) == 3
    other = {
        "linear": LinearAttention(2, 16, num_kv_heads=1, feature_map="relu"),
        "local": LocalAttention(2, 16, num_kv_heads=1, window=2, scale=0.3),
        "delta": DecayAttention(2, 16, num_kv_heads=1),
    }[name]
    assert not torch.equal(forward(other, cases[0]), expected[0])
    # Columns that are not dense have no plan, and still the kernels' result.
    transposed = [x.detach().transpose(2, 3).contiguous().transpose(2, 3) for x in cases[0]]
    assert torch.equal(forward(mechanism, transposed), expected[0])


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("name", MECHANISMS)
def test_saved_tensors_may_have_another_layout(
    name: str, planned: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view is dense after `torch.autograd.graph.save_on_cpu`, and one plan serves calls with it and without."""
    mechanism, d_out = MECHANISMS[name](), torch.randn(1, 7, 2, 16).bfloat16()
    views = [torch.cat([x.detach(), x.detach()], -1)[..., :16].requires_grad_() for x in inputs(7)]
    monkeypatch.setattr(dispatch, "eager_untraced", lambda q: True)
    expected = results(mechanism, views, d_out)
    copied = torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda x: x)
    for _ in range(2):
        with copied:
            found = results(mechanism, views, d_out)
        assert all(map(torch.equal, found, expected))
        plans.clear()  # Then the first backward pass is that of dense tensors.
    assert all(map(torch.equal, results(mechanism, views, d_out), expected))
    assert len(planned) == 4


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("name", ["linear", "softmax", "performer"])
def test_lengths_need_not_be_contiguous(name: str, planned: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "eager_untraced", lambda q: True)
    mechanism = MECHANISMS[name]()
    q, k, v = (torch.cat([x, x]).detach() for x in inputs())
    lengths = torch.tensor([2, 0, 5, 0])
    found, expected = (
        mechanism._attend_causal(q, k, v, gates=None, lengths=x) for x in (lengths[::2], lengths[::2].clone())
    )
    torch.testing.assert_close(found[0, :2], expected[0, :2], atol=0.02, rtol=0.02)  # by other kernels of performer
    torch.testing.assert_close(found[1], expected[1], atol=0.02, rtol=0.02)


@interpreted
@pytest.mark.usefixtures("bfloat16")
def test_gradients_of_gradients_are_refused(planned: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "eager_untraced", lambda q: True)
    leaves = inputs(3)
    out = MECHANISMS["linear"]()(*leaves, causal=True)
    assert planned
    with pytest.raises(RuntimeError, match="gradients of gradients were requested"):
        torch.autograd.grad(torch.autograd.grad(out.sum(), leaves[0], create_graph=True)[0].sum(), leaves[0])
