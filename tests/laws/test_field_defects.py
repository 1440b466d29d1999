"""Defects that older libraries have in causality, padding, normalization, windows and overflow, one test each.

Where it is cheap, the older formula is written out beside ours, and the test shows that it does have the defect.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from longspan import Mechanism, Projection, build_mechanism


def build(name: str, heads: int = 2, dim: int = 16, **options: object) -> Mechanism:
    return build_mechanism(name, heads, dim, **options).eval()


def inputs(
    batch: int, length: int, heads: int = 2, dim: int = 16, dtype=torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(batch, length, heads, dim, dtype=dtype) for _ in range(3))
    return q, k, v


def weighted(weights: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhts,bshe->bthe", weights, v)


def dots(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bthd,bshd->bhts", q, k)


def old_favor(q: Tensor, k: Tensor, w: Tensor, epsilon: float = 1e-4) -> tuple[Tensor, Tensor]:
    """FAVOR+ as it was: keys are divided by the largest exponential over all positions, then epsilon is added."""
    scale = q.shape[-1] ** -0.25
    (pq, nq), (pk, nk) = (((x * scale) @ w.T, (x * scale).square().sum(-1, keepdim=True) / 2) for x in (q, k))
    fq = (pq - nq - pq.amax(-1, keepdim=True)).exp() + epsilon
    return fq, (pk - nk - pk.amax((1, 3), keepdim=True)).exp() + epsilon


def relative_error(got: Tensor, truth: Tensor) -> float:
    return ((got.double() - truth).norm() / truth.norm()).item()


# Causality


@pytest.mark.parametrize("epsilon", [None, 1e-4])
def test_causal_performer_leaks_the_future_through_its_stabilizer(epsilon: float | None) -> None:
    q, k, v = inputs(1, 128)
    later = k.clone()
    later[:, -1] *= 6
    mechanism = build("performer", epsilon=epsilon)

    def old(k: Tensor) -> Tensor:
        fq, fk = old_favor(q, k, mechanism.feature_map.projection)
        weights = dots(fq, fk).tril()
        return weighted(weights / weights.sum(-1, keepdim=True), v)[:, :-1]

    assert (old(k) - old(later)).abs().max() > 1e-2
    ours = [mechanism(q, x, v, causal=True)[:, :-1] for x in (k, later)]
    assert torch.equal(*ours)


def test_causal_linformer_leaks_because_it_projects_first() -> None:
    q, k, v = inputs(1, 32)
    later = v.clone()
    later[:, -1] += 10
    mechanism = build("linformer", rank=4, max_length=32)
    e, f = mechanism.keys.table[0], mechanism.values.table[0]

    def old(v: Tensor) -> Tensor:
        rows = torch.einsum("sr,bshd->brhd", e, k)
        scores = dots(q, rows) / 4
        hidden = torch.arange(4) > torch.arange(32)[:, None]  # A triangle over rows, which are no positions.
        return weighted(scores.masked_fill(hidden, float("-inf")).softmax(-1), torch.einsum("sr,bshd->brhd", f, v))[
            :, :-1
        ]

    assert (old(v) - old(later)).abs().max() > 0.1
    ours = [mechanism(q, k, x, causal=True)[:, :-1] for x in (v, later)]
    assert torch.equal(*ours)
    torch.testing.assert_close(mechanism(q, k, v, causal=True)[:, -1], mechanism(q, k, v)[:, -1])


def test_a_causal_argument_is_swallowed() -> None:
    """Unknown arguments and wrongly named masks vanished into **kwargs."""
    q, k, v = inputs(1, 5)
    for name in ("softmax", "local", "linear", "performer", "linformer"):
        for wrong in ("mask", "input_mask", "is_causal", "attn_mask"):
            with pytest.raises(TypeError, match=wrong):
                build(name)(q, k, v, **{wrong: torch.ones(1, 5, dtype=torch.bool)})


def test_decoding_differs_from_training() -> None:
    """Without a running shift in the state, a cache of old sums is at another scale than new keys."""
    q, k, v = inputs(1, 40)
    k = k * torch.linspace(1, 8, 40)[None, :, None, None]
    mechanism = build("performer")
    parallel = mechanism(q, k, v, causal=True)
    state = mechanism.new_state(1)
    for t in range(40):
        out, state = mechanism.step(state, *(x[:, t : t + 1] for x in (q, k, v)))
        torch.testing.assert_close(out, parallel[:, t : t + 1], atol=1e-4, rtol=1e-3)


# Padding


@pytest.mark.parametrize("name", ["performer", "linear"])
def test_padded_keys_stay_in_the_normalizer(name: str) -> None:
    """Values were zeroed, keys were not."""
    q, k, v = inputs(1, 24)
    mask = torch.arange(24)[None] < 15
    mechanism = build(name)
    phi = mechanism.feature_map
    right = mechanism(q, k[:, :15], v[:, :15])
    fk, scale = phi.key(k)
    fk = fk if scale is None else fk * (scale - scale.amax(1, keepdim=True)).exp()[..., None]
    weights = dots(phi.query(q), fk)
    old = weighted(weights / weights.sum(-1, keepdim=True), v * mask[:, :, None, None])
    assert (old - right).abs().max() > 0.05
    torch.testing.assert_close(mechanism(q, k, v, key_mask=mask), right)
    causal = mechanism(q, k, v, causal=True, key_mask=mask.flip(1))  # Padding on the left
    torch.testing.assert_close(causal[:, 9:], mechanism(*(x[:, 9:] for x in (q, k, v)), causal=True))


def test_fully_masked_rows_average_padding() -> None:
    """A row of equal scores became the mean of whatever was there, padding of −1 too."""
    q, k, v = inputs(2, 12)
    mask = torch.tensor([[True] * 12, [False] * 12])
    scores = dots(q, k).masked_fill(~mask[:, None, None], -torch.finfo(q.dtype).max)
    assert weighted(scores.softmax(-1), v)[1].abs().max() > 0.1
    for name, options in (("local", {"window": 4}), ("local", {"window": 4, "look_back": 1}), ("softmax", {})):
        out = build(name, **options)(q, k, v, key_mask=mask)
        assert (out[1] == 0).all()
        torch.testing.assert_close(out[:1], build(name, **options)(q[:1], k[:1], v[:1]))


@pytest.mark.parametrize("look_ahead", [0, 1])
def test_local_attention_attends_to_its_own_padding(look_ahead: int) -> None:
    """Input padded to whole windows, without a mask: the zeros at the end took part."""
    q, k, v = inputs(1, 13)
    window, i, j = 4, torch.arange(16)[:, None], torch.arange(16)
    seen = (i // window - j // window <= 1) & (j // window - i // window <= look_ahead)
    padded = [F.pad(x, (0, 0, 0, 0, 0, 3)) for x in (q, k, v)]

    def attend(seen: Tensor) -> Tensor:
        scores = dots(*padded[:2]) / 4
        return weighted(scores.masked_fill(~seen, float("-inf")).softmax(-1), padded[2])[:, :13]

    right = attend(seen & (j < 13))
    assert (attend(seen) - right).abs().max() > 0.05
    out = build("local", window=window, look_back=1, look_ahead=look_ahead)(q, k, v)
    torch.testing.assert_close(out, right)


def test_linformer_ignores_its_mask() -> None:
    q, k, v = inputs(1, 24)
    mask = torch.arange(24)[None] < 15
    mechanism = build("linformer", rank=4, max_length=24)
    right = mechanism(q, k[:, :15], v[:, :15])
    assert (mechanism(q, k, v) - right).abs().max() > 0.05
    torch.testing.assert_close(mechanism(q, k, v, key_mask=mask), right)


@pytest.mark.parametrize("name", ["softmax", "linear", "performer", "linformer"])
def test_cross_attention_ignores_its_mask(name: str) -> None:
    q, _, _ = inputs(2, 7)
    _, k, v = inputs(2, 19)
    mask = torch.arange(19) < torch.tensor([[19], [6]])
    mechanism = build(name)
    out = mechanism(q, k, v, key_mask=mask)
    torch.testing.assert_close(out[1:], mechanism(q[1:], k[1:, :6], v[1:, :6]))
    assert (out - mechanism(q, k, v))[1].abs().max() > 0.01


# Normalization


def test_epsilon_collapses_performer_to_a_plain_mean() -> None:
    """At D = 64 and unit variance FAVOR+'s features lie far below 1e-4: adding it leaves the mean of the values."""
    q, k, v = inputs(1, 256, dim=64)
    mechanism = build("performer", dim=64, num_features=266)
    w = mechanism.feature_map.projection
    mean = v.mean(1, keepdim=True).expand_as(v)
    fq, fk = old_favor(q, k, w)
    weights = dots(fq, fk)
    old = weighted(weights / weights.sum(-1, keepdim=True), v)
    ours = mechanism(q, k, v)
    # How far the answers of different queries lie apart, beside what softmax attention makes of them.
    softmax = build("softmax", dim=64)(q, k, v)
    assert old.std(1).mean() < 0.2 * softmax.std(1).mean()
    assert ours.std(1).mean() > 0.5 * softmax.std(1).mean()
    assert (old - mean).abs().mean() < 0.3 * (ours - mean).abs().mean()
    # With the option the old answer is there for old weights.
    same = build("performer", dim=64, num_features=266, epsilon=1e-4)
    same.load_state_dict(mechanism.state_dict())
    torch.testing.assert_close(same(q, k, v), old, atol=1e-5, rtol=1e-4)


