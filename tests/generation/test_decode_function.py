"""`LanguageModel.decode_function`: the bits of `decode_step` for the options that it accepts, None for the others."""

import pytest
import torch
from torch import nn

from longspan import AttentionConfig, LanguageModel, ModelConfig
from longspan.generation.decode import DecodeLoop
from longspan.generation.sampling import Sampling, SeededSampler
from longspan.mechanisms.linear import LinearAttention

LOCAL = {"mechanism": "local", "window": 5}
MIXTURE = {"mechanism": "mixture", "window": 5}
RANDOM = {"mechanism": "performer", "num_features": 11}
WRAPPING = {"mechanism": "linformer", "rank": 3, "max_length": 7, "periodic": True}


def split(*mechanisms):
    parts = [{"num_heads": 1, **({"mechanism": m} if isinstance(m, str) else m)} for m in mechanisms]
    return {"mechanism": "split", "parts": parts}


SUPPORTED = {
    "linear": ({"mechanism": "linear", "rotary": "halves"}, {}),
    "softmax map": ({"mechanism": {"mechanism": "linear", "feature_map": "softmax"}}, {}),
    "performer": ({"mechanism": RANDOM, "num_kv_heads": 1}, {"norm": "rms"}),
    "local": ({"mechanism": LOCAL, "rotary": "halves", "num_kv_heads": 1}, {"tie_embeddings": True}),
    "linformer": ({"mechanism": WRAPPING, "rotary": "halves"}, {"positions": "sinusoidal"}),
    "decay": ({"mechanism": "decay", "conv_size": 4, "out_norm": True, "qkv_bias": True}, {"logit_softcap": 2.0}),
    "fixed": ({"mechanism": {"mechanism": "decay", "gate": "fixed"}, "value_gates": True}, {"norm": "scale"}),
    "delta": ({"mechanism": "delta", "out_gate": "silu", "qk_norm": True, "rotary": "halves"}, {"ngrams": (2, 3)}),
    "channels": ({"mechanism": {"mechanism": "delta", "gate": "channel"}, "value_embedding": True}, {"embed_dim": 10}),
    "split": ({"mechanism": split(LOCAL, "delta"), "rotary": ("halves", "none"), "conv_size": 3}, {}),
    "token shift": ({"mechanism": split(LOCAL, "linear"), "rotary": "halves"}, {"token_shift": (0, 1, 1)}),
    "parallel": ({"mechanism": LOCAL, "rotary": "halves", "rotary_dim": 4}, {"residual": "parallel"}),
    "partial": ({"mechanism": split("linear", "delta"), "rotary": ("none", "halves"), "rotary_dim": 2}, {}),
    "mixture": ({"mechanism": {**MIXTURE, "sink": True}, "rotary": "halves", "num_kv_heads": 1}, {}),
    "mixture, elu": ({"mechanism": {**MIXTURE, "memory": "linear", "scale": 0.3}}, {"norm": "rms"}),
    "split, two kinds": ({"mechanism": split(RANDOM, "decay"), "rotary": "halves", "out_bias": False}, {}),
}
UNSUPPORTED = {
    "a state that grows": ({"mechanism": "softmax"}, {}),
    "interleaved angles": ({"mechanism": "linear", "rotary": "interleaved"}, {}),
    "repeated heads": ({"mechanism": "delta", "num_qk_heads": 1}, {}),
    "one key/value head of two parts": ({"mechanism": split(LOCAL, "linear"), "num_kv_heads": 1}, {}),
    "shared keys and values": ({"mechanism": "linear", "shared_kv": True}, {}),
    "blocks": ({"mechanism": {**LOCAL, "look_back": 1}}, {}),
    "a gated mixture": ({"mechanism": {**MIXTURE, "memory": "delta"}}, {}),
    "a blind spot": ({"mechanism": {"mechanism": "linear", "blind_spot": 3}}, {}),
    "token shift by two": ({"mechanism": "linear"}, {"token_shift": (0, 2)}),
    "a norm after the layer": ({"mechanism": "linear"}, {"norm_position": "post"}),
    "two streams": ({"mechanism": "linear"}, {"residual": "double"}),
}


