"""Graphs of `extend` and of a step: torch.export and ONNX Runtime give eager's answers; pickled models too."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from training import longspan

from longspan import AttentionConfig, Classifier, EncoderDecoder, LanguageModel, ModelConfig, save
from longspan.models.export import ExtendGraph, StepGraph, export_programs, write_onnx
from longspan.train.presets import PRESETS, named_mechanism

SPLIT = [{"mechanism": "local", "num_heads": 2, "window": 7}, {"mechanism": "linear", "num_heads": 2}]
MECHANISMS = {
    "softmax": "softmax",
    "local": {"mechanism": "local", "window": 7},
    "blocks": {"mechanism": "local", "window": 8, "look_back": 1},
    "linear": "linear",
    "performer": "performer",
    "linformer": {"mechanism": "linformer", "rank": 5, "max_length": 41},
    "decay": "decay",
    "delta": "delta",
    "gate per channel": {"mechanism": "delta", "gate": "channel"},
    "split": {"mechanism": "split", "parts": SPLIT},
}
SIZES = {"chunk": 7, "batch_size": 2, "max_length": 41}


def built(mechanism: object = "linear", depth: int = 1) -> LanguageModel:
    torch.manual_seed(3)
    attention = AttentionConfig(num_heads=4, mechanism=mechanism)
    return LanguageModel(ModelConfig(dim=24, depth=depth, causal=True, vocab_size=31, attention=attention)).eval()


def of_a_preset() -> LanguageModel:
    torch.manual_seed(3)
    values = copy.deepcopy(PRESETS["tiny"].model)
    values["attention"] |= named_mechanism("split", 4, 32)
    return LanguageModel(
        ModelConfig.from_dict({**values, "dim": 32, "depth": 2, "vocab_size": 31, "causal": True})
    ).eval()


def with_positions() -> LanguageModel:
    torch.manual_seed(3)
    attention = AttentionConfig(num_heads=4, mechanism="linear", rotary="interleaved")
    sizes = {"dim": 24, "depth": 1, "vocab_size": 31, "positions": "learned", "max_length": 41}
    return LanguageModel(ModelConfig(**sizes, causal=True, attention=attention)).eval()


MODELS = {"preset": of_a_preset, "positions": with_positions}


def model_of(name: str) -> LanguageModel:
    return MODELS[name]() if name in MODELS else built(MECHANISMS[name])


def chunks() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 31, (3, 2, 7), generator=torch.Generator().manual_seed(4))
    mask = torch.ones(3, 2, 7, dtype=torch.bool)
    mask[0, 1, 4:] = mask[2, 0, 3:] = False
    return tokens, mask


def slow_but(*kept: str) -> list[object]:
    return [pytest.param(name, marks=() if name in kept else pytest.mark.slow) for name in (*MECHANISMS, *MODELS)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", slow_but("performer", "positions"))
def test_torch_export_gives_eager_s_answers(name: str) -> None:
    model, (tokens, mask) = model_of(name), chunks()
    extend, step = export_programs(model, **SIZES)
    targets = {str(node.target) for program in (extend, step) for node in program.graph.nodes}
    assert not [target for target in targets if target.startswith("longspan")]
    with torch.no_grad():
        ours, theirs = (model.new_state(2, max_length=41) for _ in range(2))
        for x, seen in zip(tokens, mask, strict=True):
            wanted, ours = ExtendGraph(model)(x, seen, ours)
            got, theirs = extend.module()(x, seen, theirs)
            torch.testing.assert_close(got[seen], wanted[seen], rtol=1e-5, atol=1e-5)
        for x in tokens[0].T:
            wanted, ours = StepGraph(model)(x, ours)
            got, theirs = step.module()(x, theirs)
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert theirs.length.tolist() == ours.length.tolist() == [14 + 3 + 7, 14 + 4 + 7]


@pytest.mark.parametrize("name", slow_but("delta"))
def test_onnx_runtime_gives_eager_s_answers(name: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'longspan[export]'")
    pytest.importorskip("onnxscript", reason="needs onnxscript: pip install 'longspan[export]'")
    from safetensors.torch import load_file

    model, (tokens, mask) = model_of(name), chunks()
    write_onnx(model, tmp_path, **SIZES)
    extend, step = (
        runtime.InferenceSession(tmp_path / f"{x}.onnx", providers=["CPUExecutionProvider"]) for x in ("extend", "step")
    )
    state = {f"state.{name}": x.numpy() for name, x in load_file(tmp_path / "state.safetensors").items()}

    def run(session, state, **inputs):
        given = {**{name: x.numpy() for name, x in inputs.items()}, **state}
        named = zip((output.name for output in session.get_outputs()), session.run(None, given), strict=True)
        found = {name.removeprefix("new_"): value for name, value in named}
        return torch.from_numpy(found.pop("logits")), found

    with torch.no_grad():
        ours = model.new_state(2, max_length=41)
        for x, seen in zip(tokens, mask, strict=True):
            wanted, ours = model.extend(x, ours, key_mask=seen)
            got, state = run(extend, state, tokens=x, key_mask=seen)
            assert (got - wanted)[seen].abs().max() < 1e-4
        for x in tokens[0].T:
            wanted, ours = model.extend(x[:, None], ours)
            got, state = run(step, state, tokens=x.contiguous())
            assert (got - wanted[:, 0]).abs().max() < 1e-4


def test_the_command_writes_both_graphs(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="needs onnxscript: pip install 'longspan[export]'")
    save(built(), tmp_path / "model")
    words = ["export", str(tmp_path / "model"), str(tmp_path / "out")]
    done = longspan(*words, "--format", "onnx", "--chunk", "5", "--batch-size", "3", log=tmp_path / "log")
    assert done.status == 0, done.stderr
    assert "extend.onnx reads 5 tokens" in done.stdout
    runtime = pytest.importorskip("onnxruntime")
    shapes = {x.name: x.shape for x in runtime.InferenceSession(tmp_path / "out/extend.onnx").get_inputs()}
    assert shapes["tokens"] == [3, 5]
    done = longspan(*words, "--chunk", "5", log=tmp_path / "log")
    assert "--chunk is for --format onnx: leave it out" in done.stderr
    save(Classifier(ModelConfig(dim=24, depth=1, vocab_size=31, num_classes=2)), tmp_path / "model")
    done = longspan(*words, "--format", "onnx", log=tmp_path / "log")
    assert done.status == 2
    assert "is a Classifier: --format onnx is for causal language models" in done.stderr


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(ValueError, match=r"ONNX graphs require onnx: pip install 'longspan\[export\]'"):
        write_onnx(built(), tmp_path, **SIZES)
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        export_programs(built(), chunk=0)


def test_states_are_pytrees() -> None:
    state = built(MECHANISMS["split"]).new_state(2)
    leaves, spec = torch.utils._pytree.tree_flatten(state)
    assert [x is y for x, y in zip(leaves, state.tensors().values(), strict=True)]
    again = torch.utils._pytree.tree_unflatten([x + 0 for x in leaves], spec)
    assert type(again) is type(state)
    assert again.branches[0].draw == state.branches[0].draw


@pytest.mark.parametrize("name", MECHANISMS)
def test_models_are_pickled_whole(name: str) -> None:
    model, x = built(MECHANISMS[name]), chunks()[0][0]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), model(x))


def test_other_models_are_pickled_whole() -> None:
    attention = AttentionConfig(num_heads=4, mechanism="linear")
    config = ModelConfig(dim=24, depth=1, vocab_size=31, attention=attention)
    decoder = ModelConfig(dim=24, depth=1, causal=True, vocab_size=31, attention=attention, cross=AttentionConfig(4))
    x = chunks()[0][0]
    for model, inputs in (
        (Classifier(ModelConfig(dim=24, depth=1, vocab_size=31, num_classes=2, attention=attention)), (x,)),
        (EncoderDecoder(config, decoder), (x, x)),
    ):
        file = io.BytesIO()
        torch.save(model.eval(), file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False)(*inputs), model(*inputs))
