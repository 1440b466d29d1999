"""Options of `linformer`, as in `test_options`."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from option_cases import (
    B,
    D,
    E,
    H,
    T,
    assert_same,
    build,
    check_dropout,
    checks,
    differ,
    inputs,
    option_test,
    softmax_attention,
)
from torch import Tensor, nn

from longspan import Projection, build_mechanism
from longspan.mechanisms import linformer as linformer_module


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
        assert_same(mechanism(q, k, v), linformer(q, k, v, mechanism.keys.table[0], mechanism.values.table[0]))
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
    assert_same(mechanism(q, k[:, :11], v[:, :11]), linformer(q, k[:, :11], v[:, :11], e, f))


@checks("linformer", "projection")
def _() -> None:
    q, k, v = inputs()
    learned = build("linformer", rank=4, max_length=T)
    assert {name for name, _ in learned.named_parameters()} == {"keys.table", "values.table"}
    random = build("linformer", rank=4, max_length=T, projection="random")
    assert list(random.parameters()) == []
    assert {"keys.table", "values.table"} <= set(random.state_dict()), "not trained, but saved"
    assert_same(random(q, k, v), linformer(q, k, v, random.keys.table[0], random.values.table[0]))

    convolution = build("linformer", rank=5, max_length=20, projection="convolution")
    assert convolution.keys.kernel.shape == (4, D, D)

    def strided(x: Tensor, kernel: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, 0, 0, 20 - T))
        flat = x.permute(0, 2, 3, 1).flatten(0, 1)
        rows = F.conv1d(flat, kernel.permute(2, 1, 0), stride=4)
        return rows.view(B, H, -1, 5).permute(0, 3, 1, 2)

    compressed = strided(k, convolution.keys.kernel), strided(v, convolution.values.kernel)
    assert_same(convolution(q, k, v), softmax_attention(q, *compressed))

    shared = Projection(4, T).double()
    mechanism = build("linformer", projection=shared)
    assert_same(mechanism(q, k, v), linformer(q, k, v, shared.table[0], shared.table[0]))


@checks("linformer", "share_projection")
def _() -> None:
    apart = build("linformer", rank=4, max_length=T)
    shared = build("linformer", rank=4, max_length=T, share_projection=True)
    assert len(list(apart.parameters())) == 2
    assert len(list(shared.parameters())) == 1
    differ(apart.keys.table, apart.values.table)
    q, k, v = inputs()
    assert_same(shared(q, k, v), linformer(q, k, v, shared.keys.table[0], shared.keys.table[0]))


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
            assert_same(out[:, :, h : h + 1], one(*(x[:, :, h : h + 1] for x in (q, k, v)), causal=causal))
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
            assert_same(out[:, :, h : h + 1], one(*(x[:, :, h : h + 1] for x in (q, k, v)), causal=causal))


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
    assert_same(out, softmax_attention(q, *half))
    k[:, 16:], v[:, 16:] = 7, 7  # What is left over counts for nothing.
    assert_same(mechanism(q, k, v), out)
    with pytest.raises(ValueError, match="whole_stretches is for a convolution"):
        build("linformer", rank=4, max_length=T, whole_stretches=True)


@checks("linformer", "periodic")
def _() -> None:
    q, k, v = inputs()
    mechanism = build("linformer", rank=4, max_length=6, periodic=True)
    e, f = (x.table[0].repeat(3, 1)[:T] / 3 for x in (mechanism.keys, mechanism.values))  # Three periods have begun.
    assert_same(mechanism(q, k, v), linformer(q, k, v, e, f))
    for t in (0, 5, 6, 12, 16):
        part = mechanism(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1])
        assert_same(mechanism(q, k, v, causal=True)[:, t : t + 1], part)
    # A sequence repeated whole is compressed to the same rows.
    twice = mechanism(q[:, :6], k[:, :6].repeat(1, 2, 1, 1), v[:, :6].repeat(1, 2, 1, 1))
    assert_same(twice, mechanism(q[:, :6], k[:, :6], v[:, :6]))


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
    assert_same(mechanism(q, k, v), softmax_attention(q, *rows))
    assert_same(mechanism(q, k, v, causal=True)[:, -1], softmax_attention(q, *rows)[:, -1])


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


@checks("linformer", "keep_slots")
def _() -> None:
    q, k, v = inputs()
    mask = torch.rand(B, T) > 0.4
    mask[0] = torch.arange(T) >= 6  # left-padded
    mechanism = build("linformer", rank=4, max_length=T, keep_slots=True)
    hidden = [x.masked_fill(~mask[:, :, None, None], 0) for x in (k, v)]
    expected = linformer(q, *hidden, mechanism.keys.table[0], mechanism.values.table[0])
    assert_same(mechanism(q, k, v, key_mask=mask), expected)
    state = mechanism.write(mechanism.new_state(B, dtype=q.dtype), k, v, key_mask=mask)
    assert_same(mechanism.read(state, q), expected)
    windows = build("linformer", rank=4, max_length=20, projection="convolution", keep_slots=True)
    with pytest.raises(ValueError, match=r"a window of 5 tokens that are all hidden.*pad on the right"):
        windows.write(windows.new_state(B, dtype=q.dtype), k, v, key_mask=mask)
    written = windows.write(windows.new_state(B, dtype=q.dtype), k, v, key_mask=(right := mask.flip(1) | mask[1]))
    assert_same(windows.read(written, q), windows(q, k, v, key_mask=right))
    part = {"mechanism": "linformer", "num_heads": H, "keep_slots": True}
    with pytest.raises(ValueError, match="keep_slots is for a Linformer with all heads"):
        build("split", parts=[part])


test_option = option_test(__name__)


def test_sums_wider_than_the_kernels_are_computed_in_parts() -> None:
    q, k, v = torch.randn(2, 17, 3, 11), torch.randn(2, 17, 3, 11), torch.randn(2, 17, 3, 7)
    before = torch.randn(2, 3, 11, 7)
    for found, expected in zip(
        linformer_module._prefix_products(q, k, v, before, 4),
        linformer_module._prefix_products(q, k, v, before),
        strict=True,
    ):
        torch.testing.assert_close(found, expected)
