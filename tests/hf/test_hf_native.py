"""Pretrained decoders as longspan models."""

import copy

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
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
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
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
GPT2 = {"vocab_size": 97, "n_embd": 24, "n_layer": 3, "n_head": 4, "attn_pdrop": 0.0}
NEOX = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
PARTIAL = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.67}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.7,
    "logits_scaling": 4.0,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=10, rms_norm_eps=1e-2)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=10)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
    "gpt2, scaled by layer": lambda: GPT2LMHeadModel(GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**NEOX, rope_parameters=PARTIAL)),
    "gpt_neox, in sequence": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**NEOX, use_parallel_residual=False)),
    "gpt_neox, no biases": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**NEOX, attention_bias=False)),
    "phi": lambda: PhiForCausalLM(PhiConfig(**SIZES | {"hidden_size": 32})),
    "phi, tied": lambda: PhiForCausalLM(PhiConfig(**SIZES, rope_parameters=PARTIAL, tie_word_embeddings=True)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES, rope_parameters=PARTIAL, pad_token_id=0)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=10)),
    "gemma, untied": lambda: GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=10, tie_word_embeddings=False)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, **MULTIPLIERS, attention_bias=True)),
    "granite, tied": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, **MULTIPLIERS, tie_word_embeddings=True)),
    "biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, hidden_act="relu")),
    "sliding": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)),
}
ONE_OF_EACH = ("llama", "qwen2", "qwen3", "gpt2", "gpt_neox", "phi", "phi3", "gemma", "granite")
MIXTURE = {"mechanism": "mixture", "window": 5}
DELTA = {"mechanism": "mixture", "window": 5, "memory": "delta"}


def built(name):
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        parameter.data.mul_(4).add_(torch.randn_like(parameter), alpha=0.1)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_same(name):
    model, tokens = built(name), torch.randint(97, (2, 13))
    expected = model(tokens).logits
    torch.testing.assert_close(to_language_model(model)(tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_state_is_the_forward_pass(name):
    """Pieces, padded rows and decoded tokens of a converted model: softmax in one layer, mixtures in the others."""
    native = to_language_model(swap_attention(built(name), MIXTURE, [0, 2]).double())
    tokens = torch.randint(97, (2, 13))
    with torch.no_grad():
        expected, state, found = native(tokens), native.new_state(2), []
        for piece in tokens.split([4, 1, 7, 1], 1):
            out, state = native.extend(piece, state)
            found.append(out)
        torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-9, rtol=0)
        mask = torch.arange(13) >= torch.tensor([[0], [5]])
        padded = native(tokens.masked_fill(~mask, 0), key_mask=mask)
        torch.testing.assert_close(padded[1, 5:], native(tokens[1:, 5:])[0], atol=1e-9, rtol=0)
        state = native.extend(tokens[:, :6], native.new_state(2, max_length=13))[1]
        state = native.transformer.stack.decode_state(state, torch.float64)
        for i in range(6, 13):
            out, state = native.decode_step(tokens[:, i], state)
            torch.testing.assert_close(out, expected[:, i], atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_fast_decode_function(name):
    """Of mixtures in all layers, which have one."""
    native = to_language_model(swap_attention(built(name), {**MIXTURE, "sink": True}))
    tokens = torch.randint(97, (1, 13))
    with torch.inference_mode():
        expected = native(tokens)
        state = native.extend(tokens[:, :6], native.new_state(1))[1]
        step = native.decode_function(native.transformer.stack.decode_state(state, torch.float32))
        for i in range(6, 13):
            torch.testing.assert_close(step(tokens[:, i]), expected[:, i], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "spec"),
    [*((name, MIXTURE) for name in ONE_OF_EACH), ("llama", DELTA), ("gpt2", DELTA), ("phi", DELTA)],
    ids=lambda value: value if isinstance(value, str) else value.get("memory", "linear"),
)
def test_swapped_layers_are_kept(name, spec, tmp_path):
    model, tokens = built(name), torch.randint(3, 97, (2, 13))  # none that transformers takes for padding
    swapped = swap_attention(copy.deepcopy(model), spec, [0, 2])
    for parameter in swapped.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.02)
    expected = swapped(tokens).logits
    assert (expected - model(tokens).logits).abs().max() > 1e-2
    native = to_language_model(swapped)
    torch.testing.assert_close(native(tokens), expected, atol=2e-4, rtol=1e-4)
    longspan.save(native, tmp_path / "model")
    again = longspan.load(tmp_path / "model")
    assert torch.equal(again(tokens), native(tokens))
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.testing.assert_close(opened(tokens).logits, native(tokens))
    ours, theirs = (x(tokens, output_hidden_states=True).hidden_states[:3] for x in (opened, swapped))
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    swapped.generation_config.eos_token_id = None
    greedy = swapped.generate(tokens, max_new_tokens=9, do_sample=False, pad_token_id=0)
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
    with pytest.raises(ValueError, match="its activation 'mish' is not one of"):
        to_language_model(LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="mish")))
    with pytest.raises(ValueError, match="its queries and keys have layer norms"):
        to_language_model(PhiForCausalLM(PhiConfig(**SIZES, qk_layernorm=True)))
    odd = GPTNeoXConfig(**NEOX | {"hidden_size": 48})
    with pytest.raises(ValueError, match="it rotates 3 features of a head, which is no even number"):
        to_language_model(GPTNeoXForCausalLM(odd))
