"""Numbers at the edges: small features, hidden keys, wide windows, numbered tokens, dtypes of states, row indices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_same
from torch import Tensor, nn

from longspan import Mechanism, Packing, build_mechanism
from longspan.ops.linear import causal_linear
from longspan.ops.linear.torch import MAPS
from longspan.testing import LAWS
from longspan.testing.compare import draw_inputs, tokens, without_queries
from longspan.testing.laws import Build

F32, F64 = torch.float32, torch.float64


def builder(name: str, head_dim: int, **options: Any) -> Build:
    def build(dtype: torch.dtype = F64) -> Mechanism:
        torch.manual_seed(3)
        m = build_mechanism(name, 3, head_dim, value_dim=7, **options).eval().to(dtype)
        for parameter in m.parameters():
            if not parameter.any():
                nn.init.normal_(parameter)
        return m

    return build


# elu


def test_elu_does_not_cancel() -> None:
    x = torch.tensor([-60.0, -18, -16, -1, -1e-3, 0, 1e-3, 5, 80], requires_grad=True)
    exact = x.detach().double()
    wanted = torch.where(exact > 0, exact + 1, exact.clamp(max=0).exp())
    f = MAPS["elu"].key(x, None)[0]
    torch.testing.assert_close(f.double(), wanted, rtol=3e-7, atol=0)
    (grad,) = torch.autograd.grad(f.sum(), x)
    torch.testing.assert_close(grad.double(), wanted.clamp(max=1), rtol=3e-7, atol=0)
    torch.testing.assert_close(MAPS["elu"].key_grad(torch.ones_like(x), x, f, None), grad, rtol=3e-7, atol=0)


@pytest.mark.parametrize("causal", [True, False])
def test_elu_of_negative_queries_weighs_values(causal: bool) -> None:
    m = build_mechanism("linear", 1, 8)
    q, k = torch.randn(1, 9, 1, 8) - 20, torch.randn(1, 9, 1, 8) - 20
    torch.testing.assert_close(m(q, k, torch.ones_like(q), causal=causal), torch.ones_like(q), atol=1e-6, rtol=0)


# Feature-normalized FAVOR+


@pytest.mark.parametrize("dim", [5, 64])
def test_hidden_keys_leave_the_maximum_of_features(dim: int) -> None:
    m = build_mechanism("performer", 1, dim, normalize="feature").eval()
    q, k, v = (torch.randn(1, 20, 1, dim) * scale for scale in (5, 5, 1))
    shorter = m(*(x[:, :7] for x in (q, k, v)))
    assert shorter.abs().amax() > 0.1
    mask = torch.arange(20)[None] < 7
    torch.testing.assert_close(m(q, k, v, key_mask=mask)[:, :7], shorter, atol=1e-5, rtol=0)
    packed = m(q, k, v, packing=Packing.from_lengths([7, 13]))
    torch.testing.assert_close(packed[:, :7], shorter, atol=1e-5, rtol=0)


def test_a_user_map_with_a_log_scale_hides_keys_too() -> None:
    from helpers import ScaledExp

    m = build_mechanism("linear", 1, 5, feature_map=ScaledExp(), normalize="feature")
    q, k, v = (torch.randn(1, 9, 1, 5) for _ in range(3))
    k[:, 4:] += 200
    mask = torch.arange(9)[None] < 4
    torch.testing.assert_close(m(q, k, v, key_mask=mask), m(q, k[:, :4], v[:, :4]), atol=1e-6, rtol=0)


# Large inputs


@pytest.mark.parametrize("options", [{}, {"normalize": "feature"}, {"row_norms": "unit"}], ids=str)
def test_large_inputs_at_64_are_weighed(options: dict[str, Any]) -> None:
    m = build_mechanism("performer", 2, 64, **options).eval()
    q, k = (10 * torch.randn(1, 67, 2, 64) for _ in range(2))
    v = torch.ones(1, 67, 2, 64)
    for causal in (True, False):
        torch.testing.assert_close(m(q, k, v, causal=causal), v, atol=1e-5, rtol=0)
    state = m.write(m.new_state(1), k[:, :60], v[:, :60])
    decoded = m.decode_state(state.clone(), F32)
    for t in range(60, 67):
        token = [x[:, t : t + 1] for x in (q, k, v)]
        out, state = m.step(state, *token)
        with torch.no_grad():
            quick, decoded = m.decode_step(decoded, *token)
        torch.testing.assert_close(torch.cat([out, quick]), v[:, :1].expand(2, -1, -1, -1), atol=1e-5, rtol=0)
    inputs = [x.requires_grad_() for x in (q, k, torch.randn_like(v))]
    for causal in (True, False):
        grads = torch.autograd.grad(m(*inputs, causal=causal).square().sum(), inputs)
        assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("tokens_before", [0, 1, 40])
def test_keys_beyond_the_range_of_float32_have_no_weight(tokens_before: int) -> None:
    """An earlier key e^−300 times the later one, whose features the query shares, in its chunk, an earlier one or the
    state.
    """
    q = torch.tensor([1e13, 1.0]).expand(1, 42, 1, 2)
    k = torch.tensor([1e13, 0.0]).repeat(1, 42, 1, 1)
    k[:, -1] = torch.tensor([0.0, 1e-20])
    scale = torch.full((1, 42, 1), -300.0)
    scale[:, -1] = 0.0
    v = torch.zeros(1, 42, 1, 1)
    v[:, -1] = 1.0
    sums = None
    if tokens_before:
        sums = causal_linear(*(x[:, :tokens_before] for x in (q, k, v)), log_scale=scale[:, :tokens_before])[1]
    rest = (x[:, tokens_before:] for x in (q, k, v))
    out, _ = causal_linear(*rest, log_scale=scale[:, tokens_before:], sums=sums)
    assert out[0, -1] == 1
    assert not out[0, :-1].any()


def test_an_overflowing_product_with_a_later_key_stays_later() -> None:
    m = build_mechanism("linear", 1, 5, feature_map="identity", normalize="none")
    q, k, v = (torch.randn(1, 9, 1, 5) for _ in range(3))
    before = m(q, k, v, causal=True)[:, :8]
    q[:, 7:], k[:, 8] = 1e20, 1e20
    assert torch.equal(m(q, k, v, causal=True)[:, :7], before[:, :7])


@pytest.mark.parametrize("normalize", ["query", "feature"])
def test_the_exponential_kernel_does_not_overflow(normalize: str) -> None:
    m = build_mechanism("performer", 1, 5, num_features=8, kernel="exp", normalize=normalize).eval()
    q, k, v = (torch.randn(1, 9, 1, 5) for _ in range(3))
    before = m(q, k, v, causal=True)
    k[:, 8] = 1000.0
    after = m(q, k, v, causal=True)
    assert after.isfinite().all()
    torch.testing.assert_close(after[:, :8], before[:, :8])
    k[:, 8] = 60.0
    torch.testing.assert_close(m(q, k, v)[:, 8], m.read(m.write(m.new_state(1), k, v), q)[:, 8])
    with pytest.raises(
        ValueError, match=r'GeneralizedExp features are exponentials.*use normalize="query" or "feature"'
    ):
        build_mechanism("performer", 1, 5, kernel="exp", normalize="none")


def test_nan_stays_in_its_row_and_in_the_future_of_a_state() -> None:
    """Inputs are finite: a NaN may reach its whole row of a parallel form, but no other row, and no state before it."""
    for name in ("softmax", "local", "linear", "performer", "linformer"):
        m = build_mechanism(name, 1, 5).eval()
        q, k, v = (torch.randn(2, 9, 1, 5) for _ in range(3))
        expected = m(q, k, v, causal=True)
        v[0, 8] = float("nan")
        assert torch.equal(m(q, k, v, causal=True)[1], expected[1])
        state = m.new_state(2)
        for part in (slice(0, 8), slice(8, 9)):
            out, state = m.extend(state, *(x[:, part] for x in (q, k, v)))
            torch.testing.assert_close(out[1], expected[1, part])
            if part.start == 0:
                torch.testing.assert_close(out, expected[:, part])


# xPos


@pytest.mark.parametrize("look_back", [None, 1])
@pytest.mark.parametrize(
    ("dtype", "window", "tolerance"), [(torch.float16, 160, 4e-3), (F32, 2048, 1e-5), (torch.bfloat16, 521, 3e-2)]
)
def test_xpos_after_resize(dtype: torch.dtype, window: int, tolerance: float, look_back: int | None) -> None:
    m = build_mechanism("local", 1, 8, window=32, xpos=16.0, look_back=look_back).to(dtype)
    m.resize(window)
    length = 2 * window + 1 if window < 1000 else window + 523
    x = torch.randn(1, length, 1, 8).to(dtype)
    exact = x.double()
    out, truth = m(x, x, x, causal=True), m(exact, exact, exact, causal=True)
    torch.testing.assert_close(out.double(), truth, atol=tolerance, rtol=0)
    state = m.write(m.new_state(1, dtype=dtype), x[:, :-1], x[:, :-1])
    last = x[:, -1:]
    torch.testing.assert_close(m.step(state, last, last, last)[0].double(), truth[:, -1:], atol=tolerance, rtol=0)
    assert m(x, x, x).isfinite().all(), "bidirectional"


def test_small_scale_bases_of_xpos() -> None:
    m = build_mechanism("local", 1, 6, window=37, xpos=0.3).double()
    q, k, v = (torch.randn(1, 41, 1, 6, dtype=F64) for _ in range(3))
    out, state = [], m.new_state(1, dtype=F64)
    for t in range(41):
        step, state = m.step(state, *(x[:, t : t + 1] for x in (q, k, v)))
        out.append(step)
    assert_same(m(q, k, v, causal=True), torch.cat(out, 1))


# Linformer numbers visible tokens in order


@pytest.mark.parametrize("options", [{}, {"projection": "convolution"}, {"periodic": True, "max_length": 5}], ids=str)
def test_linformer_numbers_visible_tokens(options: dict[str, Any]) -> None:
    m = builder("linformer", 5, **{"rank": 4, "max_length": 29, "bias": True} | options)()
    q, k, v = (torch.randn(3, 19, 3, dim, dtype=F64) for dim in (5, 5, 7))
    mask = torch.rand(3, 19) > 0.5
    mask[0] = torch.arange(19) >= 8
    mask[2] = False
    k, v = (x.masked_fill(~mask[:, :, None, None], float("nan")) for x in (k, v))
    out = m(q, k, v, key_mask=mask)
    read = m.read(m.write(m.new_state(3, dtype=F64), k, v, key_mask=mask), q)
    for b in range(2):
        one = slice(b, b + 1)
        shorter = m(q[one], k[one, mask[b]], v[one, mask[b]])
        assert_same(out[one], shorter)
        assert_same(read[one], shorter)
    assert not out[2].any()
    assert not read[2].any()


@pytest.mark.parametrize("name", ["softmax", "linear", "performer", "linformer"])
def test_a_written_mask_may_have_holes(name: str) -> None:
    m = builder(name, 5)()
    q, k, v = (torch.randn(2, 11, 3, dim, dtype=F64) for dim in (5, 5, 7))
    mask = torch.tensor([[True, False] * 5 + [True], [False] * 3 + [True] * 8])
    state = m.write(m.new_state(2, dtype=F64), k, v, key_mask=mask)
    assert state.length.tolist() == [6, 8]
    assert_same(m.read(state, q), m(q, k, v, key_mask=mask))


# What has no cross-attention


@pytest.mark.parametrize("options", [{"blind_spot": 3}, {"phantom": 0.3}], ids=str)
def test_no_cross_attention_with_a_blind_spot_or_a_phantom(options: dict[str, Any]) -> None:
    m = build_mechanism("linear", 1, 5, **options)
    assert not m.supports_cross
    q, k = torch.randn(1, 2, 1, 5), torch.randn(1, 7, 1, 5)
    with pytest.raises(ValueError, match=r"a blind spot or a phantom key.*\(got 2 queries and 7 keys\); use linear"):
        m(q, k, k)
    with pytest.raises(ValueError, match="one run of True"):
        m.write(m.new_state(1), k, k, key_mask=torch.tensor([[True, False] * 3 + [True]]))


def test_a_phantom_beside_exponential_features() -> None:
    """performer-pytorch without a projection adds 1e-6 to the sum of exp(k), whatever the keys' magnitude."""
    m = build_mechanism("performer", 1, 5, projection=False, phantom=1e-6).double().eval()
    q, k, v = (torch.randn(1, 9, 1, 5, dtype=F64) for _ in range(3))
    for shift in (-14, 0, 30):
        weights = torch.einsum("btd,bsd->bts", q[:, :, 0].softmax(-1), (k[:, :, 0] + shift).exp()).tril()
        expected = (weights @ v[:, :, 0]) / (weights.sum(-1, keepdim=True) + 1e-6)
        assert_same(m(q, k + shift, v, causal=True)[:, :, 0], expected)
        first, state = m.extend(m.new_state(1, dtype=F64), q[:, :4], k[:, :4] + shift, v[:, :4])
        second, _ = m.extend(state, q[:, 4:], k[:, 4:] + shift, v[:, 4:])
        assert_same(torch.cat([first, second], 1)[:, :, 0], expected)
    for law in (law for law in LAWS if not law.startswith("9")):
        LAWS[law](builder("performer", 5, projection=False, phantom=1e-2))
    LAWS["11, merge"](builder("performer", 5, kernel="exp", phantom=1e-2))


