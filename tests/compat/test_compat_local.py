"""local-attention's layers beside ours: the same names, and the same answers where theirs are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from older import assert_close, assert_names, assert_parity, original, recorded
from torch import Tensor

from longspan.compat.local_attention import DynamicPositionBias, LocalAttention, LocalMHA, LocalTransformer
from longspan.compat.local_attention import rotary as our_rotary
from longspan.compat.local_attention.transformer import FeedForward

B, H, N, D, W, DIM = 2, 3, 24, 10, 8, 13

MODEL = {"num_tokens": 20, "max_seq_len": 64, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8}
MODEL |= {"local_attn_window_size": 8}
VARIANTS = {
    "LocalAttention[dim=None]": lambda: LocalAttention(8),
    "LocalAttention[dim=8]": lambda: LocalAttention(8, dim=8),
    "LocalMHA": lambda: LocalMHA(dim=32, window_size=8, heads=4, dim_head=8),
    "LocalMHA[prenorm,qk_rmsnorm,gate]": lambda: LocalMHA(
        dim=32, window_size=8, heads=4, dim_head=8, prenorm=True, qk_rmsnorm=True, gate_values_per_head=True
    ),
    "LocalTransformer": lambda: LocalTransformer(**MODEL),
    "DynamicPositionBias": lambda: DynamicPositionBias(dim=8, heads=4),
    "LocalTransformer[streams1]": lambda: LocalTransformer(**MODEL, num_residual_streams=1),
    "LocalTransformer[xpos]": lambda: LocalTransformer(**MODEL, use_xpos=True),
    "LocalTransformer[dynbias]": lambda: LocalTransformer(**MODEL, use_dynamic_pos_bias=True),
    "LocalTransformer[qk_rmsnorm]": lambda: LocalTransformer(**MODEL, qk_rmsnorm=True),
    "LocalTransformer[num_tokens_none]": lambda: LocalTransformer(**MODEL | {"num_tokens": None}),
}


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_names_and_shapes(variant: str) -> None:
    assert_names(VARIANTS[variant](), f"local.{variant}")


def test_no_variant_is_left_out() -> None:
    assert {name.removeprefix("local.") for name in recorded() if name.startswith("local.")} == set(VARIANTS)


def leaves(*shape: int, number: int = 3, seed: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).requires_grad_() for _ in range(number)]


def both(arguments: dict[str, Any], shape: tuple[int, ...] = (B, H, N, D), **call: Any) -> None:
    """LocalAttention of the same inputs, and their gradients."""
    theirs = original("local_attention").LocalAttention(**arguments).eval()

    def run(module: torch.nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        q, k, v = leaves(*shape)
        return module(q, k, v, **call), {"q": q, "k": k, "v": v}

    assert_parity(theirs, LocalAttention(**arguments).eval(), run)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "rotary": {"dim": D},
    "rotary causal": {"dim": D, "causal": True},
    "rel_pos_emb_config": {"rel_pos_emb_config": (D, H), "causal": True},
    "no rotary": {"dim": D, "use_rotary_pos_emb": False, "causal": True},
    "far back": {"look_backward": 2, "causal": True, "dim": D},
    "no look": {"look_backward": 0, "look_forward": 0, "dim": D},
    "far ahead": {"look_backward": 0, "look_forward": 2, "dim": D},
    "shared": {"shared_qk": True, "causal": True, "dim": D},
    "shared both ways": {"shared_qk": True},
    "exact": {"exact_windowsize": True, "causal": True, "dim": D},
    "exact both ways": {"exact_windowsize": True, "dim": D},
    "exact far": {"exact_windowsize": True, "look_backward": 2, "look_forward": 0},
    "scale": {"scale": 0.7, "causal": True},
    "xpos": {"use_xpos": True, "dim": D, "causal": True},
    "xpos both ways": {"use_xpos": True, "dim": D, "xpos_scale_base": 5},
    "xpos exact": {"use_xpos": True, "dim": D, "exact_windowsize": True, "causal": True},
    "xpos without dim": {"use_xpos": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_attention(name: str) -> None:
    both({"window_size": W, **OPTIONS[name]})


@pytest.mark.parametrize("name", OPTIONS)
def test_attention_with_a_mask_that_has_holes(name: str) -> None:
    """Slots count, hidden or not; every query still sees a key."""
    mask = torch.rand(B, N, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[:, ::2] = True
    if name == "exact both ways" or OPTIONS[name].get("look_backward") == 0:
        mask = torch.ones_like(mask)
    if OPTIONS[name].get("causal") or OPTIONS[name].get("look_forward") == 0:
        mask[:, 0] = True
    both({"window_size": W, **OPTIONS[name]}, mask=mask)
    both({"window_size": W, **OPTIONS[name]}, input_mask=mask)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("exact", [True, False])
def test_three_dimensions_and_a_mask_of_batch_one(causal: bool, exact: bool) -> None:
    arguments = {"window_size": W, "causal": causal, "exact_windowsize": exact, "autopad": True}
    mask = torch.ones(1, N - 3, dtype=torch.bool)
    mask[:, -4:] = False
    both(arguments, (6, N - 3, D), mask=mask)


@pytest.mark.parametrize("n", [2, W - 1, W + 1, 3 * W - 2])
def test_autopad(n: int) -> None:
    """Any length; both ways with a mask, without which the original attends to its own padding."""
    both({"window_size": W, "causal": True, "autopad": True, "dim": D}, (B, H, n, D))
    mask = torch.ones(B, n, dtype=torch.bool)
    for exact in (True, False):
        both({"window_size": W, "autopad": True, "dim": D, "exact_windowsize": exact}, (B, H, n, D), mask=mask)
    q, k, v = leaves(B, H, n, D)
    layer = LocalAttention(W, causal=True)
    assert torch.equal(layer(q, k, v), LocalAttention(W, causal=True, autopad=True)(q, k, v))


@pytest.mark.parametrize(
    ("causal", "exact", "ahead"), [(True, False, 0), (True, True, 0), (False, False, 1), (False, True, 1)]
)
@pytest.mark.parametrize("heads", [1, H])
def test_bias(causal: bool, exact: bool, ahead: int, heads: int) -> None:
    arguments = {"window_size": W, "causal": causal, "exact_windowsize": exact, "dim": D}
    bias = torch.randn(heads, W, (2 + ahead) * W, generator=torch.Generator().manual_seed(2))
    both(arguments, attn_bias=bias)
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[1, -5:] = False
    both(arguments, attn_bias=bias, mask=mask)
    # A mask for each head.
    both(arguments, (B * H, N, D), attn_bias=bias, mask=mask.repeat_interleave(H, 0))


def test_window_size_at_the_call() -> None:
    arguments = {"window_size": 4, "use_xpos": True, "dim": D, "xpos_scale_base": 8}
    for causal in (True, False):
        both(arguments | {"causal": causal}, window_size=12)
    with pytest.raises(ValueError, match="another window_size needs use_xpos=True"):
        LocalAttention(4, dim=D)(*leaves(B, H, N, D), window_size=8)


@pytest.mark.parametrize("causal", [True, False])
def test_long_rows_in_large_windows(causal: bool) -> None:
    """Angles of hundreds of tokens are rounded: the original is 1e-5 from the truth there, we are nearer."""
    q, k, v = (x.detach() for x in leaves(1, 1, 2048, 64))
    theirs = original("local_attention").LocalAttention(512, dim=64, causal=causal)
    ours = LocalAttention(512, dim=64, causal=causal)
    narrow = [layer(q, k, v) for layer in (theirs, ours)]
    theirs.double().rel_pos.inv_freq = 10000.0 ** (-torch.arange(0, 64, 2).double() / 64)
    truth = theirs(q.double(), k.double(), v.double())
    assert_close(ours(q.double(), k.double(), v.double()), truth, tolerance=1e-12)
    errors = [float((out - truth).abs().max() / truth.abs().max()) for out in narrow]
    assert errors[1] < min(errors[0], 1e-5)


def test_what_the_original_gets_wrong() -> None:
    """Both answers: the original's, asserted, and the right one."""
    cls = original("local_attention").LocalAttention
    q, k, v = (x.detach() for x in leaves(B, H, N, D))
    # A row that sees no key: the original averages what is hidden, padding of −1 included.
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[0, :W] = False
    theirs, ours = (layer(W, causal=True)(q, k, v, mask=mask)[0, :, 0] for layer in (cls, LocalAttention))
    assert_close(theirs, (v[0, :, :W].sum(1) - W) / (2 * W))
    assert torch.equal(ours, torch.zeros(H, D))
    # Both ways without a mask: the original sees the zeros it padded with.
    q, k, v = (x[:, :, :13] for x in (q, k, v))
    theirs, ours = (layer(W, autopad=True)(q, k, v) for layer in (cls, LocalAttention))
    right = (q @ k.mT * D**-0.5).softmax(-1) @ v
    assert_close(ours, right)
    assert (theirs - right).abs().max() > 0.05
    # bfloat16 with rotary positions.
    half = [x.bfloat16() for x in (q, k, v)]
    with pytest.raises(RuntimeError, match="dtype"):
        cls(W, autopad=True, dim=D, causal=True)(*half)
    ours = LocalAttention(W, dim=D, causal=True)(*half)
    assert ours.dtype == torch.bfloat16
    assert_close(ours.float(), LocalAttention(W, dim=D, causal=True)(q, k, v), tolerance=0.03)


