"""Programs in the manner of projects that use local-attention, with the original and with ours: the same numbers.

Each function gets the library as an argument, builds a small model of the project's kind and returns its output. The
kinds: neural audio codecs (audiolm-pytorch and its descendants), byte-level and hierarchical transformers
(simple-hierarchical-transformer, fast-weight memories), character encoders, long-context patches of Llama, mixed
global and local heads (routing transformers, Reformer, Performer, linear attention), conditional computation (CoLT5),
and vision backbones.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from older import assert_close, original
from torch import Tensor, nn

import longspan.compat.local_attention as ours
import longspan.compat.local_attention.rotary as our_rotary
import longspan.compat.local_attention.transformer as our_transformer
from longspan.compat import import_hook

Build = Callable[[Any], tuple[nn.Module, Callable[[nn.Module], Tensor]]]


class LocalStack(nn.Module):
    """Attention and feed-forward layers on a residual stream, with a bias or rotary positions."""

    def __init__(
        self, lib: Any, *, dim: int, depth: int, heads: int, window_size: int, bias: bool, **kwargs: Any
    ) -> None:
        super().__init__()
        self.window_size = window_size
        self.pos_bias = lib.DynamicPositionBias(dim=dim // 2, heads=heads) if bias else None
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    lib.LocalMHA(
                        dim=dim,
                        heads=heads,
                        window_size=window_size,
                        use_rotary_pos_emb=not bias,
                        prenorm=True,
                        **kwargs,
                    ),
                    lib.FeedForward(dim=dim),
                ]
            )
            for _ in range(depth)
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        w = self.window_size
        bias = None if self.pos_bias is None else self.pos_bias(w, w * 2)
        for attn, ff in self.layers:
            x = attn(x, mask=mask, attn_bias=bias) + x
            x = ff(x) + x
        return x


class Codec(nn.Module):
    """Strided convolutions around local attention, as in a neural audio codec."""

    def __init__(self, lib: Any, bias: bool) -> None:
        super().__init__()
        self.down = nn.Conv1d(1, 12, 4, stride=4)
        self.attn = LocalStack(
            lib, dim=12, depth=2, heads=3, dim_head=8, window_size=7, bias=bias, causal=True, qk_rmsnorm=True,
            use_xpos=True, gate_values_per_head=True,
        )  # fmt: skip
        self.up = nn.ConvTranspose1d(12, 1, 4, stride=4)

    def forward(self, wave: Tensor) -> Tensor:
        return self.up(self.attn(self.down(wave).transpose(1, 2)).transpose(1, 2))


def codec(lib: Any, bias: bool) -> Any:
    return Codec(lib, bias), lambda model: model(torch.randn(2, 1, 4 * 23))


class Hierarchy(nn.Module):
    """Two rates: the fine one shifted and pooled into the coarse one, whose result is repeated and added."""

    def __init__(self, lib: Any) -> None:
        super().__init__()
        attention = partial(lib.LocalMHA, causal=True, prenorm=True)
        self.embed = nn.Embedding(256, 12)
        self.fine = attention(dim=12, dim_head=6, heads=2, window_size=5)
        self.coarse = attention(dim=12, dim_head=6, heads=2, window_size=3, qk_rmsnorm=True)
        self.to_logits = nn.Linear(12, 256)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text)
        x = self.fine(x) + x
        coarse = F.pad(x, (0, 0, 3, -3)).unflatten(1, (-1, 4)).mean(2)
        coarse = self.coarse(coarse) + coarse
        return self.to_logits(x + coarse.repeat_interleave(4, 1))


def hierarchy(lib: Any) -> Any:
    return Hierarchy(lib), lambda model: model(torch.randint(256, (2, 28)))


def character_encoder(lib: Any, bias: bool) -> Any:
    """Characters look at their own block and the next one; words are padded."""
    model = LocalStack(
        lib, dim=12, depth=2, heads=2, dim_head=6, window_size=5, bias=bias, look_backward=0, look_forward=1,
        dropout=0.0,
    )  # fmt: skip
    mask = torch.arange(20) < torch.tensor([[20], [17]])
    return model, lambda model: model(torch.randn(2, 20, 12), mask) * mask[..., None]


class PatchedAttention(nn.Module):
    """Projections of a pretrained model with its own rotary embedding; local attention made at the first call."""

    def __init__(self, lib: Any) -> None:
        super().__init__()
        self.lib = lib
        self.qkv, self.o_proj = nn.Linear(12, 36, bias=False), nn.Linear(12, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if getattr(self, "attn_fn", None) is None:
            self.attn_fn = self.lib.LocalAttention(window_size=8, causal=True, autopad=True)
        q, k, v = (t.unflatten(2, (2, 6)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        embedding = self.lib.SinusoidalEmbeddings(6)
        freqs, scale = embedding(k)
        q, k = self.lib.apply_rotary_pos_emb(q, k, freqs, scale)
        assert q.size() == (len(x), 2, x.shape[1], 6)
        return self.o_proj(self.attn_fn(q, k, v).transpose(1, 2).reshape(x.shape))


def patched_llama(lib: Any) -> Any:
    return PatchedAttention(lib), lambda model: model(torch.randn(2, 29, 12))


class MixedHeads(nn.Module):
    """Some heads global, some local, along one projection; the local ones as transformers of 2020 build them."""

    def __init__(self, lib: Any, causal: bool, shared: bool) -> None:
        super().__init__()
        self.qkv, self.causal = nn.Linear(12, 48, bias=False), causal
        self.local_attn = lib.LocalAttention(
            window_size=4, causal=causal, dropout=0.0, look_backward=2, look_forward=0 if causal else 2,
            shared_qk=shared, rel_pos_emb_config=(4, 2), autopad=True,
        )  # fmt: skip

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        k = q if self.local_attn.shared_qk else k
        local = self.local_attn(q[:, :2], k[:, :2], v[:, :2], input_mask=mask)
        seen = mask[:, None, None] & (torch.ones(x.shape[1], x.shape[1]).tril().bool() if self.causal else True)
        whole = F.scaled_dot_product_attention(q[:, 2:], k[:, 2:], v[:, 2:], seen)
        return torch.cat([local, whole], 1).transpose(1, 2).flatten(2)


def mixed_heads(lib: Any, causal: bool, shared: bool) -> Any:
    mask = torch.arange(19) < torch.tensor([[19], [13]])
    return MixedHeads(lib, causal, shared), lambda model: model(torch.randn(2, 19, 12), mask) * mask[..., None]


class Conditional(nn.Module):
    """A light local branch for all tokens and a heavy one for the best of them."""

    def __init__(self, lib: Any) -> None:
        super().__init__()
        self.light = lib.LocalMHA(dim=12, dim_head=4, heads=3, prenorm=True, window_size=4)
        self.router, self.heavy = nn.Linear(12, 1), nn.Linear(12, 12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out = self.light(x, mask=mask)
        best = self.router(x).squeeze(-1).masked_fill(~mask, -1e9).topk(5, 1).indices[..., None].expand(-1, -1, 12)
        return out.scatter_add(1, best, self.heavy(x.gather(1, best)))


def conditional(lib: Any) -> Any:
    mask = torch.arange(21) < torch.tensor([[21], [16]])
    return Conditional(lib), lambda model: model(torch.randn(2, 21, 12), mask) * mask[..., None]


def vision(lib: Any) -> Any:
    """Patches of an image as a sequence, beside a convolution."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.local_attn = lib.LocalMHA(dim=16, dim_head=16 // 8, window_size=7, causal=True)
            self.conv = nn.Conv2d(16, 16, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) + self.local_attn(x.flatten(2).transpose(1, 2)).transpose(1, 2).view_as(x)

    return Block(), lambda model: model(torch.randn(2, 16, 5, 6))


