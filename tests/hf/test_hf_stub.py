"""Folders open with trust_remote_code where longspan.hf was not imported, and refuse where longspan is missing."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from longspan import AttentionConfig, Classifier, ModelConfig, save
from longspan.hf import (
    LongspanConfig,
    LongspanForCausalLM,
    LongspanForMaskedLM,
    LongspanForQuestionAnswering,
    LongspanForSeq2SeqLM,
    LongspanForSequenceClassification,
    LongspanForTokenClassification,
    swap_attention,
)
from longspan.layout import TokenLayout

OPEN = """
import sys
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    assert "longspan" not in sys.modules or folder != sys.argv[1]
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    print(type(model).__name__, model.dtype)
    model.save_pretrained(folder + "-again")
"""
BLOCKED = "import sys; sys.modules['longspan'] = None\n"


def language_model():
    torch.manual_seed(1)
    attention = AttentionConfig(num_heads=4, mechanism="linear")
    model = ModelConfig(dim=24, depth=1, causal=True, vocab_size=31, attention=attention)
    return LongspanForCausalLM(LongspanConfig(model)).eval()


def run(code, *folders, home):
    environment = {**os.environ, "HF_MODULES_CACHE": str(home), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_folders_open_with_remote_code(tmp_path):
    language_model().save_pretrained(tmp_path / "own")
    sizes = {"vocab_size": 31, "hidden_size": 24, "intermediate_size": 7, "num_hidden_layers": 1}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4))
    swap_attention(llama, "linear").save_pretrained(tmp_path / "swapped")
    stub = (tmp_path / "own/modeling_longspan.py").read_text()
    assert len(stub.splitlines()) < 40
    done = run(OPEN, tmp_path / "own", tmp_path / "swapped", home=tmp_path / "home")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[::2] == ["LongspanForCausalLM", "LlamaForCausalLM"]
    for name in ("own-again", "swapped-again"):
        assert [path.name for path in (tmp_path / name).glob("*.py")] == ["modeling_longspan.py"]
        assert (tmp_path / name / "modeling_longspan.py").read_text() == stub
    done = run(BLOCKED + OPEN.replace("assert", "0 and"), tmp_path / "own", home=tmp_path / "home2")
    assert done.returncode == 1
    assert "this model needs longspan: pip install 'longspan[hf]'" in done.stderr


def test_heads_of_each_token(tmp_path):
    model, x = language_model(), torch.arange(14).view(2, 7)
    mask = torch.ones_like(x)
    mask[1, 5:] = 0
    model.save_pretrained(tmp_path)
    tagger = AutoModelForTokenClassification.from_pretrained(tmp_path, num_labels=3).eval()
    labels = torch.where(mask.bool(), x % 3, -100)
    found = tagger(x, attention_mask=mask, labels=labels)
    assert found.logits.shape == (2, 7, 3)
    wanted = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(found.loss, wanted)
    assert torch.equal(tagger.model.body.hidden(x), model.model.hidden(x))
    tagger.save_pretrained(tmp_path / "tags")
    again = AutoModelForTokenClassification.from_pretrained(tmp_path / "tags").eval()
    assert torch.equal(again(x, attention_mask=mask).logits, found.logits)
    reader = AutoModelForQuestionAnswering.from_pretrained(tmp_path).eval()
    places = torch.tensor([1, 2]), torch.tensor([3, 4])
    found = reader(x, attention_mask=mask, start_positions=places[0], end_positions=places[1])
    assert found.start_logits.shape == found.end_logits.shape == (2, 7)
    losses = [
        torch.nn.functional.cross_entropy(*pair)
        for pair in zip((found.start_logits, found.end_logits), places, strict=True)
    ]
    torch.testing.assert_close(found.loss, sum(losses) / 2)
    with pytest.raises(ValueError, match="do not take output_attentions"):
        tagger(x, output_attentions=True)


def test_embeddings_as_inputs_and_other_vocabularies(tmp_path):
    model, x = language_model(), torch.arange(14).view(2, 7)
    mask = torch.ones_like(x)
    mask[1, :3] = 0
    vectors = model.get_input_embeddings()(x).detach().requires_grad_()
    wanted = model(x, attention_mask=mask).logits
    got = model(inputs_embeds=vectors, attention_mask=mask).logits
    assert torch.equal(got, wanted)
    got.sum().backward()
    assert vectors.grad.abs().sum() > 0
    assert torch.equal(model(x, attention_mask=mask).logits, wanted)
    classifier = LongspanForSequenceClassification(LongspanConfig(model.config.model, num_labels=3)).eval()
    embedded = classifier.get_input_embeddings()(x)
    assert torch.equal(classifier(inputs_embeds=embedded).logits, classifier(x).logits)
    for size in (37, 29):
        model.resize_token_embeddings(size)
        assert model.config.vocab_size == size
        logits = model(x, attention_mask=mask).logits
        assert logits.shape == (2, 7, size)
        torch.testing.assert_close(logits[..., :29], wanted[..., :29])
    model.save_pretrained(tmp_path)
    assert torch.equal(LongspanForCausalLM.from_pretrained(tmp_path).eval()(x).logits, model(x).logits)


@pytest.mark.parametrize("causal", [True, False])
def test_hidden_states_of_every_layer(causal):
    torch.manual_seed(1)
    attention = AttentionConfig(num_heads=4, mechanism="linear")
    model = ModelConfig(dim=24, depth=3, causal=causal, vocab_size=31, attention=attention)
    model = (LongspanForCausalLM if causal else LongspanForMaskedLM)(LongspanConfig(model)).eval()
    x = torch.arange(14).view(2, 7)
    found = model(x, output_hidden_states=True)
    assert len(found.hidden_states) == 4
    torch.testing.assert_close(found.hidden_states[0], model.get_input_embeddings()(x))
    torch.testing.assert_close(found.hidden_states[-1], model.model.hidden(x))
    assert torch.equal(found.logits, model(x).logits)
    assert model(x).hidden_states is None
    layer, inner = model.model.transformer.stack.branches[2:4], found.hidden_states[1]
    torch.testing.assert_close(_run(layer, inner), found.hidden_states[2])
    with pytest.raises(ValueError, match="do not take output_attentions"):
        model(x, output_attentions=True)


@pytest.mark.parametrize("shift", [(), (0, 1)])
def test_hidden_states_beside_a_cache(shift):
    torch.manual_seed(1)
    attention = AttentionConfig(num_heads=4, mechanism="linear")
    model = ModelConfig(dim=24, depth=3, causal=True, vocab_size=31, attention=attention, token_shift=shift)
    model, x = LongspanForCausalLM(LongspanConfig(model)).eval().double(), torch.arange(14).view(2, 7)
    mask = torch.ones_like(x)
    mask[1, :3] = 0
    whole = model(x, attention_mask=mask, output_hidden_states=True).hidden_states
    first = model(x[:, :5], attention_mask=mask[:, :5], use_cache=True, output_hidden_states=True)
    rest = model(x[:, 5:], attention_mask=mask, past_key_values=first.past_key_values, output_hidden_states=True)
    assert len(first.hidden_states) == len(rest.hidden_states) == 4
    for wanted, *parts in zip(whole, first.hidden_states, rest.hidden_states, strict=True):
        found = torch.cat(parts, 1)
        torch.testing.assert_close(found[mask.bool()], wanted[mask.bool()])
    assert model(x, use_cache=True).hidden_states is None
    how = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True, "pad_token_id": 0}
    found = model.generate(x, attention_mask=mask, output_hidden_states=True, **how)
    longer = torch.nn.functional.pad(mask, (0, 3), value=1)
    whole = model(found.sequences, attention_mask=longer, output_hidden_states=True).hidden_states
    for step, states in enumerate(found.hidden_states):
        torch.testing.assert_close(states[2][:, -1], whole[2][:, 6 + step])


def test_classifiers_of_vectors_and_of_tokens(tmp_path):
    attention = AttentionConfig(num_heads=4, mechanism="linear")
    config = ModelConfig(dim=24, depth=1, attention=attention, input_dim=3, num_classes=2)
    save(Classifier(config), tmp_path / "vectors")
    with pytest.raises(
        ValueError, match=r"this model reads vectors, .* open it with longspan\.load, or give its folder"
    ):
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "vectors")
    config = ModelConfig(dim=24, depth=1, attention=attention, vocab_size=31, num_classes=2, pooling="none")
    save(Classifier(config), tmp_path / "tags")
    x = torch.arange(14).view(2, 7)
    tags = AutoModelForTokenClassification.from_pretrained(tmp_path / "tags").eval()(x).logits
    whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "tags").eval()(x).logits
    torch.testing.assert_close(tags.mean(1), whole)


def test_hidden_states_of_classifiers():
    config = language_model().config.model
    x, mask = torch.arange(14).view(2, 7), torch.ones(2, 7, dtype=torch.int64)
    mask[1, 5:] = 0
    for head in (LongspanForSequenceClassification, LongspanForTokenClassification, LongspanForQuestionAnswering):
        model = head(LongspanConfig(config, num_labels=3)).eval()
        found = model(x, attention_mask=mask, output_hidden_states=True)
        assert len(found.hidden_states) == 2
        hidden = model.model.body.hidden(x, key_mask=mask.bool())
        torch.testing.assert_close(found.hidden_states[-1][mask.bool()], hidden[mask.bool()])
        assert model(x, attention_mask=mask).hidden_states is None


def test_sequence_to_sequence_takes_embeddings_and_gives_hidden_states():
    torch.manual_seed(1)
    attention = AttentionConfig(num_heads=4, mechanism="linear")
    sizes = {"dim": 24, "vocab_size": 31, "attention": attention}
    decoder = ModelConfig(depth=3, causal=True, cross=AttentionConfig(4), **sizes)
    config = LongspanConfig(decoder, encoder=ModelConfig(depth=2, **sizes), tie_embeddings=True)
    model = LongspanForSeq2SeqLM(config).eval().double()
    source, target = torch.arange(1, 15).view(2, 7), torch.arange(1, 11).view(2, 5)
    mask = torch.ones_like(source)
    mask[1, 4:] = 0
    given = {"input_ids": source, "attention_mask": mask, "decoder_input_ids": target}
    wanted = model(**given, output_hidden_states=True)
    assert torch.equal(wanted.logits, model(**given).logits)
    assert (len(wanted.encoder_hidden_states), len(wanted.decoder_hidden_states)) == (3, 4)
    assert torch.equal(wanted.encoder_hidden_states[-1], wanted.encoder_last_hidden_state)
    torch.testing.assert_close(model.model.decoder.logits(wanted.decoder_hidden_states[-1]), wanted.logits)
    assert torch.equal(wanted.decoder_hidden_states[0], model.model.decoder.embedding(target))
    cached = model(**given, use_cache=True, output_hidden_states=True)
    for one, two in zip(cached.decoder_hidden_states, wanted.decoder_hidden_states, strict=True):
        torch.testing.assert_close(one, two)
    embedding = model.get_input_embeddings()
    vectors = {"inputs_embeds": embedding(source), "decoder_inputs_embeds": embedding(target)}
    assert torch.equal(model(attention_mask=mask, **vectors).logits, wanted.logits)
    how = {"max_new_tokens": 6, "decoder_start_token_id": 1, "pad_token_id": 0, "do_sample": False}
    tokens = model.generate(source, attention_mask=mask, **how)
    assert torch.equal(model.generate(inputs_embeds=embedding(source), attention_mask=mask, **how), tokens)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds is required"):
        model(decoder_input_ids=target)
    with pytest.raises(ValueError, match="decoder_input_ids, decoder_inputs_embeds or labels is required"):
        model(input_ids=source)


@pytest.mark.parametrize("mechanism", ["linear", "performer", "delta", "softmax"])
def test_generation_from_embeddings(mechanism):
    torch.manual_seed(1)
    attention = AttentionConfig(num_heads=4, mechanism=mechanism)
    config = ModelConfig(dim=24, depth=2, causal=True, vocab_size=31, attention=attention, positions="sinusoidal")
    model, x = LongspanForCausalLM(LongspanConfig(config)).eval().double(), torch.arange(14).view(2, 7)
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    mask = torch.ones_like(x)
    mask[1, :3] = 0
    how = {"attention_mask": mask, "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(x, **how)[:, 7:]
    vectors = model.get_input_embeddings()(x)
    assert torch.equal(model.generate(inputs_embeds=vectors, **how), wanted)
    assert not torch.equal(model.generate(inputs_embeds=-vectors, **how), wanted)


def _run(branches, x):
    position = torch.arange(x.shape[1])[None]
    layout = TokenLayout(position, torch.full_like(position, x.shape[1] - 1))
    for branch in branches:
        x = branch.merge(x, branch(x, layout, None, None))
    return x


@pytest.mark.parametrize("mechanism", ["linear", "performer", "delta"])
def test_devices_and_precisions(tmp_path, mechanism):
    torch.manual_seed(1)
    attention = AttentionConfig(num_heads=4, mechanism=mechanism)
    config = ModelConfig(dim=24, depth=2, causal=True, vocab_size=31, attention=attention)
    model, x = LongspanForCausalLM(LongspanConfig(config)).eval(), torch.arange(14).view(2, 7)
    model.save_pretrained(tmp_path)
    placed = AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto").eval()
    assert torch.equal(placed(x.to(placed.device)).logits.cpu(), model(x).logits)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert half.dtype == torch.bfloat16
    assert 0 < (half(x).logits - model(x).logits).abs().max() < 0.1
    assert half.generate(x, max_new_tokens=3, do_sample=False).shape == (2, 10)


def test_an_adapter_is_not_left_out_without_peft(tmp_path, monkeypatch):
    language_model().save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    monkeypatch.setattr("longspan.hf.models.is_peft_available", lambda: False)
    with pytest.raises(ValueError, match=r"has a LoRA adapter, which needs peft: pip install 'longspan\[hf\]'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
