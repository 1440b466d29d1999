"""`longspan linearize` on random teachers of two layers."""

import copy
import dataclasses
import json
import math
import shutil
import struct
import time

import numpy as np
import pytest
import torch
from training import ranks

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import longspan
import longspan.hf
from longspan.cli import main
from longspan.cli.generate import load_model
from longspan.generation.sampling import Sampling
from longspan.mechanisms.mixture import MixtureAttention
from longspan.models.transformer import LanguageModel
from longspan.serve import Engine, Request
from longspan.train.linearize import stages
from longspan.train.linearize.config import LinearizeConfig
from longspan.train.linearize.data import MixedWindows, Windows, mask_tokens, next_tokens, repeat_passages
from longspan.train.linearize.evaluation import losses_by_position, perplexity
from longspan.train.linearize.processes import Processes
from longspan.train.linearize.runner import LinearizeRun, _even, linearize
from longspan.train.linearize.sampling import OPENINGS, Openings, sample_text
from longspan.train.linearize.stages import AttentionTransfer, Distillation, replacement_damage
from longspan.train.linearize.student import (
    add_adapters,
    added_parameters,
    build_student,
    without_memory,
)
from longspan.train.linearize.teacher import Teacher, load_teacher
from longspan.train.loggers import read_records
from longspan.train.lora import lora_layers, remove_lora
from longspan.train.signals import StoppedError

SIZES = {
    "vocab_size": 260,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
NEOX = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
MIXTURE = {"mechanism": "mixture", "window": 5}
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=10)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=10)),
    "phi": lambda: PhiForCausalLM(PhiConfig(**SIZES | {"hidden_size": 32})),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=0)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, attention_multiplier=0.3, logits_scaling=0.1)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**NEOX, attention_dropout=0.0, hidden_dropout=0.0)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2, sliding_window=None)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=260, n_embd=24, n_layer=2, n_head=4, attn_pdrop=0.0)),
}


def built(family="llama"):
    torch.manual_seed(5)
    model = FAMILIES[family]().eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name:
            parameter.data.mul_(5)  # far enough from zero for attention to matter
    return model


def byte_tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture
def teacher(tmp_path):
    folder = tmp_path / "teacher"
    built().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} times {i + 3} is {i * (i + 3)}. " for i in range(1500)))
    return path


def settings(teacher, text, out, **changes):
    quick = {"mechanism": MIXTURE, "transfer_steps": 12, "distill_steps": 6, "context": 48, "batch_size": 2}
    quick |= {"eval_tokens": 192, "held_out": 0.03, "report": "quick", "device": "cpu"}
    return LinearizeConfig(model=teacher, data=(str(text),), out=out, **(quick | changes))


def run(teacher, text, out, **changes):
    linearize(settings(teacher, text, out, **changes))
    return read_records(out / "metrics.jsonl")


def weights(folder):
    return load_file(folder / "checkpoint" / "model.safetensors")


def test_the_command(teacher, text, tmp_path, capsys):
    out = tmp_path / "run"
    flags = {"transfer-steps": 60, "distill-steps": 20, "long-steps": 3, "context": 48, "long-context": 96}
    flags |= {"batch-size": 4, "eval-tokens": 192, "held-out": 0.03, "report-lengths": "64,96", "report-batch": 3}
    flags |= {"mechanism": json.dumps(MIXTURE), "lr": 0.001, "next-token": 0}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    words += ["--device", "cpu", "--tensorboard"]
    main(["linearize", "--model", str(teacher), "--data", str(text), "--out", str(out), *words])
    assert list((out / "tensorboard").glob("events*"))
    records = read_records(out / "metrics.jsonl")
    transfer = [r["transfer_loss"] for r in records if "transfer_loss" in r]
    assert transfer[-1] < 0.7 * transfer[0]
    assert [r["stage"] for r in records if "eval_loss" in r] == ["transfer", "distill", "long"]
    divergence = [r["divergence"] for r in records if r.get("stage") == "distill" and "divergence" in r]
    assert divergence[-1] < divergence[0]
    assert "ETA" in capsys.readouterr().err
    results = json.loads((out / "results.json").read_text())
    assert set(results["perplexity"]) == {"teacher", "student"}
    assert results["perplexity_without_memory"] != results["perplexity"]["student"]
    assert [x["length"] for x in results["decode"]["student"]] == [64, 96]
    teacher_bytes, student_bytes = ([x["bytes"] for x in results["decode"][n]] for n in ("teacher", "student"))
    assert student_bytes[0] == student_bytes[1]
    assert teacher_bytes[0] < teacher_bytes[1]
    assert results["throughput"]["student"]["batch"] == 3
    assert set(results["needle"]["student"]) == {"96"}  # 64 tokens are too few for the needle
    assert set(results["samples"][0]) == {"prompt", "teacher", "student"}
    assert [(x["stage"], x["tokens"]) for x in results["stages"]] == [
        ("transfer", 60 * 4 * 48),
        ("distill", 20 * 4 * 48),
        ("long", 3 * 2 * 96),
    ]
    page = (out / "report.html").read_text()
    assert f"{results['perplexity']['student']:.3f}" in page
    assert page.count("data:image/png") == 4
    assert not (out / "resume").exists()
    model = longspan.load(out / "checkpoint").eval()
    assert isinstance(model, LanguageModel)
    again = AutoModelForCausalLM.from_pretrained(out / "checkpoint")
    tokens = torch.randint(256, (2, 31))
    torch.testing.assert_close(again(tokens).logits, model(tokens))
    greedy = again.generate(tokens[:1], max_new_tokens=5, do_sample=False)
    with Engine(model, slots=2) as engine:
        request = Request(tokens[0].tolist(), max_tokens=5, sampling=Sampling(temperature=0))
        assert engine.submit(request).result()[0].tokens == greedy[0, 31:].tolist()
    main(["generate", "--model", str(out), "--prompt", "3 times", "--max-tokens", "3", "--device", "cpu"])
    with pytest.raises(SystemExit):
        main(["linearize", "--model", str(teacher), "--data", str(text), "--out", str(out), "--lr", "0.5"])
    assert "is a run with other settings" in capsys.readouterr().err
    (out / "run.json").write_text("{")
    with pytest.raises(SystemExit):
        main(["linearize", "--model", str(teacher), "--data", str(text), "--out", str(out)])
    assert f"{out / 'run.json'} is damaged" in capsys.readouterr().err


