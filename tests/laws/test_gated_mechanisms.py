"""`decay` and `delta` beyond the laws: awkward gates, half precision, merging, compilation."""

from __future__ import annotations

import pytest
import torch
from helpers import B, Case, D, H, T, all_cases, assert_close_to_truth, each_case
from torch import Tensor

from longspan import Mechanism, build_mechanism
from longspan.testing.compare import draw_inputs, without_queries

F64 = torch.float64
GATED = [case for case in all_cases() if case.name in ("decay", "delta") and case.build().num_gates]


@each_case(GATED)
@pytest.mark.parametrize("value", [1e30, -1e30, 104.0, -1e4])
def test_extreme_gates_stay_finite(case: Case, value: float) -> None:
    m = case.build(torch.float32)
    x = draw_inputs(m, B, 67, dtype=torch.float32)
    x["gates"][:, ::2] = value
    x = {name: y.requires_grad_() for name, y in x.items()}
    for causal in (True, False):
        out = m(**x, causal=causal)
        assert out.isfinite().all()
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), list(x.values())))
    with torch.no_grad():
        assert m.write(m.new_state(B), **without_queries(x)).kv.isfinite().all()


@pytest.mark.parametrize(("name", "gate"), [("decay", "head"), ("decay", "channel"), ("delta", "head")])
def test_a_closed_gate_forgets_everything(name: str, gate: str) -> None:
    """α = 0 at a token: what follows equals a sequence that begins there."""
    m = build_mechanism(name, H, D, gate=gate).eval().double()
    x = draw_inputs(m, B, T)
    closed = x["gates"].clone()
    closed[:, 9, :, 1 if name == "delta" else 0 :] = -1e9 if gate == "channel" else 1e9
    if name == "decay" and gate == "head":  # The same gate scales the write: compare with that of the first token.
        closed[:, 9] = 1e3
    late = {key: y[:, 9:] for key, y in {**x, "gates": closed}.items()}
    torch.testing.assert_close(
        m(**{**x, "gates": closed}, causal=True)[:, 9:], m(**late, causal=True), atol=1e-9, rtol=1e-9
    )


@each_case(GATED)
def test_training_has_no_state_to_fill_and_differentiate(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    m = case.build(torch.float32)
    x = draw_inputs(m, B, T, dtype=torch.float32)
    wanted = m.extend(m.new_state(B, dtype=torch.float32), **x)[0]
    monkeypatch.setattr(m, "new_state", None)
    assert torch.equal(m(**x, causal=True), wanted)


def test_merging_the_delta_rule_needs_a_transition() -> None:
    m = build_mechanism("delta", H, D).eval()
    x = without_queries(draw_inputs(m, B, T, dtype=torch.float32))
    first = m.write(m.new_state(B), **x)
    later = m.write(m.new_state(B, start=first.end), **x)
    with pytest.raises(ValueError, match=r"needs the later state's transition.*transition=True"):
        first.merge(later)
    assert m.new_state(B).transition is None


@each_case(GATED)
def test_half_precision_is_as_close_as_the_recurrence(case: Case) -> None:
    """Chunks in bfloat16 are no further from the truth than twice what token by token in bfloat16 is."""
    m = case.build(torch.float32)
    x = draw_inputs(m, B, 67, dtype=torch.bfloat16)
    with torch.no_grad():
        exact = case.build().to(F64)
        exact.load_state_dict(m.state_dict())
        truth = exact(**{name: y.double() for name, y in x.items()}, causal=True)
        state, steps = m.new_state(B, dtype=torch.bfloat16), []
        for t in range(67):
            out, state = m.step(state, **{name: y[:, t : t + 1] for name, y in x.items()})
            steps.append(out)
        assert_close_to_truth(m(**x, causal=True), torch.cat(steps, 1), truth)


@each_case(GATED[::3])
def test_compiled_equals_eager(case: Case) -> None:
    m = case.build(torch.float32)
    x = {name: y.requires_grad_() for name, y in draw_inputs(m, B, T, dtype=torch.float32).items()}

    def run(m: Mechanism, x: dict[str, Tensor]) -> Tensor:
        return m(**x, causal=True) + m(**x)

    torch._dynamo.reset()
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(m, x)
    expected = run(m, x)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    pairs = zip(*(torch.autograd.grad(y.sum(), [*x.values(), *m.parameters()]) for y in (got, expected)), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "width"), [("decay", 1), ("delta", 2)])
def test_gates_of_another_width_are_refused(name: str, width: int) -> None:
    m = build_mechanism(name, H, D)
    x = draw_inputs(m, B, T, dtype=torch.float32)
    with pytest.raises(ValueError, match=rf"gates must be floating point of shape .* = .*, {width}\), got"):
        m(**{**x, "gates": torch.randn(B, T, H, width + 1)}, causal=True)
