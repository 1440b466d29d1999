"""Files that must stay readable: checkpoints, checkpoints of the older packages, and a run that was interrupted.

``write`` makes them, once; each function of ``CHECKS`` reads one and returns what came of it.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from cases import COMPAT, FIXTURES, LAT_CAUSAL, Result, config, configs, described, draw_tokens, fill, values
from cases import said as continuations
from safetensors.torch import load_file

import longspan

CHECKPOINTS = {
    "softmax": "language_model/softmax-learned",
    "local": "language_model/local-rotary",
    "linear": "language_model/linear-blind",
    "performer": "language_model/performer-epsilon",
    "linformer": "language_model/linformer-shared",
    "split": "language_model/split-rotary",
}
# Each older package: how `longspan convert` calls it, and one of the cases.
ORIGINALS = {
    "linear-attention-transformer": "lat-causal",
    "performer-pytorch": "performer-local",
    "linformer": "linformer-lm",
    "linformer-pytorch": "linformer-pytorch-lm",
    "local-attention": "local-lm",
}
TRAIN = {
    "preset": "tiny",
    "context": 32,
    "batch-size": 2,
    "model.dim": 16,
    "model.depth": 2,
    "steps": 8,
    "warmup": 2,
    "model.attention.num_heads": 4,
    "model.feed_forward.mult": 1,
    "log-every": 1,
    "eval-every": 4,
    "eval-tokens": 100,
    "save-every": 4,
    "sample-tokens": 4,
    "model.attention.dropout": 0.1,
    "device": "cpu",
    "precision": "fp32",
    "compile": "off",
    "accumulate": 2,
    "mechanism": json.dumps(
        {
            "mechanism": "split",
            "parts": [
                {"mechanism": "local", "num_heads": 2, "window": 8},
                {"mechanism": "performer", "num_heads": 2, "num_features": 5, "redraw_interval": 3},
            ],
        }
    ),
}
# Ends the process, as a power failure would, right after the first checkpoint.
INTERRUPTED = """
import os, sys, torch
torch.set_num_threads(1)
from longspan.train.trainer import Trainer
save = Trainer._save
def once(self):
    save(self)
    os._exit(9)
Trainer._save = once
from longspan.cli import main
main(sys.argv[1:])
"""
RESUMED = "import sys, torch; torch.set_num_threads(1); from longspan.cli import main; main(sys.argv[1:])"


def write() -> None:
    """Makes every fixture but the configurations anew."""
    for name, case in CHECKPOINTS.items():
        longspan.save(fill(longspan.LanguageModel(config(configs()[case]))), FIXTURES / "checkpoints" / name)
    for library, case in ORIGINALS.items():
        _write_original(library, case)
    run = FIXTURES / "run"
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    (run / "corpus.txt").write_text(_corpus())
    done = _train(INTERRUPTED, run)
    assert done.returncode == 9, done.stderr


def _corpus() -> str:
    words = [
        "the",
        "river",
        "turns",
        "slowly",
        "under",
        "old",
        "light",
        "and",
        "every",
        "stone",
        "keeps",
        "a",
        "short",
        "word",
    ]
    picked = torch.randint(len(words), (700,), generator=torch.Generator().manual_seed(1)).tolist()
    return " ".join(words[i] for i in picked) + "\n"


def _write_original(library: str, case: str) -> None:
    package, name, arguments = COMPAT[case]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        theirs = getattr(import_module(package), name)(**arguments).eval()
    with torch.no_grad():
        # Buffers stay: among them are constants that only the older package reads from a checkpoint.
        for index, (key, parameter) in enumerate(sorted(theirs.named_parameters())):
            parameter.copy_(values(key, index, parameter))
    folder = FIXTURES / "originals" / library
    folder.mkdir(parents=True, exist_ok=True)
    tokens = draw_tokens("tokens", 2, 16 if arguments is LAT_CAUSAL else 17, low=1)
    with torch.no_grad():
        logits = theirs(tokens)
    torch.save(theirs.state_dict(), folder / "model.pt")
    torch.save({"tokens": tokens, "logits": logits}, folder / "expected.pt")
    (folder / "config.json").write_text(json.dumps(arguments) + "\n")


def _train(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = ["train", "--out", "out", "--data", "corpus.txt"]
    for name, value in TRAIN.items():
        words += [f"--{name}", str(value)]
    here = os.pathsep.join([str(Path(longspan.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": here}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)


def checkpoint(name: str) -> Result:
    """Loads a saved model."""
    model: Any = longspan.load(FIXTURES / "checkpoints" / name).eval()
    x = draw_tokens("tokens", 2, 17)
    result = Result(facts={"state_dict": described(model), **continuations(model)})
    result.add("plain", {"logits": model(x)})
    return result


def original(library: str) -> Result:
    """Converts weights of an older package; logits must also be those the package itself gave."""
    from longspan.cli import main

    folder = FIXTURES / "originals" / library
    expected = torch.load(folder / "expected.pt", weights_only=True)
    with tempfile.TemporaryDirectory() as made:
        words = ["convert", folder / "model.pt", Path(made) / "new", "--from", library]
        words += ["--config", folder / "config.json"]
        with redirect_stdout(io.StringIO()):
            main([str(word) for word in words])
        model: Any = longspan.load(Path(made) / "new").eval()
    logits = model(expected["tokens"])
    # performer-pytorch stabilizes causal keys by all positions, so an epsilon weighs a little differently there.
    error, scale = (logits - expected["logits"]).abs().max(), expected["logits"].abs().max()
    assert error <= (1e-4 if library == "performer-pytorch" else 1e-5) * scale, f"{error:.2e} on {scale:.2e}"
    result = Result(facts={"state_dict": described(model)})
    result.add("plain", {"logits": logits})
    return result


def resumed() -> Result:
    """Takes the interrupted run to its end."""
    names = ("step", "loss", "bits_per_byte", "lr", "tokens", "eval_loss", "eval_bits_per_byte")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "run"
        shutil.copytree(FIXTURES / "run", folder)
        done = _train(RESUMED, folder)
        assert done.returncode == 0, done.stderr
        records = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
        weights = load_file(folder / "out" / "checkpoint" / "model.safetensors")
    result = Result(facts={"steps": [record["step"] for record in records]})
    for i, record in enumerate(records):
        kept = [float(record[name]) for name in names if record.get(name) is not None]
        result.add(f"record{i}", {"curve": torch.tensor(kept, dtype=torch.float64).float()})
    result.add("weights", dict(sorted(weights.items())))
    return result


CHECKS: dict[str, Callable[[], Result]] = {
    **{f"checkpoint/{name}": lambda name=name: checkpoint(name) for name in CHECKPOINTS},
    **{f"original/{library}": lambda library=library: original(library) for library in ORIGINALS},
    "run/resumed": resumed,
}
