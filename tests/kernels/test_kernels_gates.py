"""The kernels around gated memories, L2 norms and the activation of gates, under Triton's interpreter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gate_cases import KINDS, NORMS, activated, check_gates, check_norm, rows
from interpreter import interpreted

from longspan import build_mechanism
from longspan.mechanisms.gated import GatedMechanism
from longspan.ops import gates as gates_op
from longspan.ops import l2_norm
from longspan.ops.gates import _ActivateGates
from longspan.ops.l2_norm import _L2Norm

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
kinds = pytest.mark.parametrize(("name", "options"), KINDS, ids=str)


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", NORMS, ids=str)
def test_norm(size: tuple[int, ...], dtype: torch.dtype) -> None:
    check_norm(size, dtype, "cpu")


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@kinds
def test_gates(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    check_gates(name, options, dtype, "cpu")


@interpreted
@kinds
def test_gates_without_a_mask(name: str, options: dict[str, Any]) -> None:
    check_gates(name, options, torch.float32, "cpu", D=19, masked=False, T=1031 if options["gate"] == "channel" else 7)


@interpreted
def test_gates_that_forget_everything() -> None:
    """log α is at least −104, with a gradient of zero below, and finite gates give finite numbers."""
    mechanism = build_mechanism("delta", 1, 3, gate="channel")
    assert isinstance(mechanism, GatedMechanism)
    values = torch.tensor([1e30, -1e30, 300.0, 0.0])
    raw = values[None, :, None, None].repeat(1, 1, 1, 4).requires_grad_()
    log_decay, beta = activated(mechanism, raw, None)
    grads = torch.autograd.grad([log_decay, beta], [raw, *mechanism.parameters()], [log_decay * 0 + 1, beta * 0 + 1])
    assert log_decay.min() == -104
    assert beta.isfinite().all()
    assert all(x.isfinite().all() for x in grads)
    assert not grads[0][:, :3].any()


@interpreted
def test_nan_is_not_hidden() -> None:
    mechanism = build_mechanism("delta", 1, 3, gate="channel")
    assert isinstance(mechanism, GatedMechanism)
    assert all(x.isnan().all() for x in activated(mechanism, torch.full((1, 2, 1, 4), math.nan), None))


@interpreted
def test_traced_calls() -> None:
    check_norm(NORMS[0], torch.float32, "cpu", "traced")
    mechanism = build_mechanism("delta", 3, 5, gate="channel")
    assert isinstance(mechanism, GatedMechanism)
    raw, visible = torch.randn(2, 7, 3, 6), torch.rand(2, 7) < 0.5
    for ours, theirs in zip(*(activated(mechanism, raw, visible, call) for call in ("direct", "traced")), strict=True):
        assert torch.equal(ours, theirs)


@interpreted
def test_proper_operators() -> None:
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    q, k, _, _ = rows(NORMS[0], torch.float32, "cpu")
    given = [x.detach().requires_grad_() for x in (q, k)]
    torch.library.opcheck(torch.ops.longspan.l2_norm.default, tuple(given), test_utils=tests)
    raw, A_log, bias = torch.randn(2, 7, 3, 6), torch.randn(3), torch.randn(3, 5)
    mask = torch.rand(2, 7) < 0.5
    args = [x.requires_grad_() for x in (raw, A_log, bias)]
    torch.library.opcheck(
        torch.ops.longspan.activate_gates.default, (*args, mask, "time_step", "sigmoid", 2.0), test_utils=tests
    )


@interpreted
@pytest.mark.parametrize("call", ["direct", "traced"])
def test_gradients_of_gradients_are_refused(call: str) -> None:
    q = torch.randn(1, 3, 1, 5).requires_grad_()
    raw = torch.randn(1, 3, 1, 1).requires_grad_()
    for out, x in (
        (getattr(_L2Norm, call)(q, q)[0], q),
        (getattr(_ActivateGates, call)(raw, None, None, None, "none", "sigmoid", 1.0)[1], raw),
    ):
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="gradients of gradients"):
            torch.autograd.grad(grad.sum(), x)


def test_reasons() -> None:
    q = torch.zeros(1, 4, 2, 8)
    assert l2_norm.why_unsupported(q, q) is None
    assert "CUDA" in str(l2_norm.why_not_triton(q, q))
    assert "float64" in str(l2_norm.why_unsupported(q.double(), q.double()))
    assert "over 256" in str(l2_norm.why_unsupported(torch.zeros(1, 4, 2, 257), torch.zeros(1, 4, 2, 257)))
    assert "empty" in str(l2_norm.why_unsupported(q[:, :0], q))
    assert gates_op.why_unsupported(q, q) is None
    assert "CUDA" in str(gates_op.why_not_triton(q, q))
    assert "float64" in str(gates_op.why_unsupported(q, q.double()))
    assert "over 257" in str(gates_op.why_unsupported(torch.zeros(1, 4, 2, 258), q))
    assert "empty" in str(gates_op.why_unsupported(q[:, :0], q))