def write_gguf(path, model):
    """Write a Llama as llama.cpp does, which orders the rows of queries and keys by pairs that are rotated together."""
    gguf = pytest.importorskip("gguf")
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*sorted(byte_tokenizer().get_vocab()), "12", "<s>", "</s>"])
    writer.add_token_types([1] * 257 + [3] * 2)
    writer.add_token_merges(["1 2"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, x in model.state_dict().items():
        kind = name.split(".")[-2]
        if kind in heads:
            x = x.unflatten(0, (heads[kind], 2, -1)).transpose(1, 2).flatten(0, 2)
        writer.add_tensor(names.get_name(name, (".weight",)), x.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file(text, tmp_path):
    path, model, tokens = tmp_path / "a.gguf", built(), torch.randint(256, (2, 13))
    write_gguf(path, model)
    torch.testing.assert_close(load_teacher(path).model(tokens).logits, model(tokens).logits)
    run(path, text, tmp_path / "run", transfer_steps=1, distill_steps=1)
    assert isinstance(longspan.load(tmp_path / "run" / "checkpoint"), LanguageModel)
    whole = path.read_bytes()
    for size in (len(whole) // 2, len(whole) - 99):
        path.write_bytes(whole[:size])
        with pytest.raises(
            ValueError, match=r"a\.gguf: the model cannot be read.*damaged or incomplete, download them"
        ):
            linearize(settings(path, text, tmp_path / "other"))
        assert not (tmp_path / "other").exists()


def test_tied_embeddings(text, tmp_path, monkeypatch):
    """They stay tied, also after a kill."""
    torch.manual_seed(5)
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(tmp_path / "teacher")
    byte_tokenizer().save_pretrained(tmp_path / "teacher")
    changes = {"transfer_steps": 2, "distill_steps": 4, "lr": 0.01}
    run(tmp_path / "teacher", text, tmp_path / "whole", **changes)
    with monkeypatch.context() as patch:
        step = LinearizeRun._gradients

        def signalled(self, stage, tokens, micro):
            self.signals.received = 15 * (stage == "distill" and self.step == 1)
            return step(self, stage, tokens, micro)

        patch.setattr(LinearizeRun, "_gradients", signalled)
        with pytest.raises(StoppedError):
            run(tmp_path / "teacher", text, tmp_path / "run", **changes)
    run(tmp_path / "teacher", text, tmp_path / "run", **changes)
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(first[name], second[name]) for name in first)
    model = longspan.load(tmp_path / "run" / "checkpoint")
    assert model.config.tie_embeddings
    before = load_teacher(tmp_path / "teacher").model.get_input_embeddings().weight
    assert (model.embedding.weight - before).abs().max() > 5e-4


def test_what_seed_and_sizes_of_texts_change(teacher, text, tmp_path, monkeypatch):
    batches = []
    step = LinearizeRun._gradients
    monkeypatch.setattr(LinearizeRun, "_gradients", lambda *given: (batches.append(given[2]), step(*given))[1])
    for seed, eval_tokens in ((1, 96), (2, 144)):
        out = tmp_path / str(seed)
        run(teacher, text, out, seed=seed, eval_tokens=eval_tokens, transfer_steps=1, distill_steps=0)
        assert json.loads((out / "results.json").read_text())["eval_tokens"] == eval_tokens
    assert not torch.equal(*batches)


def test_a_dry_run_writes_nothing(teacher, text, tmp_path, capsys):
    linearize(settings(teacher, text, tmp_path / "run", dry_run=True, minutes=6.0, keep=1, sampled_tokens=500))
    shown = capsys.readouterr().err
    assert "sample: 500 tokens that the teacher writes, at most 3:00; 50 % of the sequences are of these" in shown
    assert "1 layers keep softmax attention, chosen after the first stage" in shown
    assert "2 layers get MixtureAttention" in shown
    assert "transfer: 12 steps of 2 × 48 tokens, 4:00" in shown
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("train", ["all", "lora"])
def test_a_killed_run_resumes_with_the_same_result(train, teacher, text, tmp_path, monkeypatch):
    changes = {"save_minutes": 1e-9, "train": train, "transfer_steps": 4, "distill_steps": 5}
    run(teacher, text, tmp_path / "whole", **changes)
    step = LinearizeRun._gradients

    def dies(self, stage, tokens, micro):
        if (stage, self.step) in moments:
            moments.remove((stage, self.step))
            raise KeyboardInterrupt
        return step(self, stage, tokens, micro)

    moments = [("transfer", 2), ("distill", 3)]
    monkeypatch.setattr(LinearizeRun, "_gradients", dies)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(teacher, text, tmp_path / "killed", **changes)
    run(teacher, text, tmp_path / "killed", **changes)
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(first[name], second[name]) for name in first)
    steps = [r["step"] for r in read_records(tmp_path / "killed" / "metrics.jsonl")]
    assert steps == sorted(steps)


def test_a_signal_stops_after_a_checkpoint(teacher, text, tmp_path, monkeypatch):
    step = LinearizeRun._gradients

    def signalled(self, stage, tokens, micro):
        self.signals.received = 15
        return step(self, stage, tokens, micro)

    monkeypatch.setattr(LinearizeRun, "_gradients", signalled)
    with pytest.raises(StoppedError, match="the same command resumes") as caught:
        run(teacher, text, tmp_path / "run")
    assert caught.value.status == 143
    assert (tmp_path / "run" / "resume" / "student.safetensors").exists()


def test_compilation_does_not_count(teacher, text, tmp_path, monkeypatch):
    step = LinearizeRun._gradients

    def slow(self, stage, tokens, micro):
        time.sleep(0.5 if self.step == 0 else 0)
        return step(self, stage, tokens, micro)

    monkeypatch.setattr(LinearizeRun, "_gradients", slow)
    monkeypatch.setattr(LinearizeRun, "_compiles", True)
    run(teacher, text, tmp_path / "run", transfer_steps=3, distill_steps=0)
    (stage,) = json.loads((tmp_path / "run" / "results.json").read_text())["stages"]
    assert 0 < stage["seconds"] < 0.5


def test_the_rates_of_the_stages(teacher, text, tmp_path, monkeypatch):
    """The largest rate of each stage, that of its only step: warm-up is 20 steps."""
    rates = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: (rates.append(self.param_groups[0]["lr"]), step(self)))
    changes = {"transfer_steps": 1, "distill_steps": 1, "long_steps": 1, "long_context": 96, "transfer_lr": 0.2}
    run(teacher, text, tmp_path / "run", lr=0.04, long_lr=0.06, **changes)
    assert rates == pytest.approx([0.01, 0.002, 0.003])
    assert settings(teacher, text, tmp_path / "run", lr=0.04).rates["long"] == pytest.approx(0.004)


def test_the_rate_of_the_mechanisms(teacher, text, tmp_path, monkeypatch):
    """It differs in the second and third stages, also of a run that was killed and resumed."""
    rates, step, gradients = [], torch.optim.AdamW.step, LinearizeRun._gradients

    def recorded(self, closure=None):
        if self.param_groups[0]["lr"]:  # PyTorch steps with a rate of 0 before it loads a state
            rates.append({x.numel(): group["lr"] for group in self.param_groups for x in group["params"]})
        return step(self, closure)

    def dies(self, stage, tokens, micro):
        if (stage, self.step) in moments:
            moments.clear()
            raise KeyboardInterrupt
        return gradients(self, stage, tokens, micro)

    moments = [("distill", 1)]
    monkeypatch.setattr(torch.optim.AdamW, "step", recorded)
    monkeypatch.setattr(LinearizeRun, "_gradients", dies)
    changes = {"transfer_steps": 1, "distill_steps": 2, "long_steps": 1, "long_context": 96, "save_minutes": 1e-9}
    changes |= {"lr": 0.04, "mechanism_lr": 0.2, "transfer_lr": 0.06}
    with pytest.raises(KeyboardInterrupt):
        run(teacher, text, tmp_path / "run", **changes)
    run(teacher, text, tmp_path / "run", **changes)
    heads, hidden = 4, 24 * 40  # parameters of the bias of a mixture, and of a layer of the teacher
    assert heads not in [x.numel() for x in built().parameters()]
    assert [x[heads] for x in rates] == pytest.approx([0.003, 0.01, 0.01, 0.001])
    assert hidden not in rates[0]
    assert [x[hidden] for x in rates[1:]] == pytest.approx([0.002, 0.002, 0.0002])


def test_half_precision(teacher, text, tmp_path, monkeypatch):
    """As on a GPU: under autocast rotary embeddings return float32, and projections do not."""
    monkeypatch.setattr(LinearizeRun, "_autocast", lambda self: torch.autocast("cpu", torch.bfloat16))
    measured = {"report": "full", "report_lengths": (64,), "report_batch": 2}
    records = run(teacher, text, tmp_path / "run", transfer_steps=2, distill_steps=2, **measured)
    assert all(math.isfinite(r["loss"]) for r in records if "loss" in r)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["perplexity"]["student"] == pytest.approx(results["perplexity"]["teacher"], rel=0.2)


def test_batches_are_divided_evenly():
    assert [_even(32, most) for most in (40, 32, 29, 16, 11, 1)] == [32, 32, 16, 16, 11, 1]


def test_minutes_end_the_stages(teacher, text, tmp_path):
    records = run(teacher, text, tmp_path / "run", minutes=0.02, transfer_steps=10**6, distill_steps=10**6)
    assert {r["stage"] for r in records} == {"transfer", "distill"}
    assert max(r["step"] for r in records) < 10**5


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path):
    teacher, tokens = built(family), torch.randint(256, (2, 29))
    same = build_student(teacher, "softmax", [])
    torch.testing.assert_close(same(tokens).logits, teacher(tokens).logits, atol=1e-4, rtol=1e-4)
    student = build_student(teacher, MIXTURE, [1])
    assert [isinstance(m, MixtureAttention) for m in student.modules()].count(True) == 1
    losses = [train_transfer(teacher, student, tokens) for _ in range(12)]
    assert losses[-1] < losses[0]
    losses = train_distill(teacher, student, tokens, 8)
    assert losses[-1] < losses[0]
    expected = student(tokens).logits
    if family != "mixtral":
        torch.testing.assert_close(longspan.hf.to_language_model(student)(tokens), expected, atol=1e-4, rtol=1e-4)
    student.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(tokens).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "mechanism",
    [
        {"mechanism": "mixture", "window": 5, "memory": "delta", "sink": True},
        {"mechanism": "mixture", "window": 5, "memory": "decay"},
        {"mechanism": "delta"},
        {"mechanism": "linear", "feature_map": "hedgehog"},
    ],
    ids=str,
)
def test_other_mechanisms(mechanism):
    """Gates start at zero, and both stages train them; a longspan model has the same logits."""
    teacher, tokens = built(), torch.randint(256, (2, 29))
    student = build_student(teacher, mechanism, [1])
    before = copy.deepcopy(student.state_dict())
    losses = [train_transfer(teacher, student, tokens) for _ in range(6)]
    assert losses[-1] < losses[0]
    assert all(not torch.equal(x, before[name]) for name, x in added_parameters(student).items())
    losses = train_distill(teacher, student, tokens, 30)
    assert losses[-1] < losses[0]
    expected = student(tokens).logits
    torch.testing.assert_close(longspan.hf.to_language_model(student)(tokens), expected, atol=1e-4, rtol=1e-4)


