"""Every option of every mechanism does what its docstring says: each is checked against a formula written out here."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from option_cases import (
    CHECKS,
    B,
    D,
    E,
    H,
    T,
    assert_same,
    build,
    by_weights,
    check_dropout,
    checks,
    differ,
    dropped_share,
    inputs,
    kernel_attention,
    option_test,
    positions,
    scores,
    softmax_attention,
)
from torch import Tensor, nn

from longspan import FeatureMap, list_mechanisms
from longspan.mechanisms import mechanism_options
from longspan.models.positions import Rotary
from longspan.ops.window import xpos_rotate


def test_every_option_of_every_mechanism_is_checked() -> None:
    for path in Path(__file__).parent.glob("test_options*.py"):
        import_module(path.stem)
    options = {(name, option) for name in list_mechanisms() for option in mechanism_options(name)}
    assert not options - CHECKS.keys(), "options that nothing checks: add a check to a tests/laws/test_options*.py"


@checks("softmax", "scale")
def _() -> None:
    q, k, v = inputs()
    assert_same(build("softmax")(q, k, v), softmax_attention(q, k, v))
    assert_same(build("softmax", scale=0.9)(q, k, v), softmax_attention(q, k, v, scale=0.9))


@checks("softmax", "dropout")
def _() -> None:
    check_dropout("softmax")
    assert abs(dropped_share(build("softmax", dropout=0.3)) - 0.3) < 0.01


@checks("local", "window")
def _() -> None:
    q, k, v = inputs()
    i, j = positions()
    for window in (1, 4, T + 3):
        mechanism = build("local", window=window)
        assert_same(mechanism(q, k, v), softmax_attention(q, k, v, (i - j).abs() < window))
        assert_same(mechanism(q, k, v, causal=True), softmax_attention(q, k, v, (i - j < window) & (j <= i)))
        assert mechanism.new_state(B).k.shape[2] == window
    mechanism = build("local", window=(3, 1))
    assert_same(mechanism(q, k, v), softmax_attention(q, k, v, (i - j <= 3) & (j - i <= 1)))
    assert_same(mechanism(q, k, v, causal=True), softmax_attention(q, k, v, (i - j <= 3) & (j <= i)))


@checks("local", "look_back")
def _() -> None:
    q, k, v = inputs()
    i, j = positions()
    for back in (0, 2):
        mechanism = build("local", window=4, look_back=back)
        apart = i // 4 - j // 4
        assert_same(mechanism(q, k, v), softmax_attention(q, k, v, (apart >= 0) & (apart <= back)))
        assert_same(mechanism(q, k, v, causal=True), softmax_attention(q, k, v, (apart <= back) & (j <= i)))


@checks("local", "look_ahead")
def _() -> None:
    q, k, v = inputs()
    i, j = positions()
    mechanism = build("local", window=4, look_back=1, look_ahead=2)
    apart = i // 4 - j // 4
    assert_same(mechanism(q, k, v), softmax_attention(q, k, v, (apart >= -2) & (apart <= 1)))
    assert_same(mechanism(q, k, v, causal=True), build("local", window=4, look_back=1)(q, k, v, causal=True))


@checks("local", "shared_qk")
def _() -> None:
    q, k, v = inputs()
    i, j = positions()
    mechanism = build("local", window=4, shared_qk=True)
    unit = k / k.norm(dim=-1, keepdim=True)
    assert_same(mechanism(q, k, v), softmax_attention(q, unit, v, ((i - j).abs() < 4) & (i != j)))
    out = mechanism(q, k, v, causal=True)
    assert_same(out[:, :1], v[:, :1])  # The first token sees nothing else.
    assert_same(out[:, 1:], softmax_attention(q, unit, v, (i - j < 4) & (j < i) | ((i == 0) & (j == 0)))[:, 1:])


class ByDistance(nn.Module):
    """A bias without parameters: −s·|distance|."""

    def forward(self, distance: Tensor) -> Tensor:
        return -torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64)[:, None] * distance.abs()


@checks("local", "bias")
def _() -> None:
    q, k, v = inputs()
    i, j = positions()
    mechanism = build("local", window=4, bias=ByDistance())
    bias = mechanism.bias((i - j).flatten()).view(H, T, T)
    assert_same(mechanism(q, k, v), softmax_attention(q, k, v, (i - j).abs() < 4, bias))
    state = mechanism.write(mechanism.new_state(B, dtype=torch.float64), k[:, :9], v[:, :9])
    assert_same(mechanism.read(state, q[:, 8:9]), mechanism(q, k, v, causal=True)[:, 8:9])

    table = nn.Parameter(torch.randn(H, 4, 12, dtype=torch.float64))
    mechanism = build("local", window=4, look_back=1, look_ahead=1, bias=table)
    assert [name for name, _ in mechanism.named_parameters()] == ["bias"]
    assert "bias" in build("local", window=4, look_back=1, look_ahead=1, bias=table.detach()).state_dict()
    column = (j - (i // 4 - 1) * 4).clamp(0, 11)
    bias = table.detach()[:, (i % 4).expand(T, T), column]
    assert_same(mechanism(q, k, v), softmax_attention(q, k, v, (i // 4 - j // 4).abs() <= 1, bias))
    mechanism = build("local", window=(3, 4), bias=table)
    assert_same(mechanism(q, k, v), softmax_attention(q, k, v, (i - j <= 3) & (j - i <= 4), bias))
    with pytest.raises(ValueError, match=r"bias table has shape .* here \(3, 4, 20\), .* got \(3, 4, 12\)"):
        build("local", window=(5, 5), bias=table)


@checks("local", "query_offset")
def _() -> None:
    """Queries rotated to position i + 3, keys to j."""
    dim = 6
    _, _, v = inputs()
    q, k = (torch.randn(B, T, H, dim, dtype=torch.float64) for _ in range(2))
    at, rotary = torch.arange(T)[None], Rotary(dim)
    i, j = positions()
    mechanism = build("local", head_dim=dim, window=5, query_offset=3)
    rotated = rotary(q, at), rotary(k, at)
    expected = softmax_attention(rotary(q, at + 3), rotated[1], v, (i - j).abs() < 5, scale=dim**-0.5)
    assert_same(mechanism(*rotated, v), expected)
    state = mechanism.write(mechanism.new_state(B, dtype=torch.float64), rotated[1], v)
    assert_same(mechanism.read(state, rotated[0][:, -1:]), expected[:, -1:])
    plain, further = (build("local", head_dim=dim, window=5, xpos=2.0, query_offset=n) for n in (0, 3))
    assert_same(further(q, k, v), plain(xpos_rotate(q, torch.tensor([3]), 2.0), k, v))
    with pytest.raises(ValueError, match="query_offset rotates pairs of features and needs an even head_dim, got 5"):
        build("local", query_offset=3)


@checks("local", "scale")
def _() -> None:
    q, k, v = inputs()
    i, j = positions()
    expected = softmax_attention(q, k, v, (i - j < 4) & (j <= i), scale=2.0)
    mechanism = build("local", window=4, scale=2.0)
    assert_same(mechanism(q, k, v, causal=True), expected)
    state = mechanism.write(mechanism.new_state(B, dtype=torch.float64), k, v)
    assert_same(mechanism.read(state, q[:, -1:]), expected[:, -1:])


@checks("local", "xpos")
def _() -> None:
    """Pairs as complex numbers, rotated and scaled by their positions: far keys decay."""
    dim, base = 6, 3.0
    q, k = (torch.randn(B, T, H, dim, dtype=torch.float64) for _ in range(2))
    _, _, v = inputs()
    pair = torch.arange(0, dim, 2, dtype=torch.float64)
    log_zeta = ((pair + 0.4 * dim) / (1.4 * dim)).log()
    at = torch.arange(T)[:, None, None]
    turn = torch.complex(at * log_zeta / base, at * 10000 ** (-pair / dim)).exp()
    back = torch.complex(-at * log_zeta / base, at * 10000 ** (-pair / dim)).exp()
    z, y = (torch.complex(*x.chunk(2, -1)) for x in (q, k))
    products = torch.einsum("bthp,bshp->bhts", z * turn, (y * back).conj()).real * dim**-0.5
    i, j = positions()
    mechanism = build("local", head_dim=dim, window=5, xpos=base)
    seen = (i - j < 5) & (j <= i)
    expected = by_weights(products.masked_fill(~seen, float("-inf")).softmax(-1), v)
    assert_same(mechanism(q, k, v, causal=True), expected)
    state = mechanism.write(mechanism.new_state(B, dtype=torch.float64), k, v)
    assert_same(mechanism.read(state, q[:, -1:]), expected[:, -1:])
    differ(mechanism(q, k, v), build("local", head_dim=dim, window=5)(q, k, v))


@checks("local", "dropout")
def _() -> None:
    check_dropout("local", window=4)
    assert abs(dropped_share(build("local", window=E, dropout=0.3)) - 0.3) < 0.01


class Cosines(FeatureMap):
    """A map of a user's own, with more features than dimensions."""

    def num_features(self, head_dim: int) -> int:
        return 2 * head_dim

    def query(self, q: Tensor) -> Tensor:
        return torch.cat([1 + q.cos(), 1 + q.sin()], -1)

    def key(self, k: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.query(k), None


@checks("linear", "feature_map")
def _() -> None:
    q, k, v = inputs()
    formulas: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "elu": (lambda x: F.elu(x) + 1,) * 2,
        "relu": (lambda x: F.relu(x) + 1e-3,) * 2,
        "softmax": (lambda x: x.softmax(-1), torch.exp),
        "identity": (lambda x: x,) * 2,
    }
    for name, (query, key) in formulas.items():
        # Sums of signed features come near zero: made positive for the identity.
        x, y = (q.abs(), k.abs()) if name == "identity" else (q, k)
        mechanism = build("linear", feature_map=name)
        for causal in (False, True):
            assert_same(mechanism(x, y, v, causal=causal), kernel_attention(query(x), key(y), v, causal))
    mine = build("linear", feature_map=Cosines())
    assert_same(
        mine(q, k, v, causal=True), kernel_attention(mine.feature_map.query(q), mine.feature_map.query(k), v, True)
    )
    assert mine.new_state(B).kv.shape == (B, H, 2 * D, E)


