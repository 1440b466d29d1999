"""The Triton kernels under Triton's interpreter, on the CPU, against the plain path."""

from __future__ import annotations

import pytest
import torch
from interpreter import bfloat16, inside, run_under_the_interpreter  # noqa: F401
from kernel_cases import Case, arguments, by_kernels, check

from longspan.ops import window as window_op
from longspan.ops.common import dispatch

CASES = [
    Case(),
    Case(T=1, feature_map="softmax"),
    Case(T=33, H=4, Hkv=2, feature_map="softmax", lengths=(33, 29)),
    Case(T=31, feature_map="relu", lengths=(0, 31), state=False),
    Case(feature_map="identity", normalize=False),
    Case(T=300, B=1, H=2, Hkv=1, feature_map="softmax", state=False),
    Case(T=65, feature_map="identity", scaled=True, strided=True),
    Case(T=65, B=1, H=1, Hkv=1, feature_map="identity", normalize=False, scaled=True, E=20),
    Case(T=65, B=1, H=2, Hkv=1, feature_map="favor", num_features=19),
    Case(T=35, B=1, H=1, Hkv=1, feature_map="softmax", D=130, E=140),
    Case(T=33, B=1, H=2, Hkv=1, feature_map="favor", num_features=19, normalize=False, lengths=(20,)),
    Case(T=256, B=1, H=2, Hkv=1, feature_map="softmax"),
    Case(T=128, B=1, H=1, Hkv=1, state=False),
    Case(T=150, B=1, H=2, Hkv=1, feature_map="softmax", jump=60.0),
    Case(T=200, B=2, H=1, Hkv=1, feature_map="softmax", jump=-60.0, state=False),
    Case(T=300, B=1, H=1, Hkv=1, feature_map="identity", scaled=True, jump=80.0),
]


def test_under_the_interpreter() -> None:
    run_under_the_interpreter(__file__)


@inside
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of exponentials in slots that are then masked
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: Case, dtype: torch.dtype) -> None:
    if dtype == torch.float16 and CASES.index(case) % 2:
        pytest.skip("every other case will do")
    check(case, arguments(case, dtype, "cpu"), dtype)


@inside
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bfloat16(case: Case) -> None:
    check(case, arguments(case, torch.bfloat16, "cpu"), torch.bfloat16)


@inside
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("T", "jump", "seed"), [(70, 0.0, 4), (70, 0.0, 12), (150, 60.0, 1), (150, 60.0, 13)])
def test_gradients_of_queries_do_not_depend_on_luck(T: int, jump: float, seed: int) -> None:
    # With these numbers a result's own rounding alone brings d q over the limit.
    torch.manual_seed(seed)
    case = Case(T=T, B=1, H=2, Hkv=1, feature_map="softmax", jump=jump)
    check(case, arguments(case, torch.bfloat16, "cpu"), torch.bfloat16)


@inside
@pytest.mark.usefixtures("bfloat16")
def test_sums_kept_for_the_backward_pass_are_those_it_would_make() -> None:
    case = Case(T=200, B=1, H=2, Hkv=1, feature_map="softmax")
    d_out, d_kv, tensors = arguments(case, torch.bfloat16, "cpu")
    kernels = dispatch.linear_kernels()
    (out, den, *_), kept = kernels.forward(*tensors, "softmax", True)
    assert kept is not None
    given = d_out, d_kv, out, den, *tensors, "softmax", True
    again, eager_untraced = kernels.backward(*given), kernels.backward(*given, kept)
    kept.zero_()
    wrong = kernels.backward(*given, kept)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, eager_untraced, strict=True))
    assert not torch.equal(wrong[0], again[0])


@inside
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "case",
    [
        Case(T=67, B=1, H=2, Hkv=1, feature_map="softmax"),
        Case(T=35, B=1, H=1, Hkv=1, feature_map="favor", num_features=19),
        Case(T=35, B=1, H=1, Hkv=1, feature_map="identity", normalize=False),
    ],
    ids=str,
)
def test_sums_that_nobody_asks_for(case: Case) -> None:
    _, _, tensors = arguments(case, torch.bfloat16, "cpu")
    given = *tensors[:6], None, None, case.feature_map, case.normalize
    kernels = dispatch.linear_kernels()
    (out, den, *ends), _ = kernels.forward(*given, ends=False)
    whole, _ = kernels.forward(*given)
    assert ends == [None, None]
    assert torch.equal(out, whole[0])
    assert torch.equal(den, whole[1])


@inside
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("normalize", [False, True])
def test_no_sums_are_zeros(normalize: bool) -> None:
    case = Case(T=65, feature_map="softmax", normalize=normalize, state=False)
    d_out, d_kv, tensors = arguments(case, torch.float32, "cpu")
    zeros = by_kernels(case, (d_out, torch.zeros_like(d_kv), tensors))
    none = by_kernels(case, (d_out, None, (*tensors[:6], None, None)))
    assert none[-1] is None
    for ours, theirs in zip(none[:-1], zeros[:-1], strict=True):
        assert torch.equal(ours, theirs)


@inside
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("feature_map", ["softmax", "elu"])
def test_large_inputs(feature_map: str) -> None:
    case = Case(T=40, feature_map=feature_map, size=50, state=False)
    for result in by_kernels(case, arguments(case, torch.float16, "cpu")):
        assert result.isfinite().all()


