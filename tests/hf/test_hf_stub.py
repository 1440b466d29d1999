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
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from longspan import AttentionConfig, ModelConfig
from longspan.hf import (
    LongspanConfig,
    LongspanForCausalLM,
    LongspanForMaskedLM,
    LongspanForSequenceClassification,
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
    if causal:
        with pytest.raises(ValueError, match="output_hidden_states is for calls without a cache"):
            model(x, output_hidden_states=True, use_cache=True)


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
