"""Settings: presets, files and flags; every one of them has an effect, and a wrong one is answered."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

import pytest
from training import SMALL, arguments, curve, longspan, metrics, trained, write_corpus

from longspan.cli.arguments import flags as flags_of
from longspan.cli.train import REPEATED, TrainFlags, read_settings
from longspan.mechanisms import list_mechanisms
from longspan.models.checkpoint import save
from longspan.models.config import AttentionConfig, ModelConfig
from longspan.models.transformer import LanguageModel
from longspan.train.config import Settings, TrainConfig, described, differences, resolve
from longspan.train.presets import PRESETS

NEEDED = {"data": ["x"], "out": "y"}


FLAGS = {flag[2:].replace("-", "_"): kind for flag, kind in flags_of(TrainFlags).items()}
MODEL = [name for name in FLAGS if name.startswith("model.")]


def read(flags: dict[str, Any], config: Path | None = None) -> Settings:
    """The settings of a command line with these flags."""
    words = [] if config is None else ["--config", str(config)]
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        if flag in REPEATED:
            words += [word for each in value for word in (flag, each)]
        else:
            words += [flag] if value is True else [f"{flag}={value}"]
    return read_settings(words)[0]


def resolved(**flags: Any) -> Any:
    settings = read({**NEEDED, **{name.replace("__", "."): value for name, value in flags.items()}})
    return settings.train, settings.complete(256, 2)


def test_later_wins(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('preset = "tiny"\nlr = 0.5\nsteps = 7\n[model]\ndim = 32\n[model.attention]\nnum_heads = 2\n')
    file = read({**NEEDED, "steps": "9", "model.depth": "3"}, path)
    assert (file.train.lr, file.train.steps, file.train.context) == (0.5, 9, PRESETS["tiny"].train["context"])
    model = file.complete(256, 0)
    assert (model.dim, model.depth, model.attention.num_heads, model.norm) == (32, 3, 2, "rms")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_hybrids_that_can_be_built(name: str) -> None:
    train, model = resolved(preset=name)
    assert train.preset == name
    assert [part["mechanism"] for part in model.attention.mechanism["parts"]] == ["local", "linear"]
    if name == "tiny":
        LanguageModel(model)


@pytest.mark.parametrize("name", PRESETS)
def test_adamw_has_no_rates_that_presets_set_for_muon(name: str) -> None:
    preset = PRESETS[name].train
    train, _ = resolved(preset=name)
    rates = preset["muon_lr"], preset.get("embedding_lr")
    assert (train.optimizer, train.muon_lr, train.embedding_lr) == ("muon", *rates)
    train, _ = resolved(preset=name, optimizer="adamw")
    assert (train.optimizer, train.muon_lr, train.embedding_lr) == ("adamw", None, None)


def test_the_small_preset_has_the_size_of_the_measurements() -> None:
    _, model = resolved(preset="small")
    built = LanguageModel(model)
    assert built.ngrams is not None
    tables = sum(p.numel() for p in built.ngrams.parameters())
    assert tables == 3 * 32_768 * 512
    assert 20e6 < sum(p.numel() for p in built.parameters()) - tables < 22e6


@pytest.mark.parametrize("name", list_mechanisms())
def test_a_mechanism_is_known_by_its_name(name: str) -> None:
    _, model = resolved(preset="tiny", mechanism=name, context="64")
    spec = model.attention.mechanism
    assert spec["mechanism"] == name
    LanguageModel(model)
    with_options = json.dumps({"mechanism": "local", "window": 5})
    assert resolved(mechanism=with_options)[1].attention.mechanism == {"mechanism": "local", "window": 5}


@pytest.mark.parametrize("preset", PRESETS)
def test_performer_by_name_has_whole_tiles_of_features(preset: str) -> None:
    _, model = resolved(preset=preset, mechanism="performer")
    assert model.attention.mechanism["num_features"] % 64 == 0
    given = json.dumps({"mechanism": "performer"})
    assert resolved(preset=preset, mechanism=given)[1].attention.mechanism == {"mechanism": "performer"}


# Values for fields of a model whose own value does not suggest another.
MODEL_VALUES: dict[str, tuple[str, Any]] = {
    "model.legacy.inner_dim": ("64", 64),
    "model.norm": ("scale", "scale"),
    "model.final_norm": ("rms", "rms"),
    "model.norm_position": ("post", "post"),
    "model.positions": ("sinusoidal", "sinusoidal"),
    "model.max_length": ("999", 999),
    "model.axial_shape": ("64,64", (64, 64)),
    "model.token_shift": ("0,1,2", (0, 1, 2)),
    "model.legacy.axial_stride": ("4", 4),
    "model.residual": ("double", "double"),
    "model.execution": ("recompute", "recompute"),
    "model.embed_dim": ("24", 24),
    "model.num_classes": ("7", 7),
    "model.pooling": ("none", "none"),
    "model.attention.mechanism": ("linear", "linear"),
    "model.attention.rotary": ("interleaved", "interleaved"),
    "model.attention.num_qk_heads": ("1", 1),
    "model.attention.conv_size": ("4", 4),
    "model.attention.out_gate": ("sigmoid", "sigmoid"),
    "model.attention.dropout": ("0.1", 0.1),
    "model.embed_dropout": ("0.1", 0.1),
    "model.ngrams": ("2,3", (2, 3)),
    "model.feed_forward.activation": ("gelu", "gelu"),
    "model.feed_forward.dropout": ("0.1", 0.1),
    "model.legacy.out_dropout": ("0.1", 0.1),
    "model.legacy.axial": ('{"num_heads": 2}', {"num_heads": 2}),
    "model.legacy.side_feed_forward": ('{"gated": true}', {"gated": True}),
    "model.legacy.product_keys": ("1", (1,)),
}


# Flags that are refused without another.
COMPANIONS = {
    "model.legacy.resample": {"model.legacy.inner_dim": "64"},
    "model.legacy.axial": {"model.legacy.axial_stride": "4"},
    "model.attention.rotary_dim": {"model.attention.rotary": "halves"},
}


def within(model: Any, name: str) -> Any:
    for part in name.split(".")[1:]:
        model = getattr(model, part, None)
    return model


def another(name: str) -> tuple[str, Any]:
    """A value for a field that it does not have yet."""
    own, hint = within(resolved()[1], name), FLAGS[name]
    kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if name in MODEL_VALUES:
        return MODEL_VALUES[name]
    if tuple in map(typing.get_origin, kinds):
        return "1,2", (1, 2)
    if bool in kinds:
        return str(not own).lower(), not own
    if int in kinds:
        return str((own or 6) + 1), (own or 6) + 1
    if float in kinds:
        return str((own or 0) + 0.5), (own or 0) + 0.5
    # One of a side group, like the same field of attention or feed_forward.
    return next(value for other, value in MODEL_VALUES.items() if other.split(".")[-1] == name.split(".")[-1])


@pytest.mark.parametrize("name", MODEL)
def test_every_field_of_the_model_is_a_flag(name: str) -> None:
    text, value = another(name)
    assert within(resolved()[1], name) != value
    found: Any = read({**NEEDED, **COMPANIONS.get(name, {}), name: text}).model  # what ModelConfig is then made of
    for part in name.split(".")[1:]:
        found = found[part]
    assert found == value


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_corpus(tmp_path_factory.mktemp("corpus") / "text")
    (folder / "other.md").write_text("another kind of file, with other words in it " * 20)
    return folder


@pytest.fixture(scope="module")
def plain(corpus: Path) -> list[Any]:
    return curve(trained(corpus, corpus.parent / "plain", sample_tokens=0))


# Fields that change the numbers of a run, with a value that must do so; the others are below.
NUMBERS: dict[str, dict[str, Any]] = {
    "mechanism": {"mechanism": "local"},
    "objective": {"objective": "masked"},
    "context": {"context": 47},
    "batch_size": {"batch_size": 4},
    "accumulate": {"accumulate": 2},
    "lr": {"lr": 0.001},
    "warmup": {"warmup": 5},
    "min_lr": {"min_lr": 0.5},
    "decay_type": {"decay_type": "linear"},
    "decay_ratio": {"decay_ratio": 0.5},
    "optimizer": {"optimizer": "muon"},
    "weight_decay": {"weight_decay": 0.9},
    "betas": {"betas": "0.5,0.6"},
    "clip": {"clip": 0.01},
    "carry_state": {"carry_state": True},
    "packing": {"packing": "on"},
    "extensions": {"extensions": ".txt"},
    "exclude": {"exclude": "other.md,02*"},
    "held_out": {"held_out": 0.3},
    "precision": {"precision": "bf16"},
    "seed": {"seed": 5},
    "eval_every": {"eval_every": 4},
    "eval_tokens": {"eval_tokens": 100},
    "log_every": {"log_every": 3},
    "steps": {"steps": 11},
    "preset": {"preset": "small", "lr": None, "warmup": None},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_setting_changes_the_run(corpus: Path, plain: list[Any], tmp_path: Path, name: str) -> None:
    assert curve(trained(corpus, tmp_path / "run", sample_tokens=0, **NUMBERS[name])) != plain


def test_the_others_do_what_they_say(corpus: Path, plain: list[Any], tmp_path: Path) -> None:
    def run(name: str, **changes: Any) -> Path:
        trained(changes.pop("data", corpus), tmp_path / name, **changes)
        return tmp_path / name

    same = run("same", prompt="once upon", sample_tokens=3, save_every=1000, tensorboard=True, device="cpu")
    assert curve(metrics(same)) == plain  # None of these touches the numbers.
    samples = [json.loads(line) for line in (same / "samples.jsonl").read_text().splitlines()]
    assert [s["prompt"] for s in samples] == ["once upon"] * 2
    assert {len(s["text"].encode()) for s in samples} <= set(range(3, 10))
    assert list((same / "tensorboard").glob("events*"))
    assert not (run("none", sample_tokens=0) / "samples.jsonl").exists()
    about = json.loads((same / "run.json").read_text())
    assert about["device"].startswith("cpu")
    scored = run("scored", eval_data=corpus / "001.txt")
    assert json.loads((scored / "run.json").read_text())["data"]["held_out_tokens"] == (
        len((corpus / "001.txt").read_bytes())
    )
    for record in metrics(run("short", steps=None, minutes=0.01)):
        assert record["steps"] is None
    other = run("masked", objective="masked", mask_rate=0.5)
    assert curve(metrics(other)) != curve(metrics(run("less", objective="masked", mask_rate=0.1)))
    done = longspan(*arguments(corpus, tmp_path / "gpu", device="cuda"), log=tmp_path / "log")
    assert done.status in (0, 2)


COMPILED = """
import torch
def compile(module, dynamic=None, mode=None):
    print("compiled with dynamic =", dynamic)
    return module
