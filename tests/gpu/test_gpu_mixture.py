"""The mixture on a GPU: its results and gradients beside eager PyTorch in the same dtype and in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan import build_mechanism
from longspan.ops import features
from longspan.ops.common import dispatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),
]
LIMITS = {torch.bfloat16: 0.02, torch.float16: 2e-3, torch.float32: 2e-5}
BFLOAT16, FLOAT16, FLOAT32 = LIMITS
# Head dimension, heads, heads of keys, causal, dtype, tokens, options.
CASES: list[tuple[int, int, int, bool, torch.dtype, int, dict[str, Any]]] = [
    (64, 16, 16, True, BFLOAT16, 1031, {"sink": True}),
    (64, 4, 2, True, BFLOAT16, 1031, {}),
    (128, 8, 8, True, BFLOAT16, 1031, {"sink": True}),
    (160, 4, 2, True, BFLOAT16, 1031, {}),
    (256, 8, 8, True, BFLOAT16, 1031, {"sink": True}),
    (64, 16, 16, False, BFLOAT16, 1031, {"sink": True}),
    (256, 4, 2, False, BFLOAT16, 1031, {"sink": True}),
    (64, 4, 2, True, FLOAT16, 500, {"sink": True}),
    (64, 4, 2, False, FLOAT16, 500, {"sink": True}),
    (128, 4, 2, True, FLOAT16, 300, {"sink": True}),
    (256, 4, 2, True, FLOAT16, 300, {}),
    (64, 4, 2, True, FLOAT32, 150, {"sink": True}),
]


def named(case: tuple[Any, ...]) -> str:
    head_dim, heads, kv_heads, causal, dtype, _, options = case
    kind = "causal" if causal else "bidirectional"
    return "-".join(map(str, (kind, str(dtype)[6:], head_dim, heads, kv_heads, *options)))


def mixture(head_dim: int, heads: int, kv_heads: int, options: dict[str, Any]) -> torch.nn.Module:
    module: torch.nn.Module = build_mechanism("mixture", heads, head_dim, num_kv_heads=kv_heads, **options)
    for name, parameter in module.named_parameters():
        if "mix" in name or "sink" in name:
            torch.nn.init.normal_(parameter)
    return module.cuda()


def differentiated(
    call: Callable[..., Tensor], module: torch.nn.Module, inputs: list[Tensor], **how: Any
) -> list[Tensor]:
    """Return the output, zero at padding, and the gradients of queries, keys, values and parameters, in float64."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = call(*leaves, **how)
    if how["key_mask"] is not None:
        out = out.masked_fill(~how["key_mask"][:, :, None, None], 0)
    grads = torch.autograd.grad(out, [*leaves, *module.parameters()], inputs[3])
    return [x.detach().double() for x in (out, *grads)]


def given(head_dim: int, heads: int, kv_heads: int, T: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Return queries, keys, values and the gradient of the output; a mask of a full and a shorter sequence."""
    lengths = torch.tensor([[T], [T - 300 if T > 400 else T - 31]], device="cuda")
    sizes = heads, kv_heads, kv_heads, heads
    inputs = [torch.randn(2, T, count, head_dim, device="cuda", dtype=dtype) for count in sizes]
    return inputs, torch.arange(T, device="cuda") < lengths


@pytest.mark.parametrize("masked", [True, False], ids=["padded", "full"])
@pytest.mark.parametrize("case", CASES, ids=named)
def test_results_and_gradients(case: tuple[Any, ...], masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of errors are at most twice those of eager PyTorch in the same dtype, or below a limit of the dtype."""
    head_dim, heads, kv_heads, causal, dtype, T, options = case
    module = mixture(head_dim, heads, kv_heads, options)
    inputs, mask = given(head_dim, heads, kv_heads, T, dtype)
    how = {"causal": causal, "key_mask": mask if masked else None}
    if masked:
        inputs[3] = inputs[3].masked_fill(~mask[:, :, None, None], 0)
    calls: list[int] = []
    real = features._kernels
    monkeypatch.setattr(features, "_kernels", lambda: calls.append(1) or real())
    ours = differentiated(module, module, inputs, **how)
    assert bool(calls) == (dtype == BFLOAT16 or (dtype == FLOAT16 and head_dim <= 128))
    monkeypatch.setattr(dispatch, "unavailable", lambda q: "eager PyTorch, to compare with")
    eager = differentiated(module, module, inputs, **how)
    truth = differentiated(module.double(), module, [x.double() for x in inputs], **how)
    names = ["out", "d_q", "d_k", "d_v", *(name for name, _ in module.named_parameters())]
    for name, own, near, exact in zip(names, ours, eager, truth, strict=True):
        error, allowed = (float((x - exact).norm() / exact.norm()) for x in (own, near))
        assert error <= max(2 * allowed, LIMITS[dtype]), f"{name}: {error:.3g} from the truth, eager {allowed:.3g}"


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_compiled_calls(causal: bool) -> None:
    """A compiled call is one graph, with the results of an eager one and gradients that are near."""
    module = mixture(64, 4, 4, {"sink": True})
    inputs, _ = given(64, 4, 4, 517, BFLOAT16)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    ours, theirs = (differentiated(call, module, inputs, causal=causal, key_mask=None) for call in (module, compiled))
    assert torch.equal(ours[0], theirs[0])
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        assert float((one - other).norm()) <= 0.01 * float(one.norm())
