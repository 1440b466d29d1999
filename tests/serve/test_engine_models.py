"""The engine with models of older libraries and of transformers, and with long prompts."""

from __future__ import annotations

import pytest
import torch
from serve_cases import answers, language_model

import longspan
from longspan import Sampling, generate
from longspan.compat.convert import convert_weights
from longspan.compat.linear_attention_transformer import LinearAttentionTransformerLM
from longspan.compat.local_attention import LocalTransformer
from longspan.compat.performer_pytorch import PerformerLM
from longspan.serve import Engine, Request

PERFORMER = {"num_tokens": 29, "max_seq_len": 64, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8, "causal": True}
LINEAR = {"num_tokens": 29, "max_seq_len": 64, "dim": 32, "depth": 2, "heads": 4, "causal": True}
LOCAL = {"num_tokens": 29, "max_seq_len": 64, "dim": 32, "depth": 2, "heads": 4, "dim_head": 8, "causal": True}
OLDER = {
    "performer-pytorch": (PerformerLM, {**PERFORMER, "local_attn_heads": 2, "local_window_size": 16}),
    "linear-attention-transformer": (LinearAttentionTransformerLM, {**LINEAR, "reversible": True}),
    "local-attention": (LocalTransformer, {**LOCAL, "local_attn_window_size": 8}),
}


@pytest.mark.parametrize("library", OLDER)
def test_converted_checkpoints(library, tmp_path):
    older, arguments = OLDER[library]
    model = convert_weights(older(**arguments).state_dict(), library, {"class": older.__name__, **arguments})
    longspan.save(model, tmp_path / "model")
    model = longspan.load(tmp_path / "model").double().eval()
    prompts = [[(7 * i + size) % 29 for i in range(size)] for size in (1, 5, 23)]
    with Engine(model, slots=3, chunk=4, max_length=61) as engine:
        for sampling in (Sampling(temperature=0), Sampling(temperature=0.7)):
            streams = [engine.submit(Request(prompt, 9, sampling=sampling, seed=3)) for prompt in prompts]
            for prompt, stream in zip(prompts, streams, strict=True):
                assert stream.result()[0].tokens == generate(model, prompt, 9, sampling=sampling, seed=3).tokens[0]
        again = engine.submit(Request(prompts[2], 9, sampling=Sampling(temperature=0)))
        assert again.result()[0].tokens == generate(model, prompts[2], 9, sampling=Sampling(temperature=0)).tokens[0]
        assert again.cached_tokens == 22


def test_models_of_transformers():
    hf = pytest.importorskip("longspan.hf", reason="needs transformers")
    own = language_model("linear", vocab_size=29, dtype=torch.float64)
    wrapped = hf.LongspanForCausalLM(hf.LongspanConfig(own.config)).double().eval()
    model = wrapped.model
    prompt, greedy = [3, 1, 4, 1, 5], Sampling(temperature=0)
    expected = wrapped.generate(torch.tensor([prompt]), max_new_tokens=7, do_sample=False)[0, 5:].tolist()
    with Engine(model, slots=2, chunk=4) as engine:
        assert engine.submit(Request(prompt, 7, sampling=greedy)).result()[0].tokens == expected


@pytest.mark.parametrize("size", [10_016, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_hit_of_a_long_prompt_reads_its_end_only(size):
    model = language_model("linear")
    prompt = torch.arange(size) % 251
    with Engine(model, slots=2, chunk=64) as engine:
        keys = engine.cache.keys(prompt[:-1])
        with torch.no_grad():
            state = model.extend_hidden(prompt[None, : size - 32], model.new_state(1))[1]
        engine.cache.insert(keys, (size - 32) // 64, engine._layout.pack(state)[0], [])
        generation = engine.submit(Request(prompt, 3, sampling=Sampling(temperature=0)))
        found, stats = answers(generation.result()), engine.stats()
    assert (generation.cached_tokens, stats.chunks, stats.prompt_tokens) == (size - 32, 1, 31)
    assert found[0][0] == generate(model, prompt, 3, sampling=Sampling(temperature=0)).tokens[0]
