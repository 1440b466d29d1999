"""Linear layers, rotary angles and sampling of a decode step: kernels compared with eager PyTorch."""

from __future__ import annotations

import copy

import torch
from torch import nn

from longspan.generation.sampling import Sampling, SeededSampler
from longspan.ops import decode
from longspan.ops.rotary import cos_sin

# Batch, input width, widths of the layers, norm, activation, whether there is a residual.
LAYERS = {
    "one layer": (1, 37, (23,), None, "identity", False),
    "norm": (1, 37, (41, 19), nn.LayerNorm, "identity", False),
    "norm, batch": (5, 37, (41, 19), nn.LayerNorm, "identity", False),
    "rms": (1, 37, (29,), nn.RMSNorm, "silu", False),
    "rms, batch": (3, 37, (29,), nn.RMSNorm, "relu", False),
    "gelu": (1, 17, (71,), nn.LayerNorm, "gelu", False),
    "gelu, batch": (67, 131, (71,), nn.LayerNorm, "gelu", False),
    "wide, batch": (67, 131, (1031, 37), nn.LayerNorm, "gelu", False),
    "wide and long, batch": (67, 547, (1031,), None, "silu", True),
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
    B, dim, widths, norm_type, activation, has_residual = LAYERS[name]
    norm = None if norm_type is None else norm_type(dim)
    layers = [nn.Linear(dim, width, bias=i == 0) for i, width in enumerate(widths)]
    for parameter in [] if norm is None else norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(B, 2, dim).to(dtype)[:, :1] + 1  # not contiguous
    residual = torch.randn(B, 3, widths[0]).to(dtype)[:, 1:2] if has_residual else None
    modules = [m if m is None else m.to(device, dtype) for m in (norm, *layers)]
    moved = None if residual is None else residual.to(device)
    found = decode.fused_linear(x.to(device), *modules[1:], norm=modules[0], residual=moved, activation=activation)
    wide = [m if m is None else copy.deepcopy(m).cpu().double() for m in modules]
    exact = _eager(x.double(), wide, activation, None if residual is None else residual.double())
    eager = _eager(x, [m if m is None else m.cpu() for m in modules], activation, residual)
    assert len(found) == len(widths)
    for ours, near, best in zip(found, eager, exact, strict=True):
        assert ours.dtype == dtype
        assert ours.shape == best.shape
        allowed = 2 * (near.double() - best).abs().max() + best.abs().max() * torch.finfo(dtype).eps
        assert (ours.cpu().double() - best).abs().max() <= allowed


def _eager(x, modules, activation, residual):
    norm, *layers = modules
    x = x if norm is None else norm(x)
    results = [decode.FUSED_ACTIVATIONS[activation](layer(x)) for layer in layers]
    return results if residual is None else [residual + y for y in results]


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