# Dtypes of states

STATES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "local": {"window": 5},
    "linear": {},
    "performer": {},
    "linformer": {},
    "split": {"parts": [{"mechanism": "softmax", "num_heads": 1}, {"mechanism": "local", "num_heads": 2, "window": 4}]},
}
GATED_STATES: dict[str, dict[str, Any]] = {
    "decay": {"gate": "channel"},
    "delta": {},
    "mixture": {"window": 3, "memory": "delta"},
}


@pytest.mark.parametrize("name", STATES)
def test_float64_inputs_need_a_float64_state(name: str) -> None:
    m = builder(name, 5, **STATES[name])()
    q, k, v = (torch.randn(1, 3, 3, dim, dtype=F64) for dim in (5, 5, 7))
    state = m.new_state(1)
    one = [x[:, :1] for x in (q, k, v)]
    says = r"inputs of torch.float64 would be rounded to this state's torch.float32 .*dtype=torch.float64\)"
    for use in (
        lambda: m.extend(state, q, k, v),
        lambda: m.write(state, k, v),
        lambda: m.step(state, *one),
        lambda: m.read(state, q),
        lambda: m(q, k, v, causal=True, past=state),
    ):
        with pytest.raises(ValueError, match=says):
            use()


@pytest.mark.parametrize("max_length", [None, 17])
@pytest.mark.parametrize("dtypes", [(F32, torch.float16), (F32, torch.bfloat16), (F64, F32)], ids=str)
@pytest.mark.parametrize("name", [*STATES, *GATED_STATES])
def test_a_state_takes_narrower_inputs(
    name: str, dtypes: tuple[torch.dtype, torch.dtype], max_length: int | None
) -> None:
    wide, narrow = dtypes
    m = builder(name, 5, **(STATES | GATED_STATES)[name])(wide)
    x = draw_inputs(m, 1, 11, dtype=narrow)
    expected = m(**{key: y.to(wide) for key, y in x.items()}, causal=True)
    state = m.new_state(1, max_length=max_length, dtype=wide)
    with torch.no_grad():
        early, state = m.extend(state, **tokens(x, 0, 7))
        token, state = m.step(state, **tokens(x, 7, 8))
        state = m.write(state, **without_queries(tokens(x, 8, 10)))
        late = m.read(state, x["q"][:, 9:10]), m(**tokens(x, 10), causal=True, past=state)
        deferred = m.defer(**tokens(x, 10), start=state.end)(state)
        decoded, _ = m.decode_step(m.decode_state(state, narrow), **tokens(x, 10))
    out = torch.cat([early, token, *late, deferred, decoded], 1)
    assert out.dtype == narrow
    wanted = expected[:, [*range(8), 9, 10, 10, 10]]
    torch.testing.assert_close(out.to(wide), wanted, atol=4 * torch.finfo(narrow).eps, rtol=4 * torch.finfo(narrow).eps)


