"""longspan's models in transformers, used as any other model there."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithFlattening,
    DynamicCache,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    pipeline,
)

import longspan
from longspan import AttentionConfig, ModelConfig, Sampling
from longspan.hf import ByteTokenizer, LongspanConfig, LongspanForCausalLM, LongspanForMaskedLM, LongspanForSeq2SeqLM
from longspan.hf.cache import StateCache
from longspan.hf.models import LongspanForSequenceClassification

# Older versions of transformers say "gradient".
CHECKPOINTING = "activation" if hasattr(PreTrainedModel, "activation_checkpointing_enable") else "gradient"
HYBRID = {
    "mechanism": "split",
    "parts": [{"mechanism": "local", "num_heads": 2, "window": 7}, {"mechanism": "linear", "num_heads": 2}],
}
LINFORMER = {"mechanism": "linformer", "rank": 5, "max_length": 64}
MECHANISMS = [HYBRID, "performer", "linear", "softmax", "delta", LINFORMER, {"mechanism": "local", "window": 5}]


def config(mechanism, **changes) -> ModelConfig:
    attention = AttentionConfig(num_heads=4, mechanism=mechanism)
    return ModelConfig(**{"dim": 24, "depth": 2, "causal": True, "vocab_size": 256, "attention": attention, **changes})


def causal(mechanism=HYBRID, **changes) -> LongspanForCausalLM:
    torch.manual_seed(1)
    return LongspanForCausalLM(LongspanConfig(config(mechanism, **changes))).eval()


def tokens(*shape, high=256):
    return torch.randint(1, high, shape, generator=torch.Generator().manual_seed(2))


def both() -> LongspanConfig:
    attention = AttentionConfig(num_heads=4, mechanism="linear")
    encoder = ModelConfig(dim=24, depth=1, vocab_size=29, attention=attention)
    decoder = ModelConfig(dim=24, depth=1, vocab_size=29, causal=True, attention=attention, cross=AttentionConfig(4))
    return LongspanConfig(decoder, encoder=encoder, tie_embeddings=True)


@pytest.mark.parametrize("shards", [None, "9KB"])
@pytest.mark.parametrize("mechanism", [HYBRID, "performer"])
def test_one_folder_for_both(tmp_path, mechanism, shards):
    model, x = causal(mechanism, tie_embeddings=True), tokens(2, 11)
    wanted = model(x).logits
    model.save_pretrained(tmp_path, **({"max_shard_size": shards} if shards else {}))
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards is not None)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is LongspanForCausalLM
    assert again.config.model == model.config.model
    assert torch.equal(again(x).logits, wanted)
    assert torch.equal(longspan.load(tmp_path).eval()(x), wanted)


def test_a_folder_of_longspan_s_own_opens(tmp_path):
    model, x = causal(), tokens(2, 11)
    longspan.save(model.model, tmp_path / "own")
    assert isinstance(AutoConfig.from_pretrained(tmp_path / "own"), LongspanConfig)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "own").eval()(x).logits, model(x).logits)
    body = AutoModel.from_pretrained(tmp_path / "own").eval()
    assert torch.equal(body(x).last_hidden_state, model.model.hidden(x))
    assert isinstance(AutoTokenizer.from_pretrained(tmp_path / "own"), ByteTokenizer)


@pytest.mark.parametrize("shared", ["by keys and values", "by layers"])
def test_a_shared_random_projection_opens(tmp_path, shared):
    linformer = {**LINFORMER, "projection": "random", "share_projection": shared == "by keys and values"}
    attention = AttentionConfig(num_heads=4, mechanism=linformer, share_projection=shared == "by layers")
    model, x = longspan.LanguageModel(config("linear", attention=attention)).eval(), tokens(2, 9)
    longspan.save(model, tmp_path / "own")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "own")
    assert torch.equal(opened(x).logits, model(x))
    opened.save_pretrained(tmp_path / "theirs")
    assert torch.equal(longspan.load(tmp_path / "theirs")(x), model(x))


def test_a_damaged_shard_is_noticed(tmp_path):
    causal().save_pretrained(tmp_path, max_shard_size="9KB")
    first = sorted(tmp_path.glob("model-*.safetensors"))[0]
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    with pytest.raises(ValueError, match="damaged"):
        longspan.load(tmp_path)


def test_the_other_heads(tmp_path):
    x = tokens(3, 9)
    masked = LongspanForMaskedLM(LongspanConfig(config(LINFORMER, causal=False))).eval()
    masked.save_pretrained(tmp_path / "masked")
    assert torch.equal(AutoModelForMaskedLM.from_pretrained(tmp_path / "masked").eval()(x).logits, masked(x).logits)

    language_model = causal()
    language_model.save_pretrained(tmp_path / "lm")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=3).eval()
    assert torch.equal(classifier.model.body.hidden(x), language_model.model.hidden(x))
    assert 0 < float(classifier.model.to_classes.weight.detach().std()) < 1
    mask = torch.ones_like(x)
    mask[1, 5:] = 0
    out = classifier(x, attention_mask=mask, labels=torch.tensor([0, 2, 1]))
    assert out.loss.isfinite()
    torch.testing.assert_close(out.logits[1:2], classifier(x[1:2, :5]).logits)
    classifier.save_pretrained(tmp_path / "classifier")
    again = LongspanForSequenceClassification.from_pretrained(tmp_path / "classifier").eval()
    assert torch.equal(again(x).logits, classifier(x).logits)
    assert isinstance(longspan.load(tmp_path / "classifier"), longspan.Classifier)

    pair = LongspanForSeq2SeqLM(both()).eval()
    pair.save_pretrained(tmp_path / "pair")
    again = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "pair").eval()
    assert again.model.encoder.embedding is again.model.decoder.embedding
    source, target = tokens(2, 7, high=29), tokens(2, 5, high=29)
    assert torch.equal(again(input_ids=source, labels=target).logits, pair(input_ids=source, labels=target).logits)
    assert isinstance(longspan.load(tmp_path / "pair"), longspan.EncoderDecoder)


def test_every_part_of_a_language_model_becomes_the_body_of_a_classifier(tmp_path):
    """All that a configuration can add to it."""
    language_model = causal(ngrams=(2, 3), ngram_buckets=64, positions="learned", max_length=9, embed_dim=6)
    language_model.save_pretrained(tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    parts = language_model.model.state_dict()
    for name in {name.split(".")[0] for name in parts} - {"to_logits", "from_dim"}:
        assert torch.equal(
            *(
                torch.cat([x.flatten() for key, x in found.items() if key.startswith(f"{name}.")])
                for found in (parts, classifier.model.body.state_dict())
            )
        )


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_generate_is_longspan_s_own_and_padding_changes_nothing(mechanism):
    model, x = causal(mechanism, token_shift=(0, 1)).double(), tokens(2, 11)
    mask = torch.ones_like(x)
    mask[1, :4] = 0
    how = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    whole = model.generate(x, attention_mask=mask, **how)[:, 11:].tolist()
    prompts = [x[0].tolist(), x[1, 4:].tolist()]
    assert whole == longspan.generate(model.model, prompts, 9, sampling=Sampling(temperature=0)).tokens
    assert whole == model.generate(x, attention_mask=mask, use_cache=False, **how)[:, 11:].tolist()


def test_beams_follow_their_states():
    model, x = causal(HYBRID).double(), tokens(2, 7)
    how = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(x, **how), model.generate(x, use_cache=False, **how))
    sampled = model.generate(x, max_new_tokens=4, do_sample=True, num_return_sequences=3, pad_token_id=0)
    assert sampled.shape == (6, 11)


def test_each_token_is_read_once():
    model, x = causal("linear"), tokens(1, 20)
    read = []
    model.model.embedding.register_forward_pre_hook(lambda _, given: read.append(given[0].numel()))
    model.generate(x, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert read == [20, 1, 1, 1, 1, 1]


def test_seq2seq_generates_from_its_state():
    model = LongspanForSeq2SeqLM(both()).eval().double()
    source = tokens(2, 7, high=29)
    mask = torch.ones_like(source)
    mask[1, 4:] = 0
    how = {"max_new_tokens": 6, "decoder_start_token_id": 1, "pad_token_id": 0, "do_sample": False}
    out = model.generate(source, attention_mask=mask, **how)
    assert torch.equal(out, model.generate(source, attention_mask=mask, use_cache=False, **how))
    assert torch.equal(out[1:], model.generate(source[1:, :4], **how))
    beams = model.generate(source, attention_mask=mask, num_beams=2, **how)
    assert torch.equal(beams, model.generate(source, attention_mask=mask, num_beams=2, use_cache=False, **how))


def test_seq2seq_labels_are_in_step():
    model = LongspanForSeq2SeqLM(both())
    source, target = tokens(2, 7, high=29), tokens(2, 5, high=29)
    target[1, 3:] = -100
    given = model.prepare_decoder_input_ids_from_labels(target)
    assert given.tolist() == [[0, *target[0, :4].tolist()], [0, *target[1, :3].tolist(), 0]]
    out = model(input_ids=source, labels=target)
    rows = torch.nn.functional.cross_entropy(out.logits.transpose(1, 2), target, reduction="none")
    torch.testing.assert_close(out.loss, rows.sum() / 8)
    assert model(input_ids=source, labels=torch.full_like(target, -100)).loss == 0


@pytest.mark.parametrize("options", [{}, {"return_flash_attn_kwargs": True}])
def test_flattened_documents_do_not_see_each_other(options):
    model = causal(HYBRID, token_shift=(0, 1))
    documents = [tokens(n).tolist() for n in (5, 9, 7)]
    collate = DataCollatorWithFlattening(**options)

    def logits(documents):
        return model(**collate([{"input_ids": document} for document in documents])).logits[0]

    before = logits(documents)
    for i, (start, end) in enumerate([(0, 5), (5, 14), (14, 21)]):
        torch.testing.assert_close(before[start:end], model(torch.tensor([documents[i]])).logits[0])
    after = logits([documents[0], [7] * 9, documents[2]])
    assert torch.equal(after[:5], before[:5])
    assert torch.equal(after[14:], before[14:])
    assert not torch.equal(after[5:14], before[5:14])


def test_labels_of_minus_100_are_ignored_and_items_counted():
    model, x = causal(), tokens(2, 9)
    labels = x.clone()
    labels[:, :4] = -100
    logits = model(x).logits[:, :-1]
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
    torch.testing.assert_close(model(x, labels=labels).loss, each.sum() / 10)
    torch.testing.assert_close(model(x, labels=labels, num_items_in_batch=20).loss, each.sum() / 20)
    assert model(x, logits_to_keep=1).logits.shape == (2, 1, 256)


def test_outputs_are_tuples_on_request():
    x = tokens(2, 9)
    masked = LongspanForMaskedLM(LongspanConfig(config("linear", causal=False))).eval()
    model, pair = causal(), LongspanForSeq2SeqLM(both()).eval()
    source = tokens(2, 7, high=29)
    calls = [(model, {"input_ids": x}), (masked, {"input_ids": x}), (pair, {"input_ids": source, "labels": source})]
    for one, given in calls:
        wanted, found = one(**given), one(**given, return_dict=False)
        assert type(found) is tuple
        assert torch.equal(found[1 if "labels" in given else 0], wanted.logits)
    model.config.return_dict = False
    assert type(model(x)) is tuple
    assert torch.equal(model(x, return_dict=True).logits, model(x)[0])


@pytest.mark.parametrize("recompute", [False, True])
def test_the_trainer_trains(tmp_path, recompute):
    torch.manual_seed(0)
    model = causal("performer").train()
    text = b"a stitch in time saves nine. " * 30
    data = [{"input_ids": list(text[i : i + 40]), "labels": list(text[i : i + 40])} for i in range(0, 400, 29)]
    arguments = TrainingArguments(
        tmp_path,
        per_device_train_batch_size=4,
        max_steps=25,
        learning_rate=1e-2,
        report_to=[],
        disable_tqdm=True,
        logging_steps=5,
        use_cpu=True,
        save_strategy="no",
        **{f"{CHECKPOINTING}_checkpointing": recompute},
    )
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert model.model.transformer.stack.execution == ("recompute" if recompute else "keep")
    assert losses[-1] < 0.5 * losses[0]
    getattr(model, f"{CHECKPOINTING}_checkpointing_disable")()
    assert model.model.transformer.stack.execution == "keep"


def test_lora_trains_and_merges(tmp_path):
    peft = pytest.importorskip("peft")
    model, x = causal(), tokens(2, 16)
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["to_q", "to_kv", "to_out"]))
    trained = [parameter for parameter in lora.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, 2e-2)
    losses = []
    for _ in range(8):
        loss = lora(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    wanted = lora.eval()(input_ids=x).logits
    merged = lora.merge_and_unload()
    torch.testing.assert_close(merged(x).logits, wanted)
    merged.save_pretrained(tmp_path)
    torch.testing.assert_close(longspan.load(tmp_path).eval()(x), wanted)


def test_bytes_round_trip(tmp_path):
    tokenizer = ByteTokenizer()
    for raw in (bytes(range(256)), b"caf\xc3\xa9 \xff\x00 <pad>", "naïve €".encode()):
        assert tokenizer(tokenizer.decode(list(raw)))["input_ids"] == list(raw)
    padded = tokenizer(["a", "bcd"], padding=True, padding_side="left", return_tensors="pt")
    assert padded["input_ids"].tolist() == [[0, 0, 97], [98, 99, 100]]
    assert padded["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 1]]
    tokenizer.save_pretrained(tmp_path)
    assert ByteTokenizer.from_pretrained(tmp_path)("abc")["input_ids"] == [97, 98, 99]


def test_the_configuration_is_not_repeated():
    wanted = config(HYBRID, positions="learned", max_length=32)
    held = LongspanConfig(wanted)
    assert held.model == wanted
    assert LongspanConfig.from_dict(json.loads(held.to_json_string())).model == wanted
    assert (held.vocab_size, held.hidden_size, held.num_hidden_layers, held.num_attention_heads) == (256, 24, 2, 4)
    fields = set(wanted.to_dict()) - {"cross", "positions", "norm"}
    assert not fields & set(held.to_dict())


def test_what_cannot_be_is_said():
    x = tokens(1, 6)
    with pytest.raises(ValueError, match="needs ModelConfig\\(causal=True\\)"):
        LongspanForCausalLM(LongspanConfig(config("linear", causal=False)))
    with pytest.raises(ValueError, match="is bidirectional"):
        LongspanForMaskedLM(LongspanConfig(config("linear")))
    with pytest.raises(ValueError, match="needs LongspanConfig\\(decoder, encoder=…\\)"):
        LongspanForSeq2SeqLM(LongspanConfig(config("linear")))
    model = causal("linear")
    other = causal("performer")(x, use_cache=True).past_key_values
    assert isinstance(other, StateCache)
    with pytest.raises(ValueError, match="cache of another model"):
        model(x[:, :1], past_key_values=other)
    with pytest.raises(ValueError, match="holds 1 rows, the input has 2"):
        model(tokens(2, 1), past_key_values=model(x, use_cache=True).past_key_values)
    with pytest.raises(ValueError, match="what this model returned, got a DynamicCache"):
        model(x, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="do not take output_attentions"):
        model(x, output_attentions=True)
    with pytest.raises(ValueError, match=r"inputs_embeds must be \(B, T, 24\), got \(1, 3, 23\)"):
        model(inputs_embeds=torch.zeros(1, 3, 23))
    with pytest.raises(ValueError, match="input_ids and inputs_embeds exclude each other"):
        model(tokens(1, 3), inputs_embeds=torch.zeros(1, 3, 24))
    model(x, position_ids=torch.arange(6)[None])
    with pytest.raises(ValueError, match="position_ids must count the real tokens"):
        model(x, position_ids=torch.arange(6)[None] + 1)
    short = causal("linear", positions="learned", max_length=8)
    with pytest.raises(ValueError, match="8"):
        short.generate(x, max_new_tokens=5, do_sample=False, pad_token_id=0)
    with pytest.raises(ValueError, match="cannot return to an earlier token"):
        other.crop(3)
    with pytest.raises(ValueError, match="every_n_layers must be 1, got 2"):
        model._set_gradient_checkpointing(every_n_layers=2)
    if CHECKPOINTING == "activation":
        with pytest.raises(ValueError, match="offload must be False"):
            model.activation_checkpointing_enable(offload=True)


def test_fsdp_gives_the_losses_of_one_process():
    script = str(Path(__file__).parents[1] / "fsdp_script.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    how = {"capture_output": True, "text": True, "timeout": 300, "env": {**os.environ, "OMP_NUM_THREADS": "1"}}
    sharded = subprocess.run(launch, **how)
    assert sharded.returncode == 0, sharded.stderr
    alone = subprocess.run([sys.executable, script, "--alone"], check=True, **how)
    # Gloo of PyTorch 2.10 prints too.
    losses = [
        [float(line) for line in run.stdout.splitlines() if not line.startswith("[Gloo]")] for run in (sharded, alone)
    ]
    assert len(losses[0]) == 5
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=0, atol=1e-5)


def test_the_tokenizer_of_a_run_is_the_one_it_was_trained_with(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = ["one", "two", "three", "<unk>"]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    longspan.save(
        longspan.LanguageModel(ModelConfig(dim=8, depth=1, vocab_size=4, causal=True)), tmp_path / "checkpoint"
    )
    folder = tmp_path / "checkpoint"
    assert type(AutoTokenizer.from_pretrained(folder)) is ByteTokenizer
    (tmp_path / "tokenizer.json").rename(folder / "tokenizer.json")
    found = AutoTokenizer.from_pretrained(folder)
    assert found("two one three")["input_ids"] == [1, 0, 2]
    pipe = pipeline("text-generation", model=folder)
    text = pipe("two one", max_new_tokens=3, do_sample=False)[0]["generated_text"]
    assert re.fullmatch(r"two one( |one|two|three|<unk>)+", text)