torch.compile = compile
"""


def test_compile_is_asked_for(corpus: Path, tmp_path: Path) -> None:
    for switch, number in (("on", 1), ("off", 0), ("auto", 0)):
        words = arguments(corpus, tmp_path / switch, compile=switch, device="cpu")
        done = longspan(*words, log=tmp_path / "log", before=COMPILED)
        assert done.stdout.count("compiled with dynamic = False") == number
        assert json.loads((tmp_path / switch / "run.json").read_text())["compiled"] == bool(number)


# divergence, bin_dtype, image_size and tokenizer have tests of their own, beside what they change.
ELSEWHERE = {"data", "out", "prompt", "sample_tokens", "save_every", "tensorboard", "device", "eval_data", "minutes"}
ELSEWHERE |= {"mask_rate", "compile", "divergence", "bin_dtype", "image_size", "tokenizer", "format"}
ELSEWHERE |= {"muon_lr", "embedding_lr", "ngram_decay", "ramp_up"}  # test_recipe.py
ELSEWHERE |= {"text_field", "label_field", "file_field", "mesh", "init", "freeze", "chunk_length"}
ELSEWHERE |= {"init_from", "init_config", "lora_rank", "lora_alpha", "lora_dropout", "lora_targets"}


def test_no_setting_is_without_a_test() -> None:
    fields = {f.name for f in dataclasses.fields(TrainConfig)}
    assert fields == set(NUMBERS) | ELSEWHERE


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lr": "fast"}, "--lr must be a number, got 'fast'"),
        ({"steps": "1.5"}, "--steps must be an integer or none, got '1.5'"),
        ({"lr": "-1"}, "--lr must be above 0, got -1.0"),
        ({"lr": "inf"}, "--lr must be a finite number, got inf"),
        ({"divergence": "nan"}, "--divergence must be a finite number, got nan"),
        ({"weight_decay": "nan"}, "--weight-decay must be a finite number, got nan"),
        ({"seed": str(2**64)}, "--seed must be an integer of 64 bits, got 18446744073709551616"),
        ({"minutes": "nan"}, "--minutes must be a finite number, got nan"),
        ({"mechanism": "-1"}, "unknown mechanism '-1'"),
        ({"batch_size": "0"}, "--batch-size must be at least 1, got 0"),
        ({"betas": "0.9"}, "--betas are two numbers"),
        ({"decay_ratio": "0"}, "--decay-ratio must be in (0, 1], got 0.0"),
        ({"ramp_up": "1.5", "accumulate": "2"}, "--ramp-up must be in [0, 1], got 1.5"),
        ({"min_lr": "2"}, "--min-lr must be in [0, 1], got 2.0"),
        ({"ramp_up": "0.5"}, "--ramp-up grows a step to --accumulate batches: give --accumulate 2 or more"),
        ({"embedding_lr": "0"}, "--embedding-lr must be above 0, got 0.0"),
        ({"ngram_decay": "-1"}, "--ngram-decay must be 0 or more, got -1.0"),
        ({"muon_lr": "0.1", "optimizer": "adamw"}, "--muon-lr is for --optimizer muon, got adamw"),
        ({"optimizer": "moun"}, "unknown --optimizer 'moun'; there is adamw, muon (did you mean 'muon'?)"),
        (
            {"objective": "causl"},
            "unknown --objective 'causl'; there is causal, masked, classify, multilabel, regress, tag, forecast (did",
        ),
        ({"preset": "huge"}, "unknown --preset 'huge'; there is tiny, small, base"),
        ({"mechanism": "lokal"}, "unknown mechanism 'lokal'"),
        ({"mechanism": "{oops"}, "--mechanism is neither a name nor JSON"),
        ({"mechanism": "local", "model.attention.mechanism": "local"}, "are the same option"),
        ({"model.dim": "wide"}, "--model.dim must be an integer, got 'wide'"),
        ({"model.attention.qk_norm": "maybe"}, "must be true or false, got 'maybe'"),
        ({"contxt": "5"}, "unknown flag --contxt (did you mean '--context'?); longspan train --help lists them"),
        ({"task": "mqar"}, "unknown flag --task (longspan eval takes it); longspan train --help lists them"),
        ({"model.axial_stride": "5"}, "(did you mean '--model.legacy.axial-stride'?)"),
        ({"held_out": "1"}, "--held-out must be in [0, 1)"),
        ({"carry_state": True, "objective": "masked"}, "--carry-state is for --objective causal"),
        ({"carry_state": True, "packing": "on"}, "leave --packing out"),
        ({"data": []}, "nothing to train on"),
        ({"out": ""}, "give --out"),
        ({"model.vocab_size": "100"}, "--model.vocab_size is 100, and the data needs 256 at least"),
        ({"model.causal": "false"}, "needs a model with causal=True"),
    ],
)
def test_a_wrong_value_is_answered(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read({**NEEDED, **flags}).complete(256, 2)
    assert message in str(caught.value)


def test_a_wrong_file_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[model]\ndimm = 5\n")
    with pytest.raises(
        ValueError, match=r"unknown setting --model\.dimm in .*run\.toml \(did you mean '--model\.dim'\?\)"
    ):
        read(NEEDED, path)
    path.write_text("= 5")
    with pytest.raises(ValueError, match="is not TOML"):
        read(NEEDED, path)
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        read(NEEDED, tmp_path / "none.toml")


def test_a_file_has_every_kind_of_value(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        """
        data = ["a,b", "2=c"]
        out = "y"
        preset = "tiny"
        tensorboard = true
        extensions = [".py", ".md"]
        betas = [0.5, 0.9]
        image_size = 7
        [model]
        token_shift = [0, 1, 2]
        tie_embeddings = true
        final_norm = "layer"
        [model.attention]
        rotary = { local = "halves" }
        mechanism = [{ mechanism = "local", window = 5 }, "linear"]
        [model.legacy]
        axial_stride = 3
        axial = { num_heads = 2 }
        """
    )
    settings, dry_run = read_settings(["--config", str(path), "--dry-run", "--no-tensorboard", "--lr=1"])
    train, model = settings.train, settings.complete(256, 0)
    assert dry_run
    assert (train.data, train.extensions, train.betas) == (("a,b", "2=c"), (".py", ".md"), (0.5, 0.9))
    assert (train.image_size, train.lr, train.tensorboard) == (7, 1.0, False)
    assert (model.token_shift, model.tie_embeddings, model.final_norm) == ((0, 1, 2), True, "layer")
    assert model.attention.mechanism == ({"mechanism": "local", "window": 5}, "linear")
    assert model.attention.rotary == {"local": "halves"}
    assert (model.legacy.axial_stride, model.legacy.axial) == (3, AttentionConfig(num_heads=2))
    assert read_settings(["--config", str(path), "--data", "d", "--data=e"])[0].train.data == ("d", "e")
    path.write_text("lr = 'fast'")
    with pytest.raises(ValueError, match="--lr must be a number, got 'fast'"):
        read(NEEDED, path)


def test_flags_may_have_underscores_and_follow_each_other() -> None:
    words = ["--data", "x", "--out", "y", "--batch_size", "3", "--batch-size=5", "--model.attention.num_kv_heads", "2"]
    settings, _ = read_settings([*words, "--model.token_shift", "-1,0", "--carry-state"])
    assert settings.train.batch_size == 5
    assert settings.train.carry_state
    assert settings.model["attention"]["num_kv_heads"] == 2
    assert settings.model["token_shift"] == (-1, 0)


def test_values_from_python_need_known_names() -> None:
    with pytest.raises(ValueError, match=r"unknown setting contxt \(did you mean 'context'\?\)"):
        resolve({**NEEDED, "contxt": 5})


def test_differences_are_named_by_their_path() -> None:
    one, two = (resolve({**NEEDED, "model.dim": dim, "seed": seed}) for dim, seed in ((32, 1), (48, 2)))
    found = differences(described(one, one.complete(256, 0)), described(two, two.complete(256, 0)))
    assert found == {"train.seed": (1, 2), "model.dim": (32, 48)}
    assert isinstance(one.complete(256, 0), ModelConfig)
    assert SMALL["model.dim"] == 24


def test_vectors_have_no_embeddings_of_tokens(tmp_path: Path) -> None:
    """Those of the preset and of a language model are left out; what is given is refused by the model."""
    attention = AttentionConfig(num_heads=2, mechanism="linear")
    options: dict[str, Any] = {"positions": "learned", "max_length": 9, "embed_dim": 4, "ngrams": (2,)}
    config = ModelConfig(dim=8, depth=1, causal=True, vocab_size=256, attention=attention, **options)
    save(LanguageModel(config), tmp_path / "tokens")
    given = {"data": ("x",), "out": "y", "objective": "forecast"}
    for more in ({}, {"init": str(tmp_path / "tokens")}):
        found = resolve({**given, **more}).complete(256, 3, channels=3)
        assert (found.positions, found.embed_dim, found.ngrams) == ("none", None, ())
    assert resolve({**given, "model.positions": "sinusoidal"}).complete(256, 3, channels=3).positions == "sinusoidal"
