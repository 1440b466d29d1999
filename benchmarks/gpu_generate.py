"""Generation on one GPU: milliseconds per token, tokens per second in a batch, and how fast a prompt is read.

    python benchmarks/gpu_generate.py results.json
    python benchmarks/gpu_generate.py results.json --add --only --peers flash-linear-attention --limit 150

The models are those of `gpu_model.py`, in bfloat16. Beside them, where it can be imported, flash-linear-attention's
language model of the same size, by its own `generate` with a cache. A peer runs in a process of its own for so many
seconds: what it has measured by then stays in the results.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspan import AttentionConfig, LanguageModel, ModelConfig, Sampling, stream
from longspan.bench.environment import commit, machine, versions
from longspan.bench.runner import Case
from longspan.bench.subjects.models import OLDER, OlderModel
from longspan.generation.generate import prefill

LOCAL = {"mechanism": "local", "window": 256}
PERFORMER = {"mechanism": "performer", "num_features": 256}
HALF_LOCAL = {"mechanism": "split", "parts": [{**PERFORMER, "num_heads": 4}, {**LOCAL, "num_heads": 4}]}
ATTENTIONS: dict[str, dict[str, Any]] = {
    "linear": {"mechanism": "linear"},
    "performer": {"mechanism": PERFORMER},
    "local": {"mechanism": LOCAL, "rotary": "halves"},
    "linformer": {"mechanism": {"mechanism": "linformer", "rank": 256, "max_length": 4096, "periodic": True}},
    "performer, half the heads local": {"mechanism": HALF_LOCAL, "rotary": ("none", "halves")},
    "linear and local in turn": {"mechanism": ("linear", LOCAL), "rotary": "halves"},
}
TARGETS = {"ms_per_token": 0.3, "batch_tokens_per_second": 400_000, "prefill_tokens_per_second": 2_000_000}


def build(name: str) -> LanguageModel:
    attention = AttentionConfig(num_heads=8, **ATTENTIONS[name])
    config = ModelConfig(dim=512, depth=6, causal=True, vocab_size=256, tie_embeddings=True, attention=attention)
    return LanguageModel(config).eval().to("cuda", torch.bfloat16)


def seconds_per_step(model: LanguageModel, prompt: Any, steps: int) -> float:
    """The best of three blocks of steps from a stream whose graph is captured."""
    tokens = stream(model, prompt, sampling=Sampling(temperature=1, top_k=50))
    tokens.take(16)
    found = []
    for _ in range(3):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        tokens.take(steps)
        found.append((time.perf_counter() - begun) / steps)
    return min(found)


def measure(name: str, long: int) -> dict[str, Any]:
    model = build(name)
    tokens = torch.randint(256, (1, long), device="cuda")
    row: dict[str, Any] = {"model": name, "state_bytes": model.state_size(), "targets": TARGETS}
    prefill(model, tokens[:, :65536])
    torch.cuda.synchronize()
    begun = time.perf_counter()
    prefill(model, tokens[:, :65536])
    torch.cuda.synchronize()
    row["prefill_tokens_per_second"] = round(65536 / (time.perf_counter() - begun))
    for length in (512, long):
        memory = prefill(model, tokens[:, :length])
        row[f"ms_per_token_after_{length}"] = seconds_per_step(model, memory, 300) * 1e3
    each = iter(stream(model, memory, sampling=Sampling(temperature=1, top_k=50)))
    for _ in range(16):
        next(each)
    begun = time.perf_counter()
    for _ in range(200):
        next(each)
    row["ms_per_streamed_token"] = (time.perf_counter() - begun) / 200 * 1e3
    many = prefill(model, tokens[:, :512]).select([0] * 256)
    row["batch_tokens_per_second"] = round(256 / seconds_per_step(model, many, 100))
    return row


def measure_peer(name: str, long: int, kept: Path) -> None:
    """An older package's model: what a token takes beyond those before it. Its row is in a file as it grows."""
    row: dict[str, Any] = {"model": name}
    start = time.perf_counter()

    def keep() -> None:
        beside = kept.with_suffix(".half")
        beside.write_text(json.dumps(row))
        beside.replace(kept)

    # Prompts of 64 first: longer ones may be read by other kernels, which are tuned for a minute or more.
    shapes = {
        "ms_per_token_after_64": (1, 64),
        "batch_tokens_per_second_after_64": (256, 64),
        "ms_per_token_after_512": (1, 512),
        "batch_tokens_per_second": (256, 512),
        f"ms_per_token_after_{long}": (1, long),
    }
    try:
        case = Case(device="cuda", dtype="bfloat16", length=512, num_heads=8, head_dim=64, depth=6)
        older = OLDER[name](case)
        older.net.to("cuda", torch.bfloat16).eval()
        row["parameters"] = sum(x.numel() for x in older.net.parameters())
        for key, (rows, length) in shapes.items():
            row["unfinished"] = key
            keep()
            seconds = peer_seconds_per_step(older, torch.randint(256, (rows, length), device="cuda"), start)
            row[key] = seconds * 1e3 if rows == 1 else round(rows / seconds)
        del row["unfinished"]
    except Exception as error:  # whatever another package raises: the row says so
        row["skipped"] = f"{type(error).__name__}: {error}"
    keep()


