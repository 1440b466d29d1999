"""linear-attention-transformer: its public names, and its checkpoints, which load, come back and convert."""

import inspect
import json
import re
import warnings

import lat_cases
import older
import pytest
import torch
from lat_cases import MODELS, VARIANTS

import longspan
from longspan.compat import linear_attention_transformer as ours
from longspan.compat.convert import convert_file, convert_weights

IGNORED = "this checkpoint was trained without ff_glu, which the original ignored"


def settled(name):
    """Our module of a variant, after a checkpoint of the original that shows which options it ignored."""
    module = lat_cases.build(ours, name)
    if name.endswith("[axial]"):
        state = {key: torch.zeros(shape) for key, (shape, *_) in older.reference_state_dict(f"lat.{name}").items()}
        with pytest.warns(UserWarning, match=IGNORED) as caught:
            module.load_state_dict(state)
        assert len(caught) == 1
    return module


def test_every_recorded_variant_is_here():
    recorded = {name.removeprefix("lat.") for name in older.recorded() if name.startswith("lat.")}
    assert recorded == set(VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_state_dicts_have_the_recorded_names_and_load(name):
    module = settled(name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", IGNORED)
        older.assert_names(module, f"lat.{name}")


def test_positions_of_an_older_release():
    module, other = (lat_cases.build(ours, "AutoregressiveWrapper") for _ in range(2))
    other.load_state_dict({k.replace("weights.", "weights_"): v for k, v in module.state_dict().items()})
    assert torch.equal(module.net.net.pos_emb.weights[0], other.net.net.pos_emb.weights[0])


@pytest.mark.parametrize("name", MODELS)
def test_every_model_converts_and_gives_the_same(name, tmp_path):
    theirs = lat_cases.build(older.original("linear_attention_transformer"), name).eval()
    arguments = {**(lat_cases.LM if "LM" in name else lat_cases.BARE), **VARIANTS[name]}
    arguments["class"] = name.partition("[")[0]
    torch.save({"state_dict": {f"net.net.{k}": v for k, v in theirs.state_dict().items()}}, tmp_path / "old.pt")
    (tmp_path / "config.json").write_text(json.dumps(arguments))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", IGNORED)
        convert_file(tmp_path / "old.pt", tmp_path / "new", "linear-attention-transformer", tmp_path / "config.json")
    model = longspan.load(tmp_path / "new").eval()
    context = {} if model.config.cross is None else {"context": torch.randn(2, 11, 32)}
    x = torch.randint(0, 20, (2, 32)) if "LM" in name else torch.randn(2, 32, 32)
    call = model.hidden if "return_embeddings" in name else model
    older.assert_close(call(x, **context), theirs(x, **context), name)


def test_convert_names_what_is_wrong():
    weights = lat_cases.build(ours, "LinearAttentionTransformerLM").state_dict()
    with pytest.raises(
        ValueError, match=r"expected LinformerSettings\(k\), or a mapping with these, got \{'rank': 4\}"
    ):
        convert_weights(weights, "linear-attention-transformer", {**lat_cases.LM, "linformer_settings": {"rank": 4}})
    with pytest.raises(ValueError, match="unexpected keyword argument 'headz'"):
        convert_weights(weights, "linear-attention-transformer", {**lat_cases.LM, "headz": 4})
    del weights["out.bias"]
    with pytest.raises(ValueError, match=r'Missing key\(s\) in state_dict: "out.bias"'):
        convert_weights(weights, "linear-attention-transformer", lat_cases.LM)


def test_every_public_name_has_its_arguments_and_defaults():
    path = older.REFERENCE / "public_api.md"
    if not path.exists():
        pytest.skip("the recorded interface of the older libraries is not here")
    section = path.read_text().split("## linear_attention_transformer ")[1].split("\n## ")[0]
    names = re.findall(r"^- \*\*(?:class )?(\w+)\*\*", section, re.MULTILINE)
    assert len(names) == 6
    for name in names:
        assert hasattr(ours, name), name
    original = older.original("linear_attention_transformer")
    for name in [n for n in names if not n.endswith("Settings")]:
        for method in ("__init__", "generate"):
            theirs = getattr(getattr(original, name), method, None)
            if theirs is None:
                continue
            wanted = {k: v.default for k, v in inspect.signature(theirs).parameters.items() if v.kind != v.VAR_KEYWORD}
            given = {
                k: v.default for k, v in inspect.signature(getattr(getattr(ours, name), method)).parameters.items()
            }
            for part in (wanted, given):
                part.pop("filter_logits_fn", None)
            assert list(given)[: len(wanted)] == list(wanted), name
            assert {k: given[k] for k in wanted} == wanted, name
    assert ours.LinformerContextSettings._fields == ("seq_len", "k")
    assert ours.LinformerSettings._fields == ("k",)


def test_submodules_and_the_names_in_them():
    with older.older_names():
        from linear_attention_transformer.autopadder import Autopadder
        from linear_attention_transformer.autoregressive_wrapper import AutoregressiveWrapper, top_k, top_p
        from linear_attention_transformer.images import ImageLinearAttention
        from linear_attention_transformer.linear_attention_transformer import (
            FeedForward,
            LinearAttentionTransformer,
            SelfAttention,
            causal_linear_attn,
            linear_attn,
        )
        from linear_attention_transformer.reversible import ReversibleSequence, SequentialSequence
    found = [Autopadder, AutoregressiveWrapper, top_k, top_p, ImageLinearAttention, FeedForward, SelfAttention]
    found += [LinearAttentionTransformer, causal_linear_attn, linear_attn, ReversibleSequence, SequentialSequence]
    assert all(thing.__module__.startswith("longspan.compat.") for thing in found)


def test_unknown_arguments_are_refused():
    model = lat_cases.build(ours, "LinearAttentionTransformerLM")
    x = torch.randint(0, 20, (2, 7))
    with pytest.raises(TypeError, match="mask"):
        model(x, mask=torch.ones(2, 7).bool())
    with pytest.raises(TypeError, match="ff_mult"):
        lat_cases.build(ours, "LinearAttentionTransformerLM", ff_mult=2)
    with pytest.raises(ValueError, match="a context was given, but this model has no cross-attention"):
        model(x, context=torch.randn(2, 5, 32))
    with pytest.raises(ValueError, match="this model attends to a context"):
        lat_cases.build(ours, "LinearAttentionTransformerLM[context]")(x)
    with pytest.raises(ValueError, match=r"n_local_attn_heads must be .* got \(1, 2, 3\)"):
        lat_cases.build(ours, "LinearAttentionTransformerLM", n_local_attn_heads=(1, 2, 3))
    with pytest.raises(ValueError, match="linformer_settings need causal=False"):
        lat_cases.build(ours, "LinearAttentionTransformerLM[linformer]", causal=True)
    with pytest.raises(ValueError, match="net must be a LinearAttentionTransformer"):
        ours.AutoregressiveWrapper(torch.nn.Linear(2, 3))