def test_clamped_denominator_scales_the_answer() -> None:
    """k ≡ −12, v ≡ 1: a weighted mean of ones is one."""
    q, k, v = torch.zeros(1, 70, 2, 16), torch.full((1, 70, 2, 16), -12.0), torch.ones(1, 70, 2, 16)
    weights = dots(q.softmax(-1), k.exp()).tril()
    old = weighted(weights, v) / weights.sum(-1).clamp(min=1e-3).transpose(1, 2)[..., None]
    assert old.max() < 0.5
    for mechanism in (
        build("linear", feature_map="softmax"),
        build("linear", feature_map="softmax", normalize="feature"),
    ):
        torch.testing.assert_close(mechanism(q, k, v, causal=True), v)
        torch.testing.assert_close(mechanism(q, k, v), v)


def test_projected_keys_grow_with_the_length() -> None:
    """A table initialized by its rank: compressed keys were √(n/rank) times as large as keys."""
    rank, length = 16, 4096
    x = torch.randn(1, length, 1, 8)
    old = torch.einsum("sr,bshd->bhrd", torch.randn(length, rank) * rank**-0.5, x)
    assert old.std() > 10
    assert 0.8 < Projection(rank, length).compress(x).std() < 1.2


def test_shared_projection_ties_keys_to_values() -> None:
    q, k, v = inputs(1, 20)
    mechanism = build("linformer", rank=4, max_length=20, share_projection=True)
    table = mechanism.keys.table[0]
    keys = torch.einsum("sr,bshd->brhd", table, k)
    values = torch.einsum("sr,bshd->brhd", table, v)
    p = (dots(q, keys) / 4).softmax(-1)
    tied, right = weighted(p, keys), weighted(p, values)
    assert (tied - right).abs().max() > 0.1
    torch.testing.assert_close(mechanism(q, k, v), right)


