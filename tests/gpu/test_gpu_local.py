"""The Triton kernels of windowed attention on a GPU: every dtype, real sizes, and what the interpreter cannot show."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import check_errors
from local_cases import (
    CASES,
    Case,
    arguments,
    by_definition,
    by_kernels,
    check,
    check_lse,
    dropped,
    no_further,
    visible,
)

from longspan import Packing, build_mechanism
from longspan.ops.window import Window, WindowProblem, _Window, kernels, reference, why_not_triton, window_attention

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

LARGER = [
    *(Case(T=T, B=1, D=64, E=64, back=99, causal=True) for T in (63, 64, 65, 127, 129)),
    Case(T=1031, B=1, H=2, Hkv=2, D=64, E=64, back=255, causal=True),
    # Tiles divide the tokens.
    Case(T=1024, B=2, H=2, Hkv=1, D=64, E=64, back=255, causal=True),
    Case(T=1024, B=1, H=2, Hkv=2, D=128, E=128, back=511, causal=True, strided=True),
    Case(T=512, B=1, H=2, Hkv=1, D=128, E=64, back=200, ahead=90, masked=True),
    Case(T=512, B=1, H=1, Hkv=1, D=128, E=128, past=256, back=300, causal=True),
    Case(T=512, B=1, H=2, Hkv=1, D=128, E=128, packed=(65, 1, 200, 246), back=100, causal=True),
    Case(T=256, B=1, H=1, Hkv=1, D=256, E=256, back=99, causal=True),
    Case(T=1031, B=1, H=4, Hkv=2, D=64, E=64, block_size=128, back=1, ahead=0, causal=True),
    Case(T=517, B=1, H=2, Hkv=1, D=64, E=128, back=100, ahead=50, masked=True),
    Case(T=517, B=1, H=2, Hkv=2, D=128, E=128, back=200, ahead=200),
    Case(T=517, B=1, H=2, Hkv=1, D=128, E=64, block_size=64, back=2, ahead=1),
    # Narrow, aligned heads: narrow products on tensor cores.
    Case(T=517, B=1, H=2, Hkv=1, D=16, E=16, back=99, causal=True),
    Case(T=517, B=1, H=2, Hkv=1, D=32, E=32, back=99, ahead=50),
    Case(T=300, B=1, H=2, Hkv=2, D=256, E=256, back=70, causal=True),
    *(Case(T=300, B=1, H=4, Hkv=2, D=D, E=D, back=70, causal=True) for D in (80, 96, 160, 192)),
    Case(T=300, B=1, H=2, Hkv=2, D=83, E=161, back=70, ahead=9, masked=True),
    Case(T=300, B=2, H=6, Hkv=2, D=70, E=40, back=70, causal=True, past=71, start=(-71, 1000), strided=True),
    Case(T=600, B=1, H=2, Hkv=1, D=64, E=64, back=99, ahead=99, packed=(1, 0, 300, 128, 0, 171), causal=True),
    Case(*(600, 1, 2, 1, 64, 64), block_size=50, back=1, ahead=1, packed=(1, 0, 300, 128, 0, 171), shared_qk=True),
    Case(T=1031, B=2, H=4, Hkv=2, D=64, E=64, back=255, causal=True, bias=64),
    Case(T=517, B=2, H=2, Hkv=2, D=128, E=128, back=200, ahead=200, bias=64),
    Case(T=517, B=1, H=2, Hkv=1, D=64, E=64, block_size=128, back=1, ahead=0, causal=True, bias=128),
    Case(T=300, B=2, H=2, Hkv=2, D=80, E=96, back=70, ahead=9, masked=True, bias=64),
    Case(T=300, B=2, H=2, Hkv=1, D=256, E=256, back=70, causal=True, bias=64),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*CASES, *LARGER], ids=str)
def test_kernels(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("call", ["direct", "traced"])
def test_gradients_of_the_log_sum_exp(call: str, dtype: torch.dtype) -> None:
    check_lse(Case(T=517, H=6, Hkv=2, D=64, E=64, back=63, causal=True, masked=True), dtype, "cuda", call)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_inputs_are_finite(dtype: torch.dtype) -> None:
    case = Case(T=517, D=64, E=64, large=50, masked=True, back=90)
    for result in by_kernels(*arguments(case, dtype, "cuda")):
        assert result.isfinite().all()


def test_ones_come_back() -> None:
    _, problem = arguments(Case(T=517, D=64, E=64, large=10, causal=True), torch.float32, "cuda")
    out = kernels().forward(problem._replace(v=torch.ones_like(problem.v)))[0]
    torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-5, atol=1e-5)


def test_the_same_bits_twice() -> None:
    given = arguments(Case(T=2111, H=4, Hkv=2, D=64, E=64, back=255, causal=True), torch.bfloat16, "cuda")
    for first, second in zip(by_kernels(*given), by_kernels(*given), strict=True):
        assert torch.equal(first, second)


def test_dropout() -> None:
    case, rate = Case(T=257, B=1, H=4, Hkv=2, D=64, E=64, back=40, causal=True), 0.2
    d_out, problem = arguments(case, torch.float32, "cuda")
    factor, with_dropout = dropped(problem, rate, 11)
    factor = factor.cpu()
    seen = visible(case, None).expand_as(factor)
    assert abs((factor[seen] == 0).float().mean().item() - rate) < 0.02
    q, k, v = (x.cpu().double().requires_grad_() for x in problem[:3])
    scores = torch.einsum("bthd,bshd->bhts", q, reference.repeat_kv(k, 4)) * problem.scale
    weights = reference.masked_softmax(scores, seen) * (factor > 0) / (1 - rate)
    out = torch.einsum("bhts,bshe->bthe", weights, reference.repeat_kv(v, 4))
    exact = [out, *torch.autograd.grad(out, (q, k, v), d_out.cpu().double())]
    for found, expected in zip(by_kernels(d_out, with_dropout), exact, strict=True):
        torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-4, atol=1e-4)


def test_dropout_is_drawn_from_the_device_generator() -> None:
    local = build_mechanism("local", 2, 32, window=20, dropout=0.5).train()
    x = [torch.randn(2, 70, 2, 32, device="cuda") for _ in range(3)]
    torch.manual_seed(3)
    first, second = local(*x, causal=True), local(*x, causal=True)
    torch.manual_seed(3)
    assert torch.equal(local(*x, causal=True), first)
    assert not torch.equal(first, second)
    assert torch.equal(local.eval()(*x, causal=True), local(*x, causal=True))


def test_offsets_beyond_32_bits() -> None:
    T, end, last = 2**31 // (16 * 64) + 128, 300, 200
    q, k, v = (torch.randn(1, T, 16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    case = Case(T=end, B=1, H=16, Hkv=16, D=64, E=64, back=63, ahead=0, causal=True)
    out = window_attention(q, k, v, case.window)
    d_out = torch.randn_like(out)
    found = [x[:, -last:].detach() for x in (out, *torch.autograd.grad(out, (q, k, v), d_out))]
    # The last tokens see, and are seen by, nothing before the last few.
    tail = WindowProblem(*(x[:, -end:].detach() for x in (q, k, v)), *[None] * 5, *case.window, 64**-0.5, 0.0, False)
    truth, eager = (
        [x[:, -last:] for x in by_definition(case, d_out[:, -end:], tail, dtype)]
        for dtype in (torch.float64, torch.bfloat16)
    )
    no_further(found, eager, truth, torch.bfloat16)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_taken_once(compiled: bool) -> None:
    q, k, v = (torch.randn(1, 70, 2, 16, device="cuda", requires_grad=True) for _ in range(3))
    if compiled:
        out = _Window.traced(q, k, v, *[None] * 5, 0, 9, 0, True, False, 0.25, 0.0, False)[0]
    else:
        out = window_attention(q, k, v, Window(0, 9, 0, True, False))
    (d_q,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"gradients of gradients .* longspan\.ops\.\*\.reference"):
        (d_q.square().sum() + q.sum()).backward()


def test_the_mechanism_uses_the_kernels_and_agrees_with_the_cpu() -> None:
    packing = Packing.from_lengths([0, 70, 1, 59])
    blocks, shared = {"window": 16, "look_back": 1}, {"window": 9, "shared_qk": True}
    for options in ({"window": 20}, {"window": (5, 9)}, blocks, shared):
        local = build_mechanism("local", 4, 32, num_kv_heads=2, **options)
        q, k, v = torch.randn(1, 130, 4, 32), torch.randn(1, 130, 2, 32), torch.randn(1, 130, 2, 32)
        there = [x.cuda() for x in (q, k, v)]
        assert why_not_triton(*there) is None
        moved = replace(packing, offsets=packing.offsets.cuda())
        mask = torch.rand(1, 130) < 0.7
        for causal in (True, False):
            expected = local(q, k, v, causal=causal, packing=packing)
            found = local(*there, causal=causal, packing=moved)
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(local(*there, causal=causal).cpu(), local(q, k, v, causal=causal))
        found = local(*there, key_mask=mask.cuda())
        torch.testing.assert_close(found.cpu(), local(q, k, v, key_mask=mask), rtol=1e-4, atol=1e-5)
        state = local.new_state(1, device="cuda")
        pieces = []
        for a, b in ((0, 50), (50, 51), (51, 130)):
            out, state = local.extend(state, *(x[:, a:b] for x in there))
            pieces.append(out)
        torch.testing.assert_close(torch.cat(pieces, 1), local(*there, causal=True), rtol=1e-4, atol=1e-5)


def test_compiles_for_any_length() -> None:
    local = build_mechanism("local", 2, 32, window=20)
    compiled = torch.compile(lambda *qkv: local(*qkv, causal=True), fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for T in (64, 100, 131):
            x = [torch.randn(2, T, 2, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
            results = []
            for attend in (compiled, lambda *qkv: local(*qkv, causal=True)):
                out = attend(*x)
                results.append([out, *torch.autograd.grad(out.float().square().sum(), x)])
            for found, expected in zip(*results, strict=True):
                torch.testing.assert_close(found, expected)


def test_the_op_passes_opcheck() -> None:
    q, k, v = (torch.randn(1, 70, 2, 16, device="cuda", requires_grad=True) for _ in range(3))
    torch.library.opcheck(
        _Window.traced, (q, k, v, *[None] * 5, 0, 9, 0, True, False, 0.25, 0.0, False), atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("window", "xpos"), [(99, 100.0), (7, 4.0)], ids=["at once", "in spans"])
def test_xpos(window: int, xpos: float, causal: bool, dtype: torch.dtype) -> None:
    T = 517
    mechanism = build_mechanism("local", 4, 64, num_kv_heads=2, window=window, xpos=xpos).cuda()
    inputs = [torch.randn(2, T, heads, 64) for heads in (4, 2, 2, 4)]

    def results(kind: torch.dtype, device: str) -> list[torch.Tensor]:
        q, k, v, d_out = (x.to(dtype).to(device, kind) for x in inputs)
        assert device == "cpu" or why_not_triton(q, k, v, mechanism.window, xpos=xpos) is None
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = mechanism(*leaves, causal=causal)
        return [x.detach().double().cpu() for x in (out, *torch.autograd.grad(out, leaves, d_out))]

    kinds = (torch.float64, "cpu"), (dtype, "cpu"), (dtype, "cuda")
    check_errors(*(results(*kind) for kind in kinds), dtype)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_learned_bias(compiled: bool) -> None:
    """Its gradients are those of the CPU, in eager mode and compiled."""
    table = torch.nn.Parameter(torch.randn(2, 17, 3 * 17))
    local = build_mechanism("local", 2, 32, window=18, bias=table)
    q, k, v = (torch.randn(2, 131, 2, 32, requires_grad=True) for _ in range(3))
    out = local(q, k, v)
    expected = torch.autograd.grad(out.square().sum(), (q, k, v, table))
    there = build_mechanism("local", 2, 32, window=18, bias=torch.nn.Parameter(table.detach().cuda()))
    leaves = [x.detach().cuda().requires_grad_() for x in (q, k, v)]
    call = torch.compile(lambda *x: there(*x), fullgraph=True) if compiled else there
    found = torch.autograd.grad(call(*leaves).square().sum(), (*leaves, there.bias))
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), exact, rtol=1e-3, atol=1e-4)