def test_padding_may_hold_anything() -> None:
    q, k, v = (x.detach() for x in leaves(B, H, N, D))
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[:, 17:] = False
    layer = LocalAttention(W, dim=D)
    short = layer(*(x[:, :, :17] for x in (q, k, v)))
    for x in (k, v):
        x[:, :, 17:] = float("nan")
    assert_close(layer(q, k, v, mask=mask)[:, :, :17], short)


def test_dropout_of_the_weights() -> None:
    v = torch.ones(1, 1, 400, 1)
    layer = LocalAttention(20, causal=True, dropout=0.4).train()
    out = layer(torch.zeros(1, 1, 400, 4), torch.zeros(1, 1, 400, 4), v)
    assert 0.9 < float(out.mean()) < 1.1
    assert float(out.std()) > 0.05
    assert_close(layer.eval()(torch.zeros(1, 1, 400, 4), torch.zeros(1, 1, 400, 4), v), v)


def test_errors_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="look_forward is 1, but causal attention cannot look forward"):
        LocalAttention(W, causal=True, look_forward=1)
    q, k, v = leaves(B, H, N, D)
    with pytest.raises(ValueError, match="dim is 8, but q and k have 10 features"):
        LocalAttention(W, dim=8)(q, k, v)
    with pytest.raises(ValueError, match=r"mask must be \(b, n\) with n = 24, got \(2, 23\)"):
        LocalAttention(W)(q, k, v, mask=torch.ones(B, N - 1, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"sequences \(6\) must be a multiple of the rows of the mask \(5\)"):
        LocalAttention(W)(q, k, v, mask=torch.ones(5, N, dtype=torch.bool))
    with pytest.raises(TypeError, match="window"):
        LocalAttention(W, window=3)
    for given in ({"window_size": 0}, {"window_size": W, "look_backward": -1}, {"window_size": W, "look_forward": -1}):
        with pytest.raises(ValueError, match="window_size must be at least 1, look_backward and look_forward at least"):
            LocalAttention(**given)
    with pytest.raises(ValueError, match="need an even dim, got 5"):
        LocalAttention(W, dim=5)


@pytest.mark.parametrize("name", ["k", "v"])
def test_keys_and_values_are_as_many_as_queries(name: str) -> None:
    """The original fails on them too; we say why."""
    q, k, v = (x.detach() for x in leaves(B, H, 2 * N, D))
    q, k, v = q[:, :, :N], k if name == "k" else k[:, :, :N], v if name == "v" else v[:, :, :N]
    theirs = original("local_attention").LocalAttention(W)
    with pytest.raises(RuntimeError, match="size"):
        theirs(q, k, v)
    wrong = rf"{name} must have as many sequences and tokens as q, got {name} \(2, 3, 48, 10\) and q \(2, 3, 24, 10\)"
    with pytest.raises(ValueError, match=wrong):
        LocalAttention(W)(q, k, v)
    with pytest.raises(ValueError, match="same number of features, got 10 and 9"):
        LocalAttention(W)(q, k[:, :, :N, :9], v[:, :, :N])


def test_keys_and_values_of_one_sequence_serve_all_queries() -> None:
    q, k, v = (x.detach() for x in leaves(B, H, N, D))
    k, v = k[0, 0], v[0, 0]
    for mask in (None, torch.arange(N).expand(B, N) > 2):
        theirs, ours = (
            cls(W)(q, k, v, mask=mask) for cls in (original("local_attention").LocalAttention, LocalAttention)
        )
        assert_close(ours, theirs)


@pytest.mark.parametrize("use_xpos", [False, True])
def test_rotary_by_itself(use_xpos: bool) -> None:
    theirs = original("local_attention.rotary")
    q, k = (x.detach() for x in leaves(B, H, W, D, number=2))
    longer = torch.cat([k, k], 2)
    answers = []
    for module in (theirs, our_rotary):
        embedding = module.SinusoidalEmbeddings(D, use_xpos=use_xpos, scale_base=4)
        freqs, scale = embedding(longer)
        answers.append((embedding.inv_freq, freqs, scale, *module.apply_rotary_pos_emb(q, longer, freqs, scale=scale)))
    for mine, yours in zip(answers[1], answers[0], strict=True):
        assert_close(mine, yours)
    assert_close(our_rotary.rotate_half(q), theirs.rotate_half(q))
    assert_close(
        our_rotary.apply_rotary_pos_emb(q, longer, freqs)[0], our_rotary.apply_rotary_pos_emb(q, q, freqs[W:])[0]
    )
    with pytest.raises(ValueError, match="use_xpos needs scale_base"):
        our_rotary.SinusoidalEmbeddings(D, use_xpos=True)


def test_feed_forward_and_position_bias() -> None:
    transformer = original("local_attention.transformer")

    def run(module: torch.nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        (x,) = leaves(B, N, DIM, number=1)
        return module(x), {"x": x}

    assert_parity(transformer.FeedForward(DIM, mult=3), FeedForward(DIM, mult=3), run)
    assert_parity(
        transformer.DynamicPositionBias(dim=7, heads=H),
        DynamicPositionBias(dim=7, heads=H),
        lambda module: (module(5, 11), {}),
    )
    with pytest.raises(ValueError, match="at least that of queries, i, got i = 5 and j = 3"):
        DynamicPositionBias(dim=7, heads=H)(5, 3)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"exact_windowsize": True}, {"dim": 4}, {"faithful": True}])
def test_no_tokens(options):
    q, v = torch.randn(2, 3, 0, 4), torch.randn(2, 3, 0, 5)
    for mask in (None, torch.ones(2, 0).bool()):
        assert LocalAttention(5, **options)(q, q, v, mask=mask).shape == v.shape