def build(case, dtype=torch.float32):
    attention, options = case
    sizes = {"dim": 10, "depth": 2, "vocab_size": 17, "causal": True, **options}
    config = ModelConfig(attention=AttentionConfig(num_heads=2, head_dim=6, **attention), **sizes)
    model = LanguageModel(config).to(dtype).eval()
    for parameter in model.parameters():
        if not parameter.any():  # Biases and value embeddings begin at zero, where they would hide mistakes.
            nn.init.normal_(parameter)
    return model


def after_prompt(model, batch_size=1, tokens=3):
    with torch.inference_mode():
        stack = model.transformer.stack
        state = model.extend(torch.randint(17, (batch_size, tokens)), model.new_state(batch_size, max_length=97))[1]
        return stack.decode_state(state, model.embedding.weight.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SUPPORTED)
def test_equals_decode_step_bit_by_bit(name, dtype):
    model = build(SUPPORTED[name], dtype)
    ours = after_prompt(model)
    theirs = model.transformer.stack.share_length(ours.clone())
    with torch.inference_mode():
        step = model.decode_function(ours)
        for token in torch.randint(17, (11, 1)):
            expected, theirs = model.decode_step(token, theirs)
            assert torch.equal(step(token), expected)
    for key, x in theirs.tensors().items():
        assert torch.equal(ours.tensors()[key], x), key


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_is_none_where_only_decode_step_will_do(name):
    model = build(UNSUPPORTED[name])
    assert model.decode_function(after_prompt(model)) is None


def test_is_none_for_several_sequences_and_for_half_precision():
    model = build(SUPPORTED["linear"])
    assert model.decode_function(after_prompt(model)) is not None
    assert model.decode_function(after_prompt(model, batch_size=2)) is None
    assert model.bfloat16().decode_function(after_prompt(model)) is None


def test_a_subclass_with_a_step_of_its_own_does_not_inherit_the_function():
    class Same(LinearAttention):
        pass

    class Other(LinearAttention):
        def _decode_step(self, *args):
            return super()._decode_step(*args)

    state = LinearAttention(2, 5).new_state(1)
    assert Same(2, 5).decode_function(state, [None]) is not None
    assert Other(2, 5).decode_function(state, [None]) is None


class Doubled(nn.Linear):
    """A layer that is not nn.Linear, as adapters are."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_calls_modules_that_are_not_pytorchs_own_and_their_hooks():
    model = build(SUPPORTED["linear"])
    first, second = (branch.layer for branch in list(model.transformer.stack.branches)[:2])
    first.to_q = Doubled(10, 12)
    second.to_hidden.register_forward_hook(lambda module, args, out: 3 * out)
    state, token = after_prompt(model), torch.tensor([5])
    with torch.inference_mode():
        expected, _ = model.decode_step(token, model.transformer.stack.share_length(state.clone()))
        assert torch.equal(model.decode_function(state)(token), expected)


def test_weights_that_change_between_tokens_are_read_again():
    model = build(SUPPORTED["delta"])
    state, token = after_prompt(model), torch.tensor([5])
    step = model.decode_function(state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    with torch.inference_mode():
        expected, _ = model.decode_step(token, model.transformer.stack.share_length(state.clone()))
        assert torch.equal(step(token), expected)


def test_the_decode_loop_uses_it_and_gives_ordinary_states_back():
    model = build(SUPPORTED["split"])
    with torch.no_grad():
        out, state = model.extend(torch.randint(17, (1, 3)), model.new_state(1))
    sampler = SeededSampler(Sampling(temperature=0), torch.zeros(1, 0, dtype=torch.int64), (), [0])
    loop = DecodeLoop(model, state, out[:, -1], sampler)
    model.decode_step = None  # not called
    for _ in range(7):
        loop.step()
    after, logits = loop.state_and_logits()
    assert not any(x.is_inference() for x in (*after.tensors().values(), logits))
    assert int(after.length) == 10
