"""transformers' `generate` on the decode loop: the tokens of transformers' own loop, and which calls it takes."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import GenerationMixin, LogitsProcessor, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from longspan import AttentionConfig, ModelConfig
from longspan.generation.decode import DecodeLoop
from longspan.hf import LongspanConfig, LongspanForCausalLM, LongspanForSeq2SeqLM
from longspan.hf.generate import LongspanGenerationMixin

HYBRID = {
    "mechanism": "split",
    "parts": [{"mechanism": "local", "num_heads": 2, "window": 7}, {"mechanism": "linear", "num_heads": 2}],
}
MECHANISMS = [
    HYBRID,
    "performer",
    "linear",
    "softmax",
    "decay",
    {"mechanism": "linformer", "rank": 5, "max_length": 64},
]


def causal(mechanism=HYBRID, **fields) -> LongspanForCausalLM:
    torch.manual_seed(1)
    attention = AttentionConfig(num_heads=4, mechanism=mechanism)
    config = ModelConfig(**{"dim": 24, "depth": 2, "causal": True, "vocab_size": 61, "attention": attention, **fields})
    model = LongspanForCausalLM(LongspanConfig(config)).double().eval()
    with torch.no_grad():
        model.model.to_logits.weight.mul_(4)  # logits that differ enough for a choice to matter
    return model


def seq2seq() -> LongspanForSeq2SeqLM:
    torch.manual_seed(1)
    attention = AttentionConfig(num_heads=4, mechanism="linear")
    encoder = ModelConfig(dim=24, depth=1, vocab_size=61, attention=attention)
    decoder = ModelConfig(dim=24, depth=1, vocab_size=61, causal=True, attention=attention, cross=AttentionConfig(4))
    return LongspanForSeq2SeqLM(LongspanConfig(decoder, encoder=encoder)).double().eval()


def prompts(rows=2):
    tokens = torch.randint(1, 61, (rows, 11), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)
    mask[1:, :4] = 0
    return {"inputs": tokens, "attention_mask": mask}


@pytest.fixture
def steps(monkeypatch):
    """The steps of the decode loop so far."""
    seen, step = [], DecodeLoop.step
    monkeypatch.setattr(DecodeLoop, "step", lambda self: (seen.append(1), step(self))[1])
    return seen


def generated(model, *, loop: bool, **options):
    """The tokens of one seed, by the decode loop or by transformers' own."""
    with pytest.MonkeyPatch.context() as patch:
        if not loop:
            patch.setattr(LongspanGenerationMixin, "_sample", GenerationMixin._sample)
        torch.manual_seed(7)
        return model.generate(**options)


class Shift(LogitsProcessor):
    """A processor of a user's own, which writes to what it is given."""

    def __call__(self, input_ids, scores):
        scores += (input_ids.sum(1, keepdim=True) % 5) * torch.linspace(0, 1, scores.shape[1])
        return scores


class Sum(StoppingCriteria):
    """Ends a row when its tokens sum to a multiple of 5."""

    def __call__(self, input_ids, scores, **_):
        return input_ids.sum(1) % 5 == 0


