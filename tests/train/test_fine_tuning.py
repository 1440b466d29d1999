"""Start from a checkpoint, freeze parameters, and resume by the folder alone."""

from __future__ import annotations

import csv
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training import WORDS, arguments, curve, longspan, metrics, trained, write_corpus

from longspan import AttentionConfig, LanguageModel, ModelConfig, load, save
from longspan.train.initial import Initial, start_from


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a language model."""
    folder = tmp_path_factory.mktemp("base")
    trained(write_corpus(folder / "text"), folder / "run")
    return folder / "run"


def equal(one: Any, two: Any, names: Any) -> list[bool]:
    return [torch.equal(one[name], two[name]) for name in names]


def start(data: Path, out: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], str]:
    """Train a step and return the weights with the messages; shapes of the model are those of --init."""
    mine = dict.fromkeys(("model.dim", "model.depth", "model.attention.num_heads", "model.feed_forward.mult"))
    done = longspan(*arguments(data, out, **{**mine, "steps": 1, **changes}), log=out.with_name("log"))
    assert done.status == 0, done.stderr
    return load(out).state_dict(), done.stderr


def test_a_run_starts_from_another_with_a_longer_context(base: Path, tmp_path: Path) -> None:
    data = base.parent / "text"
    before = load(base).state_dict()
    after, said = start(data, tmp_path / "run", init=base, context=127, lr=1e-12, weight_decay=0)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-6)
    assert f"{len(before)} of {len(before)} tensors are from {base}" in said
    other, _ = start(data, tmp_path / "other", context=127, lr=1e-12, **{"model.dim": 24, "model.depth": 2})
    assert not torch.equal(other["embedding.weight"], before["embedding.weight"])


def test_tables_of_ngrams_are_taken_by_their_length(tmp_path: Path) -> None:
    config = ModelConfig(
        dim=8,
        depth=1,
        causal=True,
        vocab_size=256,
        attention=AttentionConfig(num_heads=2),
        ngrams=(2, 3, 5),
        ngram_buckets=7,
    )
    before = LanguageModel(config)
    save(before, tmp_path / "before")
    model = LanguageModel(replace(config, ngrams=(5, 4, 2)))
    found = start_from(model, Initial(str(tmp_path / "before")))
    assert before.ngrams is not None
    assert model.ngrams is not None
    tables, own = before.ngrams.state_dict(), model.ngrams.state_dict()
    assert torch.equal(own["tables.0.weight"], tables["tables.2.weight"])
    assert torch.equal(own["tables.2.weight"], tables["tables.0.weight"])
    assert (found.new, found.left) == (("ngrams.tables.1.weight",), ("ngrams.tables.3-grams.weight",))


def test_a_language_model_becomes_a_classifier_with_a_frozen_body(base: Path, tmp_path: Path) -> None:
    data = write_labels(tmp_path / "x.csv")
    before = load(base).state_dict()
    after, said = start(data, tmp_path / "run", init=base, objective="classify", freeze="body", steps=3)
    body = [name for name in after if name.startswith("body.")]
    assert all(equal({f"body.{name}": x for name, x in before.items()}, after, body))
    assert "new: to_classes.bias, to_classes.weight; not taken over: body.to_logits" in said
    assert not torch.equal(after["to_classes.bias"], torch.zeros(2))
    done = longspan(*arguments(data, tmp_path / "no", objective="classify", freeze="bodi"), log=tmp_path / "log")
    assert done.status == 2
    assert "--freeze bodi is no parameter of the model; it has body, to_classes" in done.stderr


def test_init_refuses_what_is_no_checkpoint(base: Path, tmp_path: Path) -> None:
    done = longspan(*arguments(base.parent / "text", tmp_path / "run", init=tmp_path), log=tmp_path / "log")
    assert done.status == 2
    assert f"--init {tmp_path} is no checkpoint of a model that can be trained" in done.stderr


def write_labels(path: Path) -> Path:
    draw = random.Random(1)
    with path.open("w", newline="") as file:
        rows = [(" ".join(draw.choices(WORDS, k=9)), draw.choice("ab")) for _ in range(40)]
        csv.writer(file).writerows([("text", "label"), *rows])
    return path


def test_a_run_starts_from_a_file_of_an_older_library(base: Path, tmp_path: Path) -> None:
    from longspan.compat.performer_pytorch import PerformerLM

    torch.manual_seed(5)
    options = {"num_tokens": 256, "max_seq_len": 61, "dim": 24, "depth": 2, "heads": 3, "dim_head": 8, "causal": True}
    older = PerformerLM(**options)
    torch.save({"state_dict": older.state_dict()}, tmp_path / "old.pt")
    (tmp_path / "old.json").write_text(json.dumps(options))
    flags = {"init": tmp_path / "old.pt", "init_from": "performer-pytorch", "init_config": tmp_path / "old.json"}
    data = base.parent / "text"
    after, said = start(data, tmp_path / "run", **flags, lr=1e-12, weight_decay=0)
    before = older.to_longspan().state_dict()
    assert after.keys() == before.keys()
    torch.testing.assert_close(after["embedding.weight"], before["embedding.weight"], rtol=0, atol=1e-6)
    assert f"{len(before)} of {len(before)} tensors are from {tmp_path / 'old.pt'}" in said
    labeled, said = start(write_labels(tmp_path / "x.csv"), tmp_path / "labels", **flags, objective="classify")
    assert "new: to_classes.bias, to_classes.weight; not taken over: body." in said
    done = longspan(*arguments(data, tmp_path / "no", init=tmp_path / "old.pt"), log=tmp_path / "log")
    assert done.status == 2
    assert "--init-from performer-pytorch --init-config arguments.json" in done.stderr
    done = longspan(*arguments(data, tmp_path / "no", init_from="linformer"), log=tmp_path / "log")
    assert "--init, --init-from and --init-config together" in done.stderr


def test_a_run_starts_from_folders_of_transformers(base: Path, tmp_path: Path) -> None:
    hf = pytest.importorskip("longspan.hf")
    data, config = base.parent / "text", load(base).config
    model = hf.LongspanForCausalLM(hf.LongspanConfig(config))
    model.save_pretrained(tmp_path / "lm")
    after, said = start(data, tmp_path / "run", init=tmp_path / "lm", lr=1e-12, weight_decay=0)
    torch.testing.assert_close(after["embedding.weight"], model.model.embedding.weight, rtol=0, atol=1e-6)
    assert f"{len(after)} of {len(after)} tensors" in said
    hf.LongspanModel(hf.LongspanConfig(config)).save_pretrained(tmp_path / "body")
    _, said = start(data, tmp_path / "second", init=tmp_path / "body")
    assert "new: to_logits.bias, to_logits.weight" in said


def test_init_refuses_a_model_with_swapped_attention(base: Path, tmp_path: Path) -> None:
    hf, transformers = pytest.importorskip("longspan.hf"), pytest.importorskip("transformers")
    sizes = {"vocab_size": 31, "hidden_size": 24, "intermediate_size": 7, "num_hidden_layers": 1}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))
    hf.swap_attention(llama, "linear").save_pretrained(tmp_path / "swapped")
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4))
    llama.save_pretrained(tmp_path / "llama")
    for name, message in (
        ("swapped", "it is a transformers model with swapped attention: train it with transformers, or"),
        ("llama", "it is a transformers model of type llama: "),
    ):
        flags = arguments(base.parent / "text", tmp_path / "run", init=tmp_path / name)
        done = longspan(*flags, log=tmp_path / "log")
        assert done.status == 2
        assert f"--init {tmp_path / name} is no checkpoint of a model that can be trained: {message}" in done.stderr
        assert not (tmp_path / "run").exists()
        done = longspan("info", "--model", tmp_path / name, log=tmp_path / "log")
        assert done.status == 0, done.stderr
        assert "reads 31 tokens" in done.stdout
        with pytest.raises(
            ValueError, match=r"is a folder of transformers, of type .*longspan generate, serve and info"
        ):
            load(tmp_path / name)


def test_the_folder_of_a_run_opens_in_transformers(base: Path, tmp_path: Path) -> None:
    hf, transformers = pytest.importorskip("longspan.hf"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    tokens = torch.arange(14).view(2, 7)
    assert torch.equal(model(tokens).logits, load(base).eval()(tokens))
    assert isinstance(transformers.AutoTokenizer.from_pretrained(base), hf.ByteTokenizer)
    body = transformers.AutoModel.from_pretrained(base).eval()
    assert torch.equal(body(tokens).last_hidden_state, model.model.hidden(tokens))
    run = tmp_path / "run"
    shutil.copytree(base, run)
    write_words(run / "checkpoint" / "tokenizer.json")
    assert transformers.AutoTokenizer.from_pretrained(run)("two one")["input_ids"] == [1, 0]
    assert transformers.pipeline("text-generation", model=str(run))("two", max_new_tokens=1)
    (run / "checkpoint" / ".metadata").touch()
    with pytest.raises(ValueError, match=r"is a checkpoint in shards: `longspan export .*checkpoint FOLDER` writes"):
        transformers.AutoModelForCausalLM.from_pretrained(run)


def test_a_foreign_configuration_in_the_folder_of_a_run_stays(base: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"mine": 1}')
    trained(base.parent / "text", tmp_path, steps=1)
    assert (tmp_path / "config.json").read_text() == '{"mine": 1}'


def test_the_tokenizer_of_an_exported_folder(base: Path, tmp_path: Path) -> None:
    transformers, hf = pytest.importorskip("transformers"), pytest.importorskip("longspan.hf")
    done = longspan("export", base, tmp_path / "bytes", log=tmp_path / "log")
    assert done.status == 0, done.stderr
    assert isinstance(transformers.AutoTokenizer.from_pretrained(tmp_path / "bytes"), hf.ByteTokenizer)
    write_words(tmp_path / "tokenizer.json")
    trained(base.parent / "text", tmp_path / "run", tokenizer=tmp_path / "tokenizer.json", steps=1, context=13)
    done = longspan("export", tmp_path / "run", tmp_path / "words", log=tmp_path / "log")
    assert done.status == 0, done.stderr
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "words")
    assert found("two one three")["input_ids"] == [1, 0, 2]
    assert found.decode([1, 0]) == "two one"


def write_words(path: Path) -> None:
    """Write a tokenizer of whole words."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["one", "two", "three", "<unk>", *sorted(set(WORDS) - {"one"})]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))


