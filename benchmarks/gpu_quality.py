"""How good a byte language model is after a fixed time of training on one GPU, with the library's own loop.

    python benchmarks/gpu_quality.py novels100.txt.xz results.json [--only NAME …] [--seconds 90]

Trained on all but the last 2,000,000 bytes of the file; scored on the first 1,048,576 of those, each predicted once, in
windows of the context. Compiling does not count: every configuration compiles in a process of its own, all at once, and
each then trains alone, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch

from longspan.bench.environment import commit, machine, versions
from longspan.train.config import resolve
from longspan.train.data.readers import open_decompressed
from longspan.train.loggers import Logger
from longspan.train.setup import make_accelerator
from longspan.train.trainer import WARMUP_STEPS, Trainer

HELD_OUT, SCORED = 2_000_000, 1_048_576

# Flags of `longspan train`; everything else is the preset's.
CONFIGURATIONS: dict[str, dict[str, str]] = {
    "4096": {"preset": "small"},
    "32768": {"preset": "small", "context": "32768", "batch_size": "1"},
}
TARGETS = {4096: 1.48, 32768: 1.60}


def prepare_data(source: Path, folder: Path) -> tuple[Path, Path]:
    """The file without its end, and what is scored of the end."""
    with open_decompressed(source) as file:
        text = file.read()
    train, scored = folder / "train.txt", folder / "scored.txt"
    train.write_bytes(text[:-HELD_OUT])
    scored.write_bytes(text[-HELD_OUT:][: SCORED + 1])
    return train, scored


class Turn(Logger):
    """Watches a run: says when it has compiled, and then waits to be told to go on."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.steps = 0

    def info(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def progress(self, fraction: float, record: dict[str, Any]) -> None:
        self.steps += 1
        if self.steps == WARMUP_STEPS:  # Until now no time has counted.
            print("ready", flush=True)
            sys.stdin.readline()

    def log_metrics(self, record: dict[str, Any]) -> None:
        self.records.append(record)


def work(flags: dict[str, Any]) -> dict[str, Any]:
    """One run; what came of it."""
    warnings.simplefilter("ignore")
    never = str(10**9)
    fixed = {
        "eval_every": never,
        "save_every": never,
        "sample_tokens": "0",
        "eval_tokens": str(SCORED),
        "log_every": "50",
    }
    settings = resolve({**fixed, **flags})
    watch, begun = Turn(), time.perf_counter()
    trainer = Trainer(settings, watch, make_accelerator(settings.train))
    score = trainer.run()
    last = next(record for record in reversed(watch.records) if "loss" in record)
    return {
        "context": settings.train.context,
        "bits_per_byte": score["eval_bits_per_byte"],
        "target": TARGETS.get(settings.train.context),
        "scored": score["eval_tokens"],
        "seconds": last["seconds"],
        "steps": last["step"],
        "tokens": last["tokens"],
        "tokens_per_second": round(last["tokens"] / last["seconds"]),
        "parameters": trainer.metadata["parameters"],
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None,
        "process_seconds": time.perf_counter() - begun,
        "settings": trainer.metadata["settings"],
        "curve": [[r["tokens"], r["seconds"], r["bits_per_byte"]] for r in watch.records if "loss" in r],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("results", type=Path, nargs="?", help="where to write the JSON")
    parser.add_argument("--only", nargs="*", default=list(CONFIGURATIONS), choices=CONFIGURATIONS)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--set", nargs="*", default=[], metavar="FLAG=VALUE", help="settings for all of them")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(work(json.loads(options.worker))), flush=True)
        return
    if options.data is None or options.results is None:
        parser.error("give the data and where to write the results")
    common = {"minutes": str(options.seconds / 60), **dict(each.split("=", 1) for each in options.set)}
    about = {
        "machine": machine("cuda" if torch.cuda.is_available() else "cpu"),
        "versions": versions(),
        "commit": commit(),
        "seconds": options.seconds,
    }
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        train, scored = prepare_data(options.data, Path(folder))
        workers = {}
        for name in options.only:
            flags = {"data": [str(train)], "eval_data": [str(scored)], "out": f"{folder}/{name}"}
            flags |= {**CONFIGURATIONS[name], **common}
            workers[name] = subprocess.Popen(
                [sys.executable, __file__, "--worker", json.dumps(flags)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=open(f"{folder}/{name}.err", "w"),  # noqa: SIM115
                text=True,
                env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "4"},
            )
        for worker in workers.values():
            assert worker.stdout is not None
            worker.stdout.readline()
        for name, worker in workers.items():
            out, _ = worker.communicate("go\n")
            try:
                row = {"name": name, **json.loads(out.splitlines()[-1])}
                print(
                    f"{name}: {row['bits_per_byte']:.4f} bits per byte (target {row['target']}), "
                    f"{row['steps']} steps, {row['tokens_per_second']:,} tokens a second",
                    flush=True,
                )
            except (IndexError, ValueError):
                error = Path(f"{folder}/{name}.err").read_text()[-3000:]
                row = {"name": name, "error": error or traceback.format_exc()}
                print(f"{name} failed: {error}", flush=True)
            rows.append(row)
            options.results.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
