"""Cases for the Triton kernels of windowed attention, and their comparison with the definition."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from helpers import random_heads, within_tolerance
from torch import Tensor

from longspan.layout import Packing
from longspan.ops.softmax import attend
from longspan.ops.window import Window, WindowProblem, WindowSaved, _WindowLse, kernels, reference
from longspan.ops.window.torch import tiled_window_attention_with_lse

NAMES = ["out", "d_q", "d_k", "d_v", "d_bias"]


@dataclass(frozen=True)
class Case:
    """Sizes are distinct primes by default. past: keys before the queries. start: one position per batch row.

    bias: the size of its blocks, 0 without.
    """

    T: int = 71
    B: int = 2
    H: int = 3
    Hkv: int = 3
    D: int = 5
    E: int = 7
    block_size: int = 0
    back: int = 18
    ahead: int = 6
    causal: bool = False
    shared_qk: bool = False
    masked: bool = False
    past: int = 0
    start: tuple[int, ...] | None = None
    packed: tuple[int, ...] | None = None
    scale: float | None = None
    large: float = 1.0
    strided: bool = False
    bias: int = 0

    def __str__(self) -> str:
        plain = Case()
        changed = {name: value for name, value in vars(self).items() if value != getattr(plain, name)}
        return "-".join(f"{name}={value}".replace(" ", "") for name, value in changed.items()) or "plain"

    @property
    def window(self) -> Window:
        return Window(self.block_size, self.back, self.ahead, self.causal, self.shared_qk)


CASES = [
    Case(causal=True),
    Case(),
    Case(T=1, B=1, causal=True),
    Case(H=4, Hkv=2, masked=True),
    Case(block_size=11, back=1, ahead=0, causal=True),
    Case(block_size=11, back=0, ahead=1, B=1, masked=True, shared_qk=True),
    Case(causal=True, shared_qk=True, back=3, scale=0.3),
    Case(causal=True, past=19, start=(-19, 4)),
    Case(block_size=7, back=1, ahead=0, causal=True, past=13, start=(-13, 9), shared_qk=True, H=2, Hkv=1),
    Case(B=1, packed=(0, 33, 1, 0, 37)),
    Case(B=1, H=4, Hkv=2, packed=(5, 1, 65), block_size=4, back=2, ahead=1),
    Case(B=1, packed=(40, 31), causal=True, strided=True),
    Case(back=2**40, ahead=2**40, B=1),
    Case(block_size=16, back=2**40, ahead=0, B=1, causal=True),
    Case(D=130, E=140, B=1, H=1, Hkv=1, T=37),
    Case(D=83, B=1, H=2, Hkv=1, T=37, causal=True, strided=True),
    Case(E=67, B=1, H=2, Hkv=1, T=37, masked=True),
    Case(bias=13, T=31, B=1, H=2, Hkv=1, causal=True),
    Case(bias=67, T=79, B=1, H=1, Hkv=1, masked=True, strided=True),
    Case(bias=11, T=31, B=1, H=1, Hkv=1, block_size=11, back=1, ahead=1, shared_qk=True),
    Case(bias=7, T=11, H=1, Hkv=1, back=8, causal=True, past=9, start=(-9, 4)),
    Case(bias=5, T=11, H=2, Hkv=1, block_size=5, back=1, ahead=0, causal=True, past=6, start=(-6, 9)),
    Case(bias=17, D=83, E=67, B=1, H=1, Hkv=1, T=37, back=5, ahead=0),
    # Tiles divide the tokens: loads without masks, and masks by distance.
    Case(T=128, D=16, E=16, causal=True, H=2, Hkv=1, strided=True),
    Case(T=128, D=16, E=16, B=1, H=2, Hkv=1),
    Case(T=64, D=16, E=16, past=64, causal=True, back=70),
    Case(T=64, D=16, E=16, past=64, causal=True, back=70, start=(-64, 3)),
    Case(T=128, D=16, E=67, B=1, packed=(40, 1, 87), causal=True),
    Case(T=64, D=16, E=16, B=1, block_size=11, back=1, ahead=1, masked=True),
    Case(T=128, D=16, E=16, B=1, H=1, Hkv=1, causal=True, shared_qk=True, back=3, scale=-0.3),
    Case(T=64, D=16, E=16, B=1, H=1, Hkv=1, bias=7, back=9, ahead=0),
]


def arguments(case: Case, dtype: torch.dtype, device: str) -> tuple[Tensor, WindowProblem]:
    """Return the gradient of out, and the arguments of the kernels."""
    B, T, H, Hkv, D, E = case.B, case.T, case.H, case.Hkv, case.D, case.E
    S = T + case.past

    def inputs(length: int, heads: int, dim: int) -> Tensor:
        return random_heads((B, length, heads, dim), case.strided, dtype, device)

    q, k, v = inputs(T, H, D) * case.large, inputs(S, Hkv, D) * case.large, inputs(S, Hkv, E)
    mask = None
    if case.masked:
        mask = torch.rand(B, S).to(device) < 0.5
        mask[:, 20:45] = False  # so that some queries see no key
        k, v = (x.masked_fill(~mask[:, :, None, None], 0) for x in (k, v))
    start = None if case.start is None else torch.tensor(case.start, device=device)
    bounds = None if case.packed is None else Packing.from_lengths(case.packed, device).bounds(T)
    scale = D**-0.5 if case.scale is None else case.scale
    bias = None
    if case.bias:
        bias = torch.randn(H, case.bias, (sum(case.window.blocks(case.bias)) + 1) * case.bias).to(device)
    tensors = q, k, v, mask, start, bounds, None, bias
    return inputs(T, H, E), WindowProblem(*tensors, *case.window, scale, 0.0, bool(case.bias))


def by_pair(case: Case, table: Tensor) -> Tensor:
    """Return the bias of each pair of positions, (B, H, T, S), by a loop over blocks of queries."""
    T, S, P, K = case.T, case.T + case.past, case.bias, table.shape[2]
    rows = []
    for start in case.start or (0,) * case.B:
        full = table.new_zeros(case.H, T, S)
        for t in range(T):
            position = start + case.past + t
            first = (position // P - case.window.blocks(P)[0]) * P - start  # key of column 0
            low, high = max(0, first), min(S, first + K)
            full[:, t, low:high] = table[:, position % P, low - first : high - first]
        rows.append(full)
    return torch.stack(rows)


def visible(case: Case, mask: Tensor | None) -> Tensor:
    """Return which keys each query sees, pair by pair: (B, 1, T, S)."""
    T, S = case.T, case.T + case.past
    start = torch.tensor(case.start or (0,) * case.B)[:, None, None]
    i, j = start + torch.arange(case.past, S)[:, None], start + torch.arange(S)
    seen = (j >= 0).expand(case.B, T, S)
    if case.packed is not None:
        lengths = torch.tensor(case.packed)
        sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        place = torch.cat([torch.arange(n) for n in case.packed])
        i, j = place[None, :, None], place[None, None]
        seen = (sequence[:, None] == sequence)[None]
    if case.causal:
        seen = seen & (j <= i)
    if case.block_size:
        block_i, block_j = i // case.block_size, j // case.block_size
        seen = seen & (block_j >= block_i - case.back) & (block_j <= block_i + case.ahead)
    else:
        seen = seen & (j >= i - case.back) & (j <= i + case.ahead)
    if mask is not None:
        seen = seen & mask.cpu()[:, None]
    if case.shared_qk:
        others = seen & (torch.arange(case.past, S)[:, None] != torch.arange(S))
        seen = others | (seen & ~others.any(-1, keepdim=True))
    return seen[:, None]


def by_definition(case: Case, d_out: Tensor, problem: WindowProblem, dtype: torch.dtype) -> list[Tensor]:
    """Return out and the gradients on the CPU: float64 by the definition, other dtypes by PyTorch's attention."""
    leaves = [x.detach().cpu().to(dtype).requires_grad_() for x in (*problem[:3], problem.bias) if x is not None]
    q, k, v, *biases = leaves
    seen, scale = visible(case, problem.key_mask), problem.scale
    bias = by_pair(case, biases[0]) if biases else None
    if dtype == torch.float64:
        out = reference.softmax_attention(q, k, v, seen, bias=bias, scale=scale)
    else:
        keys, values = (reference.repeat_kv(x, case.H).transpose(1, 2) for x in (k, v))
        out = attend(q.transpose(1, 2), keys, values, seen, bias=bias, scale=scale).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, d_out.cpu().to(dtype))]