def test_a_mechanism_without_parameters(teacher, text, tmp_path):
    local = {"mechanism": "local", "window": 5}
    with pytest.raises(ValueError, match=r"adds no parameters.*use --transfer-steps 0"):
        run(teacher, text, tmp_path / "run", mechanism=local)
    assert not (tmp_path / "run").exists()
    run(teacher, text, tmp_path / "other", mechanism=local, transfer_steps=0, distill_steps=1)
    assert (tmp_path / "other" / "checkpoint").exists()


def test_a_family_without_a_native_form(text, tmp_path):
    """Its model is a transformers folder, which the Auto class opens."""
    folder = tmp_path / "teacher"
    built("mixtral").save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    run(folder, text, tmp_path / "run", transfer_steps=2, distill_steps=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint")
    assert sum(isinstance(module, MixtureAttention) for module in model.modules()) == 2
    with pytest.raises(ValueError, match=r"cannot be converted: .*no form for type 'mixtral', only for llama, "):
        load_model(tmp_path / "run")
    with pytest.raises(ValueError, match=r"a folder of transformers.*open decoders that .*to_language_model converts"):
        longspan.load(tmp_path / "run")


def test_logits_that_are_divided():
    """Granite divides them: the losses are those of its own distributions."""
    teacher, tokens = built("granite"), torch.randint(256, (2, 13))
    student = build_student(teacher, MIXTURE, [])
    found = Distillation(teacher, student, 0.5).backward(tokens, next_tokens(tokens), 1.0)
    ours, theirs = student(tokens).logits.log_softmax(-1), teacher(tokens).logits.log_softmax(-1)
    torch.testing.assert_close(found[0], (theirs.exp() * (theirs - ours)).sum(-1).mean().detach())


def test_a_teacher_that_drops_out(text, tmp_path):
    """GPT-2 as it is published: mechanisms have no dropout, and recomputed layers have none either."""
    torch.manual_seed(5)
    config = GPT2Config(vocab_size=260, n_embd=24, n_layer=2, n_head=4)
    assert config.attn_pdrop == config.resid_pdrop == config.embd_pdrop == 0.1
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "teacher")
    byte_tokenizer().save_pretrained(tmp_path / "teacher")
    losses = []
    for name, memory in (("whole", 8.0), ("recomputed", 0.0007)):
        records = run(tmp_path / "teacher", text, tmp_path / name, memory_gb=memory, transfer_steps=0, distill_steps=2)
        losses.append([r["divergence"] for r in records if "divergence" in r])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert isinstance(longspan.load(tmp_path / "whole"), LanguageModel)


