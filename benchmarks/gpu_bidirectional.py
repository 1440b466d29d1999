"""Bidirectional linear attention and FAVOR+ on one GPU: checked first, then timed beside SDPA and performer-pytorch.

    python benchmarks/gpu_bidirectional.py results.json

Times are medians over CUDA events, forward and forward + backward, with the second-level cache flushed before each run:
as called from Python, and replayed from a CUDA graph, which leaves the launches out. Each kernel's own time stands
beside the bytes it must move, and peak memory beside the inputs, outputs and their gradients.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_linear import NUM_FEATURES, Attention, inputs, peak_memory
from torch import Tensor

from longspan.bench.environment import commit, machine, versions
from longspan.bench.timing import attention_ms
from longspan.mechanisms.feature_maps import Favor
from longspan.mechanisms.linear import LinearAttention
from longspan.ops.common import dispatch
from longspan.ops.linear.bidirectional import bidirectional_linear

# A projection as longspan draws it, float32 of numbers that bfloat16 holds; any other; and one of bfloat16.
WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "drawn": lambda weight: weight.bfloat16().float(),
    "any": lambda weight: weight,
    "bfloat16": lambda weight: weight.bfloat16(),
}
# B, H, n, D, the feature map, how it is normalized, its weight, targets in ms: forward, forward + backward.
CASES = [
    (4, 16, 8192, 64, "softmax", "query", None, 0.16, 0.48),
    (4, 16, 8192, 64, "softmax", "feature", None, 0.16, 0.48),
    (4, 16, 8192, 64, "elu", "query", None, 0.16, 0.48),
    (4, 16, 8192, 128, "softmax", "query", None, 0.32, 0.95),
    (1, 16, 65536, 64, "softmax", "query", None, 0.32, 0.95),
    (4, 8, 8192, 64, "favor", "query", "drawn", 0.25, 1.0),
    (4, 8, 8192, 64, "favor", "query", "any", 0.25, 1.0),
    (4, 8, 8192, 64, "favor", "query", "bfloat16", 0.25, 1.0),
    (1, 8, 65536, 64, "favor", "query", "drawn", math.inf, math.inf),
    (4, 8, 2048, 64, "favor", "query", "drawn", math.inf, math.inf),
    (4, 16, 2048, 64, "softmax", "query", None, math.inf, math.inf),
]
# What each kernel must read and write, in tensors the size of q.
TENSORS = {
    "bidirectional_sums_kernel": 2,
    "bidirectional_read_kernel": 2,
    "bidirectional_backward_queries_kernel": 3,
    "bidirectional_backward_keys_kernel": 4,
}


def projection(D: int, kind: str | None) -> Tensor | None:
    return None if kind is None else WEIGHTS[kind](torch.randn(NUM_FEATURES, D, device="cuda"))


def ours(feature_map: str, normalize: str, weight: Tensor | None) -> Attention:
    return lambda q, k, v: bidirectional_linear(q, k, v, feature_map=feature_map, weight=weight, normalize=normalize)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def performer(D: int) -> Attention | None:
    """FAVOR+ of performer-pytorch, where it can be imported."""
    try:
        from performer_pytorch.performer_pytorch import FastAttention
    except ImportError as error:
        print(f"performer-pytorch is left out: {error}")
        return None
    attend = FastAttention(D, nb_features=NUM_FEATURES).cuda()
    return lambda q, k, v: attend(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def check(H: int, n: int, D: int, feature_map: str, normalize: str, weight: Tensor | None) -> dict[str, float]:
    """Largest error of out and gradients against the plain path in float64, over the largest value; at most 3 %."""
    given = inputs(1, 2, min(n, 2048) - 3, D)
    why = dispatch.why_not_triton_bidirectional(*given, weight)
    if why is not None:
        raise SystemExit(f"the kernels do not run: {why}")
    phi: str | Favor = feature_map
    if weight is not None:
        phi = Favor(D, len(weight), row_norms="sampled", epsilon=0.0)
        phi.projection = weight
    plain = LinearAttention(2, D, feature_map=phi, normalize=normalize)
    d_out = torch.randn_like(given[0])

    def run(attend: Attention, dtype: torch.dtype) -> list[Tensor]:
        x = [t.detach().to(dtype).requires_grad_() for t in given]
        out = attend(*x)
        return [out, *torch.autograd.grad(out, x, d_out.to(dtype))]

    errors = {}
    found = run(ours(feature_map, normalize, weight), torch.bfloat16)
    for name, exact, near in zip(("out", "d_q", "d_k", "d_v"), run(plain, torch.float64), found, strict=True):
        errors[name] = ((near - exact).abs().max() / exact.abs().max()).item()
        if not errors[name] < 0.03:
            raise SystemExit(f"{feature_map} {D}: {name} is off by {errors[name]:.3g} of the largest value")
    return errors


def kernels(attend: Attention, given: list[Tensor]) -> dict[str, dict[str, float]]:
    """Milliseconds, bytes that must move and bandwidth of each kernel of one forward + backward."""
    d_out, repeats = torch.randn_like(given[0]), 5
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            torch.autograd.grad(attend(*given), given, d_out)
        torch.cuda.synchronize()
    found: dict[str, dict[str, float]] = {}
    for event in profile.events():
        if event.name.startswith("bidirectional_"):
            row = found.setdefault(event.name, {"ms": 0.0})
            row["ms"] += event.device_time_total / 1e3 / repeats
    for name, number in TENSORS.items():
        if name in found:
            moved = number * given[0].numel() * given[0].element_size()
            found[name] |= {"bytes": moved, "TB/s": moved / found[name]["ms"] / 1e9}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="where to write the JSON")
    path = parser.parse_args().results
    torch.manual_seed(0)
    about = {"machine": machine("cuda"), "versions": versions(), "commit": commit()}
    rows: list[dict[str, Any]] = []
    print(f"{'B·H·n·D':<36}{'limit':>15}{'target':>15}{'ours':>15}{'graph':>15}{'sdpa':>15}{'performer':>15}")
    for B, H, n, D, feature_map, normalize, kind, *targets in CASES:
        weight = projection(D, kind)
        attend = ours(feature_map, normalize, weight)
        row: dict[str, Any] = {"case": [B, H, n, D, feature_map, normalize], "weight": kind}
        row["errors"] = check(H, n, D, feature_map, normalize, weight)
        row["targets"] = [target if math.isfinite(target) else None for target in targets]
        given = inputs(B, H, n, D)
        row["ours"] = attention_ms(attend, given)
        row["kernels"] = kernels(attend, given)
        row["memory"] = peak_memory(attend, given)
        peers = {"sdpa": sdpa, "performer-pytorch": performer(D) if kind == "drawn" else None}
        repeats = 30 if n < 65536 else 5
        row["peers"] = {name: attention_ms(peer, given, repeats) for name, peer in peers.items() if peer is not None}
        # Each input read once and each output written once, at the bandwidth of an H200's copy.
        size = given[0].numel() * given[0].element_size()
        row["limit_ms"] = [4 * size / 4.2e9, 12 * size / 4.2e9]
        rows.append(row)
        times = [row["ours"], *row["peers"].values()]
        pairs = [row["limit_ms"], targets, *([t["forward"], t["both"]] for t in times)]
        pairs.insert(3, [row["ours"]["forward_graph"], row["ours"]["both_graph"]])
        name = f"{B}·{H}·{n}·{D} {feature_map} {normalize} {kind or ''}"
        print(f"{name:<36}" + "".join(f"{f'{a:.3f} / {b:.3f}':>15}" for a, b in pairs), flush=True)
        path.write_text(json.dumps({**about, "dtype": "bfloat16", "unit": "ms", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