def test_half_precision_error_grows_with_the_length() -> None:
    """Running sums kept in bfloat16 lose every token that is small beside them."""
    length = 2048
    q, k, v = inputs(1, length, heads=1, dim=8, dtype=torch.bfloat16)
    mechanism = build("linear", heads=1, dim=8)
    truth = mechanism(q.double(), k.double(), v.double(), causal=True)
    fq, fk = F.elu(q) + 1, F.elu(k) + 1
    kv, z = torch.zeros(1, 8, 8, dtype=torch.bfloat16), torch.zeros(1, 8, dtype=torch.bfloat16)
    rows = []
    for t in range(length):
        kv, z = kv + fk[0, t, :, :, None] * v[0, t, :, None], z + fk[0, t]
        rows.append((fq[0, t, :, None] @ kv)[:, 0] / (fq[0, t] * z).sum(-1, keepdim=True))
    old = torch.stack(rows)[None]
    late = slice(length - 256, length)
    assert relative_error(old[:, late], truth[:, late]) > 0.05
    ours = mechanism(q, k, v, causal=True)
    assert ours.dtype == torch.bfloat16
    # The last rounding to bfloat16 is all that is left.
    assert relative_error(ours[:, late], truth[:, late]) < 0.004
    assert relative_error(ours[:, late], truth[:, late]) < 2 * relative_error(ours[:, :256], truth[:, :256])