@pytest.mark.parametrize(
    "mechanism",
    [{"mechanism": "linear", "feature_map": "hedgehog"}, {"mechanism": "linformer", "max_length": 64, "rank": 16}],
)
def test_an_encoder(mechanism, text, tmp_path):
    """The loss of masked tokens stays near the teacher's."""
    torch.manual_seed(5)
    sizes = NEOX | {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
    teacher = BertForMaskedLM(BertConfig(**sizes)).eval()
    for name, parameter in teacher.named_parameters():
        if "attention" in name and parameter.ndim > 1:
            parameter.data.mul_(20)
    folder, out = tmp_path / "teacher", tmp_path / "run"
    teacher.save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"mask_token": "<mask>"})
    tokenizer.save_pretrained(folder)
    changes = {"mechanism": mechanism, "transfer_steps": 10, "distill_steps": 20, "next_token": 0.0, "lr": 3e-3}
    records = run(folder, text, out, **changes)
    divergence = [r["divergence"] for r in records if "divergence" in r]
    assert divergence[-1] < divergence[0]
    found = json.loads((out / "results.json").read_text())["perplexity"]
    assert found["student"] < 1.05 * found["teacher"]
    again = AutoModelForMaskedLM.from_pretrained(out / "checkpoint")
    assert type(again) is BertForMaskedLM


def train_transfer(teacher, student, tokens, rows=1.0):
    parameters = added_parameters(student).values()
    loss = AttentionTransfer(teacher, student, rows).backward(tokens, 1.0, torch.Generator().manual_seed(1))
    with torch.no_grad():
        for parameter in parameters:
            parameter -= 0.05 * parameter.grad
            parameter.grad = None
    return float(loss.mean())


def train_distill(teacher, student, tokens, steps):
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    distillation, losses = Distillation(teacher, student, 0.0), []
    for _ in range(steps):
        losses.append(float(distillation.backward(tokens, next_tokens(tokens), 1.0)[0]))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_the_losses_of_transfer():
    """Outputs of each layer on the teacher's inputs; the weights by random values."""
    teacher, tokens = built(), torch.randint(256, (2, 29))
    student = build_student(teacher, MIXTURE, [])
    hidden = teacher(tokens, output_hidden_states=True).hidden_states
    block, rotary = teacher.model.layers[1], teacher.model.rotary_emb(hidden[1], torch.arange(29)[None])
    x = block.input_layernorm(hidden[1])
    target = block.self_attn(x, position_embeddings=rotary, attention_mask=None)[0]
    found = student.model.layers[1].self_attn(x, position_embeddings=rotary)[0]
    expected = ((found - target).square().mean((1, 2)) / target.square().mean((1, 2))).mean()
    generator = torch.Generator().manual_seed(0)
    plain = AttentionTransfer(teacher, student, 0.0).backward(tokens, 1.0, generator)
    torch.testing.assert_close(plain[1], expected.detach())
    assert (AttentionTransfer(teacher, student, 1.0).backward(tokens, 1.0, generator) > plain).all()
    exact = build_student(teacher, {"mechanism": "mixture", "window": 29}, [])
    assert AttentionTransfer(teacher, exact, 1.0).backward(tokens, 1.0, generator).max() < 1e-9


def test_the_losses_of_distillation(monkeypatch):
    monkeypatch.setattr("longspan.train.linearize.stages.LOGITS_CHUNK", 7)
    teacher, tokens = built(), torch.randint(256, (2, 13))
    student = build_student(teacher, MIXTURE, [])
    targets = next_tokens(tokens)
    found = Distillation(teacher, student, 0.5).backward(tokens, targets, 2.0)
    gradients = {name: x.grad.clone() for name, x in student.named_parameters()}
    student.zero_grad()
    ours, theirs = student(tokens).logits.log_softmax(-1), teacher(tokens).logits.log_softmax(-1)
    divergence = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    text = torch.nn.functional.cross_entropy(ours[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(found, torch.stack([divergence, text]).detach())
    (2 * (divergence + 0.5 * text)).backward()
    for name, x in student.named_parameters():
        torch.testing.assert_close(gradients[name], x.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters(family):
    teacher, tokens = built(family), torch.randint(256, (2, 13))
    student = build_student(teacher, MIXTURE, [])
    before = student(tokens).logits
    add_adapters(student, 3)
    adapters = lora_layers(student)
    assert all(len(adapter.lora_A["default"].weight) == 3 for adapter in adapters.values())
    assert not any(".mechanism" in name or name.endswith("lm_head") for name in adapters)
    assert torch.equal(student(tokens).logits, before)
    for adapter in adapters.values():
        adapter.lora_B["default"].weight.data.normal_(std=0.1)
    changed = student(tokens).logits
    assert (changed - before).abs().max() > 0.01
    bare = copy.deepcopy(student)
    remove_lora(bare, merge=False)
    assert torch.equal(bare(tokens).logits, before)
    remove_lora(student, merge=True)
    torch.testing.assert_close(student(tokens).logits, changed, atol=1e-4, rtol=1e-4)
    assert not lora_layers(student)


@pytest.mark.slow
def test_separate_adapters(teacher, text, tmp_path):
    peft = pytest.importorskip("peft")
    out = tmp_path / "run"
    run(teacher, text, out, train="lora", adapters="separate", lora_rank=3, lr=0.01)
    run(teacher, text, tmp_path / "merged", train="lora", lora_rank=3, lr=0.01)
    base = AutoModelForCausalLM.from_pretrained(out / "checkpoint").eval()
    tokens = torch.randint(256, (2, 13))
    alone = base(tokens).logits
    adapted = peft.PeftModel.from_pretrained(base, out / "adapter").eval()
    merged = longspan.load(tmp_path / "merged" / "checkpoint").eval()
    assert (adapted(tokens).logits - alone).abs().max() > 1e-3
    torch.testing.assert_close(adapted(tokens).logits, merged(tokens), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(load_model(out)(tokens), merged(tokens), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(load_model(out / "checkpoint")(tokens), alone, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_memory_bounds_the_batch(teacher, text, tmp_path):
    """Smaller parts of a batch, and recomputed layers, give the same losses."""
    parts = {}
    for name, memory in (("whole", 8.0), ("parts", 0.0012), ("recomputed", 0.0006)):
        linear = settings(teacher, text, tmp_path / name, memory_gb=memory, attention_rows=0.0, distill_steps=3)
        loaded = load_teacher(teacher)
        student = build_student(loaded.model, MIXTURE, [])
        sizes = LinearizeRun._micro_batch
        probe = object.__new__(LinearizeRun)
        probe.settings, probe.student, probe.processes = linear, student, Processes("cpu")
        parts[name] = [sizes(probe, stage) for stage in ("transfer", "distill")]
        linearize(linear)
    assert parts["whole"] == [(2, False), (2, False)]
    assert parts["parts"][1] == (1, False)
    assert parts["recomputed"][1] == (1, True)
    logged = {name: read_records(tmp_path / name / "metrics.jsonl") for name in parts}
    for other in ("parts", "recomputed"):
        for ours, theirs in zip(logged[other], logged["whole"], strict=True):
            for name in {"transfer_loss", "divergence", "text_loss", "eval_loss"} & set(theirs):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-3)
    with pytest.raises(
        ValueError, match=r"--memory-gb 1e-06 is too little for one sequence of 48 tokens: use --memory"
    ):
        linearize(settings(teacher, text, tmp_path / "tiny", memory_gb=1e-6))
    assert not (tmp_path / "tiny").exists()


def test_perplexity_and_positions():
    model, tokens = built(), torch.randint(256, (101,))
    with torch.no_grad():
        logits = model(tokens[None, :100].view(2, 50)).logits
        losses = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:100].view(2, 50)[:, 1:].flatten()
        )
        late = torch.nn.functional.cross_entropy(model(tokens[None, :-1]).logits[0, 64:], tokens[65:])
    assert perplexity(model, tokens, 50) == pytest.approx(math.exp(losses), rel=1e-4)
    buckets = losses_by_position(model, tokens)
    assert [(b["from"], b["to"]) for b in buckets][:3] == [(0, 0), (1, 1), (2, 3)]
    assert buckets[-1]["to"] == 99
    assert buckets[-1]["loss"] == pytest.approx(float(late), rel=1e-4)
    student = build_student(model, MIXTURE, [])
    plain = perplexity(student, tokens, 50)
    with without_memory(student) as any_memory:
        assert any_memory
        local = build_student(model, {"mechanism": "local", "window": 5}, [])
        assert perplexity(student, tokens, 50) == pytest.approx(perplexity(local, tokens, 50), rel=1e-4)
    assert perplexity(student, tokens, 50) == plain != perplexity(local, tokens, 50)


def test_windows_are_a_permutation():
    import numpy as np

    windows = Windows(np.arange(100), 7, seed=3)
    epoch = windows.batch(0, 14)
    assert sorted(epoch[:, 0].tolist()) == list(range(0, 98, 7))
    assert torch.equal(windows.batch(5, 4), epoch[5:9])
    assert not torch.equal(windows.batch(14, 14), epoch)
    assert not torch.equal(Windows(np.arange(100), 7, seed=4).batch(0, 14), epoch)
    inputs, targets = mask_tokens(torch.arange(1, 1001)[None], 0, 0.3, seed=1)
    assert ((inputs == 0) == (targets != -100)).all()
    assert 0.2 < (inputs == 0).float().mean() < 0.4


def sampled(family, folder, **changes):
    given = Teacher(built(family).requires_grad_(False), byte_tokenizer(), False)
    options = {"tokens": 600, "context": 31, "seed": 3, "device": torch.device("cpu"), "memory_gb": 0.0001}
    options |= {"seconds": math.inf, "notify": lambda _: None}
    return sample_text(given, np.full(67, 7), folder, **(options | changes))


@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "phi"))])
def test_sampled_text(family, tmp_path):
    """phi has no form as a longspan model, and is sampled by transformers."""
    lines = []
    found, seconds = sampled(family, tmp_path / "one", notify=lines.append)
    assert len(found) == 20 * 31
    assert len(lines) == len(list((tmp_path / "one").iterdir())) > 1
    assert "of 620 tokens" in lines[-1]
    assert "ETA" in lines[-1]
    again, same = sampled(family, tmp_path / "one")
    assert np.array_equal(again, found)
    assert same == seconds > 0
    for path in sorted((tmp_path / "one").iterdir())[1:]:
        path.unlink()
    assert np.array_equal(sampled(family, tmp_path / "one")[0], found)
    assert not np.array_equal(sampled(family, tmp_path / "two", seed=5)[0], found)
    assert len(sampled(family, tmp_path / "three", seconds=0.0)[0]) < len(found)


