"""Generation on one GPU: milliseconds per token, tokens per second in a batch, and how fast a prompt is read.

    python benchmarks/gpu_generate.py results.json

The models are those of `gpu_model.py`, in bfloat16. Beside them, where it can be imported, flash-linear-attention's
language model of the same size, by its own `generate` with a cache.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from longspan import AttentionConfig, LanguageModel, ModelConfig, Sampling, stream
from longspan.bench.machine import commit, machine, versions
from longspan.bench.measuring import Case
from longspan.bench.models import OLDER
from longspan.generation import prefill

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


def measure_peer(name: str) -> dict[str, Any]:
    """An older package's model: what a token takes beyond those before it, prompts of 512."""
    row: dict[str, Any] = {"model": name}
    case = Case(device="cuda", dtype="bfloat16", batch_size=1, length=512, num_heads=8, head_dim=64, depth=6)
    try:
        older = OLDER[name](case)
        older.net.to("cuda", torch.bfloat16).eval()
        for key, rows in (("ms_per_token_after_512", 1), ("batch_tokens_per_second", 256)):
            prompt = torch.randint(256, (rows, 512), device="cuda")
            found = []
            with torch.no_grad():
                for number in (8, 8, 32):
                    torch.cuda.synchronize()
                    begun = time.perf_counter()
                    older.generate(prompt, number)
                    torch.cuda.synchronize()
                    found.append(time.perf_counter() - begun)
            each = (found[2] - found[1]) / 24
            row[key] = each * 1e3 if rows == 1 else round(rows / each)
    except Exception as error:  # whatever another package raises: the row says so
        row["skipped"] = f"{type(error).__name__}: {error}"
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="where to write the JSON")
    parser.add_argument("--long", type=int, default=1_000_000, help="tokens of the long prompt")
    parser.add_argument("--only", nargs="*", default=list(ATTENTIONS), choices=ATTENTIONS)
    parser.add_argument("--peers", nargs="*", default=["flash-linear-attention"], choices=OLDER)
    options = parser.parse_args()
    torch.manual_seed(0)
    about = {"machine": machine("cuda"), "versions": versions(), "commit": commit()}
    rows = []
    print(f"{'model':<34}{'ms/token, 512':>14}{f'{options.long}':>10}{'streamed':>10}{'batch 256':>12}{'prefill':>12}")
    for name in options.only:
        row = measure(name, options.long)
        rows.append(row)
        short, far = row["ms_per_token_after_512"], row[f"ms_per_token_after_{options.long}"]
        print(
            f"{name:<34}{short:>14.3f}{far:>10.3f}{row['ms_per_streamed_token']:>10.3f}"
            f"{row['batch_tokens_per_second']:>12,}{row['prefill_tokens_per_second']:>12,}",
            flush=True,
        )
        options.results.write_text(json.dumps({**about, "dtype": "bfloat16", "rows": rows}, indent=1))
    for name in options.peers:
        rows.append(measure_peer(name))
        print(rows[-1], flush=True)
        options.results.write_text(json.dumps({**about, "dtype": "bfloat16", "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