SAMPLE = {"do_sample": True, "max_new_tokens": 17}
OPTIONS = {
    "greedy": {"do_sample": False, "max_new_tokens": 17},
    "max_length": {"do_sample": False, "max_length": 23},
    "eos": {**SAMPLE, "eos_token_id": [3, 11, 19, 31]},
    "repetition penalty": {"do_sample": False, "max_new_tokens": 17, "repetition_penalty": 1.7},
    "no repeated pairs": {"do_sample": False, "max_new_tokens": 17, "no_repeat_ngram_size": 2},
    "sample": SAMPLE,
    "temperature": {**SAMPLE, "temperature": 0.6},
    "top_k": {**SAMPLE, "top_k": 5},
    "top_p": {**SAMPLE, "top_k": 0, "top_p": 0.7},
    "min_p": {**SAMPLE, "top_k": 0, "min_p": 0.2},
    "everything": {**SAMPLE, "temperature": 1.3, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2},
    "several": {**SAMPLE, "num_return_sequences": 3},
    "at least": {**SAMPLE, "min_new_tokens": 9, "eos_token_id": list(range(0, 61, 2))},
    "processor": {**SAMPLE, "logits_processor": [Shift()]},
    "criterion": {**SAMPLE, "stopping_criteria": [Sum()]},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_tokens_are_those_of_transformers_own_loop(name, steps):
    model, options = causal(), {**prompts(), "pad_token_id": 0, **OPTIONS[name]}
    wanted = generated(model, loop=False, **options)
    assert not steps
    found = generated(model, loop=True, **options)
    assert torch.equal(found, wanted)
    assert len(steps) == wanted.shape[1] - 11
    assert len(found.unique()) > 4


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
@pytest.mark.parametrize("sample", [False, True])
def test_every_mechanism(mechanism, sample, steps):
    model = causal(mechanism, token_shift=(0, 1))
    options = {**prompts(3), "max_new_tokens": 12, "do_sample": sample, "pad_token_id": 0}
    wanted = generated(model, loop=False, **options)
    assert torch.equal(generated(model, loop=True, **options), wanted)
    assert len(steps) == 12


@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "eos_token_id": 5}], ids=str)
def test_encoders_and_decoders(options, steps):
    model = seq2seq()
    options = {**prompts(), "max_new_tokens": 12, "decoder_start_token_id": 1, "pad_token_id": 0, **options}
    wanted = generated(model, loop=False, **options)
    assert torch.equal(generated(model, loop=True, **options), wanted)
    assert len(steps) == wanted.shape[1] - 1


class Listener(BaseStreamer):
    def __init__(self):
        self.heard = []

    def put(self, value):
        self.heard.append(value.tolist())

    def end(self):
        self.heard.append("end")


def test_a_streamer_hears_the_same(steps):
    model, heard = causal(), []
    for loop in (False, True):
        listener = Listener()
        generated(model, loop=loop, inputs=prompts()["inputs"][:1], streamer=listener, pad_token_id=0, **SAMPLE)
        heard.append(listener.heard)
    assert heard[0] == heard[1]
    assert len(heard[1]) == 19
    assert len(steps) == 17


@pytest.mark.parametrize(
    "options",
    [
        {"return_dict_in_generate": True, "output_scores": True},
        {"use_cache": False},
        {"num_beams": 2},
        {"attention_mask": torch.ones(2, 11).index_fill(1, torch.tensor([9, 10]), 0)},
        {"past_key_values": "cache"},
        {"prefill_chunk_size": 4, "past_key_values": "cache"},
    ],
    ids=str,
)
def test_other_calls_go_to_transformers_own_loop(options, steps):
    model = causal()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "inputs": prompts()["inputs"], **options}
    results = []
    for loop in (False, True):
        if options.get("past_key_values") is not None:
            options["past_key_values"] = model(prompts()["inputs"][:, :4], use_cache=True).past_key_values
        results.append(generated(model, loop=loop, **options))
    if options.get("return_dict_in_generate"):
        assert len(results[1].scores) == 5
        results = [result.sequences for result in results]
    assert torch.equal(*results)
    assert not steps


def test_dropout_in_training_mode_is_transformers_own(steps):
    model = causal("linear", embed_dropout=0.5).train()
    options = {"inputs": prompts()["inputs"], "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(generated(model, loop=True, **options), generated(model, loop=False, **options))
    assert not steps
    assert not torch.equal(generated(model, loop=True, **options), generated(model.eval(), loop=True, **options))


def test_generated_tokens_can_be_trained_on():
    model = causal()
    tokens = model.generate(prompts()["inputs"], max_new_tokens=5, pad_token_id=0)
    model(tokens, labels=tokens).loss.backward()
    assert model.model.embedding.weight.grad.abs().sum() > 0


def test_an_adapter_takes_part(steps):
    peft = pytest.importorskip("peft")
    model = causal("linear")
    adapter = peft.LoraConfig(r=2, target_modules=["to_q", "to_kv", "to_out"], init_lora_weights=False)
    lora = peft.get_peft_model(model, adapter).double().eval()
    options = {"input_ids": prompts()["inputs"], "max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}
    found = generated(lora, loop=True, **options)
    assert torch.equal(found, generated(lora, loop=False, **options))
    assert len(steps) == 9
    with lora.disable_adapter():
        assert not torch.equal(generated(lora, loop=True, **options), found)