def test_sampled_text_follows_the_teacher(tmp_path):
    """A teacher that predicts the next number, and nothing else, writes them in order."""
    given = Teacher(built().requires_grad_(False), byte_tokenizer(), False)
    given.model.lm_head.weight = torch.nn.Parameter(torch.zeros(260, 24), requires_grad=False)
    vectors = torch.nn.functional.normalize(torch.randn(260, 24), dim=1)
    given.model.model.embed_tokens.weight.data.copy_(vectors)
    for layer in given.model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    given.model.lm_head.weight.data[(torch.arange(260) + 1) % 260] = 100 * vectors
    options = {"seconds": math.inf, "notify": lambda _: None, "memory_gb": 1.0, "device": torch.device("cpu")}
    found, _ = sample_text(given, np.arange(200), tmp_path, tokens=300, context=29, seed=1, **options)
    rows = found.reshape(-1, 29)
    assert ((rows[:, 17:] - rows[:, 16:-1]) % 260 == 1).all()


def test_openings():
    tokenizer = byte_tokenizer()
    text = np.full(67, 7)
    drawn = [tuple(Openings(Teacher(None, tokenizer, False), text).draw(seed)) for seed in range(600)]
    assert all(1 <= len(x) <= 48 for x in drawn)
    lists = {tuple(tokenizer(words)["input_ids"]) for words in OPENINGS}
    assert len(lists & set(drawn)) > 15
    assert len({x for x in drawn if tokenizer.decode(x).startswith("The history of ")}) > 1
    assert "{" in {tokenizer.decode(x) for x in drawn}
    assert {len(x) for x in drawn if set(x) == {7}} == set(range(1, 17))
    assert len({x for x in drawn if len(x) == 1}) > 50
    tokenizer.add_special_tokens({"eos_token": "<e>", "bos_token": "<b>"})
    tokenizer.chat_template = "{% for m in messages %}<b>{{ m.role }}: {{ m.content }}<e>{% endfor %}"
    openings = Openings(Teacher(None, tokenizer, False), text)
    drawn = {tuple(openings.draw(seed)) for seed in range(300)}
    chat = tuple(tokenizer("<b>user: ", add_special_tokens=False)["input_ids"])
    assert {chat, (tokenizer.eos_token_id,)} <= drawn