def test_lora_trains_an_adapter_apart(base: Path, tmp_path: Path) -> None:
    """Resumed bit by bit; the frozen weights stay; loaded, exported and merged it gives the same model."""
    data, before = base.parent / "text", load(base).state_dict()
    flags = {"init": base, "lora_rank": 3, "lora_alpha": 7, "lora_targets": "to_q,to_kv", "lora_dropout": 0.2}
    merged, said = start(data, tmp_path / "whole", steps=6, **flags, min_lr=1)
    assert "LoRA of rank 3 in 4 layers" in said
    start(data, tmp_path / "half", steps=3, **flags, min_lr=1)
    again, _ = start(data, tmp_path / "half", steps=6, **flags, min_lr=1)
    assert all(equal(merged, again, merged))
    one, two = (load_file(tmp_path / name / "checkpoint/adapter_model.safetensors") for name in ("whole", "half"))
    assert one.keys() == two.keys()
    assert all(equal(one, two, one))
    changed = {name for name in before if not torch.equal(before[name], merged[name])}
    assert changed == {name for name in before if name.endswith(("to_q.weight", "to_kv.weight"))}
    frozen = load(tmp_path / "whole", adapter=False).state_dict()
    assert all(equal(before, frozen, before))
    name = next(iter(sorted(changed)))
    down, up = (
        one[f"base_model.model.model.{name.replace('weight', part)}"] for part in ("lora_A.weight", "lora_B.weight")
    )
    assert down.shape[0] == 3
    torch.testing.assert_close(merged[name], before[name] + 7 / 3 * up @ down)
    for merge in (True, False):
        out = tmp_path / f"merged-{merge}"
        done = longspan(
            "export", str(tmp_path / "whole"), str(out), *(["--merge"] if merge else []), log=tmp_path / "l"
        )
        assert done.status == 0, done.stderr
        assert (out / "adapter_model.safetensors").exists() is not merge
        assert all(equal(merged, load(out).state_dict(), merged))
    done = longspan("export", str(base), str(tmp_path / "no"), "--merge", log=tmp_path / "log")
    assert "has no LoRA adapter: leave --merge out" in done.stderr
    run = str(tmp_path / "whole")
    done = longspan("info", "--model", run, log=tmp_path / "log")
    assert "LoRA of rank 3 in 4 layers" in done.stdout
    for command in (["generate", "--model", run, "--prompt", "the ", "--max-tokens", "3"], ["eval", "--model", run]):
        extra = ["--data", str(data)] if command[0] == "eval" else []
        done = longspan(*command, *extra, log=tmp_path / "log")
        assert done.status == 0, done.stderr
    (tmp_path / "whole/checkpoint/adapter_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no adapter_config\.json"):
        load(tmp_path / "whole")


