"""Pretrained decoders as longspan models."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import longspan
from longspan.generation.generate import generate
from longspan.generation.sampling import Sampling
from longspan.hf import swap_attention, to_language_model
from longspan.serve import Engine, Request

SIZES = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=10, rms_norm_eps=1e-2)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=10)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=24, n_layer=3, n_head=4, attn_pdrop=0.0)),
}
MIXTURE = {"mechanism": "mixture", "window": 5}
DELTA = {"mechanism": "mixture", "window": 5, "memory": "delta"}


def built(name):
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        parameter.data.mul_(4)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_same(name):
    model, tokens = built(name), torch.randint(97, (2, 13))
    assert (model(tokens).logits - to_language_model(model)(tokens)).abs().max() < 1e-4


@pytest.mark.parametrize("spec", [MIXTURE, DELTA], ids=["linear", "delta"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_swapped_layers_are_kept(name, spec, tmp_path):
    model, tokens = built(name), torch.randint(97, (2, 13))
    swapped = swap_attention(copy.deepcopy(model), spec, [0, 2])
    for parameter in swapped.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
    expected = swapped(tokens).logits
    assert (expected - model(tokens).logits).abs().max() > 1e-2
    native = to_language_model(swapped)
    assert (expected - native(tokens)).abs().max() < 1e-4
    longspan.save(native, tmp_path / "model")
    again = longspan.load(tmp_path / "model")
    assert torch.equal(again(tokens), native(tokens))
    greedy = swapped.generate(tokens, max_new_tokens=9, min_new_tokens=9, do_sample=False, pad_token_id=0)
    likeliest = Sampling(temperature=0)
    assert [list(row) for row in generate(again, tokens, 9, sampling=likeliest).tokens] == greedy[:, 13:].tolist()
    with Engine(again, slots=2) as engine:
        answers = engine.submit(Request(tokens[0], max_tokens=9, sampling=likeliest)).result()
    assert answers[0].tokens == greedy[0, 13:].tolist()


def test_what_has_no_form_is_refused():
    other = OPTForCausalLM(
        OPTConfig(vocab_size=97, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(ValueError, match=r"have no form for type 'opt', only for llama.*save_pretrained"):
        to_language_model(other)
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="its rotary embedding is of type 'linear'"):
        to_language_model(LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=scaled)))
    with pytest.raises(ValueError, match="its activation 'relu' is not one of"):
        to_language_model(LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="relu")))
    with pytest.raises(ValueError, match="biases"):
        to_language_model(LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True)))