@checks("linear", "normalize")
def _() -> None:
    q, k, v = inputs()
    fq, fk = F.elu(q) + 1, F.elu(k) + 1
    assert_same(build("linear", normalize="query")(q, k, v), kernel_attention(fq, fk, v))
    assert_same(build("linear", normalize="none")(q, k, v), by_weights(scores(fq, fk), v))
    assert_same(build("linear", normalize="none")(q, k, v, causal=True), by_weights(scores(fq, fk).tril(), v))
    # Efficient Attention: softmax of the keys over the sequence, of the queries over the features.
    efficient = build("linear", feature_map="softmax", normalize="feature")
    assert_same(efficient(q, k, v), by_weights(scores(q.softmax(-1), k.softmax(1)), v))
    for t in (0, 5, T - 1):
        last = efficient(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1])
        assert_same(efficient(q, k, v, causal=True)[:, t : t + 1], last)


@checks("linear", "output_scale")
def _() -> None:
    q, k, v = inputs()
    plain, scaled = build("linear"), build("linear", output_scale=0.25)
    for causal in (False, True):
        assert_same(scaled(q, k, v, causal=causal), 0.25 * plain(q, k, v, causal=causal))
    state = scaled.new_state(B, dtype=torch.float64)
    assert_same(scaled.step(state, q[:, :1], k[:, :1], v[:, :1])[0], 0.25 * v[:, :1])


