"""Quality by equal training time: bits per byte of a language model after some seconds of training on a text."""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspan.bench.subjects.base import Case, Measurement, MeasurementConfig, Subject, Workload

HELD_OUT, SCORED = 2_000_000, 1_048_576  # bytes


@dataclass(frozen=True)
class QualitySubject(Subject):
    """A training run of `longspan train` with a preset, scored on the held-out end of the text.

    Attributes:
        data: The text: a file, compressed or not.
        seconds: Training time, compilation excluded.
        preset: The preset of `longspan train`; context and batch size come from the case.
        held_out: Bytes at the end of the text that are not trained on; the first half of them is scored.
    """

    data: str
    seconds: float
    preset: str = "small"
    held_out: int = HELD_OUT

    def workload(self, case: Case) -> Workload:
        raise NotImplementedError("a training run has no step to repeat: see `measure`")

    def measure(self, case: Case, config: MeasurementConfig, wait: Callable[[], None] = lambda: None) -> Measurement:
        """Train and score once; compilation and warm-up are done before `wait` is called."""
        # The extra [train] is needed for this subject only.
        from longspan.train.config import resolve
        from longspan.train.setup import make_accelerator
        from longspan.train.trainer import Trainer

        warnings.simplefilter("ignore")
        logger, started = _logger(wait, case.device), time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            settings = resolve(self._flags(case, Path(folder)))
            trainer = Trainer(settings, logger, make_accelerator(settings.train))
            score = trainer.run()
        last = next(record for record in reversed(logger.records) if "loss" in record)
        metrics = {
            "context": case.length,
            "bits_per_byte": score["eval_bits_per_byte"],
            "scored": score["eval_tokens"],
            "train_seconds": last["seconds"],
            "steps": last["step"],
            "tokens": last["tokens"],
            "tokens_per_second": round(last["tokens"] / last["seconds"]),
            "parameters": trainer.metadata["parameters"],
            "process_seconds": time.perf_counter() - started,
            "settings": trainer.metadata["settings"],
            "curve": [[r["tokens"], r["seconds"], r["bits_per_byte"]] for r in logger.records if "loss" in r],
        }
        peak = torch.cuda.max_memory_allocated() / 1e6 if case.device == "cuda" else None
        return Measurement("ok", peak_mb=peak, memory="torch.cuda.max_memory_allocated", metrics=metrics)

    def _flags(self, case: Case, folder: Path) -> dict[str, Any]:
        from longspan.train.data.readers import open_decompressed

        with open_decompressed(Path(self.data)) as file:
            text = file.read()
        train, scored = folder / "train.txt", folder / "scored.txt"
        train.write_bytes(text[: -self.held_out])
        scored.write_bytes(text[-self.held_out :][: SCORED + 1])
        never = 10**9
        return {
            "preset": self.preset,
            "context": case.length,
            "batch_size": case.batch_size,
            "minutes": self.seconds / 60,
            "data": [str(train)],
            "eval_data": [str(scored)],
            "out": str(folder / "run"),
            "eval_every": never,
            "save_every": never,
            "sample_tokens": 0,
            "eval_tokens": SCORED,
            "log_every": 50,
        }


def _logger(wait: Callable[[], None], device: str) -> Any:
    """A logger that collects records, and calls `wait` once the model has compiled."""
    from longspan.train.loggers import Logger
    from longspan.train.trainer import WARMUP_STEPS

    class _WaitAfterWarmUp(Logger):
        def __init__(self) -> None:
            self.records: list[dict[str, Any]] = []
            self.steps = 0

        def progress(self, fraction: float, record: dict[str, Any]) -> None:
            self.steps += 1
            if self.steps == (WARMUP_STEPS if device == "cuda" else 1):  # Models are compiled on CUDA only.
                wait()

        def log_metrics(self, record: dict[str, Any]) -> None:
            self.records.append(record)

    return _WaitAfterWarmUp()