def by_kernels(d_out: Tensor, problem: WindowProblem) -> list[Tensor]:
    out, lse = kernels().forward(problem)
    *grads, d_bias = kernels().backward(WindowSaved(d_out, None, out, lse), problem)
    return [out, *grads, *([] if d_bias is None else [d_bias])]


def check(case: Case, dtype: torch.dtype, device: str) -> None:
    """`within_tolerance` of all results, over up to four draws."""

    def draws() -> Iterator[dict[str, tuple[float, float, float]]]:
        for _ in range(4):
            d_out, problem = arguments(case, dtype, device)
            truth, eager = (by_definition(case, d_out, problem, kind) for kind in (torch.float64, dtype))
            yield _errors(by_kernels(d_out, problem), eager, truth, dtype)

    within_tolerance(draws())


def check_lse(case: Case, dtype: torch.dtype, device: str, call: str) -> None:
    """Assert the same of the gradients of out and lse together, with `tiled_window_attention_with_lse` as the truth."""
    d_out, problem = arguments(case, dtype, device)
    d_lse = torch.randn(d_out.shape[:3], device=device)

    def by_torch(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.detach().cpu().to(dtype).requires_grad_() for x in problem[:3]]
        mask = None if problem.key_mask is None else problem.key_mask.cpu()
        found = tiled_window_attention_with_lse(*leaves, case.window, key_mask=mask, scale=problem.scale)
        grads = torch.autograd.grad(found, leaves, [x.cpu().to(found[0].dtype) for x in (d_out, d_lse)])
        return [x.detach() for x in (found[0], *grads)]

    leaves = [x.detach().requires_grad_() for x in problem[:3]]
    out, lse = getattr(_WindowLse, call)(*leaves, *problem[3:])
    assert (lse[..., 0].isinf().transpose(1, 2) == (out == 0).all(-1)).all()
    d_lse2 = (math.log(2) * d_lse).transpose(1, 2)[..., None].expand_as(lse)
    found = [out.detach(), *torch.autograd.grad((out, lse), leaves, (d_out, d_lse2))]
    no_further(found, by_torch(dtype), by_torch(torch.float64), dtype)