# Windows


def test_exact_window_sees_one_key_too_many() -> None:
    """window=W is W keys, the query's own among them: the next one back changes nothing."""
    q, k, v = inputs(1, 20)
    window, t = 5, 15
    mechanism = build("local", window=window)
    for causal in (False, True):
        out = mechanism(q, k, v, causal=causal)[:, t]
        for distance, seen in ((window - 1, True), (window, False)):
            moved = v.clone()
            moved[:, t - distance] += 5
            assert torch.equal(mechanism(q, k, moved, causal=causal)[:, t], out) != seen
    state = mechanism.new_state(1)
    for step in range(t + 1):
        last, state = mechanism.step(state, *(x[:, step : step + 1] for x in (q, k, v)))
    torch.testing.assert_close(last[:, 0], mechanism(q, k, v, causal=True)[:, t])
    assert state.k.shape[2] == window


@pytest.mark.parametrize("prefix", [4, 8, 12])
def test_block_cache_is_wrong_when_the_length_is_a_multiple_of_the_window(prefix: int) -> None:
    q, k, v = inputs(2, 19)
    mechanism = build("local", window=4, look_back=1)
    parallel = mechanism(q, k, v, causal=True)
    _, state = mechanism.extend(mechanism.new_state(2), *(x[:, :prefix] for x in (q, k, v)))
    for t in range(prefix, 19):
        out, state = mechanism.step(state, *(x[:, t : t + 1] for x in (q, k, v)))
        torch.testing.assert_close(out, parallel[:, t : t + 1])


def test_cache_is_wrong_from_the_second_token() -> None:
    """The only test of the old cache took one step: keys were changed again each time they were read."""
    q, k, v = inputs(2, 30)
    mechanism = build("local", window=7, shared_qk=True)
    parallel = mechanism(q, k, v, causal=True)
    state = mechanism.new_state(2)
    for t in range(30):
        out, state = mechanism.step(state, *(x[:, t : t + 1] for x in (q, k, v)))
        torch.testing.assert_close(out, parallel[:, t : t + 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_normalized_keys_of_zero_or_great_length(causal: bool, dtype: torch.dtype) -> None:
    """In float16 0 / max(|0|, 1e-12) is NaN, and the length of a key of 2e4 is infinite."""
    q, k, v = inputs(2, 11)
    k[:, 3] = 0
    k[:, 5:] *= 2e4 / k[:, 5:].abs().amax()
    mechanism = build("local", window=4, shared_qk=True)
    mask = torch.arange(11) < torch.tensor([[11], [8]])
    exact = mechanism(q.double(), k.double(), v.double(), causal=causal, key_mask=mask)
    out = mechanism(q.to(dtype), k.to(dtype), v.to(dtype), causal=causal, key_mask=mask)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=0.03)


def test_first_blind_spot_bucket_is_all_zeros() -> None:
    q, k, v = inputs(1, 21)
    weights = dots(F.elu(q) + 1, F.elu(k) + 1) * (torch.arange(21) // 8 < torch.arange(21)[:, None] // 8)
    old = weighted(weights / weights.sum(-1, keepdim=True).clamp(min=1e-6), v)
    assert (old[:, :8] == 0).all()
    out = build("linear", blind_spot=8)(q, k, v, causal=True)
    assert (out[:, :8].abs().amax((0, 2, 3)) > 0.01).all()
    torch.testing.assert_close(out[:, :8], build("linear")(q, k, v, causal=True)[:, :8])
    torch.testing.assert_close(out[:, 8:], old[:, 8:])


@pytest.mark.parametrize("length", [1, 7, 63, 65])
def test_lengths_must_divide_by_window_and_blind_spot(length: int) -> None:
    q, k, v = inputs(1, length)
    for mechanism in (
        build("local", window=8),
        build("local", window=8, look_back=1, look_ahead=1),
        build("linear", blind_spot=8),
        build("linformer", rank=5, max_length=67, projection="convolution"),
    ):
        for causal in (False, True):
            out = mechanism(q, k, v, causal=causal)
            assert out.shape == v.shape
            assert out.isfinite().all()


def test_bias_interleaves_heads_when_the_batch_is_larger() -> None:
    """A bias repeated as (heads · batch) was added to scores laid out as (batch · heads)."""
    q, k, v = inputs(3, 14)
    table = torch.randn(2, 4, 8)
    mechanism = build("local", window=4, look_back=1, bias=table)
    for causal in (False, True):
        apart = torch.cat([mechanism(*(x[b : b + 1] for x in (q, k, v)), causal=causal) for b in range(3)])
        torch.testing.assert_close(mechanism(q, k, v, causal=causal), apart)
    assert (build("local", window=4, look_back=1, bias=table.flip(0))(q, k, v) - mechanism(q, k, v)).abs().max() > 0.05


# Overflow


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 12.0), (torch.float32, 90.0), (torch.bfloat16, 90.0)])
def test_causal_exp_overflows(dtype: torch.dtype, size: float) -> None:
    q, k, v = (x.to(dtype) for x in inputs(1, 70))
    k = torch.full_like(k, size)
    assert not k.exp().isfinite().all()
    for options in ({}, {"normalize": "feature"}, {"blind_spot": 4}):
        mechanism = build("linear", feature_map="softmax", **options)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = mechanism(*leaves, causal=True)
        if not options:
            count = torch.arange(1, 71)[None, :, None, None]  # All keys are alike: the mean so far.
            torch.testing.assert_close(out.double(), v.double().cumsum(1) / count, atol=1e-2, rtol=1e-2)
        assert out.isfinite().all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), leaves))


