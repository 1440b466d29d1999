"""The Triton kernels of causal linear attention under Triton's interpreter, against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
from helpers import check_errors
from interpreter import interpreted, take_kernels
from kernel_cases import Case, arguments, backward, by_kernels, check, forward, kernel_problem

from longspan.mechanisms.linear import LinearAttention
from longspan.mechanisms.performer import PerformerAttention
from longspan.ops import linear
from longspan.ops import window as window_op
from longspan.ops.common import dispatch
from longspan.ops.linear import LinearInputs
from longspan.ops.linear import torch as torch_chunk
from longspan.ops.linear.triton import FEATURE_MAPS

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


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of exponentials in slots that are then masked
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: Case, dtype: torch.dtype) -> None:
    if dtype == torch.float16 and CASES.index(case) % 2:
        pytest.skip("every other case will do")
    check(case, arguments(case, dtype, "cpu"), dtype, (arguments(case, dtype, "cpu") for _ in range(3)))


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bfloat16(case: Case) -> None:
    check(case, arguments(case, torch.bfloat16, "cpu"), torch.bfloat16)


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "case",
    [
        Case(T=257, B=1, H=2, Hkv=1, bucket=64),
        Case(T=129, B=1, H=2, Hkv=1, bucket=16, stateless=True, feature_map="softmax", lengths=(101,)),
        Case(T=193, B=1, H=1, Hkv=1, bucket=64, stateless=True, feature_map="softmax", jump=160.0),
        Case(T=150, B=1, H=1, Hkv=1, bucket=2, feature_map="softmax", jump=60.0),
        Case(T=401, B=1, H=2, Hkv=1, bucket=128),
        Case(T=271, B=1, H=1, Hkv=1, bucket=128, stateless=True, feature_map="softmax", lengths=(201,), jump=160.0),
        Case(T=67, B=1, H=1, Hkv=1, bucket=128, stateless=True, feature_map="softmax"),
    ],
    ids=str,
)
def test_blind_spots(case: Case) -> None:
    check(case, arguments(case, torch.bfloat16, "cpu"), torch.bfloat16)


@interpreted
@pytest.mark.parametrize(("E", "tiles"), [(128, 2), (129, 3), (160, 3), (192, 3), (256, 4)])
def test_no_tiles_of_padding(E: int, tiles: int) -> None:
    from longspan.ops.linear.triton.chunk import _ChunkBackward, _ChunkForward

    case = Case(T=70, B=1, H=1, Hkv=1, D=160, E=E)
    d_out, d_kv, tensors = arguments(case, torch.bfloat16, "cpu")
    problem, q = kernel_problem(case, tensors), tensors[0]
    assert q is not None
    assert _ChunkForward.of(tensors, problem).read.grid == (2 * tiles, 1, 1)
    plan = _ChunkBackward.of((*tensors, d_out, d_kv, d_out, q), problem)
    assert [launch.grid for launch in plan.chunks] == 3 * [(2 * tiles, 1, 1)]


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("mechanism", "causal", "route"),
    [
        (LinearAttention(2, 5, num_kv_heads=1, value_dim=7, normalize="feature"), True, "_rounds_keys"),
        (LinearAttention(2, 5, num_kv_heads=1, feature_map="softmax", normalize="feature"), True, "_rounds_keys"),
        (PerformerAttention(2, 5, num_kv_heads=1, kernel="relu", num_features=19), True, "_feature_kernels"),
        (PerformerAttention(2, 5, num_kv_heads=1, kernel="sigmoid", num_features=19), False, "_feature_kernels"),
    ],
    ids=["per feature", "softmax per feature", "relu", "sigmoid"],
)
def test_kernels_take_features_rounded_to_bfloat16(
    mechanism: LinearAttention, causal: bool, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    T, E = 131, mechanism.value_dim
    inputs = torch.randn(1, T, 2, 5), torch.randn(1, T, 1, 5), torch.randn(1, T, 1, E), torch.randn(1, T, 2, E)

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v, d_out = (x.bfloat16().to(dtype) for x in inputs)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = mechanism(*leaves, causal=causal)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    truth, eager = results(torch.float64), results(torch.bfloat16)
    monkeypatch.setattr(LinearAttention, route, lambda *_: True)
    take_kernels(monkeypatch, torch_chunk, "forward")
    check_errors(truth, eager, results(torch.bfloat16), torch.bfloat16)


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("first_bucket", "T", "size"), [("causal", 67, 16), ("zero", 13, 16), ("causal", 131, 128)])
def test_a_blind_spot_of_a_mechanism(first_bucket: str, T: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"num_kv_heads": 1, "value_dim": 7, "feature_map": "softmax", "output_scale": 3.0}
    mechanism = LinearAttention(2, 5, first_bucket=first_bucket, blind_spot=size, **options)
    inputs = torch.randn(2, T, 2, 5), torch.randn(2, T, 1, 5), torch.randn(2, T, 1, 7), torch.randn(2, T, 2, 7)
    key_mask = torch.arange(T) < torch.tensor([[T], [11]])

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v, d_out = (x.bfloat16().to(dtype) for x in inputs)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = mechanism(*leaves, causal=True, key_mask=key_mask)
        return [out.detach(), *torch.autograd.grad(out, leaves, d_out)]

    truth = results(torch.float64)
    monkeypatch.setattr(LinearAttention, "_fused_buckets", lambda *_: True)
    eager = results(torch.bfloat16)
    torch.testing.assert_close(results(torch.float64), truth)  # The same by one operation, in eager PyTorch.
    take_kernels(monkeypatch, torch_chunk, "forward")
    check_errors(truth, eager, results(torch.bfloat16), torch.bfloat16)


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "case",
    [
        Case(T=257, B=1, H=1, Hkv=1, stateless=True),
        Case(T=128, B=1, H=2, Hkv=1, stateless=True, feature_map="softmax"),
        Case(T=150, H=2, Hkv=1, stateless=True, feature_map="softmax", lengths=(101, 0), jump=60.0),
        Case(T=200, B=1, H=1, Hkv=1, stateless=True, feature_map="softmax", jump=-60.0, strided=True),
        Case(T=129, B=1, H=1, Hkv=1, D=67, E=71, stateless=True, feature_map="relu"),
        Case(T=395, B=2, H=2, Hkv=1, stateless=True, lengths=(395, 101), strided=True),
        Case(T=401, B=1, H=2, Hkv=1, stateless=True, bucket=128),
        Case(T=395, B=1, H=2, Hkv=1, stateless=True, feature_map="softmax", lengths=(301,), jump=60.0),
        Case(T=395, B=1, H=1, Hkv=1, stateless=True, feature_map="softmax", bucket=16, jump=-60.0),
        Case(T=401, B=1, H=2, Hkv=1, stateless=True, feature_map="softmax", bucket=128, lengths=(300,), jump=160.0),
    ],
    ids=str,
)
def test_short_sequences_in_one_launch(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from longspan.ops.common.launch import Launch

    launched, call = [], Launch.__call__

    def counted(self: Launch, *pointers: object) -> None:
        launched.append(self.kernel.fn.__name__)
        call(self, *pointers)

    monkeypatch.setattr(Launch, "__call__", counted)
    check(case, arguments(case, torch.bfloat16, "cpu"), torch.bfloat16)
    two = ["backward_queries_kernel", "backward_keys_kernel"]
    separate = case.feature_map == "softmax" or case.D > 64
    expected = ["forward_kernel", *(two if separate else ["backward_kernel"])]
    assert [name.removeprefix("linear_fused_chunk_") for name in launched] == expected


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("T", "jump", "seed"), [(70, 0.0, 4), (70, 0.0, 12), (150, 60.0, 1), (150, 60.0, 13)])
def test_gradients_of_queries_do_not_depend_on_luck(T: int, jump: float, seed: int) -> None:
    # With these numbers a result's own rounding alone brings d q over the limit.
    torch.manual_seed(seed)
    case = Case(T=T, B=1, H=2, Hkv=1, feature_map="softmax", jump=jump)
    check(case, arguments(case, torch.bfloat16, "cpu"), torch.bfloat16)


@interpreted
@pytest.mark.usefixtures("bfloat16")
def test_backward_uses_the_saved_sums_and_leaves_them() -> None:
    case = Case(T=200, B=1, H=2, Hkv=1, feature_map="softmax")
    given = arguments(case, torch.bfloat16, "cpu")
    out, _, _, den, saved = forward(case, given[2])
    before = saved.clone()
    first, second = backward(case, given, out, den, saved), backward(case, given, out, den, saved)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))
    torch.testing.assert_close(saved, before, rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(backward(case, given, out, den, saved.zero_())[0], first[0])


@interpreted
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
def test_without_a_final_state(case: Case) -> None:
    _, _, tensors = arguments(case, torch.bfloat16, "cpu")
    tensors = *tensors[:6], None, None
    out, kv, shift, den, _ = forward(case, tensors, final=False)
    with_state = forward(case, tensors)
    assert kv is None
    assert shift is None
    assert torch.equal(out, with_state[0])
    assert torch.equal(den, with_state[3])


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_columns_need_not_be_dense() -> None:
    case = Case(state=False)
    d_out, d_kv, (q, k, v, *rest) = arguments(case, torch.float32, "cpu")
    transposed = [x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in (q, k, v)]
    expected, found = (by_kernels(case, (d_out, d_kv, (*x, *rest))) for x in ((q, k, v), transposed))
    assert all(map(torch.equal, found, expected))


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case(T=67, B=1, H=2, Hkv=1, feature_map="softmax"),
        Case(T=35, B=1, H=1, Hkv=1, feature_map="favor", num_features=19),
        Case(T=35, B=1, H=1, Hkv=1, feature_map="identity", normalize=False),
    ],
    ids=str,
)
def test_direct_and_traced_calls_agree(case: Case, state: bool) -> None:
    d_out, d_kv, tensors = arguments(case, torch.bfloat16, "cpu")
    tensors = tensors if state else (*tensors[:6], None, None)
    problem = kernel_problem(case, tensors, final=state)
    results = []
    for call in (linear._CausalLinear.direct, linear._CausalLinear.traced):
        leaves = [x.detach().requires_grad_() for x in (*tensors[:3], *([tensors[6]] if state else []))]
        inputs = *leaves[:3], *tensors[3:6], leaves[3] if state else None, tensors[7], None
        found = call(*inputs, *problem)
        outputs = found[:2] if state else (found if isinstance(found, torch.Tensor) else found[0],)
        grads = torch.autograd.grad(outputs, leaves, (d_out, d_kv)[: len(outputs)])
        with torch.no_grad():
            again = call(*inputs, *problem)
        results.append([*outputs, *grads, again if isinstance(again, torch.Tensor) else again[0]])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@interpreted
@pytest.mark.parametrize("algorithm", ["fused_chunk", "tiled_chunk", "chunk", "favor"])
def test_an_unknown_feature_map_is_refused(algorithm: str) -> None:
    case = Case(num_features=19 if algorithm == "favor" else None)
    _, _, tensors = arguments(case, torch.bfloat16, "cpu")
    problem = kernel_problem(case, tensors)._replace(feature_map="squared", algorithm=algorithm)
    with pytest.raises(ValueError, match=r"one of identity, elu, relu, softmax, favor .* got 'squared': use eager"):
        linear._kernels(algorithm).forward(LinearInputs(*tensors), problem)


@interpreted
@pytest.mark.parametrize("algorithm", ["fused_chunk", "tiled_chunk", "chunk"])
def test_an_unknown_feature_map_does_not_compile(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import InterpreterError

    from longspan.ops.linear.triton import scan

    monkeypatch.setattr(scan, "check_feature_map", lambda name: None)
    case = Case()
    _, _, tensors = arguments(case, torch.bfloat16, "cpu")
    problem = kernel_problem(case, tensors)._replace(feature_map="squared", algorithm=algorithm)
    with pytest.raises(InterpreterError, match="do not implement this feature map"):
        linear._kernels(algorithm).forward(LinearInputs(*tensors), problem)


@interpreted
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


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("feature_map", ["softmax", "elu"])
def test_large_inputs(feature_map: str) -> None:
    case = Case(T=40, feature_map=feature_map, size=50, state=False)
    for result in by_kernels(case, arguments(case, torch.float16, "cpu")):
        assert result.isfinite().all()


@interpreted
def test_constants_are_those_of_eager_pytorch() -> None:
    from longspan.ops.common import feature_maps as maps
    from longspan.ops.common import tiles as blocks
    from longspan.ops.linear import torch as features

    assert blocks.FLOOR.value == linear.FLOOR
    assert maps.RELU_EPSILON.value == features.RELU_EPSILON
    below, above = (torch.tensor(blocks.ZERO_NORMALIZER.value * factor) for factor in (0.99, 1.01))
    assert linear.divide(below[None], below) == 0
    assert linear.divide(above[None], above) == 1


@pytest.mark.parametrize("normalize", [True, False])
def test_out_without_a_state(normalize: bool) -> None:
    from longspan.ops.linear import causal_linear, causal_linear_out

    x = [torch.randn(2, 17, 3, 5, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    how = {"feature_map": "elu", "lengths": torch.tensor([17, 11]), "normalize": normalize}
    out, expected = causal_linear_out(*x, **how), causal_linear(*x, **how)[0]
    assert torch.equal(out, expected)
    d = torch.randn_like(out)
    for ours, theirs in zip(torch.autograd.grad(out, x, d), torch.autograd.grad(expected, x, d), strict=True):
        assert torch.equal(ours, theirs)


def inputs(q: torch.Tensor, v: torch.Tensor | None = None, **other: torch.Tensor | None) -> LinearInputs:
    return LinearInputs(q, q, q if v is None else v, None, None, None, None, None)._replace(**other)


def test_reasons() -> None:
    q = torch.zeros(1, 4, 2, 8)
    x = inputs(q, kv=torch.zeros(1, 2, 8, 9))
    assert linear.why_unsupported(x, "elu", 1) is None
    assert "CUDA" in str(linear.why_not_triton(x, "elu", 1))
    assert "float64" in str(linear.why_unsupported(inputs(q.double()), "elu", 1))
    assert "the sums are float64" in str(linear.why_unsupported(inputs(q, kv=torch.zeros(1).double()), "elu", 1))
    assert "single token" in str(linear.why_unsupported(inputs(q[:, :1]), "elu", 1))
    assert "blind spot (4)" in str(linear.why_unsupported(x, "elu", 4))
    assert "'elu'" in str(linear.why_unsupported(inputs(q, log_scale=torch.zeros(1, 4, 2)), "elu", 1))
    assert "over 256" in str(linear.why_unsupported(inputs(torch.zeros(1, 4, 2, 257), q), "elu", 1))
    assert "empty" in str(linear.why_unsupported(inputs(q[:, :0]), "elu", 1))


def test_a_feature_map_that_the_kernels_do_not_know() -> None:
    from longspan.ops.linear.torch import MAPS

    assert set(FEATURE_MAPS) == set(MAPS)
    q = torch.zeros(1, 4, 2, 8)
    for why in (
        linear.why_unsupported(inputs(q), "squared", 1),
        linear.why_unsupported_bidirectional(q, q, q, None, "squared"),
    ):
        assert why == "the feature map 'squared'; the kernels implement identity, elu, relu, softmax, favor"


def test_an_unknown_feature_map_runs_in_eager_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(dispatch, "triton_missing", lambda device: None)
    x = inputs(torch.zeros(1, 4, 2, 8).as_subclass(Cuda))
    assert linear.choose_algorithm(x, "elu", True, 1) == "chunk"
    assert linear.choose_algorithm(x, "squared", True, 1) == "torch"


def test_reasons_about_projections() -> None:
    def why(D: int, M: int, dtype: torch.dtype) -> str | None:
        q = torch.empty(1, 4, 2, D, dtype=dtype, device="meta")
        return linear.why_unsupported(inputs(q, weight=torch.empty(M, D, device="meta")), "favor", 1)

    assert why(64, 256, torch.float32) is None
    assert why(256, 1024, torch.bfloat16) is None
    assert why(64, 1025, torch.bfloat16) == "the number of features (1025) is over 1024"
    assert why(64, 257, torch.float16) == "the number of features (257) is over 256"
    for dtype in (torch.float32, torch.float16):
        assert "padded, is over 16384" in str(why(65, 256, dtype))
    q = torch.empty(1, 4, 2, 64, dtype=torch.bfloat16, device="meta")
    x = inputs(q, weight=torch.empty(266, 64, device="meta"))
    assert "over 256" in str(linear.why_unsupported(x, "favor", 1, normalize=False))
    assert linear.why_unsupported(x, "favor", 1, epsilon=0.1) is None
    x = inputs(q.float(), weight=torch.empty(19, 64, device="meta"))
    assert "an epsilon (0.1) added to features 'favor' of float32" in str(
        linear.why_unsupported(x, "favor", 1, epsilon=0.1)
    )


@pytest.mark.parametrize("shared", [99, 163, 227])
def test_devices_with_little_shared_memory(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr(dispatch, "triton_missing", lambda device: None)
    monkeypatch.setattr(dispatch, "_shared_memory_kb", lambda device: shared)

    def taken(D: int, dtype: torch.dtype, M: int | None = None) -> tuple[bool, ...]:
        """Causally, bidirectionally, and in a window, which knows no projection."""
        q = torch.zeros(1, 4, 2, D, dtype=dtype).as_subclass(Cuda)
        weight = None if M is None else torch.zeros(M, D)
        found = [
            linear.why_not_triton(inputs(q, weight=weight), "softmax" if M is None else "favor", 1),
            linear.why_not_triton_bidirectional(q, q, q, weight, "softmax" if M is None else "favor"),
            window_op.why_not_triton(q, q, q),
        ]
        assert all(why is None or f"this device has {shared}" in why for why in found)
        return tuple(why is None for why in found[: 3 if M is None else 2])

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        exact = dtype != torch.bfloat16
        assert taken(64, dtype) == (True, True, True)
        assert taken(128, dtype) == (True, exact or shared > 99, True)
        assert taken(256, dtype) == (True, exact or shared > 99, dtype == torch.float32 or shared > 99)
        assert taken(32, dtype, 64) == (shared > 163 or not exact,) * 2
    assert taken(128, torch.bfloat16, 64) == (shared > 99,) * 2
    assert taken(129, torch.bfloat16, 64) == (shared > 163,) * 2


def test_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    def algorithm(size: int, dtype: torch.dtype = torch.bfloat16, name: str = "elu", normalize: bool = True) -> str:
        return linear.triton_algorithm(inputs(torch.empty(1, 4, 2, size, dtype=dtype)), name, normalize)

    for shared in (99, 163, 227):
        monkeypatch.setattr(dispatch, "_shared_memory_kb", lambda device, shared=shared: shared)
        assert algorithm(64) == "fused_chunk"
        assert algorithm(128) == ("fused_chunk" if shared > 99 else "tiled_chunk")
        assert algorithm(129) == "tiled_chunk"
        assert (
            algorithm(129, torch.float16) == algorithm(64, torch.float16) == algorithm(64, normalize=False) == "chunk"
        )
        assert algorithm(256, name="favor") == "favor"
        assert algorithm(64, torch.float32, "favor") == algorithm(64, name="favor", normalize=False) == "chunk"
    scaled = inputs(torch.empty(1, 4, 2, 8, dtype=torch.bfloat16), log_scale=torch.empty(1, 4, 2))
    assert linear.triton_algorithm(scaled, "identity", True) == "chunk"


def test_shared_memory_by_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from longspan.ops.common.launch import shared_memory_kb

    for capability, found in {(9, 0): 227, (10, 0): 227, (8, 0): 163, (8, 7): 163, (8, 9): 99, (12, 0): 99}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert shared_memory_kb.__wrapped__(0) == found
        shared_memory_kb.cache_clear()
        assert dispatch._shared_memory_kb(torch.device("cuda", 0)) == found
    shared_memory_kb.cache_clear()
