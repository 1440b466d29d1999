"""Training steps of a byte language model on one GPU: tokens per second, and the kernels that take the time.

    python benchmarks/gpu_model.py results.json [--only linear local] [--modes default eager]

The model has 19 million parameters: dim 512, 6 layers, 8 heads. A step is loss, backward and fused AdamW under bfloat16
autocast. Every model compiles in a process of its own, all at once; then each is timed alone, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from longspan import AttentionConfig, LanguageModel, ModelConfig
from longspan.bench.environment import commit, machine, versions

LOCAL = {"mechanism": "local", "window": 256}
PERFORMER = {"mechanism": "performer", "num_features": 256}
HALF_LOCAL = {"mechanism": "split", "parts": [{**PERFORMER, "num_heads": 4}, {**LOCAL, "num_heads": 4}]}
ATTENTIONS: dict[str, dict[str, Any]] = {
    "linear": {"mechanism": "linear"},
    "local": {"mechanism": LOCAL, "rotary": "halves"},
    "performer, half the heads local": {"mechanism": HALF_LOCAL, "rotary": ("none", "halves")},
    "linear and local in turn": {"mechanism": ("linear", LOCAL), "rotary": "halves"},
    "softmax": {"mechanism": "softmax", "rotary": "halves"},
}
SHAPES = {"8x4096": (8, 4096), "1x65536": (1, 65536)}
TARGETS = {"8x4096": 2_000_000, "1x65536": 1_800_000}
MODES = ("default", "reduce-overhead", "max-autotune-no-cudagraphs", "eager")


def build(name: str) -> LanguageModel:
    attention = AttentionConfig(num_heads=8, **ATTENTIONS[name])
    config = ModelConfig(dim=512, depth=6, causal=True, vocab_size=256, tie_embeddings=True, attention=attention)
    return LanguageModel(config).cuda()


def work(name: str, shape: str, mode: str, steps: int = 20) -> dict[str, Any]:
    """One worker: compiles, says so, waits for its turn, and measures."""
    torch.manual_seed(0)
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(256, SHAPES[shape], device="cuda")
    loss_of = model.loss if mode == "eager" else torch.compile(model.loss, fullgraph=True, mode=mode)

    def step() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    begun = time.perf_counter()
    first = float(step())
    for _ in range(4):
        step()
    torch.cuda.synchronize()
    compiling = time.perf_counter() - begun
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        last = step()
        event.record()
    torch.cuda.synchronize()
    each = sorted(a.elapsed_time(b) for a, b in pairwise(events))
    found: dict[str, Any] = {
        "model": name,
        "shape": shape,
        "mode": mode,
        "parameters": sum(p.numel() for p in model.parameters()),
        "ms": each[steps // 2],
        "tokens_per_second": round(tokens.numel() / each[steps // 2] * 1e3),
        "target": TARGETS[shape],
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "warm_up_s": round(compiling, 1),
        "loss": [first, float(last)],
    }
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    rows = sorted(profile.key_averages(), key=lambda row: -row.self_device_time_total)
    found["kernels_ms"] = {
        row.key[:100]: [round(row.self_device_time_total / 3e3, 4), row.count // 3]
        for row in rows[:40]
        if row.self_device_time_total > 0
    }
    found["device_ms"] = sum(row.self_device_time_total for row in rows) / 3e3
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", help="where to write the JSON")
    parser.add_argument("--only", nargs="*", default=list(ATTENTIONS), choices=ATTENTIONS)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--modes", nargs="*", default=["default"], choices=MODES)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(*options.worker)), flush=True)
        return
    wanted = [(n, s, m) for n in options.only for s in options.shapes for m in options.modes]
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", *one],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "4"},
        )
        for one in wanted
    ]
    for worker in workers:
        assert worker.stdout is not None
        worker.stdout.readline()
    rows = []
    print(f"{'model':<34}{'shape':>9}{'mode':>28}{'ms':>8}{'tokens/s':>12}{'target':>11}{'device ms':>11}")
    for (name, shape, mode), worker in zip(wanted, workers, strict=True):
        out, err = worker.communicate("go\n")
        if worker.returncode:
            print(f"{name:<34}{shape:>9}{mode:>28}  failed: {err.strip()[-1500:]}")
            continue
        row = json.loads(out.splitlines()[-1])
        rows.append(row)
        print(
            f"{name:<34}{shape:>9}{mode:>28}{row['ms']:>8.2f}{row['tokens_per_second']:>12,}{row['target']:>11,}"
            f"{row['device_ms']:>11.2f}",
            flush=True,
        )
    if options.results is not None:
        about = {"machine": machine("cuda"), "versions": versions(), "commit": commit()}
        options.results.write_text(json.dumps({**about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
