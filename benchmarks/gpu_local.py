"""Local attention on one GPU: checked first, then timed beside FlexAttention's sliding window and full attention.

    python benchmarks/gpu_local.py results.json

Times are medians over CUDA events, forward and forward + backward, with the second-level cache flushed before each run:
as called from Python, and replayed from a CUDA graph, which leaves the launches out.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from longspan.bench.environment import commit, machine, versions
from longspan.bench.timing import attention_ms
from longspan.ops.window import Window, why_not_triton, window_attention
from longspan.ops.window import reference as window_reference

# B, H, n, D, window, size of blocks (0: exact).
CASES = [
    (4, 8, 8192, 64, 256, 0),
    (4, 8, 8192, 64, 256, 256),
    (1, 8, 65536, 64, 512, 0),
    (4, 16, 8192, 128, 512, 0),
]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def window_of(W: int, size: int) -> Window:
    return Window(size, 1, 0, True, False) if size else Window(0, W - 1, 0, True, False)


def ours(W: int, size: int) -> Attention:
    window = window_of(W, size)
    return lambda q, k, v: window_attention(q, k, v, window)


def flex(n: int, W: int, size: int) -> Attention:
    """FlexAttention compiled, its block mask made beforehand and not timed."""

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & ((i // size - j // size <= 1) if size else (i - j < W))

    mask = torch.compile(create_block_mask)(sees, None, None, n, n, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask).transpose(1, 2)

    return attend


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return out.transpose(1, 2)


def check(attend: Attention, D: int, W: int, size: int, n: int = 2048) -> dict[str, float]:
    """Largest error of out and gradients against float64, over the largest value; raises where one is over 2 %."""
    given = [torch.randn(1, n, 2, D, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    d_out = torch.randn_like(given[0])
    why = why_not_triton(*given)
    if why is not None:
        raise SystemExit(f"the kernels do not run: {why}")
    i, j = torch.arange(n, device="cuda")[:, None], torch.arange(n, device="cuda")
    seen = window_of(W, size).contains(i, j)

    def run(attend: Attention, dtype: torch.dtype) -> list[Tensor]:
        x = [t.detach().to(dtype).requires_grad_() for t in given]
        out = attend(*x)
        return [out, *torch.autograd.grad(out, x, d_out.to(dtype))]

    truth = run(lambda q, k, v: window_reference.softmax_attention(q, k, v, seen), torch.float64)
    errors = {}
    for name, exact, found in zip(("out", "d_q", "d_k", "d_v"), truth, run(attend, torch.bfloat16), strict=True):
        errors[name] = ((found - exact).abs().max() / exact.abs().max()).item()
        if not errors[name] < 0.02:
            raise SystemExit(f"{name} is off by {errors[name]:.3g} of the largest value")
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="where to write the JSON")
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="which, counted from 0")
    options = parser.parse_args()
    path = options.results
    torch.manual_seed(0)
    about = {"machine": machine("cuda"), "versions": versions(), "commit": commit()}
    rows = []
    print(
        f"{'B·H·n·D window':<28}{'limit':>15}{'ours':>15}{'ours, graph':>15}{'flex':>15}{'flex, graph':>15}{'sdpa':>15}"
    )
    for B, H, n, D, W, size in (CASES[i] for i in options.cases):
        errors = check(ours(W, size), D, W, size)
        given = [torch.randn(B, n, H, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        bytes_moved = given[0].numel() * given[0].element_size()
        row: dict[str, Any] = {
            "case": [B, H, n, D, W, size],
            "errors": errors,
            "ours": attention_ms(ours(W, size), given),
        }
        # Each input read once and each output written once, at the bandwidth of an H200's copy.
        row["limit_ms"] = [4 * bytes_moved / 4.2e9, 12 * bytes_moved / 4.2e9]
        row["peers"] = {"flex": attention_ms(flex(n, W, size), given), "sdpa": attention_ms(sdpa, given)}
        rows.append(row)
        o, f, s = row["ours"], row["peers"]["flex"], row["peers"]["sdpa"]
        pairs = [row["limit_ms"], [o["forward"], o["both"]], [o["forward_graph"], o["both_graph"]]]
        pairs += [[f["forward"], f["both"]], [f["forward_graph"], f["both_graph"]], [s["forward"], s["both"]]]
        name = f"{B}·{H}·{n}·{D} {'blocks' if size else 'exact'} {W}"
        print(f"{name:<28}" + "".join(f"{f'{a:.3f} / {b:.3f}':>15}" for a, b in pairs), flush=True)
        path.write_text(json.dumps({**about, "dtype": "bfloat16", "unit": "ms", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