@pytest.mark.parametrize("share", [0.5, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_run_on_sampled_text(share, teacher, text, tmp_path, monkeypatch):
    rows, step = [], LinearizeRun._gradients

    def recorded(self, stage, tokens, micro):
        rows.extend((self.sampled.reshape(-1, 48) == row.numpy()).all(1).any() for row in tokens)
        return step(self, stage, tokens, micro)

    monkeypatch.setattr(LinearizeRun, "_gradients", recorded)
    options = {"transfer_steps": 3, "distill_steps": 2, "sampled_tokens": 500, "sampled_share": share}
    run(teacher, text, tmp_path / "run", **options)
    stages = json.loads((tmp_path / "run" / "results.json").read_text())["stages"]
    assert [(x["stage"], x["tokens"]) for x in stages] == [("sample", 528), ("transfer", 288), ("distill", 192)]
    assert stages[0]["seconds"] > 0
    assert sum(rows) == share * len(rows)


@pytest.mark.slow
def test_a_run_without_data(teacher, text, tmp_path):
    given = settings(teacher, text, tmp_path / "run", eval_data=(str(text),), transfer_steps=1, distill_steps=1)
    given = dataclasses.replace(given, data=(), sampled_tokens=480)
    linearize(given)
    assert (tmp_path / "run" / "checkpoint").exists()
    for changes, says in (
        ({"eval_data": ()}, "--data is missing: give files, folders or globs with text, or --sampled-tokens and"),
        ({"sampled_tokens": 0}, "--data is missing"),
        ({"long_steps": 1, "long_context": 500}, "--sampled-tokens 480 are fewer than one sequence of 500"),
    ):
        with pytest.raises(ValueError, match=says):
            dataclasses.replace(given, **changes)


@pytest.mark.slow
def test_sampling_takes_time_from_the_stages(teacher, text, tmp_path, monkeypatch):
    def slow(*_, seconds, **__):
        assert seconds == pytest.approx(0.6)
        return np.arange(480) % 256, 0.5

    monkeypatch.setattr("longspan.train.linearize.runner.sample_text", slow)
    options = {"transfer_steps": 1, "distill_steps": 1, "sampled_tokens": 480, "minutes": 0.02}
    run(teacher, text, tmp_path / "run", **options)
    seconds = [x["seconds"] for x in json.loads((tmp_path / "run" / "results.json").read_text())["stages"]]
    assert seconds[0] == 0.5
    assert all(0.35 <= x < 0.55 for x in seconds[1:])


def test_texts_are_mixed():
    windows = Windows(np.arange(20), 5, 0), Windows(100 + np.arange(15), 5, 0)
    for share, expected in ((0.0, 0), (0.5, 6), (0.25, 3), (1.0, 12)):
        mixed = MixedWindows(windows, share)
        rows = mixed.batch(0, 12)
        assert int((rows[:, 0] >= 100).sum()) == expected
        assert torch.equal(torch.cat([mixed.batch(0, 5), mixed.batch(5, 7)]), rows)
    half = MixedWindows(windows, 0.5).batch(0, 6)
    assert sorted(half[half[:, 0] >= 100][:, 0].tolist()) == [100, 105, 110]


def test_passages_are_repeated():
    tokens = torch.arange(3 * 257).reshape(3, 257)
    assert torch.equal(repeat_passages(tokens, 0.0, 5), tokens)
    found = repeat_passages(tokens, 1.0, 5)
    assert found.tolist() != tokens.tolist()
    assert torch.equal(repeat_passages(tokens, 1.0, 5), found)
    assert not torch.equal(repeat_passages(tokens, 1.0, 6), found)
    for before, after in zip(tokens.tolist(), found.tolist(), strict=True):
        changed = [i for i, (x, y) in enumerate(zip(before, after, strict=True)) if x != y]
        assert 8 <= len(changed) <= 3 * 64
        assert all(after[i] - before[0] < i for i in changed)  # what stands there comes from before
    assert repeat_passages(torch.arange(4).reshape(2, 2), 1.0, 0).tolist() == [[0, 0], [2, 2]]
    share = sum(
        not torch.equal(x, y)
        for x, y in zip(repeat_passages(tokens.repeat(67, 1), 0.3, 1), tokens.repeat(67, 1), strict=True)
    )
    assert 30 < share < 90


def test_the_layers_whose_replacement_hurts_most_are_kept(teacher, text, tmp_path, capsys):
    out = tmp_path / "run"
    run(teacher, text, out, keep=1, transfer_steps=4, distill_steps=2)
    (kept,) = json.loads((out / "results.json").read_text())["kept_layers"]
    shown = capsys.readouterr().err
    assert f"layers ({kept},) keep softmax" in shown
    assert "layers that keep softmax attention" in (out / "report.html").read_text()
    mechanisms = [type(x.layer.mechanism).__name__ for _, x in _attention(longspan.load(out / "checkpoint"))]
    assert mechanisms[kept] == "SoftmaxAttention"
    assert mechanisms[1 - kept] == "MixtureAttention"


def _attention(model):
    stack = model.transformer.stack
    return [(i, branch) for i, branch in enumerate(stack._branches()) if hasattr(branch.layer, "mechanism")]


def test_damage():
    teacher = built().requires_grad_(False)
    teacher.model.layers[1].self_attn.o_proj.weight.data.mul_(1e-3)
    tokens = torch.randint(256, (2, 67))
    before = teacher(tokens).logits
    found = replacement_damage(teacher, build_student(teacher, MIXTURE, []), tokens)
    assert found[0] > 100 * found[1] > 0
    assert torch.equal(teacher(tokens).logits, before)
    assert replacement_damage(teacher, build_student(teacher, MIXTURE, [0]), tokens)[0] == 0


@pytest.mark.slow
def test_kept_layers_are_kept_after_a_kill(teacher, text, tmp_path, monkeypatch):
    changes = {"save_minutes": 1e-9, "transfer_steps": 2, "distill_steps": 4, "keep": 1}
    run(teacher, text, tmp_path / "whole", **changes)
    step = LinearizeRun._gradients

    def dies(self, stage, tokens, micro):
        if (stage, self.step) == ("distill", 2):
            raise KeyboardInterrupt
        return step(self, stage, tokens, micro)

    monkeypatch.setattr(LinearizeRun, "_gradients", dies)
    with pytest.raises(KeyboardInterrupt):
        run(teacher, text, tmp_path / "killed", **changes)
    monkeypatch.setattr(LinearizeRun, "_gradients", step)
    monkeypatch.setattr("longspan.train.linearize.runner.replacement_damage", None)
    run(teacher, text, tmp_path / "killed", **changes)
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_a_run_begun_before_an_option_existed(teacher, text, tmp_path):
    out = tmp_path / "run"
    run(teacher, text, out, transfer_steps=1, distill_steps=0)
    path = out / "run.json"
    metadata = json.loads(path.read_text())
    del metadata["settings"]["keep"], metadata["settings"]["sampled_share"]
    path.write_text(json.dumps(metadata))
    run(teacher, text, out, transfer_steps=1, distill_steps=0)
    with pytest.raises(ValueError, match=r"is a run with other settings \(keep 0 → 1\)"):
        run(teacher, text, out, transfer_steps=1, distill_steps=0, keep=1)


def test_text_to_evaluate_on_is_not_trained_on(teacher, text, tmp_path, monkeypatch):
    """With repeated passages, which differ from the text itself."""
    other = tmp_path / "other.txt"
    other.write_text("".join(f"{i} squared is {i * i}. " for i in range(400)))
    seen, step = [], LinearizeRun._gradients

    def recorded(self, stage, tokens, micro):
        assert not torch.equal(tokens, self._windows(stage).batch(0, 2))
        seen.append(byte_tokenizer().decode(self.text))
        return step(self, stage, tokens, micro)

    monkeypatch.setattr(LinearizeRun, "_gradients", recorded)
    given = settings(teacher, text, tmp_path / "run", eval_data=(str(other),), transfer_steps=1, distill_steps=0)
    linearize(dataclasses.replace(given, data=(str(text), str(other)), repeat_share=1.0))
    assert "times" in seen[0]
    assert "squared" not in seen[0]


def test_token_files(teacher, text, tmp_path):
    """Tokens of the teacher's tokenizer are trained on as the text is."""
    other = tmp_path / "other.txt"
    other.write_text("".join(f"{i} squared is {i * i}. " for i in range(400)))
    for path in (text, other):
        np.save(path.with_suffix(".npy"), np.array(byte_tokenizer()(path.read_text())["input_ids"], np.uint16))
    for kind in (".txt", ".npy"):
        out, files = tmp_path / f"run{kind}", [str(path.with_suffix(kind)) for path in (text, other)]
        linearize(settings(teacher, files[0], out, eval_data=(files[1],), transfer_steps=2, distill_steps=2))
    first, second = weights(tmp_path / "run.txt"), weights(tmp_path / "run.npy")
    assert all(torch.equal(first[name], second[name]) for name in first)
    found = [json.loads((tmp_path / f"run{kind}" / "results.json").read_text()) for kind in (".txt", ".npy")]
    assert found[0]["perplexity"] == found[1]["perplexity"]


def test_when_layers_are_compiled(teacher, text, tmp_path):
    """By themselves on a GPU, where a stage is long enough."""

    def compiled(stage, device, recompute=False, processes=1, **changes):
        run = LinearizeRun.__new__(LinearizeRun)
        run.settings = settings(teacher, text, tmp_path / "run", **changes)
        run.device, run.sampled_seconds, run.processes = torch.device(device), 0.0, Processes("cpu")
        run.processes.number = processes
        return run._is_compiled(stage, recompute)

    assert compiled("distill", "cuda", distill_steps=200)
    assert compiled("distill", "cuda", minutes=1.5, transfer_steps=1, distill_steps=2)
    assert compiled("distill", "cpu", compile="on")
    assert not compiled("distill", "cuda", distill_steps=199)
    assert not compiled("distill", "cuda", minutes=1.4, transfer_steps=1, distill_steps=2)
    assert not compiled("distill", "cpu", distill_steps=200)
    assert not compiled("distill", "cuda", distill_steps=200, compile="off")
    assert not compiled("distill", "cuda", recompute=True, distill_steps=200, compile="on")
    assert not compiled("distill", "cuda", processes=2, distill_steps=200, compile="on")
    assert not compiled("transfer", "cuda", transfer_steps=200, compile="on")


@pytest.mark.parametrize("works", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_compiled_layers(works, teacher, text, tmp_path, monkeypatch, capsys):
    """What fails to compile runs without compilation, unless that was asked for."""
    options = {"transfer_steps": 1, "distill_steps": 2}
    compiled = []

    def compile(function, *, dynamic, **_):
        def run(*args, **kwargs):
            if not works:
                raise RuntimeError("no compiler here")
            compiled.append(function)
            return function(*args, **kwargs)

        assert not dynamic
        return run

    monkeypatch.setattr(torch, "compile", compile)
    stages._compiled_losses.cache_clear()
    if not works:
        with pytest.raises(RuntimeError, match="no compiler here"):
            run(teacher, text, tmp_path / "refused", compile="on", **options)
        monkeypatch.setattr(LinearizeRun, "_is_compiled", lambda self, stage, recompute: stage != "transfer")
    run(teacher, text, tmp_path / "run", compile="on" if works else "auto", **options)
    stages._compiled_losses.cache_clear()
    assert len(compiled) == (2 * (2 + 2 + 1) if works else 0)  # two layers of both models, and the losses, in each step
    said = "torch.compile failed (RuntimeError: no compiler here): the stage runs without it"
    assert (said in capsys.readouterr().err.replace("\n", " ")) is not works
    if works:
        return
    monkeypatch.undo()
    run(teacher, text, tmp_path / "plain", **options)
    first, second = weights(tmp_path / "plain"), weights(tmp_path / "run")
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"context": 0}, "--context must be at least 1, got 0"),
        ({"transfer_steps": -1}, "--transfer-steps must be 0 or more, got -1"),
        ({"lr": 0.0}, "--lr must be positive, got 0"),
        ({"held_out": 1.5}, "--held-out must be between 0 and 1, got 1.5"),
        ({"minutes": 0.0}, "--minutes must be positive"),
        ({"long_lr": 0.0}, "--long-lr must be positive, got 0"),
        ({"mechanism_lr": -1.0}, "--mechanism-lr must be positive, got -1"),
        ({"adapters": "separate"}, "--adapters separate goes with --train lora"),
        ({"report_lengths": (1,)}, "--report-lengths must be numbers of at least 2"),
        ({"keep": -1}, "--keep must be 0 or more, got -1"),
        ({"keep": 2}, "--keep 2 leaves nothing to replace: the model has 2 layers"),
        ({"keep": 1, "keep_layers": (0,)}, "--keep chooses the layers that --keep-layers names: give one of them"),
        ({"sampled_tokens": -1}, "--sampled-tokens must be 0 or more, got -1"),
        ({"sampled_share": 1.5}, "--sampled-share must be from 0 to 1, got 1.5"),
        ({"repeat_share": -0.5}, "--repeat-share must be from 0 to 1, got -0.5"),
        ({"keep_layers": (2,)}, "--keep-layers must be from 0 to 1, got 2"),
        ({"keep_layers": (0, 1)}, "nothing is left to replace"),
        ({"mechanism": "mixtur"}, "did you mean 'mixture'"),
        ({"mechanism": "mixture"}, r"--context 48 is not longer than the window of 64 tokens.*\"window\": 12"),
        ({"context": 10**6}, "too small to hold out a part of it.*lower --context, add data, or give --eval-data"),
        ({"long_steps": 1, "long_context": 10**6}, "fewer than one sequence of --long-context 1,000,000"),
    ],
)
def test_wrong_settings(change, says, teacher, text, tmp_path):
    with pytest.raises(ValueError, match=says):
        linearize(settings(teacher, text, tmp_path / "run", **change))
    assert not (tmp_path / "run").exists()