def test_a_narrow_cache_refuses_wider_inputs() -> None:
    m = build_mechanism("softmax", 1, 5)
    x = torch.randn(1, 3, 1, 5)
    with pytest.raises(ValueError, match=r"inputs of torch.float32 .*torch.bfloat16 \(k\).*dtype=torch.float32\)"):
        m.extend(m.new_state(1, dtype=torch.bfloat16), x, x, x)
    linear = build_mechanism("linear", 1, 5)
    linear.extend(linear.new_state(1, dtype=torch.bfloat16), x, x, x)  # Its sums are float32 whatever the inputs.


# Rows by index


def filled(rows: int) -> tuple[Mechanism, Any, Tensor]:
    m = build_mechanism("linear", 1, 5)
    k = torch.randn(rows, 3, 1, 5)
    return m, m.write(m.new_state(rows), k, k), k


def test_what_select_and_put_take() -> None:
    m, state, k = filled(3)
    assert len(state.select([]).length) == 0
    assert len(state.select(torch.tensor([], dtype=torch.int64)).length) == 0
    everything = torch.tensor([True, False, True])
    for index, rows in (([-1], [2]), (everything, [0, 2]), ([True, False, True], [0, 2]), (slice(1, None), [1, 2])):
        assert torch.equal(state.select(index).kv, state.kv[rows])
        other = m.new_state(len(rows))
        assert torch.equal(state.put(index, other).length, torch.tensor([0 if i in rows else 3 for i in range(3)]))
    assert torch.equal(state.select(torch.tensor([2, 0], dtype=torch.int32)).kv, state.kv[[2, 0]])
    assert torch.equal(state.put([], state.select([])).kv, state.kv)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ([3], r"outside a state of 3 rows, got \[3\]"),
        ([-4], r"outside a state of 3 rows, got \[-4\]"),
        ([0.5], r"row numbers \(n,\), a bool mask \(3,\) or a slice, got torch.float32 \(1,\)"),
        (torch.zeros(2, 2, dtype=torch.int64), r"got torch.int64 \(2, 2\)"),
        (torch.tensor(1), r"got torch.int64 \(\)"),
        ([True, False], r"a mask of rows must be \(3,\), got \(2,\)"),
    ],
)
def test_what_select_and_put_refuse(index: Any, says: str) -> None:
    _, state, _ = filled(3)
    with pytest.raises(ValueError, match=says):
        state.select(index)
    with pytest.raises(ValueError, match=says):
        state.put(index, state.select([0]))