def in_buckets(q: Tensor, k: Tensor, v: Tensor, size: int, first: str) -> Tensor:
    fq, fk = F.elu(q) + 1, F.elu(k) + 1
    i, j = positions()
    seen = j // size < i // size
    if first == "causal":
        seen = seen | ((i < size) & (j <= i))
    weights = scores(fq, fk) * seen
    return by_weights(weights / weights.sum(-1, keepdim=True).where(seen.any(-1, keepdim=True), 1), v)


@checks("linear", "blind_spot")
def _() -> None:
    q, k, v = inputs()
    for size in (2, 3, 17, 20):
        assert_same(build("linear", blind_spot=size)(q, k, v, causal=True), in_buckets(q, k, v, size, "causal"))
    assert_same(build("linear", blind_spot=1)(q, k, v, causal=True), build("linear")(q, k, v, causal=True))
    assert_same(build("linear", blind_spot=3)(q, k, v), build("linear")(q, k, v))  # Causal only.


@checks("linear", "first_bucket")
def _() -> None:
    q, k, v = inputs()
    zero = build("linear", blind_spot=4, first_bucket="zero")(q, k, v, causal=True)
    assert (zero[:, :4] == 0).all()
    assert_same(zero, in_buckets(q, k, v, 4, "zero"))
    causal = build("linear", blind_spot=4, first_bucket="causal")(q, k, v, causal=True)
    assert_same(causal[:, :4], build("linear")(q, k, v, causal=True)[:, :4])
    assert_same(causal[:, 4:], zero[:, 4:])