def test_wrong_models(teacher, text, tmp_path):
    def refused(folder, says):
        with pytest.raises(ValueError, match=says):
            linearize(settings(folder, text, tmp_path / "run"))
        assert not (tmp_path / "run").exists()

    refused(tmp_path / "nowhere", "there is no such folder or file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "has no config.json")
    (tmp_path / "a.gguf").write_bytes(b"not one")
    refused(tmp_path / "a.gguf", "is no GGUF file")
    (tmp_path / "b.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 5, 5) + bytes(99))
    refused(tmp_path / "b.gguf", r"b\.gguf.*(cannot be read|pip install gguf)")
    path = teacher / "model.safetensors"
    tensors = load_file(path)
    save_file({name: x for name, x in tensors.items() if "layers.1.mlp.up" not in name}, path, {"format": "pt"})
    refused(teacher, r"lacks weights \(model\.layers\.1\.mlp\.up_proj\.weight\)")
    save_file({name: x for name, x in tensors.items() if name != "lm_head.weight"}, path, {"format": "pt"})
    refused(teacher, r"lacks weights \(lm_head\.weight\)")  # not tied, so that it is not the embedding
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name][:31].clone()}, path, {"format": "pt"})
    refused(teacher, rf"do not fit its config\.json \({name} \(31, 24\) instead of \(40, 24\)\): restore")
    save_file(tensors | {name: tensors[name] / 0}, path, {"format": "pt"})
    refused(teacher, rf"not finite \({name}\): restore")
    path.write_bytes(path.read_bytes()[:500])
    refused(teacher, "the model cannot be read.*damaged or incomplete")
    save_file(tensors, path, {"format": "pt"})
    config = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(config | {"model_type": "nothing"}))
    refused(teacher, "an architecture that transformers does not know")
    (teacher / "config.json").write_text(json.dumps(config))
    (teacher / "tokenizer.json").unlink()
    refused(teacher, "tokenizer")
    (teacher / "tokenizer_config.json").unlink()
    refused(teacher, "tokenizer")


