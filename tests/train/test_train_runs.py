"""Complete runs, in one process and in two, and the errors for wrong input."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import socket
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training import SMALL, WORDS, arguments, curve, longspan, metrics, trained

from longspan.layout import Packing
from longspan.models.checkpoint import load
from longspan.models.config import AttentionConfig, ModelConfig
from longspan.models.transformer import LanguageModel
from longspan.train.config import resolve
from longspan.train.data.batches import Batch, BatchShape
from longspan.train.loggers import RunLogger
from longspan.train.muon import layer_matrices
from longspan.train.objectives import Objective, mask_tokens
from longspan.train.setup import RedrawSchedule, learning_rate, make_accelerator
from longspan.train.trainer import Trainer


def last(records: list[dict[str, Any]], name: str) -> float:
    return next(float(r[name]) for r in reversed(records) if name in r)


def test_a_run_beats_the_unigram_baseline(tmp_path: Path) -> None:
    text = " ".join(" ".join(WORDS) for _ in range(400))
    (tmp_path / "text.txt").write_text("".join(f"{i} {text[i : i + 900]}\n" for i in range(0, len(text), 900)))
    records = trained(tmp_path / "text.txt", tmp_path / "run", steps=80, batch_size=6, lr=0.01, log_every=5)
    unigram = json.loads((tmp_path / "run" / "run.json").read_text())["data"]["unigram_bits_per_byte"]
    assert records[0]["bits_per_byte"] > 7
    assert last(records, "eval_bits_per_byte") < unigram - 1
    seconds = [record["seconds"] for record in records]
    assert seconds == sorted(seconds)  # without the time of evaluations


def test_two_processes_match_one_with_twice_the_batch(corpus: Path, tmp_path: Path) -> None:
    """With packing, so that the processes have different numbers of targets, redraws and accumulation."""
    settings: dict[str, Any] = {
        "steps": 6,
        "accumulate": 2,
        "packing": "on",
        "mechanism": '{"mechanism": "performer", "num_features": 7, "redraw_interval": 4}',
        "device": "cpu",
    }
    one = trained(corpus, tmp_path / "one", **settings, batch_size=6)
    words = arguments(corpus, tmp_path / "two", **settings, batch_size=3)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launch, "-m", "longspan", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    two = metrics(tmp_path / "two")
    assert json.loads((tmp_path / "two" / "run.json").read_text())["processes"] == 2
    assert [r["step"] for r in two] == [r["step"] for r in one]
    assert [r["tokens"] for r in two] == [r["tokens"] for r in one]
    for name in ("loss", "eval_loss"):
        pairs = [(a[name], b[name]) for a, b in zip(one, two, strict=True) if name in a]
        assert pairs
        np.testing.assert_allclose(*zip(*pairs, strict=True), rtol=2e-6)
    weights = [load(tmp_path / name / "checkpoint").state_dict() for name in ("one", "two")]
    for name, x in weights[0].items():
        torch.testing.assert_close(weights[1][name], x, rtol=1e-3, atol=1e-5)


def small_model(**options: Any) -> LanguageModel:
    attention = AttentionConfig(num_heads=2, mechanism=options.pop("mechanism", "linear"))
    return LanguageModel(ModelConfig(dim=16, depth=2, causal=True, vocab_size=256, attention=attention, **options))


@pytest.mark.parametrize("mechanism", ["linear", "softmax", "local", "performer"])
def test_a_packed_document_does_not_see_its_neighbors(mechanism: str) -> None:
    model = small_model(mechanism=mechanism, token_shift=(0, 1)).eval()
    objective = Objective(model, context=37)
    tokens, targets = torch.randint(256, (1, 61)), torch.randint(256, (1, 61))
    offsets = torch.tensor([0, 24, 61], dtype=torch.int32)
    together = 61 * float(objective(tokens, targets, offsets)[0].detach())
    pieces = [(j - i) * float(objective(tokens[:, i:j], targets[:, i:j])[0].detach()) for i, j in ((0, 24), (24, 61))]
    assert together == pytest.approx(sum(pieces), rel=1e-5)
    other = tokens.clone()
    other[:, :24] = torch.randint(256, (1, 24))
    before = model(tokens, packing=Packing(offsets, 37))[:, 24:]
    assert torch.equal(model(other, packing=Packing(offsets, 37))[:, 24:], before)


@pytest.mark.parametrize("mechanism", ["linear", "softmax", "local"])
def test_a_carried_state_gives_the_loss_of_the_document(mechanism: str) -> None:
    model = small_model(mechanism=mechanism, token_shift=(0, 1))
    objective = Objective(model, context=20)
    tokens, targets = torch.randint(256, (2, 60)), torch.randint(256, (2, 60))
    state, total = model.new_state(2), 0.0
    for i in range(0, 60, 20):
        loss, state = objective(tokens[:, i : i + 20], targets[:, i : i + 20], state=state)
        state, total = state.detach(), total + float(loss.detach())
    assert total / 3 == pytest.approx(float(Objective(model, 60)(tokens, targets)[0].detach()), rel=1e-5)


def test_a_run_carries_the_state_through_a_document(tmp_path: Path) -> None:
    text = (" ".join(random.Random(4).choice(WORDS) for _ in range(40)))[:171].encode()
    (tmp_path / "text.txt").write_bytes(text)
    # The learning rate is too small to change the model, which reads the document twice.
    still = {"lr": 1e-12, "weight_decay": 0, "ngram_decay": 0, "batch_size": 1, "context": 20, "held_out": 0}
    still |= {"steps": 18, "model.zero_init_residual": "false"}  # Layers that begin at zero would hide the state.
    records = trained(tmp_path / "text.txt", tmp_path / "run", carry_state=True, **still)
    losses = [r["loss"] for r in records if "loss" in r]
    counts = [20] * 8 + [10]
    model = load(tmp_path / "run" / "checkpoint")
    assert isinstance(model, LanguageModel)
    tokens = torch.tensor([list(text)])
    with torch.no_grad():
        whole, _ = Objective(model, 170)(tokens[:, :-1], tokens[:, 1:])
        alone, _ = Objective(model, 20)(tokens[:, 20:40], tokens[:, 21:41])
    total = sum(loss * count for loss, count in zip(losses[:9], counts, strict=True))
    assert total / 170 == pytest.approx(float(whole), rel=1e-5)
    assert losses[9:] == pytest.approx(losses[:9], rel=1e-6)
    assert losses[1] != pytest.approx(float(alone), rel=1e-5)


def test_carried_buffers_are_as_long_as_documents(corpus: Path, tmp_path: Path) -> None:
    """Those of softmax layers hold every token, and are shortened when documents end."""
    attention = {"model.attention.mechanism": "softmax", "model.attention.conv_size": 3}
    flags = {**SMALL, **attention, "carry-state": True, "steps": 60, "eval-every": 60, "sample-tokens": 0}
    given = {name.replace("-", "_"): value for name, value in flags.items()}
    trainer = Trainer(
        resolve({**given, "data": (str(corpus),), "out": str(tmp_path / "run")}),
        RunLogger(tmp_path / "run"),
        make_accelerator("cpu", "fp32"),
    )
    trainer.run()
    (state,) = trainer._states
    assert state is not None
    longest = max(x.shape[2] for name, x in state.tensors().items() if name.endswith(".k"))
    # Not 60 · 61; the last sequence of a document is padded.
    assert longest <= trainer.store.train.longest + 61


@pytest.mark.parametrize(
    "limited",
    [
        {"model.positions": "learned"},
        {"model.positions": "axial", "model.axial_shape": "61,1"},
        {"model.attention.mechanism": '{"mechanism": "linformer", "rank": 3, "max_length": 61}'},
    ],
    ids=["learned", "axial", "linformer"],
)
def test_samples_end_where_the_positions_do(corpus: Path, tmp_path: Path, limited: dict[str, Any]) -> None:
    """The prompt from the held-out data is longer than the context of 61."""
    trained(corpus, tmp_path / "run", steps=2, eval_every=1, sample_tokens=50, **limited)
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert [len(sample["prompt"]) for sample in samples] == [30, 30]


def test_features_are_redrawn_between_steps_and_equal_in_all_processes() -> None:
    models = [small_model(mechanism={"mechanism": "performer", "redraw_interval": 6}) for _ in range(2)]
    redraws = [RedrawSchedule(model, seed=3) for model in models]
    drawn = [[r.before_step(step, accumulate=2) for step in range(13)] for r in redraws]
    assert drawn[0] == [step in (3, 6, 9, 12) for step in range(13)]
    states = [model.state_dict() for model in models]
    names = [name for name in states[0] if name.endswith("projection")]
    assert names
    assert all(torch.equal(states[0][name], states[1][name]) for name in names)
    kept = {name: states[0][name].clone() for name in names}
    models[0].train()(torch.randint(256, (1, 5)))  # The counter of the model is off.
    assert all(torch.equal(models[0].state_dict()[name], kept[name]) for name in names)


def test_masked_tokens() -> None:
    batch = Batch(torch.randint(200, (7, 300)), torch.zeros(7, 300, dtype=torch.int64), 2100)
    seeds = list(range(7))
    found = mask_tokens(batch, 0.25, 200, seeds)
    asked = found.targets != -100
    assert found.num_targets == int(asked.sum())
    assert 0.2 < asked.double().mean() < 0.3
    assert torch.equal(found.targets[asked], batch.tokens[asked])
    assert torch.equal(found.tokens[~asked], batch.tokens[~asked])
    hidden = (found.tokens[asked] == 200).double().mean()
    kept = (found.tokens[asked] == batch.tokens[asked]).double().mean()
    assert 0.74 < hidden < 0.86
    assert 0.05 < kept < 0.16
    two = Batch(batch.tokens[2:4], batch.targets[2:4], 600)
    assert torch.equal(mask_tokens(two, 0.25, 200, seeds[2:4]).tokens, found.tokens[2:4])


def test_a_masked_model_learns(corpus: Path, tmp_path: Path) -> None:
    records = trained(corpus, tmp_path / "run", objective="masked", steps=60, lr=0.01)
    model = load(tmp_path / "run" / "checkpoint")
    assert (model.config.causal, model.config.vocab_size) == (False, 257)
    assert last(records, "eval_loss") < records[0]["loss"] - 1


@pytest.mark.parametrize("form", ["folders", "csv"])
def test_a_classifier_learns(tmp_path: Path, form: str) -> None:
    draw, rows = random.Random(5), []
    for i in range(120):
        label = draw.choice(("even", "odd"))
        words = WORDS[::2] if label == "even" else WORDS[1::2]
        rows.append((f"{i} " + " ".join(draw.choice(words) for _ in range(draw.randint(5, 20))), label))
    data = tmp_path / "data"
    if form == "folders":
        for i, (text, label) in enumerate(rows):
            (data / label).mkdir(parents=True, exist_ok=True)
            (data / label / f"{i}.txt").write_text(text)
    else:
        data = tmp_path / "data.csv"
        with data.open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *rows])
    out = tmp_path / "run"
    records = trained(data, out, objective="classify", steps=60, batch_size=8, lr=0.01, held_out=0.2)
    assert last(records, "eval_accuracy") > 0.8
    assert load(out / "checkpoint").config.num_classes == 2


def test_learning_rate_schedule() -> None:
    given = {"data": ["x"], "out": "y", "lr": 2, "decay_type": "cosine"}
    train = resolve({**given, "warmup": 4, "min_lr": 0.1, "steps": 100}).train
    rates = [learning_rate(train, step, step / 100) for step in range(100)]
    assert rates[:4] == pytest.approx([0.5, 1, 1.5, 2], rel=0.01)
    assert all(a > b for a, b in pairwise(rates[4:]))
    assert learning_rate(train, 100, 1.0) == pytest.approx(0.2)
    slow = resolve({**given, "warmup": 400, "minutes": 1}).train
    assert learning_rate(slow, 3, 0.05) == pytest.approx(1, rel=0.01)
    assert learning_rate(slow, 9, 0.5) == pytest.approx(1)


def test_a_dry_run_prints_sizes_and_writes_nothing(corpus: Path, tmp_path: Path) -> None:
    done = longspan(*arguments(corpus, tmp_path / "run"), "--dry-run", log=tmp_path / "log")
    assert done.status == 0, done.stderr
    number = sum(p.numel() for p in LanguageModel(_model_of(corpus, tmp_path)).parameters())
    for words in (
        f"{number:,} parameters",
        "state of one sequence",
        "for activations of 3 sequences of 61 tokens",
        "for 12 steps",
    ):
        assert words in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_dry_run_knows_the_recipe(corpus: Path, tmp_path: Path) -> None:
    """Muon has one moment, frozen parameters have neither gradient nor moments, and steps that grow are shorter."""

    def printed(**options: Any) -> tuple[float, int]:
        words = arguments(corpus, tmp_path / "run", **options, model__ngrams="")
        done = longspan(*words, "--dry-run", log=tmp_path / "log")
        assert done.status == 0, done.stderr
        fixed = re.search(r"by formula: ([\d.,]+) KiB for weights", done.stdout)
        tokens = re.search(r"s per step of ([\d,]+) tokens", done.stdout)
        assert fixed is not None, done.stdout
        assert tokens is not None, done.stdout
        return float(fixed[1].replace(",", "")), int(tokens[1].replace(",", ""))

    (adamw, whole), (muon, grown) = printed(accumulate=3), printed(optimizer="muon", accumulate=3, ramp_up=1.0)
    model = LanguageModel(replace(_model_of(corpus, tmp_path), ngrams=()))
    assert muon == pytest.approx(adamw - 4 * sum(x.numel() for x in layer_matrices(model)) / 1024, abs=0.2)
    assert (whole, grown) == (3 * 3 * 61, pytest.approx(1.5 * 3 * 61, abs=2))
    weights = 4 * sum(x.numel() for x in model.parameters()) / 1024
    assert printed(freeze="transformer")[0] == pytest.approx(
        adamw - 3 * 4 * sum(x.numel() for x in model.transformer.parameters()) / 1024, abs=0.2
    )
    assert adamw == pytest.approx(4 * weights, abs=0.2)


def _model_of(corpus: Path, tmp_path: Path) -> ModelConfig:
    flags = {name.replace("-", "_"): value for name, value in SMALL.items()}
    return resolve({**flags, "data": [str(corpus)], "out": str(tmp_path)}).complete(256, 0)


MEMORY = """
import torch, longspan.train.objectives as objectives
def broken(self, *arguments, **how):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7.50 GiB. GPU 0 has ...")
objectives.Objective.forward = broken
"""


def test_out_of_memory_message(corpus: Path, tmp_path: Path) -> None:
    done = longspan(*arguments(corpus, tmp_path / "run", batch_size=6), log=tmp_path / "log", before=MEMORY)
    assert done.status == 4
    assert "7.50 GiB more needed" in done.stderr
    assert "--batch-size 3 --accumulate 2" in done.stderr
    done = longspan(*arguments(corpus, tmp_path / "run", batch_size=1), log=tmp_path / "log", before=MEMORY)
    assert "--context 30" in done.stderr
    assert "--model.execution recompute" in done.stderr
    assert "--chunk-length 7" in done.stderr


BAD: list[tuple[str, dict[str, Any], list[str], int]] = [
    ("missing", {"data": "nowhere.txt"}, ["nowhere.txt", "no such file or folder"], 1),
    ("no match", {"data": "no*where"}, ["no*where", "no file matches this pattern"], 1),
    ("empty file", {"data": "EMPTY/empty.txt"}, ["empty.txt is empty"], 2),
    ("empty folder", {"data": "EMPTY/folder"}, ["contains no files"], 2),
    ("no such extension", {"data": "TEXT", "extensions": ".zzz"}, ["no files with extension .zzz"], 2),
    ("too small", {"data": "EMPTY/small.txt"}, ["too small", "at least 244 are required"], 2),
    ("not text", {"data": "EMPTY/bytes.txt", "tokenizer": "TOKENIZER"}, ["is not UTF-8 text at byte 3"], 2),
    ("no tokenizer", {"data": "TEXT", "tokenizer": "none.json"}, ["none.json", "no such file"], 1),
    ("context too long", {"data": "TEXT", "context": 999_999}, ["longer than any document", "use --context"], 2),
    ("unknown flag", {"data": "TEXT", "contxt": 5}, ["unknown flag --contxt", "did you mean '--context'?"], 2),
    ("unknown model flag", {"data": "TEXT", "model.dimm": 5}, ["--model.dimm", "did you mean '--model.dim'?"], 2),
    ("bad value", {"data": "TEXT", "steps": "many"}, ["--steps must be an integer or none, got 'many'"], 2),
    ("no labels", {"data": "TEXT", "objective": "classify"}, ["has no label"], 2),
    ("heads", {"data": "TEXT", "model.attention.num_heads": 5}, ["must be a multiple of num_heads"], 2),
    ("fp16", {"data": "TEXT", "precision": "fp16", "device": "cpu"}, ["fp16 needs a CUDA device"], 2),
    ("fp8", {"data": "TEXT", "precision": "fp8", "device": "cpu"}, ["FP8 products", "cpu has none: use bf16"], 2),
    ("batch too large", {"data": "TEXT", "batch_size": 10**11}, ["tokens of a step need", "lower --batch-size"], 2),
    ("no config", {"data": "TEXT", "config": "none.toml"}, ["none.toml", "no such file"], 1),
    (
        "recompute",
        {"data": "TEXT", "carry_state": True, "model.execution": "recompute"},
        ["--carry-state cannot be combined with --model.execution recompute"],
        2,
    ),
    (
        "carried positions",
        {"data": "TEXT", "carry_state": True, "model.positions": "learned"},
        ["--carry-state continues the positions of a document", "more than the 61 positions", "larger max_length"],
        2,
    ),
    (
        "carried table",
        {"data": "TEXT", "carry_state": True, "mechanism": '{"mechanism": "linformer", "rank": 3, "max_length": 61}'},
        ["--carry-state continues the positions of a document", "61"],
        2,
    ),
]


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("bad")
    (folder / "folder").mkdir()
    (folder / "empty.txt").write_bytes(b"")
    (folder / "small.txt").write_bytes(b"only a few words, and no more than that")
    (folder / "bytes.txt").write_bytes(b"abc\xff\xfe" * 1000)
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(("case", "changes", "words", "status"), BAD, ids=[case for case, *_ in BAD])
def test_wrong_input_is_refused_in_one_line(
    corpus: Path, bad: Path, tmp_path: Path, case: str, changes: dict[str, Any], words: list[str], status: int
) -> None:
    changes = dict(changes)
    data = changes.pop("data").replace("EMPTY", str(bad)).replace("TEXT", str(corpus))
    if "tokenizer" in changes:
        changes["tokenizer"] = changes["tokenizer"].replace("TOKENIZER", str(bad / "tokenizer.json"))
    done = longspan(*arguments(data, tmp_path / "run", **changes), log=tmp_path / "log")
    assert done.status == status, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert done.stderr.startswith("longspan: ")
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "run").exists()


def test_debug_shows_a_traceback(tmp_path: Path) -> None:
    done = longspan(*arguments("nowhere.txt", tmp_path / "run"), "--debug", log=tmp_path / "log")
    assert done.status == 1
    assert "Traceback" in done.stderr


def test_help_all_lists_every_field(tmp_path: Path) -> None:
    done = longspan("train", "--help-all", log=tmp_path / "log", env={"COLUMNS": "200"})
    assert done.status == 0
    for flag in ("--data", "--carry-state", "--model.dim", "--model.attention.rotary", "--dry-run"):
        assert flag in done.stdout


def test_equal_seeds_give_equal_runs(corpus: Path, tmp_path: Path) -> None:
    first, second = (curve(trained(corpus, tmp_path / name)) for name in ("a", "b"))
    assert first == second
    assert BatchShape(61, 3).num_sequences == 3


@pytest.mark.slow
def test_sharded_weights_are_saved_and_resumed(corpus: Path, tmp_path: Path) -> None:
    """FSDP as configured by accelerate matches one process, also when stopped and resumed."""
    settings: dict[str, Any] = {"steps": 6, "save_every": 3, "packing": "off", "device": "cpu", "sample_tokens": 0}
    one = trained(corpus, tmp_path / "one", **settings, batch_size=6)
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "ResidualBranch",
    }
    stop = "from longspan.train.trainer import Trainer\nimport os\nsave = Trainer._save\n"
    stop += "Trainer._save = lambda self: (save(self), os._exit(0) if self.step == 3 and BREAK else None)\n"
    code = "import sys\nfrom longspan.cli import main\nBREAK = sys.argv.pop(1) == 'break'\n" + stop + "main()\n"
    (tmp_path / "main.py").write_text(code)
    for kind in ("break", "go"):
        words = arguments(corpus, tmp_path / "two", **settings, batch_size=3)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        command = [*launch, str(tmp_path / "main.py"), kind, *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
        assert done.returncode == 0, done.stderr
    two = metrics(tmp_path / "two")
    losses = [[r["loss"] for r in records if "loss" in r] for records in (one, two)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    weights = [load(tmp_path / name / "checkpoint").state_dict() for name in ("one", "two")]
    for name, x in weights[0].items():
        torch.testing.assert_close(weights[1][name], x, rtol=1e-3, atol=1e-5)


LITTLE_MEMORY = """
import psutil
from longspan.train import trainer
class Memory:
    total = 2**40
    available = 2**29
psutil.virtual_memory = Memory
def refuse(self):
    raise AssertionError("a dry run must not run a whole step")
trainer.Trainer.train_step = refuse
"""


def test_a_dry_run_measures_one_short_sequence(corpus: Path, tmp_path: Path) -> None:
    words = arguments(corpus, tmp_path / "run", batch_size=4096, context=1021, model__dim=64)
    done = longspan(*words, "--dry-run", log=tmp_path / "log", before=LITTLE_MEMORY)
    assert done.status == 0, done.stderr
    formula, measured = re.findall(
        r"memory, (by formula|from a sequence of \d+ tokens): .* about ([\d.,]+) GiB", done.stdout
    )
    assert (formula[0], measured[0]) == ("by formula", "from a sequence of 512 tokens")
    assert 0.3 < float(formula[1].replace(",", "")) / float(measured[1].replace(",", "")) < 3
    assert "more than the 512.0 MiB that are free on this machine: lower --batch-size" in done.stdout
    assert f"{corpus}: text; 24 documents" in done.stdout