def test_rows_that_do_not_fit_are_refused() -> None:
    _, state, _ = filled(3)
    with pytest.raises(ValueError, match=r"names a row twice, got \[1, 1\]"):
        state.put([1, 1], state.select([0, 0]))
    with pytest.raises(ValueError, match="index names 1 rows, but rows has 2"):
        state.put([1], state.select([0, 2]))
    with pytest.raises(
        ValueError, match=r"it holds \(1, 5, 5\) torch.float32 where they hold \(1, 4, 4\) torch.float32"
    ):
        state.put([1], build_mechanism("linear", 1, 4).new_state(1))
    with pytest.raises(ValueError, match=r"torch.float32 where they hold \(1, 5, 5\) torch.float64"):
        state.put([1], build_mechanism("linear", 1, 5).new_state(1, dtype=F64))


# The laws at 64


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("softmax", {}),
        ("local", {"window": 5, "xpos": 3.0}),
        ("linear", {}),
        ("linear", {"feature_map": "softmax", "normalize": "feature"}),
        ("performer", {"num_features": 37}),
        ("performer", {"num_features": 37, "normalize": "feature"}),
        ("linformer", {"rank": 11, "max_length": 41}),
    ],
    ids=str,
)
def test_laws_at_64(name: str, options: dict[str, Any]) -> None:
    for law, check in LAWS.items():
        if not law.startswith("9"):
            check(builder(name, 64, **options))


@pytest.mark.parametrize(
    ("name", "options"),
    [("linear", {}), ("performer", {"epsilon": 1e-4}), ("decay", {"gate": "head"}), ("delta", {"gate": "channel"})],
)
def test_a_backward_pass_under_autocast_is_as_precise(name: str, options: dict[str, Any]) -> None:
    m = build_mechanism(name, 2, 16, **options)
    q, k, v = (torch.randn(2, 70, 2, 16, requires_grad=True) for _ in range(3))
    gates = torch.randn(2, 70, 2, m.num_gates) if m.num_gates else None

    def gradients(*, autocast: bool) -> tuple[torch.Tensor, ...]:
        out = m(q, k, v, gates=gates, causal=True).square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return torch.autograd.grad(out, (q, k, v))

    for found, expected in zip(gradients(autocast=True), gradients(autocast=False), strict=True):
        assert torch.equal(found, expected)