PROGRAMS: dict[str, Build] = {
    "audio codec": partial(codec, bias=False),
    "audio codec with a bias": partial(codec, bias=True),
    "hierarchical bytes": hierarchy,
    "character encoder": partial(character_encoder, bias=False),
    "character encoder with a bias": partial(character_encoder, bias=True),
    "patched Llama": patched_llama,
    "mixed heads": partial(mixed_heads, causal=False, shared=False),
    "mixed causal heads": partial(mixed_heads, causal=True, shared=False),
    "mixed shared heads": partial(mixed_heads, causal=True, shared=True),
    "conditional": conditional,
    "vision": vision,
}


def libraries() -> list[Any]:
    theirs = original("local_attention")
    return [
        SimpleNamespace(**{**vars(transformer), **vars(rotary), **vars(package)})
        for package, transformer, rotary in (
            (theirs, original("local_attention.transformer"), original("local_attention.rotary")),
            (ours, our_transformer, our_rotary),
        )
    ]


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(name: str) -> None:
    """Outputs, and all weights after three steps of training."""
    outs, weights, start = [], [], None
    for lib in libraries():
        torch.manual_seed(4)
        model, call = PROGRAMS[name](lib)
        if start is None:
            start = {key: x.clone() for key, x in model.state_dict().items()}
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            torch.manual_seed(step)
            optimizer.zero_grad()
            out = call(model)
            out.square().mean().backward()
            optimizer.step()
        outs.append(out)
        weights.append(torch.cat([p.flatten() for p in model.parameters()]))
    assert_close(outs[1], outs[0])
    assert_close(weights[1], weights[0])


