"""faithful=True: the original's numbers where a correction changes what a trained model answers, one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from older import assert_close, original
from test_compat_local import OPTIONS, B, D, H, W, leaves
from test_compat_local_layer import LAYER, MHA, right_padded, shaken, vectors
from test_compat_local_transformer import MODEL, TRANSFORMERS, Mixer, tokens
from torch import Tensor, nn

from longspan.compat import faithful
from longspan.compat.local_attention import LocalAttention, LocalMHA, LocalTransformer

N = 19  # no multiple of the window


def masks(n: int = N) -> dict[str, Tensor | None]:
    holes = torch.rand(B, n, generator=torch.Generator().manual_seed(1)) < 0.3
    left = right_padded(n).flip(1)
    nothing = torch.zeros(B, n, dtype=torch.bool)
    return {"no mask": None, "holes": holes, "left": left, "right": right_padded(n), "nothing": nothing}


def layers(name: str, arguments: dict[str, Any]) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The original, ours faithful and ours corrected, with the same weights, in eval mode."""
    random.seed(3)
    theirs = shaken(getattr(original("local_attention"), name)(**arguments)).eval()
    cls = {"LocalAttention": LocalAttention, "LocalMHA": LocalMHA, "LocalTransformer": LocalTransformer}[name]
    ours = [cls(**arguments, faithful=faithful).eval() for faithful in (True, False)]
    for module in ours:
        module.load_state_dict(theirs.state_dict())
    return theirs, *ours


@pytest.mark.parametrize("name", OPTIONS)
def test_attention(name: str) -> None:
    """Every slot: queries that see no key average hidden values, and padding by autopad is a key."""
    theirs, ours, _ = layers("LocalAttention", {"window_size": W, "autopad": True, **OPTIONS[name]})
    q, k, v = (x.detach() for x in leaves(B, H, N, D))
    for what, mask in masks().items():
        assert_close(ours(q, k, v, mask=mask), theirs(q, k, v, mask=mask), what, tolerance=1e-6)


@pytest.mark.parametrize("exact", [True, False])
def test_padding_by_autopad_is_attended_to(exact: bool) -> None:
    theirs, ours, corrected = layers("LocalMHA", LAYER | {"exact_windowsize": exact})
    x = vectors(N)
    assert_close(ours(x), theirs(x), tolerance=1e-6)
    assert (corrected(x) - theirs(x)).abs().max() > 1e-3


def test_queries_that_see_no_key_average_what_is_hidden() -> None:
    theirs, ours, corrected = layers("LocalAttention", {"window_size": W, "causal": True, "autopad": True})
    q, k, v = (x.detach() for x in leaves(B, H, N, D))
    hidden = torch.zeros(B, N, dtype=torch.bool)
    assert_close(ours(q, k, v, mask=hidden), theirs(q, k, v, mask=hidden), tolerance=1e-6)
    assert not corrected(q, k, v, mask=hidden).any()


def test_exact_windows_keep_their_size_at_the_call() -> None:
    options = {"window_size": 4, "dim": D, "use_xpos": True, "exact_windowsize": True, "causal": True}
    theirs, ours, corrected = layers("LocalAttention", options)
    q, k, v = (x.detach() for x in leaves(B, H, 24, D))
    right = theirs(q, k, v, window_size=8)
    assert_close(ours(q, k, v, window_size=8), right, tolerance=1e-6)
    assert (corrected(q, k, v, window_size=8) - right).abs().max() > 1e-3


@pytest.mark.parametrize("heads", [1, H])
def test_bias(heads: int) -> None:
    theirs, ours, _ = layers("LocalAttention", {"window_size": W, "autopad": True, "dim": D})
    q, k, v = (x.detach() for x in leaves(B, H, N, D))
    bias = torch.randn(heads, W, 3 * W)
    for what, mask in masks().items():
        assert_close(ours(q, k, v, mask=mask, attn_bias=bias), theirs(q, k, v, mask=mask, attn_bias=bias), what, 1e-6)


