"""Random commands on damaged files: each succeeds, or says in one line what is wrong. Never a traceback."""

from __future__ import annotations

import gzip
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import typing
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training import trained, write_corpus

from longspan.cli import main
from longspan.cli.arguments import flags
from longspan.generation.generate import prefill
from longspan.models.checkpoint import load, save
from longspan.models.config import ModelConfig
from longspan.models.transformer import Classifier, EncoderDecoder, LanguageModel

COMMANDS = 240  # for each seed
SECONDS = 10  # until a command is told to stop, and again until it is killed
MEMORY = 6 << 30  # bytes beyond what the process that forks has mapped
FLAGS = {
    "train": "train.TrainFlags",
    "eval": "evaluate.EvalFlags",
    "generate": "generate.GenerateFlags",
    "info": "info.InfoFlags",
    "bench": "bench.BenchFlags",
}
PATHS = ("model", "data", "eval-data", "prompt-file", "state", "resume", "out", "config", "tokenizer")
HOSTILE = (
    *("nan", "inf", "-inf", "1e-45", "1e308", "-1", "0", "3.7", str(10**30), str(10**9), str(2**31), str(2**63)),
    *("", " ", "none", "true", "[", "{}", "[1]", "[[" * 5000, '{"mechanism": 5}', '{"a": NaN}', "a,b,,", "1,2,3"),
    *("\x1b[31m", "\udcff", "$\\frac{$", "[/b]", "<script>", "💥", "--", "-x", "%s{}", "cuda", "cuda:9", "meta", "foo"),
)
TINY = [
    *("--preset", "tiny", "--context", "16", "--batch-size", "2", "--steps", "2", "--warmup", "1", "--device", "cpu"),
    *("--eval-tokens", "64", "--sample-tokens", "3", "--model.dim", "8", "--model.depth", "1", "--compile", "off"),
    *("--model.attention.num_heads", "2"),
]


