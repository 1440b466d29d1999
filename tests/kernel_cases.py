"""Cases for the Triton kernels of causal linear attention, and their comparison with eager PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

import torch
from helpers import case_id, random_heads, within_tolerance
from torch import Tensor

from longspan.mechanisms.performer import PerformerAttention
from longspan.ops.linear import (
    FLOOR,
    LinearInputs,
    LinearProblem,
    LinearSaved,
    _CausalLinear,
    _kernels,
    triton_algorithm,
)

NAMES = ["out", "den", "kv", "shift", "d_q", "d_k", "d_v", "d_start"]


@dataclass(frozen=True)
class Case:
    """Sizes are distinct primes where nothing else matters."""

    T: int = 17
    B: int = 2
    H: int = 3
    Hkv: int = 3
    D: int = 5
    E: int = 7
    feature_map: str = "elu"
    normalize: bool = True
    state: bool = True
    lengths: tuple[int, ...] | None = None
    scaled: bool = False
    num_features: int | None = None
    size: float = 1.0
    strided: bool = False
    bucket: int = 1
    stateless: bool = False  # No sums before, none after.
    jump: float = 0.0  # How much larger the later half of the keys is, or their log scales.

    __str__ = case_id


Arguments = tuple[Tensor, Tensor | None, tuple[Tensor | None, ...]]


def arguments(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    """The gradients of out and of the sums, and the tensors of the op."""
    B, T, H, Hkv, D, E = case.B, case.T, case.H, case.Hkv, case.D, case.E

    def inputs(heads: int, dim: int) -> Tensor:
        return random_heads((B, T, heads, dim), case.strided, dtype, device)

    q, k, v, d_out = inputs(H, D) * case.size, inputs(Hkv, D) * case.size, inputs(Hkv, E), inputs(H, E)
    if case.feature_map == "identity" and case.normalize:
        q, k = q.abs(), k.abs()  # Features of either sign have normalizers near 0, and nothing near them is exact.
    if case.jump and not case.scaled:
        k[:, T // 2 :] += case.jump
    M = case.num_features or D
    weight = torch.randn(M, D).to(device) if case.num_features else None
    scale = 3 * torch.randn(B, T, Hkv).to(device) if case.scaled else None
    if scale is not None:
        scale[:, T // 2 :] += case.jump
    lengths = None if case.lengths is None else torch.tensor(case.lengths, device=device)
    if case.stateless:
        return d_out, None, (q, k, v, weight, scale, lengths, None, None)
    kv, shift = torch.rand(B, Hkv, M, E + case.normalize), torch.randn(B, Hkv)
    if not case.state:
        kv, shift = torch.zeros_like(kv), torch.full_like(shift, FLOOR)
    d_kv = torch.randn_like(kv).to(device)
    return d_out, d_kv, (q, k, v, weight, scale, lengths, kv.to(device), shift.to(device))


def by_torch(case: Case, given: Arguments, dtype: torch.dtype, scale: Tensor | None = None) -> tuple[Tensor, ...]:
    """All results of eager PyTorch on the CPU, with inputs in this dtype.

    scale: (B, Hkv) the log scale of the sums whose gradient is given, if it is not that of the result.
    """
    sums = torch.float64 if dtype == torch.float64 else torch.float32

    def to(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        return x if x is None else x.cpu().to(dtype) if x.is_floating_point() else x.cpu()

    d_out, d_kv, tensors = given
    tensors = tuple(to(x, dtype if i < 3 else sums) for i, x in enumerate(tensors))
    problem = LinearProblem(case.feature_map, case.normalize, case.bucket, True, "torch")
    tensors = LinearInputs(*tensors)
    out, after, shift, den, *starts = _CausalLinear.traced(*tensors, *problem)
    d_kv = d_kv if scale is None else _at(scale.cpu(), d_kv.cpu(), shift)
    d = _CausalLinear.traced_backward(to(d_out, dtype), to(d_kv, sums), out, den, *starts, *tensors, *problem)
    return out, den, after, shift, *d[:4]


def kernel_problem(case: Case, tensors: tuple[Tensor | None, ...], *, final: bool = True) -> LinearProblem:
    """The options of a case, with the kernels that take it."""
    algorithm = triton_algorithm(LinearInputs(*tensors), case.feature_map, case.normalize)
    return LinearProblem(case.feature_map, case.normalize, case.bucket, final and not case.stateless, algorithm)


def forward(case: Case, tensors: tuple[Tensor | None, ...], *, final: bool = True) -> tuple[Tensor | None, ...]:
    """out, the sums and shift after it, den, and what is saved for backward, by the kernels."""
    problem = kernel_problem(case, tensors, final=final)
    return _kernels(problem.algorithm).forward(LinearInputs(*tensors), problem)


def backward(case: Case, given: Arguments, out: Tensor, den: Tensor, saved: Tensor | None) -> tuple[Tensor, ...]:
    """The gradients by the kernels."""
    d_out, d_kv, tensors = given
    problem = kernel_problem(case, tensors)
    for_backward = LinearSaved(d_out, d_kv, out, den, saved, None)
    return _kernels(problem.algorithm).backward(for_backward, LinearInputs(*tensors), problem)[:4]


def by_kernels(case: Case, given: Arguments) -> tuple[Tensor, ...]:
    out, kv, shift, den, saved = forward(case, given[2])
    return out, den, kv, shift, *backward(case, given, out, den, saved)


def by_short_kernels(case: Case, given: Arguments) -> tuple[Tensor | None, ...]:
    """`by_kernels` in as few launches as eager calls of FAVOR+ without a state take. The normalizer is not returned."""
    d_out, _, tensors = given
    x, problem, kernels = LinearInputs(*tensors), kernel_problem(case, tensors), _kernels("favor_short")
    assert kernels.takes(x, problem)
    out, kv, shift, _, saved = kernels.forward_plan(x, problem)(x)
    found = LinearSaved(d_out, None, out, None, saved, None)
    grads = kernels.backward_plan(found, x, problem)(found, x)
    return out, out.new_empty(out.shape[:3], dtype=torch.float32), kv, shift, *grads, None


def check(case: Case, given: Arguments, dtype: torch.dtype, more: Iterable[Arguments] = ()) -> None:
    """`within_tolerance` of all results. more: Further draws of the inputs."""
    within_tolerance(_errors(case, draw, dtype) for draw in chain([given], more))


def _errors(case: Case, given: Arguments, dtype: torch.dtype) -> dict[str, tuple[float, float, float]]:
    """Largest errors of the kernels and of eager PyTorch, and an ulp of the largest value, for each result.

    Sums are compared at the truth's scale, and an ulp is one of the inputs' dtype, whose products they are.
    """
    errors = {}
    found = by_kernels(case, given)
    # The largest features of FAVOR+ differ between the two, and with them the scale of the sums.
    scale = found[3] if case.feature_map == "favor" else None
    truth, eager = (by_torch(case, given, kind, scale) for kind in (torch.float64, dtype))
    for name, exact, near, ours in zip(NAMES, truth, eager, found, strict=True):
        if case.stateless and name in ("kv", "shift", "d_start"):
            assert ours is None, name
            continue
        assert ours.shape == exact.shape, name
        assert ours.dtype == near.dtype, name
        own_scale = case.feature_map == "favor" or (case.feature_map == "softmax" and dtype == torch.bfloat16)
        if not exact.numel() or (name == "den" and own_scale):
            continue  # The kernels' normalizers have another scale, which cancels.
        near, ours = near.double(), ours.cpu().double()
        if name == "shift":
            if case.feature_map == "favor":
                continue
            torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)
            continue
        if name == "kv":
            near, ours = (_at(truth[3], x, shift) for x, shift in ((near, eager[3]), (ours, found[3])))
        ulp = exact.abs().max().item() * torch.finfo(dtype).eps
        errors[name] = (ours - exact).abs().max().item(), (near - exact).abs().max().item(), ulp
    return errors


def check_epsilon(case: Case, epsilon: float, dtype: torch.dtype, device: str) -> None:
    """`check` of causal FAVOR+ with an epsilon."""
    within_tolerance([_epsilon_errors(case, epsilon, dtype, device)])


def _epsilon_errors(
    case: Case, epsilon: float, dtype: torch.dtype, device: str
) -> dict[str, tuple[float, float, float]]:
    """`_errors` against `PerformerAttention` with an epsilon, whose state holds a phantom key."""
    mechanism = PerformerAttention(
        *(case.H, case.D), num_kv_heads=case.Hkv, value_dim=case.E, num_features=case.num_features, epsilon=epsilon
    )
    d_out, d_kv, (q, k, v, _, _, lengths, kv, shift) = arguments(case, dtype, device)
    hidden = torch.zeros(case.B, case.T, 1, 1, dtype=torch.bool, device=device)
    if lengths is not None:
        hidden = (torch.arange(case.T, device=device) >= lengths[:, None])[..., None, None]
    v, d_out = v.masked_fill(hidden, 0), d_out.masked_fill(hidden, 0)  # What a mechanism is given.
    total = torch.randn(case.B, case.Hkv, case.E + 1, device=device).abs()
    weight = mechanism.feature_map.weight.to(device)
    x = LinearInputs(q, k, v, weight, None, lengths, kv, shift, total)
    problem = LinearProblem("favor", True, 1, True, "favor", epsilon)
    out, after, shift_out, den, saved = _kernels("favor").forward(x, problem)
    grads = _kernels("favor").backward(LinearSaved(d_out, d_kv, out, den, saved, None), x, problem)
    found = [y.cpu().double() for y in (out.masked_fill(hidden, 0), after, shift_out, *grads)]

    def eager(dtype: torch.dtype) -> list[Tensor]:
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        inputs = [y.cpu().to(dtype).requires_grad_() for y in (q, k, v)]
        before = [y.cpu().to(sums).requires_grad_() for y in (kv, total)]
        kv_before, z_before = before[0][..., :-1], before[0][..., -1]
        state = mechanism.new_state(case.B, dtype=dtype)
        state = replace(state, kv=kv_before, z=z_before, shift=shift.cpu().to(sums), total=before[1])
        out, state = mechanism._extend(state, *inputs, gates=None, lengths=None if lengths is None else lengths.cpu())
        after = torch.cat([state.kv, state.z[..., None]], -1)
        d = d_out.cpu().to(dtype), d_kv.cpu().to(sums)
        grads = torch.autograd.grad([out, after], [*inputs, *before], d)
        out = out.masked_fill(hidden.cpu(), 0)
        return [y.detach().double() for y in (out, after, state.shift, *grads)]

    truth, near, errors = eager(torch.float64), eager(dtype), {}
    names = ["out", "kv", "shift", "d_q", "d_k", "d_v", "d_start", "d_total"]
    for name, exact, theirs, ours in zip(names, truth, near, found, strict=True):
        assert ours.shape == exact.shape, name
        if name == "shift":
            torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-5)
            continue
        ulp = exact.abs().max().item() * torch.finfo(dtype).eps
        errors[name] = (ours - exact).abs().max().item(), (theirs - exact).abs().max().item(), ulp
    return errors


def _at(shift: Tensor, kv: Tensor, own: Tensor) -> Tensor:
    """Sums at the scale `own`, at the scale `shift`."""
    return kv * (own.cpu() - shift).exp()[..., None, None]