def test_gradients() -> None:
    theirs, ours, _ = layers("LocalMHA", LAYER | {"prenorm": True})
    found = []
    for module in (theirs, ours):
        x = vectors(N).requires_grad_()
        module(x, mask=masks()["holes"]).square().sum().backward()
        found.append(x.grad)
    assert_close(found[1], found[0], tolerance=1e-6)


@pytest.mark.parametrize("name", MHA)
def test_layer_and_its_cache(name: str) -> None:
    """Masks by slot, left padding included; the cache, whose keys are rotated anew at each token."""
    theirs, ours, corrected = layers("LocalMHA", LAYER | MHA[name])
    x = vectors(N)
    for what, mask in masks().items():
        assert_close(ours(x, mask=mask), theirs(x, mask=mask), what, tolerance=1e-6)
    if not MHA[name].get("causal"):
        return
    caches = [module(x[:, :9], return_cache=True)[1] for module in (theirs, ours)]
    differs = False
    for t in range(9, N):
        outs = []
        for i, module in enumerate((theirs, ours)):
            out, caches[i] = module(x[:, t : t + 1], cache=caches[i], return_cache=True)
            outs.append(out)
        assert_close(outs[1], outs[0], f"token {t}", tolerance=2e-6)
        differs |= bool((outs[0] - corrected(x)[:, t : t + 1]).abs().max() > 1e-3)
    assert differs != (name == "bare")


@pytest.mark.parametrize("name", [name for name in TRANSFORMERS if "vectors" not in name])
def test_transformer(name: str) -> None:
    arguments = MODEL | TRANSFORMERS[name]
    if "global_attn_layer" in arguments:
        arguments["global_attn_layer"] = Mixer()
    theirs, ours, corrected = layers("LocalTransformer", arguments)
    x = tokens(N)
    for what, mask in masks().items():
        assert_close(ours(x, mask=mask), theirs(x, mask=mask), what, tolerance=2e-6)
    left = masks()["left"]
    assert left is not None
    mask = left if arguments.get("causal", True) else None  # both ways, padding by autopad is attended to
    difference = (corrected(x, mask=mask) - theirs(x, mask=mask)).masked_fill(~left[..., None], 0)
    assert difference.abs().max() > 1e-3
    loss = theirs(x, mask=left[:, :-1], return_loss=True)
    assert_close(ours(x, mask=left[:, :-1], return_loss=True), loss)
    if arguments.get("causal", True):
        for use_kv_cache in (True, False):
            drawn = []
            for module in (theirs, ours):
                torch.manual_seed(5)
                drawn.append(module.generate(tokens(7), 12, filter_thres=0.5, use_kv_cache=use_kv_cache))
            assert torch.equal(*drawn), f"use_kv_cache={use_kv_cache}"
    with pytest.raises(ValueError, match="a faithful model computes what no longspan model does"):
        ours.to_longspan()


def test_generation_past_max_seq_len() -> None:
    """The original goes on with its cache, at the last position."""
    theirs, ours, _ = layers("LocalTransformer", MODEL)
    assert torch.equal(
        ours.generate(tokens(37), 7, temperature=0.0, filter_thres=0.5),
        theirs.generate(tokens(37), 7, temperature=0.0, filter_thres=0.5),
    )


def test_attention_dropout_is_ignored() -> None:
    theirs, ours, corrected = layers("LocalTransformer", MODEL | {"attn_dropout": 0.5})
    x = tokens(20)
    assert_close(ours.train()(x), theirs.train()(x), tolerance=2e-6)
    assert (corrected.train()(x) - theirs(x)).abs().max() > 1e-3


def test_inside_a_block_models_are_faithful_unless_they_say_otherwise() -> None:
    with faithful():
        built = [LocalAttention(W), LocalMHA(**LAYER), LocalTransformer(**MODEL), LocalMHA(**LAYER, faithful=False)]
    assert [module.faithful for module in built] == [True, True, True, False]
    assert all(m.faithful for m in built[2].modules() if isinstance(m, LocalMHA | LocalAttention))
    assert not built[3].attn_fn.faithful
    assert not LocalTransformer(**MODEL).faithful
