"""The kernels of bidirectional linear attention on a GPU: every dtype, odd lengths, and what the interpreter cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bidirectional_cases import NAMES, Case, arguments, by_kernels, by_torch, check, mechanism

from longspan import Packing, build_mechanism
from longspan.mechanisms import linear as mechanisms
from longspan.ops import linear
from longspan.ops.linear import bidirectional_linear
from longspan.protocol import Mechanism

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PACKED = (0, 65, 1, 300, 517, 0), (130, 1, 64, 0, 700, 33)
LARGE = {"B": 1, "H": 2, "Hkv": 1, "T": 130, "S": 517}
FAVOR = {"feature_map": "favor", "D": 64, "E": 64, "num_features": 256}

CASES = [
    *(Case(T=67, S=S, D=16, E=16, feature_map=map) for S in (2, 63, 64, 65, 1031) for map in ("elu", "softmax")),
    *(Case(**LARGE, D=dim, E=dim, normalize=n) for dim in (32, 64, 96, 128, 192, 256) for n in ("query", "feature")),
    *(Case(**LARGE, D=64, E=64, feature_map=map, normalize=n) for map in ("elu", "relu") for n in ("feature", "none")),
    Case(T=517, S=517, D=64, E=64, mask=True),
    Case(T=517, S=300, D=64, E=64, mask=True, normalize="feature", feature_map="relu"),
    Case(**LARGE, D=64, E=128, strided=True),
    Case(**LARGE, D=128, E=64, feature_map="elu"),
    Case(**LARGE, D=64, E=256),
    Case(**LARGE, D=256, E=64, feature_map="identity", normalize="none"),
    *(Case(packed=PACKED, H=4, Hkv=2, D=64, E=64, normalize=n) for n in ("query", "feature")),
    Case(packed=PACKED, D=128, E=128, feature_map="elu"),
    *(Case(T=130, S=517, **FAVOR, weight=dtype) for dtype in (torch.float32, torch.bfloat16)),
    Case(T=130, S=517, **FAVOR, normalize="feature", exact=True),
    Case(T=130, S=517, **FAVOR, mask=True, H=4, Hkv=2),
    Case(packed=PACKED, **FAVOR),
    Case(**LARGE, feature_map="favor", D=33, E=100, num_features=100),
    Case(**LARGE, feature_map="favor", D=16, E=16, num_features=33),
    Case(**LARGE, D=64, E=32),
    Case(**LARGE, D=32, E=64, feature_map="elu"),
    Case(**LARGE, feature_map="favor", D=64, E=256, num_features=256),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: Case, dtype: torch.dtype) -> None:
    if dtype != torch.bfloat16 and case.num_features == 256:
        case = replace(case, num_features=128)  # A larger projection does not fit on the chip: plain PyTorch takes it.
    check(case, arguments(case, dtype, "cuda"), dtype)


@pytest.mark.parametrize(
    ("dim", "number"), [(64, 256), (64, 266), (64, 1024), (128, 256), (128, 621), (160, 70), (256, 266)]
)
@pytest.mark.parametrize("normalize", ["query", "feature"])
def test_many_features_and_wide_heads(dim: int, number: int, normalize: str) -> None:
    options = {"feature_map": "favor", "normalize": normalize, "algorithm": "favor_bidirectional"}
    case = Case(**LARGE, **options, D=dim, E=dim, num_features=number)
    check(case, arguments(case, torch.bfloat16, "cuda"), torch.bfloat16)


@pytest.mark.parametrize("epsilon", [1e-4, 1e-2])
@pytest.mark.parametrize("how", [{"mask": True}, {"packed": PACKED}, {"T": 130, "S": 517, "D": 128, "E": 128}])
def test_epsilon(how: dict, epsilon: float) -> None:
    case = Case(**{**FAVOR, "num_features": 266, "H": 4, "Hkv": 2, "epsilon": epsilon, **how})
    check(case, arguments(case, torch.bfloat16, "cuda"), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("normalize", ["query", "feature"])
@pytest.mark.parametrize("feature_map", ["elu", "softmax", "favor"])
def test_large_inputs(feature_map: str, normalize: str, dtype: torch.dtype) -> None:
    features = 64 if feature_map == "favor" else None
    case = Case(**LARGE, D=64, E=64, feature_map=feature_map, normalize=normalize, size=50, num_features=features)
    for name, result in zip(NAMES, by_kernels(case, arguments(case, dtype, "cuda")), strict=True):
        assert result.isfinite().all(), name


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_same_bits_twice(dim: int) -> None:
    case = Case(T=2111, S=3001, H=4, Hkv=2, D=dim, E=dim)
    given = arguments(case, torch.bfloat16, "cuda")
    for first, second in zip(by_kernels(case, given), by_kernels(case, given), strict=True):
        assert torch.equal(first, second)


def test_ones_come_back() -> None:
    for feature_map in ("elu", "relu", "softmax"):
        given = arguments(Case(T=517, S=517, D=64, E=64, size=10), torch.float32, "cuda")
        out = bidirectional_linear(given.q, given.k, torch.ones_like(given.v), feature_map=feature_map)
        torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-5, atol=1e-5)


def test_offsets_beyond_32_bits() -> None:
    # 2³¹ + numbers in each of q, k, v: the last sequence must come out as it does alone.
    T, own = 2**31 // (16 * 64) + 128, 200
    q, k, v = (torch.randn(1, T, 16, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    offsets = torch.tensor([0, T - own, T], device="cuda", dtype=torch.int32)
    out = bidirectional_linear(q, k, v, feature_map="elu", offsets=offsets, key_offsets=offsets)
    tail = bidirectional_linear(*(x[:, -own:] for x in (q, k, v)), feature_map="elu")
    torch.testing.assert_close(out[:, -own:], tail, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("name", ["linear", "performer"])
@pytest.mark.parametrize("how", ["plain", "mask", "packed"])
def test_mechanisms_take_the_kernels(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"feature_map": "softmax", "normalize": "feature"} if name == "linear" else {"num_features": 37}
    attend: Mechanism = build_mechanism(name, 4, 16, num_kv_heads=2, **options)
    x = [torch.randn(1, 130, heads, 16, device="cuda") for heads in (4, 2, 2)]
    where: dict = {}
    if how == "mask":
        where["key_mask"] = torch.rand(1, 130, device="cuda") < 0.6
        x[1:] = [t.masked_fill(~where["key_mask"][:, :, None, None], float("nan")) for t in x[1:]]
    if how == "packed":
        where["packing"] = Packing.from_lengths([64, 0, 65, 1], "cuda")
    x = [t.requires_grad_() for t in x]
    attend.cuda()
    called = []
    real = linear._kernels
    monkeypatch.setattr(linear, "_kernels", lambda name: called.append(name) or real(name))
    d_out = torch.randn(1, 130, 4, 16, device="cuda")
    out = attend(*x, **where)
    ours = [out, *torch.autograd.grad(out, x, d_out)]
    assert set(called) == {"bidirectional"}
    monkeypatch.setattr(mechanisms, "why_not_triton_bidirectional", lambda *_: "not now")
    out = attend(*x, **where)
    for fast, plain in zip(ours, [out, *torch.autograd.grad(out, x, d_out)], strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)


def test_autocast_and_fallbacks() -> None:
    case = Case(D=16, E=16, feature_map="elu")
    given = arguments(case, torch.float64, "cuda")
    assert "float64" in str(linear.why_not_triton_bidirectional(given.q, given.k, given.v, None, "elu"))
    out = mechanism(case, given).cuda()(given.q, given.k, given.v)
    torch.testing.assert_close(out.cpu(), by_torch(case, given, torch.float64)[0])


@pytest.mark.parametrize("direct", [False, True])
def test_gradients_are_taken_once(direct: bool) -> None:
    q, k, v = (torch.randn(1, 9, 2, 16, device="cuda", requires_grad=True) for _ in range(3))
    if direct:
        out = bidirectional_linear(q, k, v, feature_map="elu")
    else:
        settings = "elu", "query", "bidirectional", 0.0
        out = torch.ops.longspan.bidirectional_linear(q, k, v, None, None, None, None, *settings)[0]
    (d_q,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"gradients of gradients .* longspan\.ops\.\*\.reference"):
        (d_q.square().sum() + q.sum()).backward()


def test_compiled_whole_and_for_any_length() -> None:
    linear = build_mechanism("linear", 3, 16, feature_map="softmax")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return linear(q, k, v) * 2

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for T in (130, 257, 1031):
            given = [torch.randn(2, n, 3, 16, device="cuda", requires_grad=True) for n in (T, T + 7, T + 7)]
            out, plain = compiled(*given), attend(*given)
            torch.testing.assert_close(out, plain)
            d = torch.randn_like(out)
            for ours, theirs in zip(
                torch.autograd.grad(out, given, d), torch.autograd.grad(plain, given, d), strict=True
            ):
                torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed: bool) -> None:
    case = Case(T=130, S=65, D=16, E=16, packed=PACKED if packed else None, mask=not packed)
    given = arguments(case, torch.float32, "cuda")
    offsets = [None if packing is None else packing.offsets for packing in (given.packing, given.key_packing)]
    x = [t.nan_to_num().requires_grad_() for t in (given.q, given.k, given.v)]
    op = torch.ops.longspan.bidirectional_linear.default
    torch.library.opcheck(op, (*x, None, given.key_mask, *offsets, "softmax", "query", "bidirectional", 0.0))


@pytest.mark.parametrize("feature_map", ["softmax", "favor"])
def test_memory_stays_near_the_tensors(feature_map: str) -> None:
    shape, weight = (4, 8192, 16, 64), None
    if feature_map == "favor":
        shape, weight = (4, 8192, 8, 128), torch.randn(256, 128, device="cuda")
    given = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    d_out = torch.randn_like(given[0])
    own = 4 * d_out.numel() * d_out.element_size()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(bidirectional_linear(*given, feature_map=feature_map, weight=weight), given, d_out)
    assert torch.cuda.max_memory_allocated() - before + own <= 1.5 * 2 * own
