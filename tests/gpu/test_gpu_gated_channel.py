"""The Triton kernels of gated linear attention and the delta rule with a decay per channel on a GPU."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from gated_cases import NAMES, Case, arguments, by_kernels, check, grouped_keys

from longspan.ops.gated import GatedInputs, choose_algorithm, gated_linear

Channel = partial(Case, decay="channel")
EXTREMES = (-math.inf, -1e30, -104.0, -20.0, 0.0)
CASES = [
    *(Channel(T=T, D=16, E=16) for T in (2, 63, 64, 65, 129)),
    *(Channel(T=261, B=1, H=2, Hkv=2, D=dim, E=dim) for dim in (32, 48, 64, 96, 128, 160, 192, 256)),
    *(Channel(T=261, B=1, H=2, Hkv=2, D=D, E=E) for D, E in ((256, 64), (64, 256))),
    Channel(T=1024, B=1, H=4, Hkv=2, D=128, E=128, strength=0.02),
    Channel(T=261, B=1, H=2, Hkv=1, D=64, E=128, beta=False, state=False),
    Channel(T=261, B=1, H=4, Hkv=2, D=256, E=256),
    Channel(T=517, B=1, H=2, Hkv=2, D=256, E=256, strength=2.0),
    Channel(T=261, B=1, H=2, Hkv=2, D=256, E=256, beta=False, state=False),
    Channel(T=261, D=70, E=40, strided=True, strength=2.0),
    Channel(T=517, D=64, E=64, forgets=EXTREMES),
]
deltas = pytest.mark.parametrize("delta", [False, True], ids=["decay", "delta"])


@deltas
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: Case, dtype: torch.dtype, delta: bool) -> None:
    case = Case(**{**vars(case), "delta": delta})
    check(case, arguments(case, dtype, "cuda"), dtype)


@deltas
@pytest.mark.parametrize("dim", [64, 128])
def test_any_pattern_of_gates(dim: int, delta: bool) -> None:
    case = Channel(T=517, D=dim, E=dim, delta=delta, strength=0.01)
    d_out, d_state, x = arguments(case, torch.bfloat16, "cuda")
    assert x.log_decay is not None
    which = torch.rand(x.log_decay.shape, device="cuda")
    for share, value in ((0.6, 0.0), (0.4, -20.0), (0.3, -104.0)):
        x.log_decay[which < share] = value
    check(case, (d_out, d_state, x), torch.bfloat16)


@pytest.mark.parametrize("dim", [64, 128])
def test_keys_in_nearly_parallel_groups(dim: int) -> None:
    """In every other chunk, which is marked."""
    case = Channel(T=517, D=dim, E=dim, delta=True, strength=0.01)
    d_out, d_state, x = arguments(case, torch.bfloat16, "cuda")
    grouped = torch.arange(517) // 64 % 2 == 0
    keys = torch.where(grouped[:, None, None], grouped_keys(x.k.shape, 16), x.k.cpu().float())
    x = x._replace(k=(keys / keys.norm(dim=-1, keepdim=True)).to(x.k))
    check(case, (d_out, d_state, x), torch.bfloat16)


@deltas
def test_large_queries_of_one_head_of_a_group(delta: bool) -> None:
    case = Channel(T=129, H=2, Hkv=1, D=64, E=64, strength=0.8, delta=delta)
    d_out, d_state, x = arguments(case, torch.bfloat16, "cuda")
    x.q[:, :, 1] *= 1e25
    check(case, (d_out, d_state, x), torch.bfloat16)


@deltas
@pytest.mark.parametrize("dim", [64, 128])
def test_the_same_bits_twice(dim: int, delta: bool) -> None:
    case = Channel(T=1031, H=4, Hkv=2, D=dim, E=dim, delta=delta)
    given = arguments(case, torch.bfloat16, "cuda")
    for name, first, second in zip(NAMES, by_kernels(case, given), by_kernels(case, given), strict=True):
        assert torch.equal(first, second), name


@deltas
def test_compile(delta: bool) -> None:
    d_out, _, x = arguments(Channel(T=130, D=64, E=64, delta=delta), torch.bfloat16, "cuda")
    assert choose_algorithm(x, delta) == "channel"
    results = []
    for function in (gated_linear, torch.compile(gated_linear, fullgraph=True)):
        leaves = [y.detach().requires_grad_() for y in x]
        out, state = function(**dict(zip(GatedInputs._fields, leaves, strict=True)), delta=delta, scale=0.7)
        results.append([out, state, *torch.autograd.grad((out, state), leaves, (d_out, x.state))])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@deltas
def test_memory(delta: bool) -> None:
    """Peak memory is at most 1.6 times inputs, outputs and gradients."""
    case = Channel(T=8192, B=4, H=8, Hkv=8, D=128, E=128, state=False, delta=delta)
    d_out, _, x = arguments(case, torch.bfloat16, "cuda")
    leaves = [y.requires_grad_() for y in x if y is not None]
    torch.cuda.reset_peak_memory_stats()
    out, _ = gated_linear(x.q, x.k, x.v, log_decay=x.log_decay, beta=x.beta, delta=delta)
    torch.autograd.grad(out, leaves, d_out)
    assert torch.cuda.max_memory_allocated() <= 1.6 * 2 * sum(y.nbytes for y in (*leaves, out))