@checks("linear", "phantom")
def _() -> None:
    q, k, v = inputs()
    mechanism = build("linear", phantom=0.3)
    first = torch.full_like(k[:, :1], math.log(0.3))  # elu(x) + 1 = 0.3
    before = build("linear").write(build("linear").new_state(B, dtype=q.dtype), first, torch.zeros_like(v[:, :1]))
    assert_same(mechanism(q, k, v, causal=True), build("linear")(q, k, v, causal=True, past=before))
    assert_same(mechanism(q, k, v), build("linear")(q, k, v))  # Causal only.
    stepped = mechanism.extend(mechanism.new_state(B, dtype=q.dtype), q[:, :1], k[:, :1], v[:, :1])[0]
    assert_same(stepped, mechanism(q, k, v, causal=True)[:, :1])
    with pytest.raises(ValueError, match="needs normalize"):
        build("linear", phantom=0.3, normalize="feature")
    mechanism, plain = build("linear", phantom=0.3, feature_map="softmax"), build("linear", feature_map="softmax")
    before = plain.write(plain.new_state(B, dtype=q.dtype), first, torch.zeros_like(v[:, :1]))  # exp(x) = 0.3
    assert_same(mechanism(q, k, v, causal=True), plain(q, k, v, causal=True, past=before))
    with pytest.raises(ValueError, match="Favor features without an epsilon have no fixed scale"):
        build("performer", phantom=0.3)


@checks("split", "parts")
def _() -> None:
    q, k, v = inputs()
    parts = [{"mechanism": "local", "num_heads": 1, "window": 3}, {"mechanism": "linear", "num_heads": 2}]
    split = build("split", parts=parts)
    for causal in (False, True):
        out = split(q, k, v, causal=causal)
        assert_same(
            out[:, :, :1], build("local", num_heads=1, window=3)(*(x[:, :, :1] for x in (q, k, v)), causal=causal)
        )
        assert_same(out[:, :, 1:], build("linear", num_heads=2)(*(x[:, :, 1:] for x in (q, k, v)), causal=causal))
    one_key_head = build("split", parts=parts, num_kv_heads=1)
    out = one_key_head(q, k[:, :, :1], v[:, :, :1], causal=True)
    assert_same(out, split(q, k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v), causal=True))


@pytest.mark.parametrize("name", [name for name in list_mechanisms() if name not in ("decay", "delta")])
def test_grouped_heads_and_value_width(name: str) -> None:
    """num_kv_heads and value_dim belong to every mechanism: a shared key head is that head repeated."""
    options: dict = {
        "linformer": {"rank": 4, "max_length": T, "projection": "random"},
        "split": {"parts": [{"mechanism": "local", "num_heads": 2}, {"mechanism": "linear", "num_heads": 4}]},
    }.get(name, {})
    torch.manual_seed(1)
    grouped = build(name, num_heads=6, num_kv_heads=3, **options)
    torch.manual_seed(1)
    full = build(name, num_heads=6, **options)
    _, k, v = inputs()
    q = torch.randn(B, T, 6, D, dtype=torch.float64)
    for causal in (False, True):
        out = grouped(q, k, v, causal=causal)
        assert out.shape == (B, T, 6, E)
        assert_same(out, full(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2), causal=causal))


@pytest.mark.parametrize(
    "options", [{"window": 4}, {"window": 4, "xpos": 2.0}, {"window": 3, "look_back": 1, "look_ahead": 1}], ids=str
)
def test_a_window_is_resized(options: dict) -> None:
    """A resized window is one built with that size: exact, or blocks."""
    q, k, v = (torch.randn(B, T, 2, 6, dtype=torch.float64) for _ in range(3))
    resized = build("local", num_heads=2, head_dim=6, value_dim=6, **options)
    before = resized(q, k, v, causal=True)
    resized.resize(7)
    wide = build("local", num_heads=2, head_dim=6, value_dim=6, **(options | {"window": 7}))
    assert resized.window == wide.window
    for causal in (False, True):
        assert_same(resized(q, k, v, causal=causal), wide(q, k, v, causal=causal))
    differ(resized(q, k, v, causal=True), before)
    state = resized.write(resized.new_state(B, dtype=torch.float64), k, v)
    assert_same(resized.read(state, q[:, -1:]), wide(q, k, v, causal=True)[:, -1:])
    resized.resize(4)
    with pytest.raises(ValueError, match=r"this state is of a window that reaches .* start from new_state"):
        resized.extend(state, q, k, v)


def test_a_window_with_a_table_is_not_resized() -> None:
    table = build("local", window=3, look_back=1, bias=torch.zeros(H, 3, 6))
    with pytest.raises(ValueError, match="a window with a bias table cannot be resized"):
        table.resize(5)
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        build("local").resize(0)


test_option = option_test(__name__)
