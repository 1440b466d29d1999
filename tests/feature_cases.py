"""Cases for the kernels of causal linear attention with given features and of the join of a window and a memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from helpers import within_tolerance
from torch import Tensor

from longspan.ops.features import BLIND, feature_attention
from longspan.ops.merge import merge_attention


class FeatureCase(NamedTuple):
    """Sizes, the delay, and whether there are sums before."""

    T: int = 131
    B: int = 2
    H: int = 2
    Hkv: int = 2
    M: int = 16
    E: int = 16
    delay: int = 0
    state: bool = False

    def __str__(self) -> str:
        return "-".join(f"{name}{value}" for name, value in self._asdict().items())


CASES = [
    FeatureCase(),
    FeatureCase(T=2, H=4, Hkv=2, M=3, E=7, delay=1, state=True),
    FeatureCase(T=65, H=4, Hkv=2, M=70, E=80, delay=5, state=True),
    FeatureCase(T=200, B=1, M=200, E=128, delay=64),
    FeatureCase(T=64 * 17, B=1, H=1, Hkv=1, delay=3, state=True),
]


def attention(query: Tensor, f: Tensor, v: Tensor, *sums: Tensor, delay: int) -> list[Tensor]:
    """The definition by matrix products in the dtype of the features; sums in float32 at least."""
    T, group, wide = query.shape[1], query.shape[2] // f.shape[2], torch.promote_types(f.dtype, torch.float32)
    q, k, values = (x.transpose(1, 2) for x in (query, f.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    pairs = (q @ k.mT).tril(-delay)
    num, den = pairs @ values, pairs.to(wide).sum(-1)
    kept = f[:, : T - delay].to(wide), v[:, : T - delay].to(wide)
    kv, z = torch.einsum("bthm,bthe->bhme", *kept), kept[0].sum(1)
    if sums:
        sees = (torch.arange(T, device=q.device) >= delay)[:, None]
        num = num + sees * (q @ sums[0].repeat_interleave(group, 1).to(q.dtype))
        den = den + (sees * (q.to(wide) @ sums[1].repeat_interleave(group, 1)[..., None]))[..., 0]
        kv, z = kv + sums[0], z + sums[1]
    seen = den > 0
    out = num / den.masked_fill(~seen, 1)[..., None].to(num.dtype)
    return [out.transpose(1, 2), den.masked_fill(~seen, 1).log().masked_fill(~seen, BLIND), kv, z]


def compare(
    names: list[str],
    arguments: Callable[[], tuple[list[Tensor], list[Tensor]]],
    kernels: Callable[..., list[Tensor]],
    definition: Callable[..., list[Tensor]],
) -> None:
    """Assert an error of at most twice that of eager PyTorch in the same dtype, plus an ulp of the largest value."""

    def results(d: list[Tensor], inputs: list[Tensor], run: Callable[..., list[Tensor]], exact: bool) -> list[Tensor]:
        leaves = [(x.double() if exact else x).detach().requires_grad_() for x in inputs]
        found = run(*leaves)
        grads = torch.autograd.grad(found, leaves, [x.to(y.dtype) for x, y in zip(d, found, strict=True)])
        return [x.detach() for x in (*found, *grads)]

    def errors() -> dict[str, tuple[float, float, float]]:
        given = arguments()
        ours, eager = results(*given, kernels, False), results(*given, definition, False)
        truth, found = results(*given, definition, True), {}
        for name, own, near, exact in zip(names, ours, eager, truth, strict=False):
            assert own.shape == exact.shape
            assert own.isfinite().all()
            error, allowed = (float((x.double() - exact).abs().max()) for x in (own, near))
            largest = exact.masked_fill(exact < BLIND / 2, 0).abs().max()  # lse of queries that see nothing
            found[name] = error, allowed, torch.finfo(torch.bfloat16).eps * float(largest)
        return found

    within_tolerance(errors() for _ in range(3))


def check(case: FeatureCase, device: str) -> None:
    """Compare `feature_attention` with the definition."""
    B, T, H, Hkv, M, E = case.B, case.T, case.H, case.Hkv, case.M, case.E

    def features(heads: int) -> Tensor:
        x = torch.randn(B, heads, T + 2, M).softmax(-1).transpose(1, 2)[:, 1:-1]
        return x.bfloat16().to(device)

    def arguments() -> tuple[list[Tensor], list[Tensor]]:
        inputs = [features(H), features(Hkv), torch.randn(B, T, Hkv, E).bfloat16().to(device)]
        if case.state:
            inputs += [torch.randn(B, Hkv, M, E, device=device), torch.rand(B, Hkv, M, device=device) + 0.1]
        shapes = (B, T, H, E), (B, H, T), (B, Hkv, M, E), (B, Hkv, M)
        return [torch.randn(shape, device=device) for shape in shapes], inputs

    compare(
        ["out", "lse", "kv", "z", "d_query", "d_f", "d_v", "d_kv", "d_z"],
        arguments,
        lambda *leaves: list(feature_attention(*leaves, delay=case.delay)),
        lambda *leaves: attention(*leaves, delay=case.delay),
    )


def merged(*inputs: Tensor) -> list[Tensor]:
    """The definition of `merge_attention` in eager PyTorch, in float32 at least."""
    dtype, wide = inputs[4].dtype, torch.promote_types(inputs[4].dtype, torch.float32)
    window, window_lse, memory, memory_lse, q, weight, bias, *value = (x.to(wide) for x in inputs)
    hidden = memory_lse < BLIND / 2
    learned = torch.einsum("bthd,nhd->nbth", q, weight) + bias[:, None, None]
    scores = [window_lse, (memory_lse + learned[0]).masked_fill(hidden, BLIND)]
    parts = [window, memory]
    if value:
        scores.append(learned[1].masked_fill(hidden, BLIND))
        parts.append(value[0].expand_as(window))
    weights = torch.stack(scores).softmax(0)[..., None]
    return [(weights * torch.stack(parts)).sum(0).to(dtype)]


def check_merge(sizes: tuple[int, ...], sink: bool, dtype: torch.dtype, device: str) -> None:
    """Compare `merge_attention` with the definition; the first five queries see no memory."""
    B, T, H, D, E = sizes

    def arguments() -> tuple[list[Tensor], list[Tensor]]:
        out, lse = ([torch.randn(shape, device=device) for _ in range(2)] for shape in ((B, T, H, E), (B, H, T)))
        lse[1][:, :, :5] = BLIND
        q = torch.randn(B, H, T + 2, D, device=device).transpose(1, 2)[:, 1:-1].to(dtype)
        scores = 2 if sink else 1
        learned = [torch.randn(scores, H, D, device=device), torch.randn(scores, H, device=device)]
        value = [torch.randn(H, E, device=device)] * sink
        pairs = [out[0], lse[0].transpose(1, 2), out[1].to(dtype), lse[1].transpose(1, 2)]
        return [torch.randn(B, T, H, E, device=device)], [*pairs, q, *learned, *value]

    names = ["out", "d_window", "d_lse", "d_memory", "d_memory_lse", "d_q", "d_weight", "d_bias", "d_value"]
    compare(names, arguments, lambda *leaves: [merge_attention(*leaves)], merged)
