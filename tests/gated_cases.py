"""Cases for the Triton kernels of gated linear attention, and their comparison with eager PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import torch
from helpers import case_id, random_heads, within_tolerance
from torch import Tensor

from longspan.ops.gated import GatedInputs, GatedProblem, GatedSaved, _kernels, triton_algorithm
from longspan.ops.gated import torch as torch_chunk

NAMES = ["out", "state", "d_q", "d_k", "d_v", "d_log_decay", "d_beta", "d_start"]


@dataclass(frozen=True)
class Case:
    """Sizes are distinct primes where nothing else matters. decay: None, "head" or "channel"."""

    T: int = 17
    B: int = 2
    H: int = 3
    Hkv: int = 3
    D: int = 5
    E: int = 7
    delta: bool = False
    decay: str | None = "head"
    strength: float = 0.3  # Mean of -log_decay
    forgets: tuple[float, ...] = ()  # log_decay of some tokens
    beta: bool = True
    state: bool = True
    strided: bool = False

    __str__ = case_id


Arguments = tuple[Tensor, Tensor | None, GatedInputs]


def arguments(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    """The gradients of out and of the state, and the tensors of the op."""
    B, T, H, Hkv, D, E = case.B, case.T, case.H, case.Hkv, case.D, case.E

    def inputs(heads: int, dim: int) -> Tensor:
        return random_heads((B, T, heads, dim), case.strided, dtype, device)

    q, k, v, d_out = inputs(H, D), inputs(Hkv, D), inputs(Hkv, E), inputs(H, E)
    if case.delta:
        k = (k.float() / k.float().norm(dim=-1, keepdim=True)).to(dtype)
    decay = beta = None
    if case.decay is not None:
        decay = -2 * case.strength * torch.rand(B, T, Hkv, 1 if case.decay == "head" else D)
        for value in case.forgets:
            decay[torch.rand(B, T, Hkv) * 2 * len(case.forgets) < 1] = value
        decay = decay.to(device)
    if case.beta:
        beta = torch.rand(B, T, Hkv)
        beta[:, 1::5] = 0  # Tokens that write nothing have a gradient too.
        beta = beta.to(device)
    state, d_state = (torch.randn(B, Hkv, D, E).to(device) if case.state else None for _ in range(2))
    return d_out, d_state, GatedInputs(q, k, v, decay, beta, state)


def with_time_steps(given: Arguments) -> Arguments:
    """The arguments with the gates of Mamba-2 as they are at first: β = Δ from 0.001 to 0.1, log α = −Δ A, A to 16."""
    d_out, d_state, x = given
    assert x.beta is not None
    step = (0.001 * 100 ** torch.rand(x.beta.shape[2])) * 2 ** torch.randn(x.beta.shape)
    rate = 1 + 15 * torch.rand(x.beta.shape[2])
    gates = (y.to(x.beta.device) for y in (-(step * rate)[..., None], step))
    return d_out, d_state, x._replace(**dict(zip(("log_decay", "beta"), gates, strict=True)))


def with_keys(given: Arguments, keys: Tensor, beta: float) -> Arguments:
    """The arguments with these keys, made of norm 1, and one β."""
    d_out, d_state, x = given
    assert x.beta is not None
    k = (keys / keys.norm(dim=-1, keepdim=True)).to(x.k)
    return d_out, d_state, x._replace(k=k, beta=torch.full_like(x.beta, beta))


def grouped_keys(shape: torch.Size, size: int) -> Tensor:
    """Keys in groups of this size that are nearly equal."""
    keys = torch.randn(shape).repeat_interleave(size, 1)[:, : shape[1]]
    return keys + 0.1 * torch.randn(shape)


def partly_parallel(case: Case, given: Arguments, chunk: int = 64) -> Arguments:
    """Nearly parallel keys and β = 1 everywhere; every other chunk, from the second on, forgets most of each token."""
    d_out, d_state, x = with_keys(given, torch.randn(case.D) + 0.1 * torch.randn(given[2].k.shape), 1.0)
    assert x.log_decay is not None
    strong = torch.arange(case.T, device=x.k.device) // chunk % 2 == 1
    return d_out, d_state, x._replace(log_decay=x.log_decay - strong[:, None, None].to(x.log_decay))


def by_torch(case: Case, given: Arguments, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """All results of eager PyTorch on the CPU, with inputs in this dtype."""
    sums = torch.float64 if dtype == torch.float64 else torch.float32

    def to(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        return None if x is None else x.cpu().to(dtype)

    d_out, d_state, x = given
    x = GatedInputs(*(to(y, dtype if i < 3 else sums) for i, y in enumerate(x)))
    problem = GatedProblem(case.delta, 0.7, "torch")
    out, state, starts = torch_chunk.forward(x, problem)
    grads = torch_chunk.backward(GatedSaved(to(d_out, dtype), to(d_state, sums), starts), x, problem)
    return out, state, *(None if y is None else grad for grad, y in zip(grads, x, strict=True))


def by_kernels(case: Case, given: Arguments) -> tuple[Tensor | None, ...]:
    """All results of the kernels."""
    d_out, d_state, x = given
    problem = GatedProblem(case.delta, 0.7, triton_algorithm(x, case.delta))
    kernels = _kernels(problem.algorithm)
    out, state, saved = kernels.forward(x, problem)
    assert saved.numel() <= kernels.saved_size(x, problem)
    return out, state, *kernels.backward(GatedSaved(d_out, d_state, saved), x, problem)


def errors(case: Case, given: Arguments, dtype: torch.dtype) -> dict[str, tuple[float, float, float]]:
    """Largest errors of the kernels and of eager PyTorch, and an ulp of the largest value, for each result.

    An ulp is one of the inputs' dtype.
    """
    found, truth, eager = by_kernels(case, given), by_torch(case, given, torch.float64), by_torch(case, given, dtype)
    result = {}
    for name, exact, near, ours in zip(NAMES, truth, eager, found, strict=True):
        if exact is None or near is None:
            assert ours is None, name
            continue
        assert ours is not None, name
        assert ours.shape == exact.shape, name
        assert ours.dtype == near.dtype, name
        own, plain = ((x.cpu().double() - exact).abs().max().item() for x in (ours, near))
        result[name] = own, plain, exact.abs().max().item() * torch.finfo(dtype).eps
    return result


def check_sums(case: Case, draws: Iterable[Arguments], dtype: torch.dtype) -> None:
    """`within_tolerance` of the gradients of the gates times the gates, summed over tokens.

    Gates are usually multiplied by one parameter per head (A_log of Mamba-2), whose gradient this is. Rounding errors
    that tokens share add up.
    """
    within_tolerance(_errors_of_sums(case, given, dtype) for given in draws)


def _errors_of_sums(case: Case, given: Arguments, dtype: torch.dtype) -> dict[str, tuple[float, float, float]]:
    found, truth, eager = by_kernels(case, given), by_torch(case, given, torch.float64), by_torch(case, given, dtype)
    result = {}
    for name, gate in (("d_log_decay", given[2].log_decay), ("d_beta", given[2].beta)):
        assert gate is not None
        i = NAMES.index(name)
        ours, exact, near = ((y[i].cpu().double() * gate.cpu()).sum(1) for y in (found, truth, eager))
        own, plain = ((x - exact).abs().max().item() for x in (ours, near))
        result[f"sum of {name}"] = own, plain, exact.abs().max().item() * torch.finfo(dtype).eps
    return result


def check(case: Case, given: Arguments, dtype: torch.dtype, more: Iterable[Arguments] = ()) -> None:
    """`within_tolerance` of all results. more: Further draws of the inputs."""
    within_tolerance(errors(case, draw, dtype) for draw in chain([given], more))
