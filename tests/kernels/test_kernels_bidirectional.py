"""The kernels of bidirectional linear attention under Triton's interpreter, on the CPU, against eager PyTorch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bidirectional_cases import Case, arguments, by_kernels, check
from interpreter import interpreted

from longspan import Packing, build_mechanism
from longspan.mechanisms import linear as mechanisms
from longspan.ops import linear
from longspan.ops.common import dispatch
from longspan.ops.linear import BidirectionalInputs, BidirectionalProblem, bidirectional_linear

PACKED = (11, 0, 1, 23, 5), (3, 7, 0, 41, 1)
CASES = [
    *(Case(feature_map=map, normalize=n) for map in ("elu", "relu") for n in ("query", "feature", "none")),
    *(Case(feature_map="identity", normalize=n, mask=True) for n in ("query", "feature", "none")),
    *(Case(normalize=n, **how) for n in ("query", "feature") for how in ({}, {"mask": True})),
    *(Case(normalize=n, packed=PACKED, H=2, Hkv=1) for n in ("query", "feature")),
    Case(feature_map="elu", mask=True, H=4, Hkv=2),
    Case(feature_map="elu", packed=PACKED, normalize="feature", H=1, Hkv=1),
    Case(feature_map="favor", num_features=19, H=6, Hkv=2, mask=True),
    Case(feature_map="favor", num_features=19, packed=PACKED, H=1, Hkv=1),
    Case(feature_map="favor", num_features=19, normalize="feature", strided=True),
    Case(feature_map="favor", num_features=19, weight=torch.bfloat16),
    Case(feature_map="favor", num_features=19, exact=True),
    Case(T=1, S=2, B=1),
    Case(T=1, S=1, feature_map="elu", normalize="none"),
    Case(T=3, S=300, B=1, H=2, Hkv=1, D=16, E=16),
    Case(T=3, S=5, B=1, H=1, Hkv=1, D=130, E=70),
    Case(T=5, S=3, B=1, H=2, Hkv=1, D=20, E=140, feature_map="elu", normalize="feature"),
    # Tiles of values that divide E, in which a head's padding would be the values of the next one.
    Case(T=5, S=37, B=1, H=2, Hkv=2, D=96, E=96, feature_map="elu"),
    Case(T=5, S=3, B=1, H=2, Hkv=1, D=70, E=96, normalize="feature"),
    Case(T=5, S=3, B=1, H=2, Hkv=2, D=7, E=96, feature_map="favor", num_features=70),
]
# Blocks of bfloat16 are padded to 64, and slow here: one head, all that differs, and every other of the rest.
BFLOAT16 = [
    replace(case, H=case.H // case.Hkv, Hkv=1)
    for i, case in enumerate(CASES)
    if i % 2 or case.num_features or case.packed or case.D > 64
]
# Tiles of features, and wide heads.
TILED = {"feature_map": "favor", "algorithm": "favor_bidirectional"}
BFLOAT16 += [
    Case(B=1, H=2, Hkv=1, **TILED, num_features=131, exact=True),
    Case(B=2, H=3, Hkv=1, **TILED, num_features=19, mask=True, strided=True),
    Case(B=1, H=1, Hkv=1, S=131, feature_map="favor", num_features=266, normalize="feature", exact=True),
    Case(B=1, H=1, Hkv=1, D=131, E=70, **TILED, num_features=70, mask=True),
    Case(B=2, H=2, Hkv=1, feature_map="favor", num_features=70, mask=True, exact=True, epsilon=1e-2),
    Case(packed=PACKED, H=1, Hkv=1, feature_map="favor", num_features=19, exact=True, epsilon=1e-4),
    Case(B=1, H=1, Hkv=1, feature_map="favor", num_features=19, size=3, epsilon=1e-4),
    Case(B=1, H=1, Hkv=1, D=16, feature_map="favor", num_features=19, size=3, epsilon=1e-2),
    Case(B=1, H=1, Hkv=1, **TILED, num_features=70, size=3),
    Case(T=5, S=7, B=1, H=2, Hkv=2, D=192, E=192, feature_map="elu"),  # of four tiles of values the last has none
]


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of numbers that are then masked
@pytest.mark.parametrize("case", CASES, ids=str)
def test_float32(case: Case) -> None:
    check(case, arguments(case, torch.float32, "cpu"), torch.float32)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_float16(case: Case) -> None:
    check(case, arguments(case, torch.float16, "cpu"), torch.float16)


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", BFLOAT16, ids=str)
def test_bfloat16(case: Case) -> None:
    check(case, arguments(case, torch.bfloat16, "cpu"), torch.bfloat16)


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_weight_that_bfloat16_holds_takes_one_product() -> None:
    case = Case(feature_map="favor", num_features=19, exact=True)
    given = arguments(case, torch.bfloat16, "cpu")
    assert given.weight is not None
    rounded = replace(given, weight=given.weight.bfloat16())
    for ours, theirs in zip(by_kernels(case, given), by_kernels(case, rounded), strict=True):
        assert torch.equal(ours, theirs)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("normalize", ["query", "feature"])
@pytest.mark.parametrize("feature_map", ["softmax", "favor", "elu"])
def test_large_inputs(feature_map: str, normalize: str) -> None:
    features = 19 if feature_map == "favor" else None
    case = Case(feature_map=feature_map, normalize=normalize, size=50, num_features=features)
    given = arguments(case, torch.float16, "cpu")
    for result in by_kernels(case, given):
        assert result.isfinite().all()


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("feature_map", ["softmax", "favor", "elu", "relu"])
def test_ones_come_back(feature_map: str) -> None:
    features = 19 if feature_map == "favor" else None
    case = Case(feature_map=feature_map, size=10, num_features=features)
    given = arguments(case, torch.float32, "cpu")
    for normalize in ("query", "feature"):
        if normalize == "feature" and feature_map in ("elu", "relu"):
            continue  # There weights sum to one over keys, not over a query's features.
        x = BidirectionalInputs(given.q, given.k, torch.ones_like(given.v), given.weight, None, None, None)
        problem = BidirectionalProblem(feature_map, normalize, "bidirectional")
        out = linear._kernels("bidirectional").forward(x, problem)[0]
        torch.testing.assert_close(out, torch.ones_like(out), rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("normalize", ["query", "feature"])
def test_one_key_is_the_answer(normalize: str) -> None:
    # Its own gradient is 0, a difference of equal numbers: it is as good as those are.
    given = arguments(Case(S=1, normalize=normalize), torch.float32, "cpu")
    out, d_q, d_k, d_v = by_kernels(Case(normalize=normalize), given)
    torch.testing.assert_close(out, given.v.expand_as(out))
    torch.testing.assert_close(d_v, given.d_out.sum(1, keepdim=True))
    for gradient in (d_q, d_k):
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-5)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed: bool) -> None:
    case = Case(B=1, H=2, Hkv=1, packed=((5, 0, 6), (7, 3, 1)) if packed else None, mask=not packed)
    given = arguments(case, torch.float32, "cpu")
    offsets = [None if packing is None else packing.offsets for packing in (given.packing, given.key_packing)]
    x = [t.nan_to_num().requires_grad_() for t in (given.q, given.k, given.v)]
    op = torch.ops.longspan.bidirectional_linear.default
    torch.library.opcheck(op, (*x, None, given.key_mask, *offsets, "softmax", "query", "bidirectional", 0.0))


@interpreted
def test_an_unknown_feature_map_is_refused() -> None:
    given = arguments(Case(), torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"feature_map must be one of identity, .* got 'squared'"):
        by_kernels(Case(feature_map="squared"), given)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gradients_are_taken_once() -> None:
    q, k, v = (torch.randn(1, 5, 2, 7, requires_grad=True) for _ in range(3))
    (d_q,) = torch.autograd.grad(bidirectional_linear(q, k, v, feature_map="elu").sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        d_q.sum().backward()


@interpreted
@pytest.mark.filterwarnings("ignore")  # NumPy's, and those of torch's compiler
@pytest.mark.parametrize("how", ["plain", "mask", "packed"])
def test_compiled_whole_and_for_any_length(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanisms, "why_not_triton_bidirectional", lambda *_: None)
    performer = build_mechanism("performer", 2, 5, num_features=7, num_kv_heads=1)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: dict) -> torch.Tensor:
        return performer(q, k, v, **where) * 2

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for T, S in ((11, 13), (17, 7), (5, 23)):
            x = [torch.randn(1, n, heads, 5, requires_grad=True) for n, heads in ((T, 2), (S, 1), (S, 1))]
            where: dict = {"key_mask": torch.rand(1, S) < 0.5} if how == "mask" else {}
            if how == "packed":
                where = {"packing": Packing.from_lengths([3, T - 3]), "key_packing": Packing.from_lengths([S - 2, 2])}
            out, plain = compiled(*x, where), attend(*x, where)
            torch.testing.assert_close(out, plain)
            d = torch.randn_like(out)
            for ours, theirs in zip(torch.autograd.grad(out, x, d), torch.autograd.grad(plain, x, d), strict=True):
                torch.testing.assert_close(ours, theirs)


def test_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    def algorithm(D: int, M: int, dtype: torch.dtype = torch.bfloat16, **other: float) -> str:
        weight = torch.empty(M, D, dtype=dtype)
        return linear.bidirectional_algorithm(torch.empty(1, 4, 2, D, dtype=torch.bfloat16), weight, "favor", **other)

    monkeypatch.setattr(dispatch, "_shared_memory_kb", lambda device: 227)
    for found in (algorithm(64, 256, torch.float32), algorithm(128, 256)):
        assert found == "bidirectional"
    tiled = algorithm(64, 257), algorithm(128, 256, torch.float32), algorithm(129, 256), algorithm(64, 19, epsilon=0.1)
    assert set(tiled) == {"favor_bidirectional"}
    q = torch.empty(1, 4, 2, 64)
    assert linear.bidirectional_algorithm(q, torch.empty(19, 64), "favor") == "bidirectional"
    monkeypatch.setattr(dispatch, "_shared_memory_kb", lambda device: 163)
    assert algorithm(64, 256) == "favor_bidirectional"
    assert linear.bidirectional_algorithm(q.bfloat16(), None, "elu") == "bidirectional"


def test_reasons() -> None:
    q = torch.zeros(1, 4, 2, 8)
    assert linear.why_unsupported_bidirectional(q, q, q, None, "elu") is None
    assert "CUDA" in str(linear.why_not_triton_bidirectional(q, q, q, None, "elu"))
    assert "float64" in str(linear.why_unsupported_bidirectional(q.double(), q, q, None, "elu"))
    assert "epsilon (0.1)" in str(linear.why_unsupported_bidirectional(q, q, q, None, "elu", 0.1))
    weight, halves = torch.zeros(19, 8), q.bfloat16()
    assert "of float32; the kernels take" in str(linear.why_unsupported_bidirectional(q, q, q, weight, "favor", 0.1))
    assert linear.why_unsupported_bidirectional(halves, halves, halves, weight, "favor", 0.1) is None
    wide = torch.zeros(1, 4, 2, 257)
    assert "over 256" in str(linear.why_unsupported_bidirectional(q, q, wide, None, "elu"))
    assert "empty" in str(linear.why_unsupported_bidirectional(q[:, :0], q, q, None, "elu"))
    for dtype, number, expected in (
        (torch.bfloat16, 1024, "None"),
        (torch.bfloat16, 1025, "number of features (1025) is over 1024"),
        (torch.float32, 32, "None"),
        (torch.float32, 33, "a projection of 33 × 129 elements, padded, is over 8192"),
        (torch.float16, 257, "number of features (257) is over 256"),
    ):
        x = torch.zeros(1, 4, 2, 129, dtype=dtype)
        assert expected in str(linear.why_unsupported_bidirectional(x, x, x, torch.zeros(number, 129), "favor"))
