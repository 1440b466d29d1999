"""Attention over feature maps: the older library's answers where it has any, and right ones where it had none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same, check_gradients_by_name, gradients, leaves, refused
from torch import Tensor

from longspan import build_mechanism
from longspan.models.vision import ImageAttention, ScaledSoftmax, efficient_attention

B, C, HEIGHT, WIDTH, S, H, D, E = 2, 11, 7, 13, 5, 3, 5, 7


def build(raw_queries: bool = False, **options) -> ImageAttention:
    return ImageAttention(C, efficient_attention(H, D, E, raw_queries=raw_queries), **options).double()


def feature_map(batch: int = B, channels: int = C) -> Tensor:
    return torch.randn(batch, channels, HEIGHT, WIDTH, dtype=torch.float64)


def by_definition(m: ImageAttention, x: Tensor, context: Tensor | None, raw_queries: bool) -> Tensor:
    """Efficient Attention written out, with a map-sized context convolved as a map of height one."""
    q = m.to_q(x)
    size = q.shape[2:]
    pieces = []
    for project, dim in ((m.to_k, D), (m.to_v, E)):
        piece = project(x).reshape(B, H, dim, -1)
        if context is not None:
            margin = m.kernel_size // 2
            line = F.conv2d(context.mT[:, :, None], project.weight, project.bias, padding=margin)
            piece = torch.cat([piece, line.reshape(B, H, dim, -1)], 3)
        pieces.append(piece)
    k, v = pieces
    q, k = q.reshape(B, H, D, -1) * D**-0.25, (k * D**-0.25).softmax(-1)
    q = q if raw_queries else q.softmax(2)
    out = torch.einsum("bhdn,bhds,bhes->bhen", q, k, v)
    return m.to_out(out.reshape(B, H * E, *size))


@pytest.mark.parametrize("with_context", [False, True], ids=["map", "context"])
@pytest.mark.parametrize("raw_queries", [False, True], ids=["softmaxed", "raw"])
@pytest.mark.parametrize(
    ("kernel_size", "stride", "padding"),
    [(1, 1, 0), (3, 1, 1), (1, 2, 0), (3, 2, 1), (3, 2, 0), (5, 3, 2)],
)
def test_definition(kernel_size: int, stride: int, padding: int, raw_queries: bool, with_context: bool) -> None:
    m = build(raw_queries, out_channels=17, kernel_size=kernel_size, stride=stride, padding=padding)
    x = feature_map().requires_grad_()
    context = torch.randn(B, S, C, dtype=torch.float64, requires_grad=True) if with_context else None
    out, expected = m(x, context), by_definition(m, x, context, raw_queries)
    inner = [(side + 2 * padding - kernel_size) // stride + 1 for side in (HEIGHT, WIDTH)]
    assert out.shape == (B, 17, *(side + 2 * padding - kernel_size + 1 for side in inner))
    assert_same(out, expected)
    of = leaves(m, x=x, **({} if context is None else {"context": context}))
    check_gradients_by_name(gradients(out, of), gradients(expected, of))


@pytest.mark.parametrize("with_context", [False, True], ids=["map", "context"])
@pytest.mark.parametrize("norm_queries", [True, False])
@pytest.mark.parametrize(("kernel_size", "padding"), [(1, 0), (3, 1), (5, 2)])
def test_older_library(kernel_size: int, padding: int, norm_queries: bool, with_context: bool) -> None:
    older = pytest.importorskip(
        "linear_attention_transformer.images", reason="the older package is not installed ([parity])"
    )
    their_options = {"chan_out": 17, "kernel_size": kernel_size, "padding": padding, "norm_queries": norm_queries}
    # Its contexts need value_dim = key_dim.
    theirs = older.ImageLinearAttention(C, heads=H, key_dim=D, value_dim=D, **their_options).double()
    mechanism = efficient_attention(H, D, raw_queries=not norm_queries)
    our_options = {"out_channels": 17, "kernel_size": kernel_size, "padding": padding, "context_scale": D**0.25}
    ours = ImageAttention(C, mechanism, **our_options).double()
    ours.load_state_dict(theirs.state_dict())
    x = feature_map()
    context = torch.randn(B, S, C, dtype=torch.float64) if with_context else None
    assert_same(ours(x, context), theirs(x, None if context is None else context.mT))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("softmax", {}),
        ("softmax", {"num_kv_heads": 1}),
        ("linear", {}),
        ("linear", {"num_kv_heads": 2, "feature_map": "softmax", "normalize": "feature"}),
        ("performer", {}),
        ("linformer", {"rank": 4, "max_length": 131, "num_kv_heads": 2}),
    ],
)
def test_any_cross_mechanism(name: str, options: dict) -> None:
    """With 1 × 1 kernels the layer is attention over the list of places, context last."""
    mechanism = build_mechanism(name, 6, D, value_dim=E, **options)
    m = ImageAttention(C, mechanism, out_channels=17, context_dim=19).double().eval()
    x, context = feature_map(), torch.randn(B, S, 19, dtype=torch.float64)
    places = x.flatten(2).mT

    def project(layer, x: Tensor) -> Tensor:
        return F.linear(x, layer.weight.flatten(1), layer.bias)

    k = torch.cat([project(m.to_k, places), m.context_to_k(context)], 1).unflatten(2, (-1, D))
    v = torch.cat([project(m.to_v, places), m.context_to_v(context)], 1).unflatten(2, (-1, E))
    out = mechanism(project(m.to_q, places).unflatten(2, (-1, D)), k, v)
    expected = project(m.to_out, out.flatten(2)).mT.unflatten(2, (HEIGHT, WIDTH))
    assert_same(m(x, context), expected)


@pytest.mark.parametrize("context_dim", [None, 19])
@pytest.mark.parametrize("kernel_size", [1, 3])
def test_masked_context_is_a_shorter_one(kernel_size: int, context_dim: int | None) -> None:
    m = build(kernel_size=kernel_size, padding=kernel_size // 2, context_dim=context_dim)
    x, context = feature_map(), torch.randn(B, S, context_dim or C, dtype=torch.float64)
    padded = torch.cat([context, context.new_full((B, 4, context.shape[2]), float("nan"))], 1)
    mask = torch.arange(S + 4).expand(B, -1) < S
    expected, got = m(x, context), m(x, padded, context_mask=mask)
    assert_same(got, expected)
    check_gradients_by_name(gradients(got, leaves(m)), gradients(expected, leaves(m)))
    assert_same(m(x, padded, context_mask=mask & False), m(x))


def test_even_kernels_and_contexts_shorter_than_them() -> None:
    m = build(kernel_size=4, stride=2, padding=2)
    assert m(feature_map(), torch.randn(B, 1, C, dtype=torch.float64)).shape == (B, C, 5, 8)
    assert m(feature_map(), torch.randn(B, 0, C, dtype=torch.float64)).shape == (B, C, 5, 8)


def test_large_inputs_and_low_precision() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        out = build().to(dtype)(feature_map().to(dtype) * 50)
        assert out.dtype == dtype
        assert out.isfinite().all()


def test_defaults() -> None:
    m = ImageAttention(C)
    assert (m.mechanism.num_heads, m.mechanism.head_dim, m.mechanism.value_dim) == (8, 64, 64)
    assert m(torch.randn(1, C, 3, 2)).shape == (1, C, 3, 2)


def test_channels_last_and_no_batch() -> None:
    m, x = build(kernel_size=3, padding=1), feature_map()
    assert_same(m(x.contiguous(memory_format=torch.channels_last)), m(x))
    assert m(x[:0]).shape == (0, C, HEIGHT, WIDTH)


def test_compiles() -> None:
    m, x, context = build(stride=2), feature_map(), torch.randn(B, S, C, dtype=torch.float64)
    assert_same(torch.compile(m, fullgraph=True, backend="aot_eager")(x, context), m(x, context))


def test_raw_queries_need_feature_normalizing() -> None:
    raw = ScaledSoftmax(raw_queries=True)
    assert raw.num_features(D) == D
    with refused("exponentials", 'normalize="query" or "feature"'):
        build_mechanism("linear", H, D, feature_map=raw, normalize="none")


def test_refusals() -> None:
    with refused("LocalAttention has windows along one line", "linformer or softmax"):
        ImageAttention(C, build_mechanism("local", H, D))
    with refused("must be a Mechanism", "build_mechanism", "got 'linear'"):
        ImageAttention(C, "linear")
    with refused("padding 0 or more, got 1, 0, 0"):
        ImageAttention(C, stride=0)
    m, x = build(kernel_size=5, padding=1), feature_map()
    with refused("x must be (B, 11, H, W), got (2, 7, 13)"):
        m(x[:, 0])
    with refused("a feature map of 2 × 13 with padding 1 is smaller than the kernel (5)"):
        m(x[:, :, :2])
    with refused("a feature map after the stride of 2 × 3 with padding 0 is smaller than the kernel (3)"):
        build(kernel_size=3, stride=4)(x)
    with refused("context must be (B, S, 11) with B = 2, got (2, 11, 5); set context_dim"):
        m(x, torch.randn(B, C, S))
    with refused("context_mask needs a context"):
        m(x, context_mask=torch.ones(B, S, dtype=torch.bool))
    with refused("context_mask must be (B, S) = (2, 5) bool", "got (2, 5) torch.int64"):
        m(x, torch.randn(B, S, C), context_mask=torch.ones(B, S, dtype=torch.int64))