def test_caches_in_lists_of_a_users_own() -> None:
    """A byte-level decoder that carries (cache, offset) itself: decoding is recomputing, and the original's tokens."""

    class Decoder(nn.Module):
        def __init__(self, lib: Any) -> None:
            super().__init__()
            self.token_emb, self.pos_emb = nn.Embedding(17, 12), nn.Embedding(64, 12)
            self.layers = nn.ModuleList(
                nn.ModuleList(
                    [
                        lib.LocalMHA(dim=12, dim_head=6, heads=2, window_size=5, prenorm=True, causal=True,
                                     use_rotary_pos_emb=False),
                        lib.FeedForward(dim=12),
                    ]
                )
                for _ in range(2)
            )  # fmt: skip
            self.to_logits = nn.Linear(12, 17)

        def forward(self, x: Tensor, cache: Any = None) -> Any:
            layer_caches, offset = ([], 0) if cache is None else cache
            x = x if cache is None else x[:, -1:]
            n, waiting, after = x.shape[1], iter(layer_caches), []
            x = self.token_emb(x) + self.pos_emb(torch.arange(n) + offset)
            for attn, ff in self.layers:
                y, held = attn(x, cache=next(waiting, None), return_cache=True)
                after.append(held)
                x = x + y
                x = x + ff(x)
            return self.to_logits(x), (after, offset + n)

    found, start = [], None
    for lib in libraries():
        torch.manual_seed(4)
        model = Decoder(lib).eval()
        start = start or model.state_dict()
        model.load_state_dict(start)
        out, cache = torch.randint(17, (2, 9), generator=torch.Generator().manual_seed(1)), None
        for _ in range(12):
            logits, cache = model(out, cache)
            out = torch.cat([out, logits[:, -1:].argmax(-1)], 1)
            assert_close(logits[:, -1], model(out[:, :-1])[0][:, -1])
        found.append(out)
    assert torch.equal(*found)


STAR = """
from local_attention.transformer import *

class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.pos_bias = DynamicPositionBias(dim=dim // 2, heads=2)
        self.attn = LocalMHA(dim=dim, dim_head=6, heads=2, window_size=5, causal=True, use_rotary_pos_emb=False)
        self.ff = FeedForward(dim)

    def forward(self, x, mask=None):
        bias = self.pos_bias(5, 10) if exists(self.pos_bias) else None
        x = x + self.attn(x, mask=mask, attn_bias=bias)
        return F.relu(x + self.ff(x))

model = Block(12)
print(type(model.attn).__module__, *model(torch.randn(2, 13, 12)).shape)
"""


def test_everything_imported_by_a_star(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "script.py"
    path.write_text(STAR)
    import_hook.run(path, [], device="cpu")
    assert capsys.readouterr().out == "longspan.compat.local_attention.transformer 2 13 12\n"


def test_the_originals_own_test_of_its_cache() -> None:
    """One token after many: with rotary positions or a bias, blocks or exact windows, inside and beyond a window."""
    for rotary in (True, False):
        for biased in (True, False):
            for exact in (True, False):
                for window in (7, 61):
                    bias = ours.DynamicPositionBias(dim=5, heads=3)(window, 2 * window) if biased else None
                    layer = ours.LocalMHA(
                        dim=12, dim_head=4, heads=3, window_size=window, exact_windowsize=exact, causal=True,
                        use_rotary_pos_emb=rotary,
                    ).eval()  # fmt: skip
                    x = torch.randn(2, 62, 12)
                    _, cache = layer(x[:, :-1], return_cache=True)
                    assert_close(layer(x[:, -1:], cache=cache, attn_bias=bias)[:, -1], layer(x, attn_bias=bias)[:, -1])