@pytest.mark.slow
def test_lora_trains_a_new_head_as_a_whole_and_peft_opens_it(base: Path, tmp_path: Path) -> None:
    hf, peft = pytest.importorskip("longspan.hf"), pytest.importorskip("peft")
    data = write_labels(tmp_path / "x.csv")
    flags = {"init": base, "lora_rank": 2, "objective": "classify", "min_lr": 1}
    after, said = start(data, tmp_path / "whole", steps=4, **flags)
    assert "and to_classes.bias, to_classes.weight" in said
    start(data, tmp_path / "half", steps=2, **flags)
    again, _ = start(data, tmp_path / "half", steps=4, **flags)
    assert all(equal(after, again, after))
    assert after["to_classes.bias"].abs().max() > 0
    folder, x = tmp_path / "whole/checkpoint", torch.arange(14).view(2, 7)
    wanted = load(folder).eval()(x)
    found = hf.LongspanForSequenceClassification.from_pretrained(folder).eval()
    torch.testing.assert_close(found(x).logits, wanted)
    config = hf.LongspanConfig.from_pretrained(folder)  # bidirectional, unlike the language model
    plain = hf.LongspanForSequenceClassification.from_pretrained(base / "checkpoint", config=config)
    torch.testing.assert_close(peft.PeftModel.from_pretrained(plain, folder).eval()(x).logits, wanted)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lora_rank": 3}, "--lora-rank adapts a trained model: give --init"),
        ({"lora_alpha": 3}, "--lora-alpha is for LoRA: give --lora-rank too"),
        ({"init": "{base}", "lora_rank": 0}, "--lora-rank must be at least 1"),
        ({"init": "{base}", "lora_rank": 2, "lora_dropout": 1}, "--lora-dropout must be in [0, 1), got 1.0"),
        ({"init": "{base}", "lora_rank": 2, "lora_targets": "query"}, "--lora-targets query is no linear layer inside"),
        ({"init": "{base}", "lora_rank": 2, "mesh": "dp=2"}, "--lora-rank cannot be combined with --mesh"),
    ],
)
def test_what_lora_refuses(base: Path, tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    flags = {name: base if value == "{base}" else value for name, value in flags.items()}
    done = longspan(*arguments(base.parent / "text", tmp_path / "run", **flags), log=tmp_path / "log")
    assert done.status == 2
    assert message in done.stderr


def test_lora_without_peft_names_what_to_install(base: Path, tmp_path: Path) -> None:
    words = arguments(base.parent / "text", tmp_path / "run", init=base, lora_rank=2)
    done = longspan(*words, log=tmp_path / "log", before="import sys; sys.modules['peft'] = None")
    assert done.status == 2
    assert "--lora-rank requires peft: pip install 'longspan[hf]'" in done.stderr


def test_the_folder_alone_resumes_a_run(base: Path, tmp_path: Path) -> None:
    data = base.parent / "text"
    whole = trained(data, tmp_path / "whole", steps=12, min_lr=1)
    trained(data, tmp_path / "run", steps=7, min_lr=1)
    done = longspan("train", "--out", tmp_path / "run", "--steps", "12", log=tmp_path / "log")
    assert done.status == 0, done.stderr
    assert "resuming from step 7" in done.stderr
    losses = [{r["step"]: r["loss"] for r in records if "loss" in r} for records in (whole, metrics(tmp_path / "run"))]
    assert losses[0] == losses[1]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["settings"]["train"]["steps"] == 12
    done = longspan("train", "--out", tmp_path / "run", "--model.dim", "24", log=tmp_path / "log")
    assert done.status == 0, done.stderr
    done = longspan("train", "--out", tmp_path / "run", "--model.dim", "9", log=tmp_path / "log")
    assert "--model.dim cannot change in a run that is resumed" in done.stderr
    done = longspan("train", "--out", tmp_path / "nothing", log=tmp_path / "log")
    assert "there is nothing to train on: give --data" in done.stderr


OTHER_PRESET = """
from longspan.train.presets import PRESETS
PRESETS["tiny"].train.update(lr=0.5, warmup=1)
PRESETS["tiny"].model.update(norm="layer")
"""


def test_a_run_keeps_the_defaults_that_it_started_with(base: Path, tmp_path: Path) -> None:
    data, how = base.parent / "text", {"warmup": None, "min_lr": 1, "model.vocab_size": 263}
    whole = trained(data, tmp_path / "whole", steps=12, **how)
    trained(data, tmp_path / "run", steps=7, **how)
    flags = arguments(data, tmp_path / "run", steps=9, **how)
    done = longspan(*flags, log=tmp_path / "log", before=OTHER_PRESET)
    assert done.status == 0, done.stderr
    done = longspan("train", "--out", tmp_path / "run", "--steps", "12", log=tmp_path / "log", before=OTHER_PRESET)
    assert done.status == 0, done.stderr
    losses = [{r["step"]: r["loss"] for r in records if "loss" in r} for records in (whole, metrics(tmp_path / "run"))]
    assert losses[0] == losses[1]
    assert load(tmp_path / "run").config.vocab_size == 263
    done = longspan(*flags, "--lr", "0.4", log=tmp_path / "log", before=OTHER_PRESET)
    assert done.status == 2
    assert "train.lr 0.003 → 0.4" in done.stderr
    (tmp_path / "run/run.json").write_text("{")
    done = longspan("train", "--out", tmp_path / "run", log=tmp_path / "log")
    assert done.status == 2
    assert "run.json is damaged: give all settings of the run again, --data among them" in done.stderr


def test_minutes_replace_the_steps_of_a_run(base: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(base, run)
    done = longspan("train", "--out", run, "--minutes", "0.0001", log=tmp_path / "log")
    assert done.status == 0, done.stderr
    assert json.loads((run / "run.json").read_text())["settings"]["train"]["steps"] is None
    done = longspan("train", "--out", run, "--steps", "14", log=tmp_path / "log")
    assert json.loads((run / "run.json").read_text())["settings"]["train"]["minutes"] is None


def test_a_run_is_loaded_by_its_folder(base: Path) -> None:
    one, two = load(base).state_dict(), load(base / "checkpoint").state_dict()
    assert all(equal(one, two, one))
    assert curve(metrics(base))