def no_further(found: list[Tensor], eager: list[Tensor], truth: list[Tensor], dtype: torch.dtype) -> None:
    """`within_tolerance` of one draw."""
    within_tolerance([_errors(found, eager, truth, dtype)])


def _errors(
    found: list[Tensor], eager: list[Tensor], truth: list[Tensor], dtype: torch.dtype
) -> dict[str, tuple[float, float, float]]:
    """Largest errors of the kernels and of eager PyTorch for each result, and an ulp of the largest of all values.

    The largest of all: the gradient of a query that sees one key is a difference of others, and 0.
    """
    ulp = max(exact.abs().max().item() for exact in truth) * torch.finfo(dtype).eps
    errors = {}
    for name, exact, near, ours in zip(NAMES[: len(truth)], truth, eager, found, strict=True):
        assert ours.shape == exact.shape, name
        assert ours.dtype == (torch.float32 if name == "d_bias" else dtype), name
        own, plain = ((x.cpu().double() - exact).abs().max().item() for x in (ours, near))
        errors[name] = own, plain, ulp
    return errors


def dropped(problem: WindowProblem, rate: float, seed: int) -> tuple[Tensor, WindowProblem]:
    """Return the factor (B, H, T, S) by which dropout multiplies each weight, read off the kernel's output, and the
    problem with dropout.
    """
    k, S = problem.k, problem.k.shape[1]
    one_hot = torch.eye(S, device=k.device, dtype=k.dtype)[None, :, None].expand(len(k), S, k.shape[2], S).contiguous()
    with_dropout = problem._replace(seed=torch.tensor([seed], device=k.device), dropout=rate)
    weights, left = (
        kernels().forward(x._replace(v=one_hot))[0].float() for x in (problem, with_dropout)
    )  # (B, T, H, S)
    factor = torch.where(weights > 1e-6, left / weights.clamp(min=1e-6), 0)
    return factor.transpose(1, 2), with_dropout
