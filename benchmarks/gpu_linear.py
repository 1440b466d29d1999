"""Causal linear attention and FAVOR+ on one GPU: checked first, then timed beside softmax attention and its like.

    python benchmarks/gpu_linear.py results.json [--only favor 2048]

Times are medians over CUDA events, forward and forward + backward, with the second-level cache flushed before each run:
as called from Python, and replayed from a CUDA graph, which leaves the launches out. Each kernel's own time stands
beside the bytes it must move, and peak memory beside the inputs, outputs and their gradients.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.bench.environment import commit, machine, versions
from longspan.bench.timing import attention_ms, cuda_ms
from longspan.ops.common import dispatch
from longspan.ops.linear import causal_linear_out
from longspan.ops.linear.feature_maps import orthogonal_rows

# B, H, n, D, the feature map, targets in ms: forward, forward + backward.
CASES = [
    (4, 16, 8192, 64, "softmax", 0.16, 0.50),
    (4, 16, 8192, 64, "elu", 0.16, 0.50),
    (4, 16, 8192, 128, "softmax", 0.32, 1.0),
    (1, 16, 65536, 64, "softmax", 0.32, 1.0),
    (1, 16, 65536, 128, "softmax", 0.65, 2.0),
    (4, 8, 8192, 64, "favor", 0.35, 1.4),
    (1, 8, 65536, 64, "favor", 0.7, 2.8),
    (4, 16, 2048, 64, "softmax", math.inf, math.inf),
]
NUM_FEATURES = 256

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def inputs(B: int, H: int, n: int, D: int) -> list[Tensor]:
    return [torch.randn(B, n, H, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def ours(feature_map: str, D: int) -> Attention:
    weight = orthogonal_rows(NUM_FEATURES, D, unit=False).cuda() if feature_map == "favor" else None
    return lambda q, k, v: causal_linear_out(
        q, k, v, feature_map=feature_map, weight=None if weight is None else weight.to(_sums(q))
    )


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return out.transpose(1, 2)


def flash_linear_attention() -> Attention | None:
    """Chunked linear attention of flash-linear-attention, feature maps outside its kernel, where it is installed."""
    try:
        from fla.ops.linear_attn import chunk_linear_attn
    except ImportError:
        return None
    return lambda q, k, v: chunk_linear_attn(q.softmax(-1), k.softmax(-1), v, normalize=True)[0]


def check(B: int, H: int, n: int, D: int, feature_map: str) -> dict[str, float]:
    """Largest error of out and gradients against float64, over the largest value; raises where one is over 3 %."""
    attend = ours(feature_map, D)
    given = inputs(1, 2, min(n, 2048) - 3, D)
    d_out = torch.randn_like(given[0])
    kv = torch.empty(1, 2, NUM_FEATURES if feature_map == "favor" else D, D + 1, device="cuda")
    weight = kv if feature_map == "favor" else None
    why = dispatch.why_not_triton(*given, weight, None, kv, feature_map, 1)
    if why is not None:
        raise SystemExit(f"the kernels do not run: {why}")

    def run(dtype: torch.dtype) -> list[Tensor]:
        x = [t.detach().to(dtype).requires_grad_() for t in given]
        out = attend(*x)
        return [out, *torch.autograd.grad(out, x, d_out.to(dtype))]

    errors = {}
    for name, exact, found in zip(("out", "d_q", "d_k", "d_v"), run(torch.float64), run(torch.bfloat16), strict=True):
        errors[name] = ((found - exact).abs().max() / exact.abs().max()).item()
        if not errors[name] < 0.03:
            raise SystemExit(f"{feature_map} {D}: {name} is off by {errors[name]:.3g} of the largest value")
    return errors


def kernels(attend: Attention, given: list[Tensor], feature_map: str) -> dict[str, dict[str, float]]:
    """Milliseconds, bytes moved and bandwidth of each kernel of one forward + backward."""
    d_out = torch.randn_like(given[0])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            torch.autograd.grad(attend(*given), given, d_out)
        torch.cuda.synchronize()
    times: dict[str, list[float]] = {}
    for event in profile.events():
        if event.name.startswith(("walking_", "favor_")):
            times.setdefault(event.name.removeprefix("walking_"), []).append(event.device_time_total / 1e3)
    B, n, H, D = given[0].shape
    rows, scalars = 2 * B * n * H * D, 4 * B * H * n
    states = 2 * B * H * math.ceil(n / 64) * NUM_FEATURES * D
    # Inputs and outputs of each, and numbers for each token; sums that are walked with are next to nothing beside them.
    moved = {
        "forward_sums_kernel": 2 * rows,
        "forward_kernel": 4 * rows + scalars,
        "backward_sums_kernel": 3 * rows + 3 * scalars,
        "backward_queries_kernel": 5 * rows + 2 * scalars,
        "backward_keys_kernel": 6 * rows + 2 * scalars,
        # One launch each; the sizes are those of queries or of keys.
        "favor_sizes_kernel": rows + 2 * scalars,
        "favor_forward_sums_kernel": 2 * rows + states + scalars,
        "favor_forward_kernel": 4 * rows + states + 5 * scalars,
        "favor_backward_rows_kernel": 2 * rows + 4 * scalars,
        "favor_backward_sums_kernel": 2 * rows + states + 3 * scalars,
        "favor_backward_queries_kernel": 5 * rows + states + 5 * scalars,
        "favor_backward_keys_kernel": 6 * rows + states + 5 * scalars,
    }
    found = {}
    for name, each in times.items():
        found[name] = {"ms": sum(each) / (len(each) if name.startswith("favor_") else 3)}
        if name in moved:
            found[name] |= {"bytes": moved[name], "TB/s": moved[name] / found[name]["ms"] / 1e9}
    return found


def peak_memory(attend: Attention, given: list[Tensor]) -> dict[str, float]:
    """Peak bytes of forward + backward, and of inputs, output and their gradients."""
    d_out = torch.randn_like(given[0])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(attend(*given), given, d_out)
    torch.cuda.synchronize()
    own = 4 * d_out.numel() * d_out.element_size()  # Inputs and d_out were there before.
    peak = torch.cuda.max_memory_allocated() - before + own
    return {"peak": peak, "tensors": 2 * own, "ratio": peak / (2 * own)}


def longest(feature_map: str, n: int = 4_194_304) -> dict[str, Any]:
    """One step of one layer of 1·16·n·64, the second: in the first its memory is taken from the device."""
    given = inputs(1, 16, n, 64)
    d_out, attend = torch.ones_like(given[0]), ours(feature_map, 64)
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(attend(*given), given, d_out)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    grads = torch.autograd.grad(attend(*given), given, d_out)
    end.record()
    torch.cuda.synchronize()
    finite = all(bool(x[:, ::4099].isfinite().all()) for x in grads)
    peak = torch.cuda.max_memory_allocated()
    return {"map": feature_map, "n": n, "ms": begin.elapsed_time(end), "peak": peak, "finite": finite}


def in_turns(attends: dict[str, Attention], given: list[Tensor], depth: int, rounds: int = 7) -> dict[str, float]:
    """Forward + backward as called, of `depth` attentions in a row, each the next one's queries: medians for one.

    Here the host decides, and its speed changes from one tenth of a second to the next: everybody takes turns. The
    wake-up of autograd's thread, once a backward pass, is most of it for one attention and little for a model of them.
    """
    d_out = torch.randn_like(given[0])

    def both(attend: Attention) -> None:
        out, k, v = given
        for _ in range(depth):
            out = attend(out, k, v)
        torch.autograd.grad(out, given, d_out)

    steps = {name: partial(both, attend) for name, attend in attends.items()}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            found[name] += cuda_ms(step, 10)
    return {name: median(each) / depth for name, each in found.items()}


def _words(case: tuple[Any, ...]) -> set[str]:
    return {str(word) for word in case[:5]}


def _sums(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="where to write the JSON")
    parser.add_argument(
        "--only", nargs="*", default=[], help="words of which a case's name, 4·8·8192·64 favor, has one"
    )
    known = ("sdpa", "fla")
    parser.add_argument("--peers", nargs="*", choices=known, default=known, help="whom to time beside")
    options = parser.parse_args()
    path, wanted = options.results, [case for case in CASES if not options.only or set(options.only) & _words(case)]
    torch.manual_seed(0)
    found: dict[str, Any] = {"machine": machine("cuda"), "versions": versions(), "commit": commit()}
    found |= {"dtype": "bfloat16", "unit": "ms", "rows": []}
    for B, H, n, D, feature_map, *targets in wanted:
        errors = check(B, H, n, D, feature_map)
        given = inputs(B, H, n, D)
        row: dict[str, Any] = {"case": [B, H, n, D, feature_map], "errors": errors}
        row["targets"] = [target if math.isfinite(target) else None for target in targets]
        row["ours"] = attention_ms(ours(feature_map, D), given)
        row["kernels"] = kernels(ours(feature_map, D), given, feature_map)
        row["memory"] = peak_memory(ours(feature_map, D), given)
        # Each input read once and each output written once, at the bandwidth of an H200's copy.
        size = given[0].numel() * given[0].element_size()
        row["limit_ms"] = [4 * size / 4.2e9, 12 * size / 4.2e9]
        row["peers"] = {}
        if not math.isfinite(targets[0]):
            rivals = {"ours": ours(feature_map, D), "sdpa": sdpa}
            row["in_turns"] = {str(depth): in_turns(rivals, given, depth) for depth in (1, 8)}
            print("forward + backward as called, in turns, of 1 and of 8 in a row:", row["in_turns"], flush=True)
        found["rows"].append(row)
        show(row)
        path.write_text(json.dumps(found, indent=1))
        del given
    if not options.only:
        found["longest"] = [longest("elu"), longest("softmax")]
        print(found["longest"], flush=True)
    # Last, because they take the longest: what was measured before is there if they do not end.
    for name in options.peers:
        peer = sdpa if name == "sdpa" else flash_linear_attention()
        if peer is None:
            print("flash-linear-attention is not installed", flush=True)
            continue
        for row in found["rows"]:
            B, H, n, D, feature_map = row["case"]
            row["peers"][name] = attention_ms(peer, inputs(B, H, n, D), repeats=30 if n < 65536 else 7)
            show(row)
            path.write_text(json.dumps(found, indent=1))


def show(row: dict[str, Any]) -> None:
    B, H, n, D, feature_map = row["case"]
    times = {"ours": row["ours"], **row["peers"]}
    shown = {"limit": row["limit_ms"], "target": row["targets"]}
    for name, t in times.items():
        shown |= {name: [t["forward"], t["both"]], f"{name}, graph": [t["forward_graph"], t["both_graph"]]}
    pairs = [f"{name} {a:.3f} / {b:.3f}" for name, (a, b) in shown.items() if a is not None]
    print(f"{f'{B}·{H}·{n}·{D} {feature_map}':<26}" + "  ".join(pairs), flush=True)


if __name__ == "__main__":
    main()
