"""Linear layers, rotary angles and sampling of a decode step: kernels compared with eager PyTorch."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from longspan.generation.sampling import Sampling, SeededSampler, SlotSampler
from longspan.models.layers import ShortConvolution, shift_token
from longspan.models.ngrams import NgramEmbedding
from longspan.ops import decode, rms_norm
from longspan.ops.rotary import cos_sin

# Batch, input width, widths of the layers, norm, activation, whether there is a residual, offsets of token shift.
LAYERS: dict[str, tuple] = {
    "one layer": (1, 37, (23,), None, "identity", False),
    "norm": (1, 37, (41, 19), nn.LayerNorm, "identity", False),
    "norm, batch": (5, 37, (41, 19), nn.LayerNorm, "identity", False),
    "rms": (1, 37, (29,), nn.RMSNorm, "silu", False),
    "rms, batch": (3, 37, (29,), nn.RMSNorm, "relu", False),
    "gelu": (1, 17, (71,), nn.LayerNorm, "gelu", False),
    "gelu, batch": (67, 131, (71,), nn.LayerNorm, "gelu", False),
    "wide, batch": (67, 131, (1031, 37), nn.LayerNorm, "gelu", False),
    "wide and long, batch": (67, 547, (1031,), None, "silu", True),
    "wide and aligned, batch": (67, 1536, (1031,), None, "silu", True),
    "large batch": (128, 37, (41, 19), nn.RMSNorm, "silu", False, (0, 1)),
    "four layers": (1, 37, (41, 19, 13, 67), nn.RMSNorm, "relu2", False),
    "four layers, batch": (5, 37, (41, 19, 13, 67), nn.RMSNorm, "relu2", False),
    "shift": (1, 37, (41, 19), nn.RMSNorm, "identity", False, (0, 1)),
    "shift, batch": (5, 37, (41, 19), nn.LayerNorm, "relu", False, (2, 0, 1)),
    "shift, wide batch": (17, 131, (29,), None, "identity", False, (1, 3)),
    "residual": (1, 67, (37,), None, "identity", True),
    "residual, batch": (19, 67, (37,), None, "identity", True),
}

SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "default": Sampling(),
    "hot": Sampling(temperature=1.7),
    "top_k": Sampling(top_k=7),
    "top_k of all": Sampling(top_k=200),
    "top_p": Sampling(top_p=0.6),
    "min_p": Sampling(min_p=0.2),
    "penalty": Sampling(repetition_penalty=3.0),
    "all options": Sampling(temperature=0.8, top_k=31, top_p=0.9, min_p=0.01, repetition_penalty=1.3),
    "greedy, penalized": Sampling(temperature=0, repetition_penalty=9.0),
}


@torch.no_grad()
def compare_layers(name: str, dtype: torch.dtype, device: str) -> None:
    """Compare with the modules in the same dtype and in float64, by the tolerance rule."""
    B, dim, widths, norm_type, activation, has_residual, *offsets = LAYERS[name]
    norm = None if norm_type is None else norm_type(dim)
    layers = [nn.Linear(dim, width, bias=i == 0) for i, width in enumerate(widths)]
    for parameter in [] if norm is None else norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(B, 2, dim).to(dtype)[:, :1] + 1  # not contiguous
    residual = torch.randn(B, 3, widths[0]).to(dtype)[:, 1:2] if has_residual else None
    modules = [m if m is None else m.to(device, dtype) for m in (norm, *layers)]
    moved = None if residual is None else residual.to(device)
    recent = torch.randn(B, max(offsets[0]), dim).to(dtype) if offsets else None
    shift, length = None, torch.arange(B) * 5 + 3
    if recent is not None:
        ring = decode.TokenShift.ring(recent, length)
        shift = decode.TokenShift(ring.to(device), length.to(device), *offsets)
    options = {"residual": moved, "activation": activation, "shift": shift}
    found = decode.fused_linear(x.to(device), *modules[1:], norm=modules[0], **options)
    wide = [m if m is None else copy.deepcopy(m).cpu().double() for m in modules]
    older = None if recent is None else (*offsets, recent.double())
    exact = _eager(x.double(), wide, activation, None if residual is None else residual.double(), older)
    older = None if recent is None else (*offsets, recent)
    eager = _eager(x, [m if m is None else m.cpu() for m in modules], activation, residual, older)
    if shift is not None:
        latest = decode.TokenShift.latest(shift.recent.cpu(), length + 1)
        torch.testing.assert_close(latest, older[1], rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)
    assert len(found) == len(widths)
    for ours, near, best in zip(found, eager, exact, strict=True):
        assert ours.dtype == dtype
        assert ours.shape == best.shape
        allowed = 2 * (near.double() - best).abs().max() + best.abs().max() * torch.finfo(dtype).eps
        error = (ours.cpu().double() - best).abs().max()
        assert error <= allowed, f"{error:.3g} from the truth, {allowed:.3g} allowed"


def _eager(x, modules, activation, residual, shift):
    norm, *layers = modules
    x = x if norm is None else norm(x)
    x = x if shift is None else shift_token(x, *shift)
    results = [decode.FUSED_ACTIVATIONS[activation](layer(x)) for layer in layers]
    return results if residual is None else [residual + y for y in results]


HEADS = {  # whether there is a convolution, its size, and norms
    "convolution": (4, False),
    "norms": (0, True),
    "both": (2, True),
}


@torch.no_grad()
def compare_heads(name: str, dtype: torch.dtype, device: str) -> None:
    """Compare convolution and norms of three tokens with the modules, by the tolerance rule."""
    (size, has_norms), B, (Q, K, D), width = HEADS[name], 3, (4, 2, 6), 11
    N = (Q + K) * D + width
    conv = ShortConvolution(N, size).to(dtype) if size else None
    norms = tuple(nn.RMSNorm(D, eps=1e-12).to(dtype) for _ in range(2)) if has_norms else None
    for norm in norms or ():
        nn.init.normal_(norm.weight)
    recent = torch.randn(B, max(size - 1, 0), N).to(dtype)
    ours = recent.to(device)
    moved = None if norms is None else tuple(copy.deepcopy(norm).to(device) for norm in norms)
    exact = recent.double()
    errors = []
    for _ in range(3):
        x = torch.randn(B, 1, N + 5).to(dtype)
        q, kv = x[..., : Q * D], x[..., Q * D : N]
        mixing = None if conv is None else (conv.weight.to(device), ours)
        found = decode.fused_heads(q.to(device), kv.to(device), (Q, K, D), mixing, moved)
        assert found is not None
        near = _eager_heads(x[..., :N], conv, norms, recent, (Q, K, D))
        wide = (None if conv is None else copy.deepcopy(conv).double(),)
        wide += (None if norms is None else [copy.deepcopy(norm).double() for norm in norms],)
        best = _eager_heads(x[..., :N].double(), *wide, exact, (Q, K, D))
        errors.append(((found.cpu().double() - best).abs().max(), (near.double() - best).abs().max(), best.abs().max()))
        assert torch.equal(ours.cpu(), recent)
    error, near, size = torch.tensor(errors).amax(0)
    assert error <= 2 * near + size * torch.finfo(dtype).eps


def _eager_heads(x, conv, norms, recent, heads):
    x = x if conv is None else conv.step(x, recent)
    if norms is None:
        return x
    (Q, K, D), rest = heads, x[..., (heads[0] + heads[1]) * heads[2] :]
    q, k = x[..., : Q * D].unflatten(2, (Q, D)), x[..., Q * D : (Q + K) * D].unflatten(2, (K, D))
    return torch.cat([norms[0](q).flatten(2), norms[1](k).flatten(2), rest], 2)


OUTPUTS = {  # norm, activation of the gates, and gates of heads
    "norm": (True, None, False),
    "silu": (True, "silu", False),
    "sigmoid": (False, "sigmoid", True),
    "heads": (False, None, True),
}


@torch.no_grad()
def compare_outputs(name: str, dtype: torch.dtype, device: str) -> None:
    """Compare norm and gates of heads with eager PyTorch, by the tolerance rule."""
    (has_norm, activation, has_heads), (B, H, E) = OUTPUTS[name], (3, 5, 7)
    norm = nn.RMSNorm(E, eps=1e-6).to(dtype) if has_norm else None
    if norm is not None:
        nn.init.normal_(norm.weight)
    out = torch.randn(B, 1, H, E).to(dtype)
    gates = torch.randn(B, 1, H * E + 3).to(dtype)[..., : H * E] if activation else None
    heads = torch.randn(B, 1, H).to(dtype) if has_heads else None
    own = None if norm is None else copy.deepcopy(norm).to(device)
    given = [None if x is None else x.to(device) for x in (gates, heads)]
    found = decode.gate_heads(out.to(device), own, given[0], activation or "identity", given[1])
    assert found is not None
    answers = []
    for dt in (dtype, torch.float64):
        y = out.to(dt) if norm is None else copy.deepcopy(norm).to(dt)(out.to(dt))
        if gates is not None:
            raw = gates.to(dt)
            y = y * (nn.functional.silu(raw) if activation == "silu" else raw.sigmoid()).view(y.shape)
        y = y if heads is None else y * heads.to(dt).sigmoid()[..., None]
        answers.append(y.flatten(2).double())
    near, best = answers
    allowed = 2 * (near - best).abs().max() + best.abs().max() * torch.finfo(dtype).eps
    assert found.shape == best.shape
    assert (found.cpu().double() - best).abs().max() <= allowed


NORMS = {"norm": None, "silu": "silu", "sigmoid": "sigmoid"}  # activation of the gates


@torch.no_grad()
def compare_norms(name: str, dtype: torch.dtype, device: str) -> None:
    """Compare norm and gates of the heads of a prompt with eager PyTorch, by the tolerance rule."""
    activation, (B, T, H, D) = NORMS[name], (2, 67, 3, 5)
    norm = nn.RMSNorm(D, eps=1e-6).to(dtype)
    nn.init.normal_(norm.weight)
    x = torch.randn(B, T + 1, H + 1, D).to(dtype)[:, 1:, 1:]  # not contiguous
    gates = torch.randn(B, T, H * D + 2).to(dtype)[..., : H * D] if activation else None
    given = None if gates is None else gates.to(device)
    own = copy.deepcopy(norm).to(device)
    found = rms_norm.rms_norm_heads(x.to(device), own, given, activation or "identity")
    assert found is not None
    answers = []
    for dt in (dtype, torch.float64):
        y = copy.deepcopy(norm).to(dt)(x.to(dt))
        if gates is not None:
            raw = gates.to(dt)
            y = y * (nn.functional.silu(raw) if activation == "silu" else raw.sigmoid()).view(y.shape)
        answers.append(y.double())
    near, best = answers
    allowed = 2 * (near - best).abs().max() + best.abs().max() * torch.finfo(dtype).eps
    assert found.shape == best.shape
    assert (found.cpu().double() - best).abs().max() <= allowed


@torch.no_grad()
def compare_embedding(dtype: torch.dtype, device: str) -> None:
    """Compare embeddings of seven tokens and their n-grams with the modules: the same bits."""
    B, vocabulary, dim = 3, 11, 37
    embedding = nn.Embedding(vocabulary, dim).to(dtype)
    ngrams = NgramEmbedding(dim, (4, 2, 5), 101).to(dtype)
    recent = torch.zeros(B, ngrams.reach, 1, dtype=torch.int64)
    ours = recent.to(device, copy=True)
    own, tables = copy.deepcopy(embedding).to(device), copy.deepcopy(ngrams).to(device)
    for tokens in torch.randint(0, vocabulary, (7, B)):
        found = tables.step(tokens.to(device), ours, own)
        codes = torch.cat([recent, tokens[:, None, None] + 1], 1)
        window = list(codes[:, :, 0].flip(1).unbind(1))
        recent = codes[:, 1:]
        assert torch.equal(found.cpu(), embedding(tokens) + ngrams._look_up(window))
        assert torch.equal(ours.cpu(), recent)


def compare_rotary(device: str) -> None:
    position = torch.tensor([0, 1, 65537, 1_000_003], device=device)
    found = decode.cos_sin_at(position, (10, 100.0), torch.float32)
    for ours, best in zip(found[:2], cos_sin(position[:, None].cpu(), 10, 100.0, torch.float64), strict=True):
        assert ours.shape == (4, 1, 5)
        assert (ours.cpu().double() - best).abs().max() < 3e-7


def _sampler(logits: torch.Tensor, sampling: Sampling, stop: list[int], fused: bool) -> SeededSampler:
    """A sampler with recent tokens and uniform numbers of its own, the same for each call."""
    B, generator = len(logits), torch.Generator().manual_seed(7)
    recent = torch.randint(-1, logits.shape[1], (B, 5), generator=generator).to(logits.device)
    sampler = SeededSampler(sampling, recent, stop, range(B))
    sampler.prepare()
    sampler._index.fill_(2)
    sampler._fused = fused
    return sampler


def compare_samples(name: str, device: str, vocabulary: int = 131, rows: int = 5) -> None:
    """Assert that the kernel chooses the same tokens as eager PyTorch from the same uniform numbers."""
    logits = (torch.randn(rows, vocabulary) * 3).to(device)
    logits[:, 3] = logits[:, 5] = logits[:, 4]  # ties
    stop = [4, 17]
    ours, eager = (_sampler(logits, SAMPLINGS[name], stop, fused) for fused in (True, False))
    tokens = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2)]
    for append in (False, True, True):
        for sampler, token in zip((ours, eager), tokens, strict=True):
            sampler.sample(logits, token, append=append)
        assert torch.equal(*tokens)
        assert torch.equal(ours.recent, eager.recent)
        assert torch.equal(ours._ended, eager._ended)
        assert torch.equal(ours.answer[0], eager.answer[0])
        torch.testing.assert_close(ours.answer[1], eager.answer[1], rtol=1e-5, atol=1e-5)
    assert eager._ended.any() or not (tokens[1][:, None] == eager._stop).any()


def compare_slot_samples(device: str, vocabulary: int = 131) -> None:
    """Assert that the kernel chooses the same tokens as eager PyTorch where each row has options of its own."""
    rows = len(SAMPLINGS) + 1  # One row has not begun.
    logits = (torch.randn(rows, vocabulary) * 3).to(device)
    logits[:, 3] = logits[:, 5] = logits[:, 4]  # ties
    samplers = [SlotSampler(rows, vocabulary, 11, logits.dtype, logits.device) for _ in range(2)]
    tokens = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in samplers]
    options = [replace(own, repetition_window=1 + i) for i, own in enumerate(SAMPLINGS.values())]
    recent = [torch.randint(vocabulary, (n,)) for n in range(0, 2 * len(options), 2)]
    for sampler, fused in zip(samplers, (True, False), strict=True):
        sampler.capturable = fused
        sampler.put(range(1, rows), options, range(rows - 1), recent)
    for append in (False, True, True):
        for sampler, token in zip(samplers, tokens, strict=True):
            sampler.prepare()
            sampler.sample(logits, token, append=append)
        assert torch.equal(*tokens)
        assert torch.equal(samplers[0].recent, samplers[1].recent)
        assert torch.equal(samplers[0]._index, samplers[1]._index)
    assert len(set(tokens[0].tolist())) > 3