class Fuzzer:
    """Draws commands over a folder of materials, damaged copies of them included."""

    def __init__(self, materials: Path, work: Path, seed: int) -> None:
        self.draw, self.materials, self.work, self.number = random.Random(seed), materials, work, 0

    def command(self) -> list[str]:
        self.number += 1
        name = self.draw.choice(
            ["train", "train", "eval", "generate", "generate", "report", "convert", "info", "bench", "run"]
        )
        return [name, *getattr(self, f"_{name}", lambda: self._flags(name))()]

    def _train(self) -> list[str]:
        out = self._out() if self.draw.random() < 0.7 else self.path("run", own=True)
        return ["--data", self.path("data"), "--out", out, *TINY, *self._flags("train")]

    def _eval(self) -> list[str]:
        if self.draw.random() < 0.15:
            return ["--task", "copy", "--mechanisms", "linear", "--length", "8", "--steps", "1", *self._flags("eval")]
        return ["--model", self.path("model"), "--data", self.path("data"), "--context", "16", *self._flags("eval")]

    def _generate(self) -> list[str]:
        given = ["--prompt", self.draw.choice(["hi", "\x1b[0m", "\udcff", ""])] if self.draw.random() < 0.7 else []
        return ["--model", self.path("model"), *given, "--max-tokens", "3", *self._flags("generate")]

    def _info(self) -> list[str]:
        return ["--model", self.path("model"), *self._flags("info")]

    def _report(self) -> list[str]:
        out = ["--out", self._out()] if self.draw.random() < 0.5 else []
        return [*(self.path("run", own=True) for _ in range(self.draw.randint(0, 3))), *out]

    def _convert(self) -> list[str]:
        library = self.draw.choice(["linformer", "local-attention", "performer-pytorch", *HOSTILE])
        return [self.path("old"), self._out(), "--from", library, "--config", self.path("json")]

    def _run(self) -> list[str]:
        more = self.draw.choice([[], ["--device", "cpu"], ["--device", "tpu"], ["--nope"], ["--device"]])
        return [*more, self.path("script"), *self.draw.sample(HOSTILE, 2)]

    def _bench(self) -> list[str]:
        subjects = ["mechanisms", "layers", "train", "generate", "decode", "all", "gpu", "nothing"]
        return [self.draw.choice(subjects), *self._flags("bench")]

    def _flags(self, command: str) -> list[str]:
        module, cls = FLAGS[command].split(".")
        known = flags(getattr(import_module(f"longspan.cli.{module}"), cls))
        words = []
        for flag in self.draw.sample(sorted(known), self.draw.randint(0, min(3, len(known)))):
            kind = known[flag]
            if kind is bool and "." not in flag:
                words.append(flag)
            elif self.draw.random() < 0.97:
                words.append(f"{flag}={self._value(flag[2:], kind)}")
            else:
                words.append(self.draw.choice([flag, f"{flag}x=1", flag[:-1]]))
        return words

    def _value(self, name: str, kind: Any) -> str:
        if name in ("out", "state"):
            return self._out()
        if name in PATHS:
            return self.path({"eval-data": "data", "resume": "session", "config": "toml"}.get(name, name))
        if self.draw.random() < 0.5:
            return self.draw.choice(HOSTILE)
        options = [x for part in (kind, *typing.get_args(kind)) for x in typing.get_args(part) if isinstance(x, str)]
        numbers = ["1", "2", "3", "5", "7", "64", "0.5", "1e-3"]
        return self.draw.choice([*options, *numbers, "linear", "local", "copy", ".txt"])

    def _out(self) -> str:
        """Somewhere to write: new, there already, impossible, or full."""
        file = self.materials / "data" / "000.txt"
        made = self.work / self.draw.choice(["a", "b.json", "c.png", "d/e/f", "\x1b[1m", "\udcff", "x" * 300])
        return str(
            self.draw.choice([made, made, made, made, file / "x", "/dev/full", "/dev/null", "/proc/x", self.work])
        )

    def path(self, kind: str, own: bool = False) -> str:
        """A file or folder of a kind; often a damaged copy, sometimes of another kind or none.

        own: A copy, which a command may write to.
        """
        if self.draw.random() < 0.06 and not own:
            return str(
                self.draw.choice(["/nonexistent", "/dev/null", "/proc/self/mem", "a\0b", "", "~nobody0/x", "[", "**"])
            )
        kind = kind if self.draw.random() < 0.95 else self.draw.choice(["data", "run", "model", "session", "json"])
        source = self.draw.choice(sorted(self.materials.glob(f"{kind}*")))
        if self.draw.random() < 0.35 and not own:
            return str(source)
        copy = self.work / f"{self.number}-{self.draw.randrange(10**6)}{source.suffix}"
        if source.is_dir():
            shutil.copytree(source, copy, symlinks=True)
        else:
            shutil.copy(source, copy)
        if self.draw.random() < 0.8:
            files = (
                [copy] if copy.is_file() else sorted(x for x in copy.rglob("*") if x.is_file() and not x.is_symlink())
            )
            for file in self.draw.sample(files, min(len(files), self.draw.randint(1, 2))):
                self._damage(file)
        return str(copy)

    def _damage(self, path: Path) -> None:
        content = bytearray(path.read_bytes())
        how = self.draw.choice(
            ["flip", "cut", "empty", "noise", "gone", "folder", "pipe", "loop", "json", "json", "json", "deep"]
        )
        if how == "flip":
            for _ in range(self.draw.randint(1, 5)):
                if content:
                    content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)
        elif how == "cut":
            del content[self.draw.randrange(len(content) + 1) :]
        elif how == "json":
            content = bytearray(self._damaged_json(bytes(content)))
        else:
            made = {"empty": b"", "noise": self.draw.randbytes(200), "deep": b"[" * 200_000}
            content = bytearray(made.get(how, b""))
        path.unlink()
        others: dict[str, Callable[[], Any]] = {
            "gone": lambda: None,
            "folder": path.mkdir,
            "pipe": lambda: os.mkfifo(path),
            "loop": lambda: path.symlink_to(path.name),
        }
        others.get(how, lambda: path.write_bytes(content))()

    def _damaged_json(self, content: bytes) -> bytes:
        """One value of a JSON file, or of a line of one, replaced by another."""
        lines = content.splitlines() if content.count(b"}\n{") else [content]
        try:
            value = json.loads(lines[0])
        except ValueError:
            return b'{"x": NaN}'
        places: list[tuple[Any, Any]] = []

        def collect(inner: Any) -> None:
            for key, part in inner.items() if isinstance(inner, dict) else enumerate(inner):
                places.append((inner, key))
                if isinstance(part, dict | list):
                    collect(part)

        if isinstance(value, dict | list):
            collect(value)
        if places:
            where, key = self.draw.choice(places)
            where[key] = self.draw.choice(
                [None, True, -1, 0, 10**12, 1e308, float("nan"), "x", [], {}, [[]], "<script>"]
            )
        return b"\n".join([json.dumps(value).encode(), *lines[1:]])


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files and folders of each kind, by the beginning of their names."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("materials")
    write_corpus(folder / "data", documents=5, words=(40, 90))
    trained(folder / "data", folder / "run", steps=4, eval_every=2, save_every=2)
    small = ModelConfig(dim=8, depth=1, vocab_size=256, causal=True)
    for name in ("linear", "performer", "softmax", "local"):
        attention = {"num_heads": 2, "mechanism": name}
        save(
            LanguageModel(ModelConfig.from_dict({**small.to_dict(), "attention": attention})), folder / f"model-{name}"
        )
    split = {"num_heads": 2, "mechanism": {"mechanism": "linformer", "rank": 3, "max_length": 31}}
    table = {"attention": split, "positions": "learned", "max_length": 31, "tie_embeddings": True}
    save(LanguageModel(ModelConfig.from_dict({**small.to_dict(), **table})), folder / "model-table")
    save(Classifier(ModelConfig(dim=8, depth=1, num_classes=3, vocab_size=256)), folder / "model-classifier")
    cross = ModelConfig.from_dict({**small.to_dict(), "cross": {"num_heads": 2, "mechanism": "linear"}})
    save(EncoderDecoder(ModelConfig(dim=8, depth=1, vocab_size=256), cross), folder / "model-pair")
    for name in ("linear", "softmax"):
        model = load(folder / f"model-{name}")
        assert isinstance(model, LanguageModel)
        prefill(model, b"once").save(folder / f"session-{name}")
    text = (folder / "data" / "000.txt").read_bytes()
    (folder / "data.txt.gz").write_bytes(gzip.compress(text * 20))
    (folder / "data.csv").write_text("text,label\n" + "".join(f"{'word ' * i},{i % 2}\n" for i in range(1, 60)))
    (folder / "data.fa").write_bytes(b">a\n" + b"ACGT" * 99 + b"\n>b\n" + b"TTGA" * 77)
    np.save(folder / "data.npy", np.arange(999, dtype=np.uint16) % 251)
    (folder / "data.bin").write_bytes(np.arange(997, dtype=np.uint16).tobytes())
    (folder / "prompt-file.txt").write_bytes(text[:50])
    (folder / "tokenizer.json").write_text(
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
    )
    (folder / "json-linformer").write_text(
        '{"num_tokens": 11, "dim": 8, "seq_len": 16, "depth": 1, "k": 4, "heads": 2}'
    )
    (folder / "json-local").write_text(
        '{"num_tokens": 11, "dim": 8, "depth": 1, "max_seq_len": 16, "local_attn_window_size": 4}'
    )
    from longspan.compat.linformer import LinformerLM

    torch.save(LinformerLM(num_tokens=11, dim=8, seq_len=16, depth=1, k=4, heads=2).state_dict(), folder / "old.pt")
    (folder / "toml.toml").write_text('lr = 0.001\n[model]\ndim = 8\n[model.attention]\nmechanism = "linear"\n')
    (folder / "script.py").write_text("import sys\nfrom linformer import Linformer\nprint(len(sys.argv))\n")
    (folder / "script-latin.py").write_bytes(b"# \xe9\nprint(1)\n")
    return folder


