"""Every option of every mechanism does what its docstring says: each is checked against a formula written out here."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan import FeatureMap, Mechanism, Projection, build_mechanism, mechanisms
from longspan.mechanisms import mechanism_options
from longspan.mechanisms.feature_maps import ACTIVATIONS
from longspan.ops.local import turn
from longspan.positions import Rotary

B, T, S, H, D, E = 2, 17, 19, 3, 5, 7
Check = Callable[[], None]
CHECKS: dict[tuple[str, str], Check] = {}


def checks(name: str, option: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        assert (name, option) not in CHECKS
        CHECKS[name, option] = check
        return check

    return register


@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name in mechanisms() for option in mechanism_options(name)]
)
def test_option(name: str, option: str) -> None:
    assert (name, option) in CHECKS, f"{name} has an option {option} that nothing here checks"
    CHECKS[name, option]()


def test_no_check_is_left_over() -> None:
    assert {(name, option) for name in mechanisms() for option in mechanism_options(name)} >= set(CHECKS)


def build(name: str, **options: object) -> Mechanism:
    heads, dim = options.pop("num_heads", H), options.pop("head_dim", D)
    return build_mechanism(name, heads, dim, **({"value_dim": E} | options)).eval().double()


def inputs(queries: int = T, keys: int | None = None, batch: int = B) -> tuple[Tensor, Tensor, Tensor]:
    keys = queries if keys is None else keys
    sizes = (queries, D), (keys, D), (keys, E)
    q, k, v = (torch.randn(batch, length, H, dim, dtype=torch.float64) for length, dim in sizes)
    return q, k, v


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-9)


def differ(a: Tensor, b: Tensor) -> None:
    assert (a - b).abs().max() > 1e-3


def scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bthd,bshd->bhts", q, k)


def by_weights(weights: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhts,bshe->bthe", weights, v)


def softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | bool = True, bias: Tensor | float = 0.0, scale: float = D**-0.5
) -> Tensor:
    """Softmax attention over the pairs in seen (T, S)."""
    hidden = ~torch.as_tensor(seen).expand(q.shape[1], k.shape[1])
    return by_weights((scores(q, k) * scale + bias).masked_fill(hidden, float("-inf")).softmax(-1), v)


def kernel_attention(fq: Tensor, fk: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """Normalised attention by features."""
    weights = scores(fq, fk)
    weights = weights.tril() if causal else weights
    return by_weights(weights / weights.sum(-1, keepdim=True), v)


def positions(length: int = T) -> tuple[Tensor, Tensor]:
    return torch.arange(length)[:, None], torch.arange(length)


def check_dropout(name: str, **options: object) -> None:
    """Nothing in eval mode; in training the expectation is the answer without it."""
    p, repeats = 0.3, 2000
    torch.manual_seed(7)
    dropped = build(name, dropout=p, **options)
    torch.manual_seed(7)
    plain = build(name, **options)
    q, k, v = inputs(6, batch=1)
    for causal in (False, True):
        expected = plain(q, k, v, causal=causal)
        same(dropped(q, k, v, causal=causal), expected)
        dropped.train()
        many = dropped(*(x.expand(repeats, -1, -1, -1) for x in (q, k, v)), causal=causal)
        assert many.std(0).min() > 1e-3, "every output is touched"
        assert ((many.mean(0) - expected[0]).abs() < 5 * many.std(0) / repeats**0.5).all()
        dropped.eval()
    state = dropped.write(
        dropped.new_state(repeats, dtype=torch.float64), *(x.expand(repeats, -1, -1, -1) for x in (k, v))
    )
    read = q[:, -1:].expand(repeats, -1, -1, -1)
    assert dropped.read(state, read).std(0).max() < 1e-9
    assert dropped.train().read(state, read).std(0).min() > 1e-3


def dropped_share(mechanism: Mechanism) -> float:
    """How many of the weights of a softmax are dropped in training, by values that are an identity."""
    q, k, _ = inputs(E, batch=500)
    weights = mechanism.train()(q, k, torch.eye(E, dtype=torch.float64)[None, :, None].expand(500, -1, H, -1))
    return (weights == 0).double().mean().item()


@checks("softmax", "scale")
def _() -> None:
    q, k, v = inputs()
    same(build("softmax")(q, k, v), softmax_attention(q, k, v))
    same(build("softmax", scale=0.9)(q, k, v), softmax_attention(q, k, v, scale=0.9))


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
        same(mechanism(q, k, v), softmax_attention(q, k, v, (i - j).abs() < window))
        same(mechanism(q, k, v, causal=True), softmax_attention(q, k, v, (i - j < window) & (j <= i)))
        assert mechanism.new_state(B).k.shape[2] == window
    mechanism = build("local", window=(3, 1))
    same(mechanism(q, k, v), softmax_attention(q, k, v, (i - j <= 3) & (j - i <= 1)))
    same(mechanism(q, k, v, causal=True), softmax_attention(q, k, v, (i - j <= 3) & (j <= i)))


@checks("local", "look_back")
def _() -> None:
    q, k, v = inputs()
    i, j = positions()
    for back in (0, 2):
        mechanism = build("local", window=4, look_back=back)
        apart = i // 4 - j // 4
        same(mechanism(q, k, v), softmax_attention(q, k, v, (apart >= 0) & (apart <= back)))
        same(mechanism(q, k, v, causal=True), softmax_attention(q, k, v, (apart <= back) & (j <= i)))


@checks("local", "look_ahead")
def _() -> None:
    q, k, v = inputs()
    i, j = positions()
    mechanism = build("local", window=4, look_back=1, look_ahead=2)
    apart = i // 4 - j // 4
    same(mechanism(q, k, v), softmax_attention(q, k, v, (apart >= -2) & (apart <= 1)))
    same(mechanism(q, k, v, causal=True), build("local", window=4, look_back=1)(q, k, v, causal=True))


@checks("local", "shared_qk")
def _() -> None:
    q, k, v = inputs()
    i, j = positions()
    mechanism = build("local", window=4, shared_qk=True)
    unit = k / k.norm(dim=-1, keepdim=True)
    same(mechanism(q, k, v), softmax_attention(q, unit, v, ((i - j).abs() < 4) & (i != j)))
    out = mechanism(q, k, v, causal=True)
    same(out[:, :1], v[:, :1])  # The first token sees nothing else.
    same(out[:, 1:], softmax_attention(q, unit, v, (i - j < 4) & (j < i) | ((i == 0) & (j == 0)))[:, 1:])


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
    same(mechanism(q, k, v), softmax_attention(q, k, v, (i - j).abs() < 4, bias))
    state = mechanism.write(mechanism.new_state(B, dtype=torch.float64), k[:, :9], v[:, :9])
    same(mechanism.read(state, q[:, 8:9]), mechanism(q, k, v, causal=True)[:, 8:9])

    table = nn.Parameter(torch.randn(H, 4, 12, dtype=torch.float64))
    mechanism = build("local", window=4, look_back=1, look_ahead=1, bias=table)
    assert [name for name, _ in mechanism.named_parameters()] == ["bias"]
    assert "bias" in build("local", window=4, look_back=1, look_ahead=1, bias=table.detach()).state_dict()
    column = (j - (i // 4 - 1) * 4).clamp(0, 11)
    bias = table.detach()[:, (i % 4).expand(T, T), column]
    same(mechanism(q, k, v), softmax_attention(q, k, v, (i // 4 - j // 4).abs() <= 1, bias))
    mechanism = build("local", window=(3, 4), bias=table)
    same(mechanism(q, k, v), softmax_attention(q, k, v, (i - j <= 3) & (j - i <= 4), bias))
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
    turned = rotary(q, at), rotary(k, at)
    expected = softmax_attention(rotary(q, at + 3), turned[1], v, (i - j).abs() < 5, scale=dim**-0.5)
    same(mechanism(*turned, v), expected)
    state = mechanism.write(mechanism.new_state(B, dtype=torch.float64), turned[1], v)
    same(mechanism.read(state, turned[0][:, -1:]), expected[:, -1:])
    plain, further = (build("local", head_dim=dim, window=5, xpos=2.0, query_offset=n) for n in (0, 3))
    same(further(q, k, v), plain(turn(q, torch.tensor([3]), 2.0), k, v))
    with pytest.raises(ValueError, match="query_offset turns pairs of features and needs an even head_dim, got 5"):
        build("local", query_offset=3)


@checks("local", "scale")
def _() -> None:
    q, k, v = inputs()
    i, j = positions()
    expected = softmax_attention(q, k, v, (i - j < 4) & (j <= i), scale=2.0)
    mechanism = build("local", window=4, scale=2.0)
    same(mechanism(q, k, v, causal=True), expected)
    state = mechanism.write(mechanism.new_state(B, dtype=torch.float64), k, v)
    same(mechanism.read(state, q[:, -1:]), expected[:, -1:])


@checks("local", "xpos")
def _() -> None:
    """Pairs as complex numbers, turned and scaled by their positions: far keys fade."""
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
    same(mechanism(q, k, v, causal=True), expected)
    state = mechanism.write(mechanism.new_state(B, dtype=torch.float64), k, v)
    same(mechanism.read(state, q[:, -1:]), expected[:, -1:])
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
            same(mechanism(x, y, v, causal=causal), kernel_attention(query(x), key(y), v, causal))
    mine = build("linear", feature_map=Cosines())
    same(mine(q, k, v, causal=True), kernel_attention(mine.feature_map.query(q), mine.feature_map.query(k), v, True))
    assert mine.new_state(B).kv.shape == (B, H, 2 * D, E)


@checks("linear", "normalise")
def _() -> None:
    q, k, v = inputs()
    fq, fk = F.elu(q) + 1, F.elu(k) + 1
    same(build("linear", normalise="query")(q, k, v), kernel_attention(fq, fk, v))
    same(build("linear", normalise="none")(q, k, v), by_weights(scores(fq, fk), v))
    same(build("linear", normalise="none")(q, k, v, causal=True), by_weights(scores(fq, fk).tril(), v))
    # Efficient Attention: softmax of the keys over the sequence, of the queries over the features.
    efficient = build("linear", feature_map="softmax", normalise="feature")
    same(efficient(q, k, v), by_weights(scores(q.softmax(-1), k.softmax(1)), v))
    for t in (0, 5, T - 1):
        last = efficient(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1])
        same(efficient(q, k, v, causal=True)[:, t : t + 1], last)


@checks("linear", "output_scale")
def _() -> None:
    q, k, v = inputs()
    plain, scaled = build("linear"), build("linear", output_scale=0.25)
    for causal in (False, True):
        same(scaled(q, k, v, causal=causal), 0.25 * plain(q, k, v, causal=causal))
    state = scaled.new_state(B, dtype=torch.float64)
    same(scaled.step(state, q[:, :1], k[:, :1], v[:, :1])[0], 0.25 * v[:, :1])


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
        same(build("linear", blind_spot=size)(q, k, v, causal=True), in_buckets(q, k, v, size, "causal"))
    same(build("linear", blind_spot=1)(q, k, v, causal=True), build("linear")(q, k, v, causal=True))
    same(build("linear", blind_spot=3)(q, k, v), build("linear")(q, k, v))  # Causal only.


@checks("linear", "first_bucket")
def _() -> None:
    q, k, v = inputs()
    zero = build("linear", blind_spot=4, first_bucket="zero")(q, k, v, causal=True)
    assert (zero[:, :4] == 0).all()
    same(zero, in_buckets(q, k, v, 4, "zero"))
    causal = build("linear", blind_spot=4, first_bucket="causal")(q, k, v, causal=True)
    same(causal[:, :4], build("linear")(q, k, v, causal=True)[:, :4])
    same(causal[:, 4:], zero[:, 4:])


@checks("linear", "phantom")
def _() -> None:
    q, k, v = inputs()
    mechanism = build("linear", phantom=0.3)
    first = torch.full_like(k[:, :1], math.log(0.3))  # elu(x) + 1 = 0.3
    before = build("linear").write(build("linear").new_state(B, dtype=q.dtype), first, torch.zeros_like(v[:, :1]))
    same(mechanism(q, k, v, causal=True), build("linear")(q, k, v, causal=True, past=before))
    same(mechanism(q, k, v), build("linear")(q, k, v))  # Causal only.
    stepped = mechanism.extend(mechanism.new_state(B, dtype=q.dtype), q[:, :1], k[:, :1], v[:, :1])[0]
    same(stepped, mechanism(q, k, v, causal=True)[:, :1])
    with pytest.raises(ValueError, match="needs normalise"):
        build("linear", phantom=0.3, normalise="feature")
    with pytest.raises(ValueError, match="Softmax features have no size"):
        build("linear", phantom=0.3, feature_map="softmax")


@checks("performer", "phantom")
def _() -> None:
    q, k, v = inputs()
    mechanism = build("performer", epsilon=0.01, phantom=0.05)
    plain = build("performer", epsilon=0.01)
    plain.load_state_dict(mechanism.state_dict())
    w = mechanism.feature_map.projection
    largest = (k * D**-0.25 @ w.T).amax(-1).cummax(1).values  # (B, T, H)
    query = (favor(q, w) * (-(q * D**-0.25 @ w.T).amax(-1, keepdim=True)).exp()) + 0.01
    for t in (0, 1, T - 1):
        keys = favor(k[:, : t + 1], w) * (-largest[:, t, None, :, None]).exp() + 0.01
        weights = torch.einsum("bhm,bshm->bsh", query[:, t], keys)
        den = weights.sum(1) + 0.05 * query[:, t].sum(-1)
        expected = torch.einsum("bsh,bshe->bhe", weights, v[:, : t + 1]) / den[..., None]
        same(mechanism(q, k, v, causal=True)[:, t], expected)
    same(mechanism(q, k, v), plain(q, k, v))  # Causal only.
    with pytest.raises(ValueError, match="must not be negative"):
        build("performer", epsilon=0.01, phantom=-0.05)


def favor(x: Tensor, w: Tensor) -> Tensor:
    x = x * x.shape[-1] ** -0.25
    return (x @ w.T - x.square().sum(-1, keepdim=True) / 2).exp()


@checks("performer", "num_features")
def _() -> None:
    q, k, v = inputs()
    mechanism = build("performer", num_features=11)
    w = mechanism.feature_map.projection
    assert w.shape == (11, D)
    assert mechanism.new_state(B).kv.shape == (B, H, 11, E)
    for causal in (False, True):
        same(mechanism(q, k, v, causal=causal), kernel_attention(favor(q, w), favor(k, w), v, causal))


@pytest.mark.parametrize("dim", [1, 2, 5, 64, 128])
def test_performer_default_number_of_features(dim: int) -> None:
    mechanism = build_mechanism("performer", 1, dim)
    assert len(mechanism.feature_map.projection) == max(1, math.floor(dim * math.log(dim)))


# Householder's Q alone leans to one side (Mezzadri, 2007): each column needs the sign of R's diagonal.
def test_more_features_come_nearer_to_softmax() -> None:
    q, k, v = (0.5 * x for x in inputs())
    exact = softmax_attention(q, k, v)
    errors = [(build("performer", num_features=m)(q, k, v) - exact).abs().mean().item() for m in (10, 4000)]
    assert errors[1] < errors[0] / 5  # Like 1/√M, a factor of 20.


@checks("performer", "kernel")
def _() -> None:
    q, k, v = inputs()
    for kernel in (*ACTIVATIONS, lambda x: x.square() + x.abs()):
        mechanism = build("performer", kernel=kernel)
        act, w = ACTIVATIONS.get(kernel, kernel), mechanism.feature_map.projection
        fq, fk = (act(x * D**-0.25 @ w.T) + 1e-3 for x in (q, k))
        # elu, silu and gelu have a sign, so their normaliser may come near zero and lose digits.
        expected = kernel_attention(fq, fk, v)
        torch.testing.assert_close(mechanism(q, k, v), expected, atol=1e-7, rtol=1e-7)
    softmax, relu = build("performer"), build("performer", kernel="relu")
    differ(softmax(q, k, v), relu(q, k, v))


@checks("performer", "projection")
def _() -> None:
    q, k, v = inputs()
    bare = build("performer", projection=False)
    same(bare(q, k, v, causal=True), build("linear", feature_map="softmax")(q, k, v, causal=True))
    relu = build("performer", projection=False, kernel="relu")
    fq, fk = (F.relu(x * D**-0.25) + 1e-3 for x in (q, k))
    same(relu(q, k, v, causal=True), kernel_attention(fq, fk, v, True))
    assert relu.new_state(B).kv.shape == (B, H, D, E)
    assert not any("projection" in name for name in relu.state_dict())
    relu.redraw()  # Nothing to draw: states stay good.
    relu.read(build("performer", projection=False, kernel="relu").new_state(B, dtype=torch.float64), q)


@checks("performer", "row_norms")
def _() -> None:
    torch.manual_seed(0)
    unit = build("performer", head_dim=16, num_features=1024, row_norms="unit").feature_map.projection
    sampled = build("performer", head_dim=16, num_features=1024, row_norms="sampled").feature_map.projection
    torch.testing.assert_close(unit.norm(dim=1), torch.full((1024,), 4.0, dtype=torch.float64), atol=0, rtol=2**-8)
    squares = sampled.square().sum(1)  # χ² with 16 degrees of freedom: mean 16, variance 32
    assert abs(squares.mean() - 16) < 5 * (32 / 1024) ** 0.5
    assert abs(squares.var() - 32) < 8


@pytest.mark.parametrize("row_norms", ["sampled", "unit"])
def test_rows_are_orthogonal_in_blocks(row_norms: str) -> None:
    rows = build("performer", head_dim=16, num_features=40, row_norms=row_norms).feature_map.projection
    rows = rows / rows.norm(dim=1, keepdim=True)
    for block in rows.split(16):
        same_block = block @ block.T
        torch.testing.assert_close(same_block, torch.eye(len(block), dtype=torch.float64), atol=2**-7, rtol=0)
    assert (rows[:16] @ rows[16:32].T).abs().max() > 0.1, "blocks are independent of each other"


def test_directions_are_uniform() -> None:
    rows = build("performer", head_dim=4, num_features=4000, row_norms="unit").feature_map.projection
    assert rows.mean(0).abs().max() < 5 * 4000**-0.5
    assert rows.unflatten(0, (1000, 4)).mean(0).abs().max() < 5 * 1000**-0.5, "whatever the place in the block"


@checks("performer", "epsilon")
def _() -> None:
    """As performer-pytorch: the largest w·k is divided out of the keys, then epsilon is added to every feature."""
    q, k, v = inputs()
    mechanism = build("performer", epsilon=0.05)
    w = mechanism.feature_map.projection

    def old(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        largest_q = (q * D**-0.25 @ w.T).amax(-1, keepdim=True)
        largest_k = (k * D**-0.25 @ w.T).amax((1, 3), keepdim=True)
        return kernel_attention(favor(q, w) / largest_q.exp() + 0.05, favor(k, w) / largest_k.exp() + 0.05, v)

    same(mechanism(q, k, v), old(q, k, v))
    differ(mechanism(q, k, v), kernel_attention(favor(q, w), favor(k, w), v))
    causal = mechanism(q, k, v, causal=True)
    for t in range(T):
        same(causal[:, t : t + 1], old(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1]))
    relu = build("performer", kernel="relu", epsilon=0.5)
    w = relu.feature_map.projection
    same(relu(q, k, v), kernel_attention(*(F.relu(x * D**-0.25 @ w.T) + 0.5 for x in (q, k)), v))


@checks("performer", "redraw_interval")
def _() -> None:
    mechanism = build("performer", redraw_interval=3).train()
    for call in range(1, 8):
        before = mechanism.feature_map.projection.clone()
        mechanism.advance()
        assert mechanism.draw == call // 3
        assert torch.equal(mechanism.feature_map.projection, before) == (call % 3 != 0)
    assert mechanism.counts.tolist() == [2, 1]
    frozen = build("performer", redraw_interval=None).train()
    before = frozen.feature_map.projection.clone()
    for _ in range(2000):
        frozen.advance()
    assert torch.equal(frozen.feature_map.projection, before)
    assert frozen.counts.tolist() == [0, 0]


@checks("performer", "normalise")
def _() -> None:
    q, k, v = inputs()
    mechanism = build("performer", normalise="feature")
    w = mechanism.feature_map.projection
    keys = favor(k, w)
    query = (q * D**-0.25 @ w.T).softmax(-1)  # A query's features sum to one, and so do its weights over the keys.
    same(mechanism(q, k, v), by_weights(scores(query, keys / keys.sum(1, keepdim=True)), v))
    relu = build("performer", kernel="relu", normalise="none")
    w = relu.feature_map.projection
    same(relu(q, k, v), by_weights(scores(*(F.relu(x * D**-0.25 @ w.T) + 1e-3 for x in (q, k))), v))


def test_eval_never_redraws() -> None:
    mechanism = build("performer", redraw_interval=1).eval()
    before = mechanism.feature_map.projection.clone()
    for _ in range(5):
        mechanism.advance()
    assert torch.equal(mechanism.feature_map.projection, before)
    assert mechanism.counts.tolist() == [0, 0]


def test_a_forward_does_not_count_by_itself() -> None:
    """A layer that is recomputed runs forward twice: only `advance` counts."""
    mechanism = build("performer", redraw_interval=1).train()
    before = mechanism.feature_map.projection.clone()
    mechanism(*inputs(), causal=True)
    assert torch.equal(mechanism.feature_map.projection, before)


def test_counts_survive_a_state_dict() -> None:
    mechanism = build("performer", redraw_interval=3).train()
    for _ in range(5):
        mechanism.advance()
    resumed = build("performer", redraw_interval=3).train()
    resumed.load_state_dict(mechanism.state_dict())
    assert (resumed.draw, resumed.counts.tolist()) == (1, [1, 2])
    assert torch.equal(resumed.feature_map.projection, mechanism.feature_map.projection)
    resumed.advance()
    assert resumed.draw == 2
    assert mechanism.draw == 1
    # A state from before the checkpoint is still good after it.
    q, k, v = inputs()
    state = mechanism.write(mechanism.new_state(B, dtype=torch.float64), k, v)
    loaded = build("performer")
    loaded.load_state_dict(mechanism.state_dict())
    same(loaded.read(state, q), mechanism.read(state, q))


def test_redraw_with_a_generator_is_repeatable() -> None:
    draws = []
    for _ in range(2):
        mechanism = build("performer")
        before = mechanism.feature_map.projection.clone()
        mechanism.redraw(torch.Generator().manual_seed(3))
        differ(mechanism.feature_map.projection, before)
        draws.append(mechanism.feature_map.projection)
    assert torch.equal(*draws)


def test_split_advances_its_parts() -> None:
    part = {"mechanism": "performer", "num_heads": 1, "redraw_interval": 2}
    split = build("split", parts=[part, {"mechanism": "softmax", "num_heads": 2}]).train()
    split.advance()
    split.advance()
    assert split.parts[0].draw == 1


def linformer(q: Tensor, k: Tensor, v: Tensor, e: Tensor, f: Tensor) -> Tensor:
    """Softmax over rows compressed by tables (S, R)."""
    return softmax_attention(q, torch.einsum("sr,bshd->brhd", e, k), torch.einsum("sr,bshd->brhd", f, v))


@checks("linformer", "rank")
def _() -> None:
    q, k, v = inputs()
    for rank in (1, 4):
        mechanism = build("linformer", rank=rank, max_length=T)
        assert mechanism.keys.table.shape == (1, T, rank)
        assert mechanism.new_state(B).k.shape == (B, H, rank, D)
        same(mechanism(q, k, v), linformer(q, k, v, mechanism.keys.table[0], mechanism.values.table[0]))
    assert build("linformer", rank=4, max_length=10, projection="convolution").rank == 4


@checks("linformer", "max_length")
def _() -> None:
    q, k, v = inputs()
    mechanism = build("linformer", rank=4, max_length=T)
    mechanism(q, k, v, causal=True)
    shorter = build("linformer", rank=4, max_length=T - 1)
    with pytest.raises(ValueError, match=f"{T} tokens are more than .* {T - 1}"):
        shorter(q, k, v)
    # Shorter input uses the first rows of the table.
    e, f = (x.table[0, :11] for x in (mechanism.keys, mechanism.values))
    same(mechanism(q, k[:, :11], v[:, :11]), linformer(q, k[:, :11], v[:, :11], e, f))


@checks("linformer", "projection")
def _() -> None:
    q, k, v = inputs()
    learned = build("linformer", rank=4, max_length=T)
    assert {name for name, _ in learned.named_parameters()} == {"keys.table", "values.table"}
    random = build("linformer", rank=4, max_length=T, projection="random")
    assert list(random.parameters()) == []
    assert {"keys.table", "values.table"} <= set(random.state_dict()), "not trained, but saved"
    same(random(q, k, v), linformer(q, k, v, random.keys.table[0], random.values.table[0]))

    convolution = build("linformer", rank=5, max_length=20, projection="convolution")
    assert convolution.keys.kernel.shape == (4, D, D)

    def strided(x: Tensor, kernel: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, 0, 0, 20 - T))
        flat = x.permute(0, 2, 3, 1).flatten(0, 1)
        rows = F.conv1d(flat, kernel.permute(2, 1, 0), stride=4)
        return rows.view(B, H, -1, 5).permute(0, 3, 1, 2)

    compressed = strided(k, convolution.keys.kernel), strided(v, convolution.values.kernel)
    same(convolution(q, k, v), softmax_attention(q, *compressed))

    shared = Projection(4, T).double()
    mechanism = build("linformer", projection=shared)
    same(mechanism(q, k, v), linformer(q, k, v, shared.table[0], shared.table[0]))


@checks("linformer", "share_projection")
def _() -> None:
    apart = build("linformer", rank=4, max_length=T)
    shared = build("linformer", rank=4, max_length=T, share_projection=True)
    assert len(list(apart.parameters())) == 2
    assert len(list(shared.parameters())) == 1
    differ(apart.keys.table, apart.values.table)
    q, k, v = inputs()
    same(shared(q, k, v), linformer(q, k, v, shared.keys.table[0], shared.keys.table[0]))


@checks("linformer", "per_head")
def _() -> None:
    mechanism = build("linformer", rank=4, max_length=T, per_head=True)
    assert mechanism.keys.table.shape == (H, T, 4)
    q, k, v = inputs()
    for causal in (False, True):
        out = mechanism(q, k, v, causal=causal)
        for h in range(H):
            one = build("linformer", rank=4, max_length=T, num_heads=1)
            one.keys.table.data, one.values.table.data = (
                mechanism.keys.table[h : h + 1],
                mechanism.values.table[h : h + 1],
            )
            same(out[:, :, h : h + 1], one(*(x[:, :, h : h + 1] for x in (q, k, v)), causal=causal))
    # Kernels and biases are the heads' own too.
    apart = build("linformer", rank=4, max_length=T, projection="convolution", per_head=True, bias=True)
    assert apart.keys.kernel.shape == (H, 5, D, D)
    assert apart.values.bias.shape == (H, 1, E)
    assert build("linformer", rank=4, max_length=T, per_head=True, bias=True).keys.bias.shape == (H, 4, 1)
    for parameter in apart.parameters():
        nn.init.normal_(parameter)
    for causal in (False, True):
        out = apart(q, k, v, causal=causal)
        for h in range(H):
            one = build("linformer", rank=4, max_length=T, projection="convolution", bias=True, num_heads=1)
            one.load_state_dict({name: x[h] for name, x in apart.state_dict().items()})
            same(out[:, :, h : h + 1], one(*(x[:, :, h : h + 1] for x in (q, k, v)), causal=causal))


@checks("linformer", "whole_stretches")
def _() -> None:
    q, k, v = inputs()
    mechanism = build("linformer", rank=6, max_length=T, projection="convolution", whole_stretches=True)
    assert mechanism.keys.kernel.shape == (2, D, D)
    assert mechanism.rank == 8
    out = mechanism(q, k, v)
    half = [
        torch.einsum("brshd,sdc->brhc", x[:, :16].unflatten(1, (8, 2)), p.kernel)
        for x, p in ((k, mechanism.keys), (v, mechanism.values))
    ]
    same(out, softmax_attention(q, *half))
    k[:, 16:], v[:, 16:] = 7, 7  # What is left over counts for nothing.
    same(mechanism(q, k, v), out)
    with pytest.raises(ValueError, match="whole_stretches is for a convolution"):
        build("linformer", rank=4, max_length=T, whole_stretches=True)


@checks("linformer", "periodic")
def _() -> None:
    q, k, v = inputs()
    mechanism = build("linformer", rank=4, max_length=6, periodic=True)
    e, f = (x.table[0].repeat(3, 1)[:T] / 3 for x in (mechanism.keys, mechanism.values))  # Three periods have begun.
    same(mechanism(q, k, v), linformer(q, k, v, e, f))
    for t in (0, 5, 6, 12, 16):
        part = mechanism(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1])
        same(mechanism(q, k, v, causal=True)[:, t : t + 1], part)
    # A sequence repeated whole is compressed to the same rows.
    twice = mechanism(q[:, :6], k[:, :6].repeat(1, 2, 1, 1), v[:, :6].repeat(1, 2, 1, 1))
    same(twice, mechanism(q[:, :6], k[:, :6], v[:, :6]))


@checks("linformer", "bias")
def _() -> None:
    q, k, v = inputs()
    assert build("linformer", rank=4, max_length=T).keys.bias is None
    mechanism = build("linformer", rank=4, max_length=T, bias=True)
    assert (mechanism.keys.bias == 0).all()
    for projection in (mechanism.keys, mechanism.values):
        nn.init.normal_(projection.bias)
    rows = [
        torch.einsum("sr,bshd->brhd", p.table[0], x) + p.bias[:, :, None]
        for p, x in ((mechanism.keys, k), (mechanism.values, v))
    ]
    same(mechanism(q, k, v), softmax_attention(q, *rows))
    same(mechanism(q, k, v, causal=True)[:, -1], softmax_attention(q, *rows)[:, -1])


@checks("linformer", "dropout")
def _() -> None:
    check_dropout("linformer", rank=4, max_length=T)


def test_a_projection_shared_by_layers_shares_its_parameters() -> None:
    projection = Projection(4, T, num_heads=H)
    layers = nn.ModuleList(build_mechanism("linformer", H, D, value_dim=E, projection=projection) for _ in range(2))
    assert len(list(layers.parameters())) == 1
    x, _, v = (y.float() for y in inputs())
    layers[0](x, x, v).sum().backward()
    once = projection.table.grad.clone()
    layers[1](x, x, v).sum().backward()
    torch.testing.assert_close(projection.table.grad, 2 * once)
    copied = copy.deepcopy(layers)
    assert copied[0].keys is copied[1].keys
    assert copied[0].keys is not projection


def test_projected_keys_keep_their_size() -> None:
    for length in (64, 4096):
        compressed = Projection(32, length).compress(torch.randn(1, length, 1, 16))
        assert 0.8 < compressed.std() < 1.2


@checks("split", "parts")
def _() -> None:
    q, k, v = inputs()
    parts = [{"mechanism": "local", "num_heads": 1, "window": 3}, {"mechanism": "linear", "num_heads": 2}]
    split = build("split", parts=parts)
    for causal in (False, True):
        out = split(q, k, v, causal=causal)
        same(out[:, :, :1], build("local", num_heads=1, window=3)(*(x[:, :, :1] for x in (q, k, v)), causal=causal))
        same(out[:, :, 1:], build("linear", num_heads=2)(*(x[:, :, 1:] for x in (q, k, v)), causal=causal))
    one_key_head = build("split", parts=parts, num_kv_heads=1)
    out = one_key_head(q, k[:, :, :1], v[:, :, :1], causal=True)
    same(out, split(q, k[:, :, :1].expand_as(k), v[:, :, :1].expand_as(v), causal=True))


@pytest.mark.parametrize("name", list(mechanisms()))
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
        same(out, full(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2), causal=causal))
