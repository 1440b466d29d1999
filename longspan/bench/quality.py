"""Quality by equal training time: bits per byte of language models after some seconds of training on a text.

`longspan bench quality --data novels.txt` trains one model per candidate, context and seed with a preset of `longspan
train`, and appends every result to a file. `python -m longspan.bench.quality '{"data": "novels.txt"}'` does the same
from options as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from longspan.bench.arguments import check_device, check_positive, json_argument
from longspan.bench.environment import environment
from longspan.bench.jsonl import Row, append, prepare, read
from longspan.bench.report import TextTable
from longspan.bench.runner import WorkerProcess
from longspan.bench.subjects.base import Case, Measurement, MeasurementConfig, Subject, Workload
from longspan.train.presets import PRESETS, half_local
from longspan.utils import choose, printable

HELD_OUT, SCORED = 2_000_000, 1_048_576  # bytes
Settings = dict[str, Any]
_ANY_TIME = 86_400.0  # seconds, for runs of a number of steps
SEPARATOR = "@"  # between a candidate and its recipe
_NONE = {"optimizer": "adamw", "decay_type": "cosine", "model.ngrams": [], "model.zero_init_residual": False}
_NONE |= {"model.residual_in_fp32": True, "ngram_decay": 0.0}
_MUON = {"optimizer": "muon", "muon_lr": 5e-3}
_NGRAMS = {"model.ngrams": [2, 3, 4], "model.ngram_buckets": 32_768}
_ZERO_INIT, _LINEAR = {"model.zero_init_residual": True}, {"decay_type": "linear"}
BATCH_FACTOR = "batch_factor"  # multiplies the batch size of the case
# Settings of `longspan train` for any candidate, instead of the preset's: each alone over the recipe `none` and several
# together, then changes of the preset, one at a time.
RECIPES: dict[str, Settings] = {
    "none": _NONE,
    "muon": _NONE | _MUON,
    "ngrams": _NONE | _NGRAMS,
    "zero-init": _NONE | _ZERO_INIT,
    "softcap": _NONE | {"model.logit_softcap": 15.0},
    "linear-decay": _NONE | _LINEAR,
    "all": _NONE | _MUON | _NGRAMS | _ZERO_INIT | _LINEAR,
    "all-fast": _NONE | _MUON | _NGRAMS | _ZERO_INIT | _LINEAR | {"muon_lr": 1e-2},
    "no-ngrams": {"model.ngrams": []},
    "no-ngram-decay": {"ngram_decay": 0.0},
    "no-muon": {"optimizer": "adamw"},
    "no-zero-init": {"model.zero_init_residual": False},
    "cosine-decay": {"decay_type": "cosine"},
    "logit-softcap": {"model.logit_softcap": 15.0},
    "fast": {"muon_lr": 1e-2},
    "lr-high": {"lr": 4e-3},
    "embedding-high": {"embedding_lr": 6e-3},
    "embedding-fast": {"embedding_lr": 1.2e-2},
    "stable-decay": {"decay_ratio": 0.6},
    "warmup-100": {"warmup": 100},
    "half-batch": {BATCH_FACTOR: 0.5},
    "double-batch": {BATCH_FACTOR: 2},
    "batch-growth": {BATCH_FACTOR: 0.5, "accumulate": 2, "ramp_up": 0.3},
    "ngrams-5": {"model.ngrams": [2, 3, 4, 5], "model.ngram_buckets": 65_536},
    "ngrams-6": {"model.ngrams": [2, 3, 4, 5, 6], "model.ngram_buckets": 65_536},
    "value-embedding": {"model.attention.value_embedding": True},
    "value-gates": {"model.attention.value_gates": True},
    "fp32-residual": {"model.residual_in_fp32": True},
    "fp8": {"precision": "fp8"},
}
NUM_FEATURES = (64, 128, 192, 256, 320)  # of the candidates that are performers
# The outputs of Gated DeltaNet and Kimi Linear. Their convolution is left out: the presets shift tokens already.
_GATED_LAYER = {"out_norm": True, "out_gate": "silu"}
_PLAIN_LAYER = {"out_norm": False, "out_gate": "none"}


def candidates(num_heads: int, context: int) -> dict[str, Settings]:
    """Return settings of `longspan train` by name.

    Names with "+" divide the heads of every layer, names with "/" the layers; "head" and "channel" are gates. Gated
    DeltaNet and Samba alternate memories with windows, Kimi Linear and Jamba have a softmax layer after several
    memories. Gated memories have a normalized, gated output, as "gated" ones do, and "conv" a convolution on q, k, v.
    The number of a performer is that of its features, that of local heads their window.

    Args:
        num_heads: Heads of a layer.
        context: Context length, which limits the window.
    """
    window = max(2, min(256, context // 4))
    local = {"mechanism": "local", "window": window}
    linear = {"mechanism": "linear", "feature_map": "softmax"}
    delta, kda = {"mechanism": "delta", "gate": "head"}, {"mechanism": "delta", "gate": "channel"}
    decay = {"mechanism": "decay", "gate": "head"}

    def model(mechanism: Any, **layer: Any) -> Settings:
        return _attention({"mechanism": mechanism, "rotary": {"softmax": "halves", "local": "halves"}, **layer})

    return {
        "softmax": {"mechanism": "softmax", **_attention(_PLAIN_LAYER)},
        "softmax-gated": {"mechanism": "softmax", **_attention(_GATED_LAYER)},
        **{
            f"performer-{number}": model({"mechanism": "performer", "num_features": number}, **_GATED_LAYER)
            for number in NUM_FEATURES
        },
        "local+linear": {"mechanism": "split", **_attention(_PLAIN_LAYER)},
        "local+linear-gated": {"mechanism": "split", **_attention(_GATED_LAYER)},
        "local-512+linear-gated": model(half_local(num_heads, min(512, context), linear), **_GATED_LAYER),
        "local+delta-head": model(half_local(num_heads, window, delta), **_GATED_LAYER),
        "local+decay-head": model(half_local(num_heads, window, decay), **_GATED_LAYER),
        "local+delta-head-conv": model(half_local(num_heads, window, delta), conv_size=4, **_GATED_LAYER),
        "delta-head/local": model([delta, local], **_GATED_LAYER),
        "3delta-head/local": model([delta, delta, delta, local], **_GATED_LAYER),
        "3delta-channel/softmax": model([kda, kda, kda, {"mechanism": "softmax"}], **_GATED_LAYER),
    }


def _settings(name: str, num_heads: int, context: int) -> Settings:
    """Return the settings of a candidate and its recipes, the last of which prevail, by their names."""
    model, *recipes = name.split(SEPARATOR)
    known = candidates(num_heads, context)
    settings = known[choose("candidate", model, known)]
    for recipe in recipes:
        settings = settings | RECIPES[choose("recipe", recipe, RECIPES)]
    return settings


def _attention(values: Mapping[str, Any]) -> Settings:
    return {f"model.attention.{name}": value for name, value in values.items()}


@dataclass(frozen=True)
class QualityOptions:
    """Train language models on a text for equal times and report their bits per byte on its end.

    Every finished run is appended to the results file: call again to continue.
    """

    data: str = ""
    """The text: a file, compressed or not."""
    candidates: tuple[str, ...] = ()
    """Models to train, such as softmax,local+delta-head,delta-head/local@muon: recipes may follow, each after an @. By
    default all models, with the recipe of the preset."""
    contexts: tuple[int, ...] = (4096, 32768)
    """Context lengths."""
    batch_sizes: tuple[int, ...] = (8, 1)
    """Sequences per step for each context length."""
    seeds: tuple[int, ...] = (0, 1)
    """Seeds of weights and data order."""
    seconds: float = 90.0
    """Training time of each model, compilation excluded; on a CPU its processor time, whatever else runs there."""
    steps: int | None = None
    """Steps of each model, instead of a time."""
    preset: str = "small"
    """Preset of `longspan train`."""
    held_out: int = HELD_OUT
    """Bytes at the end of the text that are not trained on; the first half of them is scored."""
    eval_every: int | None = None
    """Steps between two scores during training, which takes no training time. By default the end alone is scored."""
    jobs: int = 4
    """Models that compile at the same time; they train one after another."""
    minutes: float | None = None
    """Time budget: what would not finish by then is left to the next call."""
    device: str = "cpu"
    """cpu or cuda."""
    out: Path = Path("runs/quality.jsonl")
    """File of the results, one JSON object per run. Runs that it holds are not repeated."""

    def __post_init__(self) -> None:
        if not self.data:
            raise ValueError("bench quality trains on a text: give its file as data")
        choose("preset", self.preset, PRESETS)
        if not self.seeds or not self.contexts or len(self.contexts) != len(self.batch_sizes):
            raise ValueError(
                f"give seeds, and one batch size for each context: got seeds {self.seeds}, contexts {self.contexts}, "
                f"batch_sizes {self.batch_sizes}"
            )
        check_positive(self, "contexts", "batch_sizes", "seconds", "steps", "held_out", "eval_every", "jobs", "minutes")
        for name in self.candidates:
            _settings(name, 8, 4096)
        check_device(self.device)


@dataclass(frozen=True)
class QualitySubject(Subject):
    """A training run of `longspan train` with a preset, scored on the held-out end of the text.

    Attributes:
        data: The text: a file, compressed or not.
        seconds: Training time, compilation excluded; on a CPU the processor time of all threads.
        candidate: One of `candidates`, alone or followed by some of `RECIPES`, each after an @.
        seed: Seed of weights and data order.
        preset: The preset of `longspan train`; context and batch size come from the case.
        held_out: Bytes at the end of the text that are not trained on; the first half of them is scored.
        eval_every: Steps between two scores during training; None: the end alone is scored.
        steps: Steps to train for, instead of a time.
    """

    data: str
    seconds: float
    candidate: str = "local+linear"
    seed: int = 0
    preset: str = "small"
    held_out: int = HELD_OUT
    eval_every: int | None = None
    steps: int | None = None

    def workload(self, case: Case) -> Workload:
        raise NotImplementedError("a training run has no step to repeat: see `measure`")

    def measure(self, case: Case, config: MeasurementConfig, wait: Callable[[], None] = lambda: None) -> Measurement:
        """Train and score once; compilation and warm-up are done before `wait` is called."""
        # The extra [train] is needed for this subject only.
        from longspan.train.config import resolve
        from longspan.train.setup import make_accelerator
        from longspan.train.signals import TrainingTimer
        from longspan.train.trainer import Trainer

        warnings.simplefilter("ignore")
        logger, started = _logger(wait, case.device), time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            settings = resolve(self._flags(case, Path(folder)))
            trainer = Trainer(settings, logger, make_accelerator(settings.train.device, settings.train.precision))
            if case.device == "cpu":
                trainer.timer = TrainingTimer(clock=time.process_time)
            score = trainer.run()
        last = next(record for record in reversed(logger.records) if "loss" in record)
        metrics = {
            "context": case.length,
            "bits_per_byte": score["eval_bits_per_byte"],
            "scored": score["eval_tokens"],
            "train_seconds": last["seconds"],
            "epochs": trainer.batches.epochs,
            "clock": "processor" if case.device == "cpu" else "wall",
            "steps": last["step"],
            "tokens": last["tokens"],
            "tokens_per_second": round(last["tokens"] / last["seconds"]),
            "parameters": trainer.metadata["parameters"],
            "process_seconds": time.perf_counter() - started,
            "settings": _without_folder(trainer.metadata["settings"], folder),
            "curve": _curve(logger.records, "bits_per_byte"),
            "held_out_curve": _curve(logger.records, "eval_bits_per_byte"),
        }
        peak = torch.cuda.max_memory_allocated() / 1e6 if case.device == "cuda" else None
        return Measurement("ok", peak_mb=peak, memory="torch.cuda.max_memory_allocated", metrics=metrics)

    def _flags(self, case: Case, folder: Path) -> dict[str, Any]:
        from longspan.train.data.containers import open_decompressed

        with open_decompressed(Path(self.data)) as file:
            text = file.read()
        train, scored = folder / "train.txt", folder / "scored.txt"
        train.write_bytes(text[: -self.held_out])
        scored.write_bytes(text[-self.held_out :][: SCORED + 1])
        never = 10**9
        num_heads = PRESETS[self.preset].model["attention"]["num_heads"]
        settings = _settings(self.candidate, num_heads, case.length)
        return {
            "batch_size": max(1, int(case.batch_size * settings.pop(BATCH_FACTOR, 1))),
            **settings,
            "seed": self.seed,
            "preset": self.preset,
            "context": case.length,
            **({"minutes": self.seconds / 60} if self.steps is None else {"steps": self.steps}),
            "data": [str(train)],
            "eval_data": [str(scored)],
            "out": str(folder / "run"),
            "eval_every": self.eval_every or never,
            "save_every": never,
            "sample_tokens": 0,
            "eval_tokens": SCORED,
            "log_every": 50,
        }


def run(options: QualityOptions) -> list[Row]:
    """Train what the options select and the results file does not hold.

    The candidates of a seed and a context train one after another, so that a drift of the machine affects all of them.
    The table goes to stdout and progress to stderr.

    Args:
        options: What to train, for how long, and where to store it.

    Returns:
        All results in the file.

    Raises:
        ValueError: The text cannot be read, or the results cannot be read or written.
    """
    if not Path(options.data).is_file():
        raise ValueError(f"data {options.data}: there is no such file")
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    prepare(options.out)
    rows = read_results(options.out)
    done = [_identity(row) for row in rows if row["status"] == "ok"]
    waiting = [pair for pair in _subjects(options) if _identity(_described(*pair)) not in done]
    about, pairs, total, number = environment(options.device), iter(waiting), len(waiting), 0
    slower = 1 if options.device == "cuda" else 10  # A CPU may be shared with other processes.
    timeout = slower * options.seconds + 300 if options.steps is None else _ANY_TIME
    config = MeasurementConfig(timeout=timeout, threads=torch.get_num_threads())
    while batch := list(islice(pairs, options.jobs)):
        workers = [(WorkerProcess(*pair, config), pair) for pair in batch]
        for worker, _ in workers:
            worker.wait_until_ready()
        for worker, pair in workers:
            required = options.seconds if options.steps is None else 0.0
            if deadline is not None and time.monotonic() + required > deadline:
                worker.kill()
                continue
            number += 1
            print(f"[{number}/{total}] {pair[0].name}", file=sys.stderr, flush=True)
            found = worker.finish()
            row = {**about, **_described(*pair), "status": found.status, "message": found.message}
            append(options.out, {**row, "peak_mb": found.peak_mb, **found.metrics})
            print(printable(_line(found)), file=sys.stderr, flush=True)
    rows = read_results(options.out)
    print(table(rows).markdown(), flush=True)
    print(printable(f"written to {options.out}"), file=sys.stderr)
    return rows


def table(rows: Sequence[Row]) -> TextTable:
    """Return bits per byte and tokens per second of every candidate and context, as means over seeds."""
    finished = [row for row in rows if row["status"] == "ok"]
    contexts = sorted({row["context"] for row in finished})
    header = ["", "parameters", "seconds", *(f"{n:,}: bits per byte | tokens/s | seeds" for n in contexts)]
    header = [part for cell in header for part in cell.split(" | ")]
    body = []
    for name, seconds in dict.fromkeys((row["candidate"], row["seconds"]) for row in finished):
        own = [row for row in finished if (row["candidate"], row["seconds"]) == (name, seconds)]
        cells = [name, f"{own[0]['parameters'] / 1e6:.1f} M", "–" if seconds is None else f"{seconds:g}"]
        for context in contexts:
            found = [row for row in own if row["context"] == context]
            if not found:
                cells += ["–", "–", ""]
                continue
            bits, speed = (fmean(row[key] for row in found) for key in ("bits_per_byte", "tokens_per_second"))
            cells += [f"{bits:.3f}", f"{speed / 1e6:.2f} M", str(len(found))]
        body.append(cells)
    return TextTable(header, body)


def steps_table(rows: Sequence[Row]) -> TextTable:
    """Return steps, tokens per second and bits per byte of every candidate and time, as means over seeds."""
    finished, body = [row for row in rows if row["status"] == "ok"], []
    for name, seconds in dict.fromkeys((row["candidate"], row["seconds"]) for row in finished):
        own = [row for row in finished if (row["candidate"], row["seconds"]) == (name, seconds)]
        steps, speed, bits = (fmean(row[key] for row in own) for key in ("steps", "tokens_per_second", "bits_per_byte"))
        body.append([name, f"{seconds:g}", f"{steps:,.0f}", f"{speed:,.0f}", f"{bits:.3f}", str(len(own))])
    return TextTable(["", "seconds", "steps", "tokens/s", "bits per byte", "seeds"], body)


def epochs_table(rows: Sequence[Row]) -> TextTable:
    """Return the held-out bits per byte of every candidate at the end of every epoch, as means over seeds."""
    scores: dict[str, dict[int, list[float]]] = {}
    finished = [row for row in rows if row["status"] == "ok"]
    for row in finished:
        own = scores.setdefault(row["candidate"], {})
        for tokens, _, bits in row["held_out_curve"]:
            own.setdefault(round(tokens * row["epochs"] / row["tokens"]), []).append(bits)
    columns = sorted({epoch for own in scores.values() for epoch in own})
    body = []
    for name, own in scores.items():
        first = next(row for row in finished if row["candidate"] == name)
        cells = [f"{fmean(own[epoch]):.3f}" if epoch in own else "–" for epoch in columns]
        number = sum(row["candidate"] == name for row in finished)
        body.append([name, f"{first['parameters'] / 1e6:.1f} M", *cells, str(number)])
    return TextTable(["", "parameters", *(f"epoch {epoch}" for epoch in columns), "seeds"], body)


def _subjects(options: QualityOptions) -> Iterator[tuple[QualitySubject, Case]]:
    """What to train, in order: all candidates of a seed and a context together."""
    names = options.candidates or tuple(candidates(8, 4096))
    for seed in options.seeds:
        for context, batch_size in zip(options.contexts, options.batch_sizes, strict=True):
            for name in names:
                label = f"{name}, context {context}, seed {seed}"
                settings = options.seconds, name, seed, options.preset, options.held_out, options.eval_every
                case = Case(context, batch_size, device=options.device)
                yield QualitySubject(label, options.data, *settings, options.steps), case


def _without_folder(settings: Settings, folder: str) -> Settings:
    """Return settings whose files have no temporary folder in their names."""
    return json.loads(json.dumps(settings).replace(json.dumps(f"{folder}/")[1:-1], ""))


def _curve(records: Sequence[Mapping[str, Any]], name: str) -> list[list[float]]:
    """Return tokens, seconds and the figure `name` of the records that have it."""
    return [[record["tokens"], record["seconds"], record[name]] for record in records if name in record]


def _described(subject: QualitySubject, case: Case) -> Row:
    return {
        "candidate": subject.candidate,
        "context": case.length,
        "batch_size": case.batch_size,
        "seed": subject.seed,
        "seconds": subject.seconds if subject.steps is None else None,
        "max_steps": subject.steps,
        "preset": subject.preset,
        "held_out": subject.held_out,
    }


def _identity(row: Row) -> list[Any]:
    names = ("candidate", "context", "batch_size", "seed", "seconds", "max_steps", "preset", "held_out")
    return [row.get(name) for name in names]


def read_results(path: Path) -> list[Row]:
    """Return the rows of a results file."""
    return read(path, "candidate", "context", "seed", "seconds", "status")


def _line(found: Measurement) -> str:
    if found.status != "ok":
        return f"{found.status}: {found.message}"
    return f"{found.metrics['bits_per_byte']:.4f} bits per byte, {found.metrics['tokens_per_second']:,} tokens/s"


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


if __name__ == "__main__":
    # A worker imports the classes by the module's name, not as __main__.
    from longspan.bench import quality

    quality.run(quality.QualityOptions(**json_argument()))