def answer(words: list[str], work: Path) -> tuple[int, str]:
    """Run a command in a fork of this process; return its status, negative for a signal, and its standard error."""
    log = work / "log"
    process = os.fork()
    if process == 0:
        try:
            os.chdir(work)
            with open(log, "wb") as file, open(os.devnull, "rb+") as nothing:
                os.dup2(nothing.fileno(), 0)
                os.dup2(nothing.fileno(), 1)
                os.dup2(file.fileno(), 2)
            sys.stdin, sys.stdout, sys.stderr = (open(i, mode) for i, mode in enumerate(("r", "w", "w")))  # noqa: SIM115
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, mapped + MEMORY))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 29, 1 << 29))
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            bench = import_module("longspan.cli.bench")
            bench.run, bench.failed = lambda options: bench.sections(options), lambda results: False
            main(words)
            status = 0
        except SystemExit as stopped:
            status = stopped.code if isinstance(stopped.code, int) else 0
        except BaseException:
            import traceback

            traceback.print_exc()
            status = 99
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    start, told = time.monotonic(), False
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), log.read_text(errors="replace")
        time.sleep(0.02)
        if time.monotonic() - start > SECONDS and not told:
            os.kill(process, signal.SIGTERM)  # A run of many steps is no defect; one that cannot be stopped is.
            told = True
        if time.monotonic() - start > 2 * SECONDS:
            os.kill(process, signal.SIGKILL)


def fault(words: list[str], status: int, err: str) -> str | None:
    """What is wrong with an answer."""
    last = (err.splitlines() or [""])[-1]
    if words[0] == "run" and status == 99 and any(f'File "{word}"' in err for word in words):
        return None  # The script's own error.
    if "Traceback" in err:
        return "a traceback"
    if status < 0 or status == 99:
        return f"status {status}"
    if "--debug shows the traceback" in err:
        return "an error without words"
    if "\x1b" in err:
        return "a terminal escape"
    if status and words[0] != "run" and not last.startswith("longspan: "):
        return "no message"
    return None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_commands_answer_in_words(seed: int, materials: Path, tmp_path: Path) -> None:
    for name in ("train", "evaluate", "generate", "info", "bench", "convert", "report", "run"):
        import_module(f"longspan.cli.{name}")
    for name in ("dry_run", "evaluation", "report", "synthetic.evaluation", "trainer"):
        import_module(f"longspan.train.{name}")
    import_module("longspan.cli.bench").sections = import_module("longspan.bench").sections
    fuzzer, found = Fuzzer(materials, tmp_path, seed), []
    before = {path: path.stat().st_mtime_ns for path in materials.rglob("*") if path.is_file()}
    for number in range(COMMANDS):
        work = tmp_path / f"work{number}"
        work.mkdir()
        fuzzer.work = work
        words = fuzzer.command()
        status, err = answer(words, work)
        problem = fault(words, status, err)
        if problem is not None:
            found.append(f"{problem}: longspan {' '.join(map(repr, words))}\n{err[-1500:]}")
        shutil.rmtree(work)
    assert not found, f"{len(found)} of {COMMANDS}:\n" + "\n".join(found)
    assert before == {path: path.stat().st_mtime_ns for path in before}
