"""The Triton kernels on a GPU: every dtype, odd lengths, and what the interpreter cannot show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import check_errors
from kernel_cases import NAMES, Case, arguments, by_kernels, check, forward, kernel_problem

from longspan import build_mechanism
from longspan.mechanisms.feature_maps import orthogonal_rows
from longspan.ops.linear import LinearInputs, causal_linear, causal_linear_out, choose_algorithm

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

CASES = [
    *(Case(T=T, D=16, E=16, feature_map=map) for T in (2, 63, 64, 65, 129, 1031) for map in ("elu", "softmax")),
    *(Case(T=517, B=1, H=2, Hkv=2, D=dim, E=dim, feature_map="softmax") for dim in (32, 64, 80, 96, 128)),
    *(Case(T=517, B=1, H=2, Hkv=2, D=dim, E=dim, feature_map="softmax") for dim in (160, 192, 256)),
    Case(T=1024, B=1, H=2, Hkv=2, D=64, E=64, feature_map="softmax", state=False),
    Case(T=1024, B=1, H=4, Hkv=2, D=128, E=128, feature_map="softmax"),
    Case(T=517, B=1, H=2, Hkv=1, D=64, E=128, feature_map="relu", state=False),
    Case(T=517, B=1, H=2, Hkv=1, D=128, E=64, feature_map="relu", state=False),
    Case(T=517, B=1, H=6, Hkv=2, D=70, E=40, lengths=(400,)),
    Case(T=517, B=3, H=4, Hkv=2, D=64, E=64, feature_map="softmax", lengths=(0, 1, 517)),
    Case(T=517, B=1, H=2, Hkv=2, D=64, E=64, feature_map="identity", normalize=False),
    Case(T=517, B=1, H=2, Hkv=2, D=64, E=256, feature_map="identity", normalize=False),
    Case(T=517, B=1, H=2, Hkv=2, D=256, E=64, feature_map="identity", normalize=False),
    Case(T=517, D=64, E=64, feature_map="identity", scaled=True),
    Case(T=517, D=64, E=64, feature_map="softmax", strided=True),
    *(Case(T=517, D=64, E=64, feature_map="softmax", jump=jump) for jump in (60.0, -60.0)),
    Case(T=1024, H=4, Hkv=2, D=128, E=128, feature_map="softmax", jump=60.0),
    Case(T=1031, D=64, E=64, feature_map="identity", scaled=True, jump=80.0, lengths=(1031, 700)),
    Case(T=517, B=1, D=64, E=64, feature_map="favor", num_features=256, state=False),
    Case(T=517, B=1, D=64, E=64, feature_map="favor", num_features=100),
    Case(T=300, B=1, H=2, Hkv=1, D=33, E=100, feature_map="favor", num_features=256),
]


# One launch where there is no state, and blind spots: bfloat16 only.
STATELESS = [
    Case(T=1024, B=1, H=2, Hkv=2, D=64, E=64, stateless=True, feature_map="softmax"),
    Case(T=192, B=1, H=4, Hkv=2, D=64, E=64, stateless=True),
    Case(T=193, H=4, Hkv=2, D=64, E=64, stateless=True, feature_map="softmax", lengths=(193, 0)),
    Case(T=193, D=64, E=64, stateless=True, feature_map="softmax", jump=60.0, strided=True),
    Case(T=193, B=1, D=128, E=96, stateless=True, feature_map="relu"),
    Case(T=1024, B=2, H=16, Hkv=16, D=64, E=64, stateless=True),
    Case(T=1031, B=3, H=6, Hkv=2, D=64, E=64, stateless=True, lengths=(1031, 700, 0)),
    Case(T=2048, B=2, H=16, Hkv=16, D=64, E=64, stateless=True),
    Case(T=4096, B=1, H=2, Hkv=2, D=64, E=64, stateless=True),
    Case(T=1024, B=2, H=16, Hkv=16, D=64, E=64, stateless=True, feature_map="softmax"),
    Case(T=1024, B=1, H=8, Hkv=8, D=128, E=128, stateless=True),
    Case(T=1031, H=4, Hkv=2, D=64, E=64, stateless=True, bucket=128, feature_map="softmax", jump=60.0),
    Case(T=1031, H=4, Hkv=2, D=64, E=64, stateless=True, feature_map="softmax", lengths=(1031, 700), jump=60.0),
    Case(T=1024, H=2, Hkv=2, D=64, E=64, stateless=True, feature_map="softmax", strided=True, jump=-60.0),
    Case(T=1031, B=1, H=4, Hkv=2, D=64, E=64, bucket=64, stateless=True),
    Case(T=1024, B=1, D=64, E=64, bucket=64, feature_map="softmax"),
    Case(T=517, D=64, E=64, bucket=16, feature_map="softmax", jump=160.0, lengths=(517, 100)),
    Case(T=1031, B=2, H=4, Hkv=2, D=64, E=64, bucket=128, stateless=True),
    Case(T=1024, B=1, D=64, E=64, bucket=256, feature_map="softmax"),
    Case(T=517, D=64, E=64, bucket=128, feature_map="softmax", jump=160.0, lengths=(517, 100)),
    Case(T=517, B=1, D=128, E=128, bucket=192),
    Case(T=67, B=1, D=64, E=64, bucket=128, stateless=True, feature_map="softmax"),
]

# Features and values in tiles: bfloat16 only. 2 × 32 heads are enough for one segment, 2 are divided into many.
WIDE = [
    Case(T=1024, B=1, H=4, Hkv=2, D=192, E=192, feature_map="softmax"),
    Case(T=1024, B=2, H=32, Hkv=32, D=192, E=192, feature_map="softmax", stateless=True),
    Case(T=517, B=2, H=2, Hkv=2, D=131, E=200, feature_map="softmax", lengths=(0, 400), jump=60.0),
    Case(T=517, B=1, H=2, Hkv=2, D=192, E=192, feature_map="softmax", strided=True),
    Case(T=1031, B=2, H=4, Hkv=2, D=256, E=160, lengths=(1031, 700), stateless=True),
    Case(T=517, B=1, H=2, Hkv=1, D=192, E=64, feature_map="relu", state=False),
    Case(T=517, B=1, H=2, Hkv=1, D=64, E=192),
    Case(T=517, B=1, H=2, Hkv=1, D=256, E=64, feature_map="identity"),
    Case(T=517, B=1, H=4, Hkv=2, D=64, E=256, feature_map="identity", normalize=False, lengths=(500,)),
    Case(T=517, B=1, H=2, Hkv=2, D=192, E=192, normalize=False, stateless=True),
]


@pytest.mark.parametrize("case", WIDE, ids=str)
def test_wide_heads(case: Case) -> None:
    given = arguments(case, torch.bfloat16, "cuda")
    assert kernel_problem(case, given[2]).algorithm == "tiled_chunk"
    check(case, given, torch.bfloat16)


@pytest.mark.parametrize("case", STATELESS, ids=str)
def test_short_sequences_and_blind_spots(case: Case) -> None:
    check(case, arguments(case, torch.bfloat16, "cuda"), torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "options", "causal"),
    [
        ("linear", {"normalize": "feature"}, True),
        ("linear", {"normalize": "feature", "feature_map": "softmax"}, True),
        ("performer", {"kernel": "relu", "num_features": 256}, True),
        ("performer", {"kernel": "relu", "num_features": 256}, False),
        ("linear", {"blind_spot": 64}, True),
        ("linear", {"blind_spot": 128, "feature_map": "softmax"}, True),
    ],
    ids=str,
)
def test_options_by_kernels_of_bfloat16(name: str, options: dict[str, Any], causal: bool) -> None:
    """Errors are at most twice those of the CPU in bfloat16."""
    mechanism = build_mechanism(name, 4, 64, num_kv_heads=2, **options).eval()
    inputs = [torch.randn(2, 517, heads, 64).bfloat16() for heads in (4, 2, 2, 4)]

    def results(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v, d_out = (x.to(device, dtype) for x in inputs)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = mechanism.to(device, torch.promote_types(dtype, torch.float32))(*leaves, causal=causal)
        return [x.detach().double().cpu() for x in (out, *torch.autograd.grad(out, leaves, d_out))]

    kinds = ("cpu", torch.float64), ("cpu", torch.bfloat16), ("cuda", torch.bfloat16)
    check_errors(*(results(*kind) for kind in kinds), torch.bfloat16)


def test_a_blind_spot_of_many_tokens_compiles() -> None:
    linear = build_mechanism("linear", 2, 64, blind_spot=128)
    q, k, v = (torch.randn(2, 517, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    results = []
    for attend in (linear, torch.compile(lambda *qkv, **options: linear(*qkv, **options), fullgraph=True)):
        out = attend(q, k, v, causal=True)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: Case, dtype: torch.dtype) -> None:
    draws = 4 if dtype == torch.float32 and case.feature_map == "favor" else 1
    first, *more = (arguments(case, dtype, "cuda") for _ in range(draws))
    check(case, first, dtype, more)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("feature_map", ["elu", "softmax", "favor"])
def test_large_inputs(feature_map: str, dtype: torch.dtype) -> None:
    features = 64 if feature_map == "favor" else None
    case = Case(T=517, D=64, E=64, feature_map=feature_map, size=50, state=False, num_features=features)
    for name, result in zip(NAMES, by_kernels(case, arguments(case, dtype, "cuda")), strict=True):
        assert result.isfinite().all(), name


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_same_bits_twice(dim: int) -> None:
    case = Case(T=2111, H=4, Hkv=2, D=dim, E=dim, feature_map="softmax")
    given = arguments(case, torch.bfloat16, "cuda")
    for first, second in zip(by_kernels(case, given), by_kernels(case, given), strict=True):
        assert torch.equal(first, second)


def test_the_future_does_not_move_the_past() -> None:
    case = Case(T=517, D=64, E=64, feature_map="softmax")
    _, _, (q, k, v, *rest) = arguments(case, torch.bfloat16, "cuda")
    before = forward(case, (q, k, v, *rest))[0]
    k, v = k.clone(), v.clone()
    k[:, 300:] += 30
    v[:, 300:] = 0
    after = forward(case, (q, k, v, *rest))[0]
    torch.testing.assert_close(after[:, :300], before[:, :300], rtol=1e-2, atol=1e-2)


def test_ones_come_back() -> None:
    for feature_map in ("elu", "relu", "softmax"):
        case = replace(Case(T=517, D=64, E=64, size=10, state=False), feature_map=feature_map)
        _, _, (q, k, v, *rest) = arguments(case, torch.float32, "cuda")
        out = forward(case, (q, k, torch.ones_like(v), *rest))[0]
        torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-5, atol=1e-5)


def test_offsets_beyond_32_bits() -> None:
    # 2³¹ + numbers in each of q, k, v: the last tokens must come out as they do alone.
    T = 2**31 // (16 * 64) + 128
    q, k, v = (torch.randn(1, T, 16, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out, sums = causal_linear(q, k, v, feature_map="elu")
    cut = T - 200
    _, before = causal_linear(q[:, :cut], k[:, :cut], v[:, :cut], feature_map="elu")
    tail, after = causal_linear(q[:, cut:], k[:, cut:], v[:, cut:], feature_map="elu", sums=before)
    torch.testing.assert_close(out[:, cut:], tail, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(sums.kv, after.kv, rtol=1e-3, atol=1.0)


def test_the_op_takes_the_kernels() -> None:
    q, k, v = (torch.randn(2, 130, 3, 16, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    assert choose_algorithm(LinearInputs(q, k, v, *[None] * 5), "elu", True, 1) == "fused_chunk"
    out, _ = causal_linear(q, k, v, feature_map="elu")
    out.float().square().sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_are_taken_once(dtype: torch.dtype, direct: bool) -> None:
    q, k, v = (torch.randn(1, 9, 2, 16, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    if direct:
        out = causal_linear(q, k, v, feature_map="elu")[0]
    else:
        algorithm = choose_algorithm(LinearInputs(q, k, v, *[None] * 5), "elu", True, 1)
        options = "elu", True, 1, True, algorithm, 0.0
        out = torch.ops.longspan.causal_linear(q, k, v, *[None] * 6, *options)[0]
    (d_q,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"gradients of gradients .* longspan\.ops\.\*\.reference"):
        (d_q.square().sum() + q.sum()).backward()


def test_compiled_whole_and_for_any_length() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return causal_linear(q, k, v, feature_map="softmax")[0] * 2

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for T in (130, 257, 1031):
            given = [torch.randn(2, T, 3, 16, device="cuda", requires_grad=True) for _ in range(3)]
            out, plain = compiled(*given), attend(*given)
            torch.testing.assert_close(out, plain)
            d = torch.randn_like(out)
            for ours, theirs in zip(
                torch.autograd.grad(out, given, d), torch.autograd.grad(plain, given, d), strict=True
            ):
                torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("state", [False, True])
def test_opcheck(state: bool) -> None:
    case = Case(T=130, D=16, E=16, feature_map="softmax")
    _, _, (q, k, v, *rest) = arguments(case, torch.float32, "cuda")
    if not state:
        rest[3:] = [None, None]
    given = [x.requires_grad_() for x in (q, k, v)]
    problem = kernel_problem(case, (q, k, v, *rest))
    torch.library.opcheck(torch.ops.longspan.causal_linear.default, (*given, *rest, None, *problem))


@pytest.mark.parametrize("feature_map", ["softmax", "favor", "identity"])
def test_out_without_a_state(feature_map: str) -> None:
    """Called twice, because from the second time on kernels are given addresses."""
    x = [torch.randn(2, 517, 3, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    weight = orthogonal_rows(100, 64, unit=False).cuda() if feature_map == "favor" else None
    how = {"feature_map": feature_map, "weight": weight, "normalize": feature_map != "identity"}
    expected = causal_linear(*x, **how)[0]
    d = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, x, d)
    for _ in range(2):
        out = causal_linear_out(*x, **how)
        assert torch.equal(out, expected)
        assert torch.equal(causal_linear_out(*(t.detach() for t in x), **how), expected)
        for ours, theirs in zip(torch.autograd.grad(out, x, d), grads, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("batch", [1, 4])
def test_memory_stays_near_the_tensors(batch: int) -> None:
    given = [
        torch.randn(batch, 8192, 16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    d_out = torch.randn_like(given[0])
    own = 4 * d_out.numel() * d_out.element_size()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(causal_linear(*given, feature_map="softmax")[0], given, d_out)
    assert torch.cuda.max_memory_allocated() - before + own <= 1.5 * 2 * own


@pytest.mark.parametrize("name", ["linear", "performer", "local", "decay", "delta", "linformer"])
@pytest.mark.parametrize("causal", [True, False])
def test_forward_mode_is_right_or_refused(name: str, causal: bool) -> None:
    options = {"linformer": {"rank": 16, "max_length": 65}, "local": {"window": 16}}.get(name, {})
    mechanism = build_mechanism(name, 2, 64, **options).cuda()
    q, k, v = (torch.randn(1, 65, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    gates = q.new_ones(1, 65, 2, mechanism.num_gates) if mechanism.num_gates else None

    def run(x: torch.Tensor) -> torch.Tensor:
        return mechanism(q, k, x, causal=causal, gates=gates)

    try:
        _, got = torch.func.jvp(run, (v,), (v,))
    except (RuntimeError, NotImplementedError) as error:
        assert "forward-mode gradients" in str(error) or "forward AD" in str(error)  # noqa: PT017
        return
    torch.testing.assert_close(got, run(v), atol=0.1, rtol=0.1)  # linear in v