@inside
def test_constants_are_those_of_the_plain_path() -> None:
    from longspan.ops import linear
    from longspan.ops.common import feature_maps as maps
    from longspan.ops.common import tiles as blocks
    from longspan.ops.linear import feature_maps as features

    assert blocks.FLOOR.value == linear.FLOOR
    assert maps.RELU_EPSILON.value == features.RELU_EPSILON
    below, above = (torch.tensor(blocks.ZERO_NORMALIZER.value * factor) for factor in (0.99, 1.01))
    assert linear.divide(below[None], below) == 0
    assert linear.divide(above[None], above) == 1


@pytest.mark.parametrize("normalize", [True, False])
def test_the_result_alone(normalize: bool) -> None:
    from longspan.ops.linear import causal_linear, causal_linear_out

    x = [torch.randn(2, 17, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    how = {"feature_map": "elu", "lengths": torch.tensor([17, 11]), "normalize": normalize}
    out, whole = causal_linear_out(*x, **how), causal_linear(*x, **how)[0]
    assert torch.equal(out, whole)
    d = torch.randn_like(out)
    for ours, theirs in zip(torch.autograd.grad(out, x, d), torch.autograd.grad(whole, x, d), strict=True):
        assert torch.equal(ours, theirs)


def test_reasons() -> None:
    q = torch.zeros(1, 4, 2, 8)
    kv = torch.zeros(1, 2, 8, 9)
    known = {"weight": None, "log_scale": None, "kv": kv, "feature_map": "elu", "bucket": 1}
    assert dispatch.why_unsupported(q, q, q, **known) is None
    assert "CUDA" in str(dispatch.why_not_triton(q, q, q, **known))
    double = q.double()
    assert "float64" in str(dispatch.why_unsupported(double, double, double, **{**known, "kv": kv.double()}))
    assert "single token" in str(dispatch.why_unsupported(q[:, :1], q[:, :1], q[:, :1], **known))
    assert "blind spot (4)" in str(dispatch.why_unsupported(q, q, q, **{**known, "bucket": 4}))
    assert "'elu'" in str(dispatch.why_unsupported(q, q, q, **{**known, "log_scale": torch.zeros(1, 4, 2)}))
    wide = torch.zeros(1, 4, 2, 257)
    assert "over 256" in str(dispatch.why_unsupported(wide, wide, q, **{**known, "kv": torch.zeros(1, 2, 257, 9)}))
    none = q[:, :0]
    assert "empty" in str(dispatch.why_unsupported(none, none, none, **known))


def test_reasons_about_projections() -> None:
    known = {"log_scale": None, "kv": None, "feature_map": "favor", "bucket": 1}

    def why(D: int, M: int, dtype: torch.dtype) -> str | None:
        q = torch.empty(1, 4, 2, D, dtype=dtype, device="meta")
        return dispatch.why_unsupported(q, q, q, weight=torch.empty(M, D, device="meta"), **known)

    assert why(64, 256, torch.float32) is None
    assert why(128, 256, torch.bfloat16) is None
    for D, dtype in ((65, torch.float32), (65, torch.float16), (129, torch.bfloat16)):
        assert "padded, is over 16384" in str(why(D, 256, dtype))


@pytest.mark.parametrize("room", [99, 163, 227])
def test_devices_with_little_shared_memory(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(dispatch, "triton_missing", lambda device: None)
    monkeypatch.setattr(dispatch, "_shared_memory_kb", lambda device: room)

    def taken(D: int, dtype: torch.dtype, M: int | None = None) -> tuple[bool, ...]:
        """Causally, bidirectionally, and in a window, which knows no projection."""
        q = torch.zeros(1, 4, 2, D, dtype=dtype).as_subclass(Cuda)
        weight = None if M is None else torch.zeros(M, D)
        found = [
            dispatch.why_not_triton(q, q, q, weight, None, None, "softmax" if M is None else "favor", 1),
            dispatch.why_not_triton_bidirectional(q, q, q, weight),
            window_op.why_not_triton(q, q, q),
        ]
        assert all(why is None or f"this device has {room}" in why for why in found)
        return tuple(why is None for why in found[: 3 if M is None else 2])

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        exact = dtype != torch.bfloat16
        assert taken(64, dtype) == (True, True, True)
        assert taken(128, dtype) == (True, exact or room > 99, True)
        assert taken(256, dtype) == (True, exact or room > 99, dtype == torch.float32 or room > 99)
        assert taken(32, dtype, 64) == (room > 163 or not exact, room > 163)
    assert taken(128, torch.bfloat16, 64) == (room > 99, room > 163)


def test_wide_heads_walk_where_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from longspan.ops.linear.triton import fused_chunk as walking

    for room in (99, 163, 227):
        monkeypatch.setattr(walking, "shared_memory_kb", lambda device, room=room: room)
        for size, found in ((64, True), (128, room > 99), (129, False)):
            q = torch.empty(1, 4, 2, size, dtype=torch.bfloat16)
            assert walking.takes(q, q, None, "elu", True) is found


def test_room_by_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from longspan.ops.common.launch import shared_memory_kb

    for capability, found in {(9, 0): 227, (10, 0): 227, (8, 0): 163, (8, 7): 163, (8, 9): 99, (12, 0): 99}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert shared_memory_kb.__wrapped__(0) == found
        shared_memory_kb.cache_clear()
        assert dispatch._shared_memory_kb(torch.device("cuda", 0)) == found
    shared_memory_kb.cache_clear()
