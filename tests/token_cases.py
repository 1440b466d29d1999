"""What stands around a memory in one token's step, kernel beside plain PyTorch: linear maps, angles, the choice."""

from __future__ import annotations

import copy

import torch
from torch import nn

from longspan.generation.sampling import Sampling, SeededSampler
from longspan.ops import decode as step
from longspan.ops.rotary import cos_sin

# Rows, width, widths of the maps, norm, activation, whether something is added.
MAPS = {
    "plain": (1, 37, (23,), None, "identity", False),
    "normed": (1, 37, (41, 19), nn.LayerNorm, "identity", False),
    "normed rows": (5, 37, (41, 19), nn.LayerNorm, "identity", False),
    "rms": (1, 37, (29,), nn.RMSNorm, "silu", False),
    "rms rows": (3, 37, (29,), nn.RMSNorm, "relu", False),
    "gelu": (1, 17, (71,), nn.LayerNorm, "gelu", False),
    "gelu rows": (67, 131, (71,), nn.LayerNorm, "gelu", False),
    "wide rows": (67, 131, (1031, 37), nn.LayerNorm, "gelu", False),
    "wide rows, long": (67, 547, (1031,), None, "silu", True),
    "added": (1, 67, (37,), None, "identity", True),
    "added rows": (19, 67, (37,), None, "identity", True),
}

SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "plain": Sampling(),
    "hot": Sampling(temperature=1.7),
    "top_k": Sampling(top_k=7),
    "all of them": Sampling(top_k=200),
    "top_p": Sampling(top_p=0.6),
    "min_p": Sampling(min_p=0.2),
    "penalty": Sampling(repetition_penalty=3.0),
    "everything": Sampling(temperature=0.8, top_k=31, top_p=0.9, min_p=0.01, repetition_penalty=1.3),
    "greedy, penalized": Sampling(temperature=0, repetition_penalty=9.0),
}


@torch.no_grad()
def compare_maps(name: str, dtype: torch.dtype, device: str) -> None:
    """By the tolerance rule, beside the modules themselves in the same dtype and in float64."""
    B, dim, widths, norm_type, activation, adds = MAPS[name]
    norm = None if norm_type is None else norm_type(dim)
    maps = [nn.Linear(dim, width, bias=i == 0) for i, width in enumerate(widths)]
    for parameter in [] if norm is None else norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(B, 2, dim).to(dtype)[:, :1] + 1  # rows that do not lie end to end
    add = torch.randn(B, 3, widths[0]).to(dtype)[:, 1:2] if adds else None
    how = {"activation": activation}
    modules = [m if m is None else m.to(device, dtype) for m in (norm, *maps)]
    moved = None if add is None else add.to(device)
    found = step.project(x.to(device), *modules[1:], norm=modules[0], add=moved, **how)
    wide = [m if m is None else copy.deepcopy(m).cpu().double() for m in modules]
    exact = _plainly(x.double(), wide, activation, None if add is None else add.double())
    plain = _plainly(x, [m if m is None else m.cpu() for m in modules], activation, add)
    assert len(found) == len(widths)
    for ours, near, best in zip(found, plain, exact, strict=True):
        assert ours.dtype == dtype
        assert ours.shape == best.shape
        allowed = 2 * (near.double() - best).abs().max() + best.abs().max() * torch.finfo(dtype).eps
        assert (ours.cpu().double() - best).abs().max() <= allowed


def _plainly(x, modules, activation, add):
    norm, *maps = modules
    x = x if norm is None else norm(x)
    results = [step.FUSED[activation](f(x)) for f in maps]
    return results if add is None else [add + y for y in results]


def compare_turns(device: str) -> None:
    length = torch.tensor([0, 1, 65537, 1_000_003], device=device)
    found = step.cos_sin_at(length, (10, 100.0), torch.float32)
    for ours, best in zip(found[:2], cos_sin(length[:, None].cpu(), 10, 100.0, torch.float64), strict=True):
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


def compare_choices(name: str, device: str, vocabulary: int = 131, rows: int = 5) -> None:
    """The kernel chooses what eager PyTorch chooses from the same numbers, time after time."""
    logits = (torch.randn(rows, vocabulary) * 3).to(device)
    logits[:, 3] = logits[:, 5] = logits[:, 4]  # ties
    stop = [4, 17]
    ours, plain = (_sampler(logits, SAMPLINGS[name], stop, fused) for fused in (True, False))
    tokens = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2)]
    for append in (False, True, True):
        for sampler, token in zip((ours, plain), tokens, strict=True):
            sampler.sample(logits, token, append=append)
        assert torch.equal(*tokens)
        assert torch.equal(ours.recent, plain.recent)
        assert torch.equal(ours._ended, plain._ended)
        assert torch.equal(ours.answer[0], plain.answer[0])
        torch.testing.assert_close(ours.answer[1], plain.answer[1], rtol=1e-5, atol=1e-5)
    assert plain._ended.any() or not (tokens[1][:, None] == plain._stop).any()