HALF = [torch.float16, torch.bfloat16, torch.float32]
NAMES = ["performer", "linear", "linformer", "local", "softmax"]


def check_finite(name: str, dtype: torch.dtype, scale: int) -> None:
    mechanism = build(name, **({"rank": 4, "max_length": 70} if name == "linformer" else {})).to(dtype)
    q, k, v = inputs(1, 70)
    leaves = [x.to(dtype).requires_grad_() for x in (scale * q, scale * k, v)]
    for causal in (False, True):
        out = mechanism(*leaves, causal=causal)
        assert out.dtype == dtype
        assert out.isfinite().all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.float().square().sum(), leaves))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_gradients_are_not_finite(name: str, dtype: torch.dtype) -> None:
    check_finite(name, dtype, 1)
    check_finite(name, dtype, 10)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", NAMES)
def test_large_inputs_are_not_finite(name: str, dtype: torch.dtype) -> None:
    check_finite(name, dtype, 50)


def test_small_keys_after_a_large_one_vanish() -> None:
    """One large key must not push the keys before it out of the answers that do not see it."""
    q, k, v = inputs(1, 40)
    k[:, 30] = 300
    for mechanism in (build("linear", feature_map="softmax"), build("performer")):
        out = mechanism(q, k, v, causal=True)
        assert torch.equal(out[:, :30], mechanism(*(x[:, :30] for x in (q, k, v)), causal=True))
        ones = mechanism(q, k, torch.ones_like(v), causal=True)
        torch.testing.assert_close(ones, torch.ones_like(v))


@pytest.mark.parametrize("masked", [False, True])
def test_features_far_below_the_others_keep_their_weight(masked: bool) -> None:
    """Efficient Attention in float32: one feature's keys lie 300 below another's, and its softmax is still exact."""
    mechanism = build_mechanism("linear", 1, 4, feature_map="softmax", normalize="feature")
    k = torch.randn(1, 9, 1, 4) + torch.tensor([-200.0, 100.0, 0.0, 0.0])
    q = torch.tensor([200.0, 0.0, 0.0, 0.0]).view(1, 1, 1, 4)
    v = torch.randn(1, 9, 1, 4)
    mask = torch.arange(9)[None] < 6 if masked else None
    n = 6 if masked else 9
    expected = (k[0, :n, 0, 0].softmax(0)[:, None] * v[0, :n, 0]).sum(0)
    torch.testing.assert_close(mechanism(q, k, v, key_mask=mask)[0, 0, 0], expected)