def peer_seconds_per_step(older: OlderModel, prompt: Tensor, start: float) -> float:
    """Many tokens less few, after a first call in which kernels are compiled and tuned."""
    found = []
    for number in (8, 8, 32):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with torch.no_grad():
            older.generate(prompt, number)
        torch.cuda.synchronize()
        now = time.perf_counter()
        found.append(now - begun)
        print(f"{now - start:7.1f} s  {number} tokens after {tuple(prompt.shape)}: {found[-1]:.3f} s", flush=True)
    return (found[2] - found[1]) / 24


def run_peer(name: str, long: int, limit: float, kept: Path, keep: Callable[[dict[str, Any]], None]) -> None:
    """`measure_peer` in a process of its own, for `limit` seconds; its row is handed on as it grows."""
    kept.unlink(missing_ok=True)
    row: dict[str, Any] = {"model": name}
    child = subprocess.Popen([sys.executable, __file__, str(kept), "--within", name, "--long", str(long)])
    end = time.monotonic() + limit
    while child.poll() is None and time.monotonic() < end:
        time.sleep(1)
        if kept.exists():
            row = json.loads(kept.read_text())
            keep(row)
    if child.poll() is None:
        row["skipped"] = f"not finished after {limit:g} s"
        child.kill()
    elif child.returncode:
        row["skipped"] = f"ended with status {child.returncode}"
    child.wait()
    kept.unlink(missing_ok=True)
    keep(row)
    print(row, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="where to write the JSON")
    parser.add_argument("--long", type=int, default=1_000_000, help="tokens of the long prompt")
    parser.add_argument("--only", nargs="*", default=list(ATTENTIONS), choices=ATTENTIONS)
    parser.add_argument("--peers", nargs="*", default=["flash-linear-attention"], choices=OLDER)
    parser.add_argument("--limit", type=float, default=150, help="seconds for each peer")
    parser.add_argument("--add", action="store_true", help="keep the rows that are in the results already")
    parser.add_argument(
        "--within", choices=OLDER, help="measure this peer in this process; its row is all that is kept"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.within:
        measure_peer(options.within, options.long, options.results)
        return
    ran = {"machine": machine("cuda"), "versions": versions(), "commit": commit(), "dtype": "bfloat16"}
    rows: dict[str, dict[str, Any]] = {}
    if options.add and options.results.exists():
        page = json.loads(options.results.read_text())
        # Rows of two runs: each says itself what ran.
        about = {name: page[name] for name in ran}
        rows = {row["model"]: {**about, **row} for row in page["rows"]}

    def keep(row: dict[str, Any]) -> None:
        rows[row["model"]] = {**ran, **row} if options.add else row
        options.results.write_text(json.dumps({**ran, "rows": list(rows.values())}, indent=1))

    print(f"{'model':<34}{'ms/token, 512':>14}{f'{options.long}':>10}{'streamed':>10}{'batch 256':>12}{'prefill':>12}")
    for name in options.only:
        row = measure(name, options.long)
        keep(row)
        short, far = row["ms_per_token_after_512"], row[f"ms_per_token_after_{options.long}"]
        print(
            f"{name:<34}{short:>14.3f}{far:>10.3f}{row['ms_per_streamed_token']:>10.3f}"
            f"{row['batch_tokens_per_second']:>12,}{row['prefill_tokens_per_second']:>12,}",
            flush=True,
        )
    for name in options.peers:
        run_peer(name, options.long, options.limit, options.results.with_suffix(".peer.json"), keep)


if __name__ == "__main__":
    main()
