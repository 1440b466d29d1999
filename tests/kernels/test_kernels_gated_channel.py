"""The Triton kernels of gated linear attention with a decay per channel, delta rule or not, under the interpreter."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from gated_cases import Case, arguments, by_kernels, check, grouped_keys
from interpreter import interpreted

from longspan.ops import gated
from longspan.ops.common import dispatch
from longspan.ops.gated import GatedInputs, GatedProblem

Channel = partial(Case, decay="channel", B=1, H=1, Hkv=1)
EXTREMES = (-math.inf, -1e30, -104.0, -20.0, 0.0)
CASES = [
    Channel(T=2),
    Channel(T=33, H=2, strength=2.0),
    Channel(T=31, beta=False, state=False, strided=True),
    Channel(T=33, H=2, delta=True, forgets=EXTREMES),
    Channel(T=32, beta=False, delta=True, state=False),
    # Of four tiles of 16 channels the last has none.
    *(Channel(T=33, D=48, delta=delta) for delta in (False, True)),
]


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels(case: Case) -> None:
    check(case, arguments(case, torch.float32, "cpu"), torch.float32)


@interpreted
@pytest.mark.parametrize("case", [CASES[3]], ids=str)
def test_float16(case: Case) -> None:
    check(case, arguments(case, torch.float16, "cpu"), torch.float16)


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(
    "sizes",
    [
        {"T": 67},
        {"T": 65, "D": 65},
        {"T": 65, "D": 192},
        pytest.param({"T": 63, "D": 67, "E": 71, "H": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bfloat16(sizes: dict, delta: bool) -> None:
    case = Channel(**sizes, delta=delta)
    check(case, arguments(case, torch.bfloat16, "cpu"), torch.bfloat16)


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize(
    ("delta", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)], ids=str
)
def test_channels_that_forget_everything_cost_no_digits(delta: bool, dtype: torch.dtype) -> None:
    """Any pattern of gates, down to those that underflow, in any channel."""
    case = Channel(T=35 if dtype == torch.float32 else 65, delta=delta, strength=0.01)
    d_out, d_state, x = arguments(case, dtype, "cpu")
    assert x.log_decay is not None
    which = torch.rand(x.log_decay.shape)
    for share, value in ((0.6, 0.0), (0.4, -20.0), (0.3, -104.0), (0.1, -1e30)):
        x.log_decay[which < share] = value
    check(case, (d_out, d_state, x), dtype)
    x.log_decay[:, -1] = -104
    x.v[:, :10] = 1e20
    for result in by_kernels(case, (d_out, d_state, x)):
        assert result is not None
        assert result.isfinite().all()


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("value", [-104.0, -2.0])
def test_mild_and_strong_gates_in_one_sequence(value: float, delta: bool) -> None:
    """Chunks of 64 tokens take one pass or levels: here the second has a strong gate, alone at its first token, or in
    one channel of all of them.
    """
    case = Channel(T=130, strength=0.1, delta=delta)
    d_out, d_state, x = arguments(case, torch.bfloat16, "cpu")
    assert x.log_decay is not None
    x.log_decay[:, 64 if value < -2 else slice(64, 128), :, 1] = value
    check(case, (d_out, d_state, x), torch.bfloat16)


@interpreted
@pytest.mark.usefixtures("bfloat16")
@pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value encountered")
@pytest.mark.parametrize("delta", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_large_queries_of_one_head_of_a_group(delta: bool) -> None:
    """Queries of 1e25 times a factor above 1 would be infinite."""
    case = Channel(T=65, H=2, strength=0.8, delta=delta)
    d_out, d_state, x = arguments(case, torch.bfloat16, "cpu")
    x.q[:, :, 1] *= 1e25
    check(case, (d_out, d_state, x), torch.bfloat16)


@interpreted
@pytest.mark.usefixtures("bfloat16")
def test_marked_chunks() -> None:
    """Nearly parallel keys and strong gates are marked, and the results of a sequence with both are right."""
    from longspan.ops.gated.triton import channel

    case = Channel(T=192, D=64, delta=True, strength=0.01, state=False)
    d_out, d_state, x = arguments(case, torch.bfloat16, "cpu")
    assert x.log_decay is not None
    keys = x.k.float()
    keys[:, :64] = grouped_keys(keys[:, :64].shape, 16)
    x = x._replace(k=(keys / keys.norm(dim=-1, keepdim=True)).to(x.k))
    x.log_decay[:, 64:128, :, 3] = -2
    saved = channel.forward(x, GatedProblem(True, 0.7, "channel"))[2]
    assert saved.view(torch.int32)[:3].tolist() == [1, 1, 0]
    check(case, (d_out, d_state, x), torch.bfloat16)


@interpreted
def test_direct_and_traced_calls_agree() -> None:
    d_out, d_state, x = arguments(Channel(T=3, delta=True), torch.float32, "cpu")
    results = []
    for call in (gated._GatedLinear.direct, gated._GatedLinear.traced):
        leaves = [y.detach().requires_grad_() for y in x]
        out, state = call(*leaves, True, 0.7, "channel")[:2]
        results.append([out, state, *torch.autograd.grad((out, state), leaves, (d_out, d_state))])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@interpreted
def test_the_kernels_are_a_proper_operator() -> None:
    _, _, x = arguments(Channel(T=3), torch.float32, "cpu")
    leaves = [y.requires_grad_() for y in x]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.longspan.gated_linear.default, (*leaves, False, 0.5, "channel"), test_utils=tests)


@interpreted
def test_expanded_inputs() -> None:
    """Queries and keys shared by heads are views."""
    case = Channel(T=3, H=2, Hkv=2)
    d_out, d_state, x = arguments(case, torch.float32, "cpu")
    views = x._replace(q=x.q[:, :, :1].expand_as(x.q), k=x.k[:, :, :1].expand_as(x.k))
    copies = GatedInputs(*(y.contiguous() for y in views))
    found, expected = (by_kernels(case, (d_out, d_state, y)) for y in (views, copies))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_devices_with_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "unavailable", lambda q: None)
    monkeypatch.setattr(dispatch, "_shared_memory_kb", lambda device: 99)
    x = arguments(Channel(D=131, delta=True), torch.bfloat16, "cpu")[2]
    narrow = arguments(Channel(D=67), torch.bfloat16, "cpu")[2]
    assert "120 KB of shared memory, this device has 99" in str(gated.why_not_triton(x, False))
    assert "120 KB of shared memory, this device has 99" in str(gated.why_not_triton(x, True))
    assert gated.why_not_triton(arguments(Channel(E=256, delta=True), torch.bfloat16, "cpu")[2], True) is None
    for delta in (False, True):
        assert gated.why_not_triton(narrow, delta) is None