def test_a_teacher_without_tokenizer(tmp_path, text):
    """transformers builds an empty one for some types."""
    built("phi").save_pretrained(tmp_path / "teacher")
    with pytest.raises(ValueError, match=r"--model .*teacher.*tokenizer"):
        linearize(settings(tmp_path / "teacher", text, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_teacher_that_caps_its_scores(tmp_path, text):
    Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=10, layer_types=["full_attention"] * 2)).save_pretrained(
        tmp_path / "teacher"
    )
    byte_tokenizer().save_pretrained(tmp_path / "teacher")
    with pytest.raises(ValueError, match=r"caps its scores at 50.*set that to null in its config\.json"):
        linearize(settings(tmp_path / "teacher", text, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_that_does_not_fit(tmp_path, text):
    LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 100})).save_pretrained(tmp_path / "small")
    byte_tokenizer().save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match="the tokenizer has 256 tokens and the model 100"):
        linearize(settings(tmp_path / "small", text, tmp_path / "run"))
    MistralForCausalLM(MistralConfig(**SIZES, sliding_window=9)).save_pretrained(tmp_path / "sliding")
    byte_tokenizer().save_pretrained(tmp_path / "sliding")
    with pytest.raises(ValueError, match=r"--model .*sliding: .*window of 9.*name such layers in --keep-layers"):
        linearize(settings(tmp_path / "sliding", text, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_an_architecture_without_an_adapter(tmp_path, text):
    sizes = {"vocab_size": 260, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    OPTForCausalLM(OPTConfig(**sizes)).save_pretrained(tmp_path / "opt")
    byte_tokenizer().save_pretrained(tmp_path / "opt")
    with pytest.raises(ValueError, match=r"--model .*opt: .*of type 'opt', which can be added to longspan.hf.swap.FAM"):
        linearize(settings(tmp_path / "opt", text, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


STOP = """
from longspan.train.linearize.processes import Processes
from longspan.train.linearize.runner import LinearizeRun
step = LinearizeRun._gradients
def signalled(self, stage, tokens, micro):
    self.signals.received = 15 * (stage == "distill" and self.step == 1 and self.processes.rank == 1)
    return step(self, stage, tokens, micro)
LinearizeRun._gradients = signalled
"""


def flags(given):
    words = {"model": given.model, "data": given.data[0], "out": given.out, "mechanism": json.dumps(given.mechanism)}
    names = ("transfer_steps", "distill_steps", "long_steps", "context", "long_context", "batch_size", "eval_tokens")
    names += ("held_out", "report", "device", "train", "memory_gb", "keep", "sampled_tokens")
    words |= {n: getattr(given, n) for n in names}
    return ["linearize", *(str(word) for n, x in words.items() for word in (f"--{n.replace('_', '-')}", x))]


def assert_same_weights(found, expected):
    one, two = weights(expected), weights(found)
    for name, x in one.items():
        torch.testing.assert_close(two[name], x, rtol=1e-3, atol=1e-5)


def test_several_processes(teacher, text, tmp_path):
    """Weights sharded over two processes are those of one process, with the text that the teacher wrote."""
    changes = {"batch_size": 4, "transfer_steps": 2, "distill_steps": 2, "keep": 1, "sampled_tokens": 480}
    expected = run(teacher, text, tmp_path / "one", **changes)
    done = ranks(2, flags(settings(teacher, text, tmp_path / "two", **changes)), tmp_path / "log")
    assert [result.status for result in done] == [0, 0], done
    assert done[1].stderr == ""
    found = read_records(tmp_path / "two" / "metrics.jsonl")
    assert [(r["stage"], r["step"], r["tokens"]) for r in found] == [
        (r["stage"], r["step"], r["tokens"]) for r in expected
    ]
    for ours, theirs in zip(found, expected, strict=True):
        for name in {"transfer_loss", "divergence", "text_loss", "eval_loss"} & set(theirs):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)
    assert_same_weights(tmp_path / "two", tmp_path / "one")
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two")]
    assert results[0]["kept_layers"] == results[1]["kept_layers"]
    assert json.loads((tmp_path / "two" / "run.json").read_text())["processes"] == 2
    assert "perplexity" in (tmp_path / "two" / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("train", ["all", "lora"])
def test_several_processes_resume(train, teacher, text, tmp_path):
    """Stopped by a signal to one of them, they continue together, or in one process."""
    changes = {"batch_size": 4, "transfer_steps": 3, "distill_steps": 3, "long_steps": 2, "long_context": 96}
    changes["train"] = train
    run(teacher, text, tmp_path / "one", **changes)
    words = flags(settings(teacher, text, tmp_path / "two", **changes))
    stopped = ranks(2, words, tmp_path / "log", before=STOP)
    assert [result.status for result in stopped] == [143, 143], stopped
    shutil.copytree(tmp_path / "two", tmp_path / "alone")
    done = ranks(2, words, tmp_path / "again")
    assert [result.status for result in done] == [0, 0], done
    run(teacher, text, tmp_path / "alone", **changes)
    for name in ("two", "alone"):
        assert_same_weights(tmp_path / name, tmp_path / "one")


def test_batches_that_processes_cannot_share(teacher, text, tmp_path, monkeypatch):
    monkeypatch.setattr(Processes, "number", 2)
    with pytest.raises(ValueError, match="--batch-size 3 cannot be divided among 2 processes: use a multiple"):
        linearize(settings(teacher, text, tmp_path / "run", batch_size=3))
    assert not (tmp_path / "run").exists()
