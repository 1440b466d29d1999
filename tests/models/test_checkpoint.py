"""Checkpoints: what comes back is what was saved, to the bit, whatever happened in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import refused
from safetensors.torch import save_file
from torch import Tensor, nn

from longspan import Mechanism, build_mechanism, register_mechanism
from longspan import mechanisms as registry
from longspan.mechanisms.linear import LinearAttention
from longspan.models import checkpoint
from longspan.models.checkpoint import CONFIG, TENSORS, committed_folder, load, replace_folder, save
from longspan.models.config import AttentionConfig, FeedForwardConfig, ModelConfig
from longspan.models.transformer import Classifier, EncoderDecoder, LanguageModel, Transformer

VOCABULARY = 23


def config(mechanism: Any = "linear", attention: dict | None = None, **more: Any) -> ModelConfig:
    return ModelConfig(
        dim=12,
        depth=2,
        attention=AttentionConfig(num_heads=3, mechanism=mechanism, **(attention or {})),
        feed_forward=FeedForwardConfig(mult=2),
        **more,
    )


LINFORMER = {"mechanism": "linformer", "rank": 4, "max_length": 31, "bias": True}
SPLIT = {
    "mechanism": "split",
    "parts": [
        {"mechanism": "local", "num_heads": 1, "window": (3, 2)},
        {"mechanism": "performer", "num_heads": 2, "redraw_interval": 2},
    ],
}


def language_model(*args: Any, **more: Any) -> LanguageModel:
    return LanguageModel(config(*args, vocab_size=VOCABULARY, **more))


def encoder_decoder(tie: bool) -> EncoderDecoder:
    cross = AttentionConfig(num_heads=3, mechanism="linear")
    encoder = config(vocab_size=VOCABULARY)
    decoder = config("performer", vocab_size=VOCABULARY, causal=True, cross=cross, tie_embeddings=True)
    return EncoderDecoder(encoder, decoder, pad_token=5, tie_embeddings=tie)


MODELS = {
    "transformer": lambda: Transformer(config(("local", "linear"), {"rotary": "halves"}, token_shift=(0, 1))),
    "language": lambda: language_model(causal=True, positions="axial", axial_shape=(5, 7), embed_dim=7),
    "tied": lambda: language_model(SPLIT, causal=True, tie_embeddings=True, positions="learned", max_length=41),
    "random projection": lambda: language_model({**LINFORMER, "projection": "random"}),
    "shared projection": lambda: language_model(LINFORMER, {"share_projection": True}),
    "hyper": lambda: Transformer(config("performer", residual="hyper", norm_position="rezero")),
    "encoder-decoder": lambda: encoder_decoder(tie=False),
    "encoder-decoder, tied": lambda: encoder_decoder(tie=True),
    "classifier": lambda: Classifier(config(num_classes=3)),
    "token classifier": lambda: Classifier(config(num_classes=3, vocab_size=VOCABULARY)),
}


def scrambled(model: nn.Module) -> nn.Module:
    """Every floating-point number another one, so that none is what building the model again would give."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_()
    return model


def assert_identical(got: nn.Module, expected: nn.Module) -> None:
    assert type(got) is type(expected)
    ours, theirs = got.state_dict(keep_vars=True), expected.state_dict(keep_vars=True)
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
        assert ours[name].requires_grad == tensor.requires_grad, name
    assert groups(ours) == groups(theirs)


def groups(tensors: dict[str, Tensor]) -> list[list[str]]:
    """Names of one and the same tensor, together."""
    return [[other for other in tensors if tensors[other] is tensors[name]] for name in tensors]


@pytest.mark.parametrize("name", MODELS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    model = scrambled(MODELS[name]())
    save(model, tmp_path / "model")
    before = torch.random.get_rng_state()
    loaded = load(tmp_path / "model")
    assert torch.equal(torch.random.get_rng_state(), before), "loading moved the random state"
    assert_identical(loaded, model)
    assert sorted(os.listdir(tmp_path)) == ["model"]
    assert sorted(os.listdir(tmp_path / "model")) == [CONFIG, TENSORS]


@pytest.mark.parametrize("name", ["tied", "shared projection", "encoder-decoder, tied"])
def test_outputs_and_gradients_after_loading(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    save(model, tmp_path / "model")
    outs = []
    tokens = torch.randint(6, VOCABULARY, (2, 17))
    for m in (model.eval(), load(tmp_path / "model").eval()):
        out = m(tokens, tokens) if isinstance(m, EncoderDecoder) else m(tokens)
        out.sum().backward()
        outs.append([out, *(x.grad for x in m.parameters() if x.grad is not None)])
    for got, expected in zip(*outs, strict=True):
        assert torch.equal(got, expected)


def test_arguments_survive(tmp_path: Path) -> None:
    model = encoder_decoder(tie=True)
    save(model, tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert loaded.pad_token == 5
    assert loaded.encoder.embedding is loaded.decoder.embedding
    assert loaded.decoder.config == model.decoder.config


def test_dtypes_and_random_features_survive(tmp_path: Path) -> None:
    model = MODELS["tied"]().to(torch.bfloat16)
    model.embedding.double()
    for _ in range(3):
        model.transformer._redraw_features(None)
    save(model, tmp_path / "model")
    loaded = load(tmp_path / "model", device="cpu")
    assert_identical(loaded, model)
    ours, theirs = (m.transformer.stack.branches[0].layer.mechanism.parts[1] for m in (loaded, model))
    assert ours.clock.tolist() == theirs.clock.tolist() == [1, 1]


def test_tied_by_hand(tmp_path: Path) -> None:
    """A tie the configuration does not know, and two views of one memory."""
    model = language_model()
    model.to_logits.weight = model.embedding.weight
    joint = torch.randn(2, 12)
    layers = [branch.norm for branch in model.transformer.stack.branches]
    layers[0].weight.data, layers[1].weight.data, layers[1].bias.data = joint[0], joint[1], joint[1]
    save(model, tmp_path / "model")
    loaded = load(tmp_path / "model")
    assert_identical(loaded, model)
    assert loaded.to_logits.weight is loaded.embedding.weight


def test_registered_mechanism(tmp_path: Path) -> None:
    class Mine(LinearAttention):
        """A mechanism of a user's own."""

    register_mechanism("mine", Mine)
    try:
        save(Transformer(config("mine")), tmp_path / "model")
        assert isinstance(load(tmp_path / "model").stack.branches[0].layer.mechanism, Mine)
    finally:
        del registry._REGISTRY["mine"]
    with refused("cannot build the Transformer", "unknown mechanism 'mine'"):
        load(tmp_path / "model")


def test_replacing_and_deep_folders(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er" / "model"
    first, second = scrambled(language_model()), scrambled(Classifier(config(num_classes=2)))
    save(first, folder)
    save(second, str(folder))
    assert_identical(load(folder), second)
    (tmp_path / "link").symlink_to(folder)
    save(first, tmp_path / "link")
    assert_identical(load(folder), first)
    assert (tmp_path / "link").is_symlink()


def test_other_files_are_never_deleted(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with refused("holds more than a checkpoint (notes.txt)", "choose a folder of its own"):
        save(language_model(), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with refused("notes.txt is a file; a checkpoint is a folder"):
        save(language_model(), tmp_path / "notes.txt")


def test_files_have_the_mode_that_the_system_gives_new_ones(tmp_path: Path) -> None:
    save(language_model(), tmp_path / "model")
    modes = {(tmp_path / "model" / name).stat().st_mode & 0o777 for name in (CONFIG, TENSORS)}
    (tmp_path / "new").touch()
    assert modes == {(tmp_path / "new").stat().st_mode & 0o777}


def test_a_failed_save_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = scrambled(language_model())
    save(model, tmp_path / "model")

    def full(*args: Any, **how: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("longspan.models.checkpoint.save_file", full)
    with pytest.raises(OSError, match="no space left"):
        save(language_model(), tmp_path / "model")
    assert os.listdir(tmp_path) == ["model"]
    assert_identical(load(tmp_path / "model"), model)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with refused("save takes a Transformer, LanguageModel", "got a Sequential", "not a wrapper"):
        save(nn.Sequential(language_model()), tmp_path / "model")
    model = Transformer(config({"mechanism": "performer", "kernel": torch.relu}))
    with refused("holds an object of type builtin_function_or_method, which JSON cannot"):
        save(model, tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_missing(tmp_path: Path) -> None:
    with refused("there is no checkpoint folder", "nowhere", error=FileNotFoundError):
        load(tmp_path / "nowhere")
    with refused("has no config.json: it is not a checkpoint", error=FileNotFoundError):
        load(tmp_path)
    save(language_model(), tmp_path / "model")
    (tmp_path / "model" / TENSORS).unlink()
    with refused("has no model.safetensors", error=FileNotFoundError):
        load(tmp_path / "model")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"format": 2, "longspan": "7.8"}, ("of format 2, written by longspan 7.8", "reads format 1", "install")),
        ({"class": "LanguageModels"}, ("unknown class in", "'LanguageModels'", "did you mean 'LanguageModel'?")),
        ({"arguments": {"config": {"dims": 3}}}, ("cannot build the LanguageModel", "unknown field dims")),
        ({"arguments": {"configs": {}}}, ("cannot build the LanguageModel", "'configs'")),
        ({"arguments": [1]}, ("is damaged: arguments must be a dict, got [1]",)),
        ({"sha256": "0"}, ("is damaged or from another save", "SHA-256", "from one save")),
    ],
)
def test_wrong_description(change: dict, parts: tuple[str, ...], tmp_path: Path) -> None:
    save(language_model(), tmp_path / "model")
    path = tmp_path / "model" / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with refused(*parts):
        load(tmp_path / "model")


def test_options_that_models_of_vectors_ignored(tmp_path: Path) -> None:
    model = Transformer(config())
    save(model, tmp_path / "model")
    path = tmp_path / "model" / CONFIG
    description = json.loads(path.read_text())
    description["arguments"]["config"] |= {"positions": "axial", "axial_shape": [4, 8], "embed_dim": 3, "ngrams": [2]}
    path.write_text(json.dumps(description))
    loaded = load(tmp_path / "model")
    assert loaded.config == model.config


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"format": 1, ', ("config.json is damaged, it cannot be read as JSON",)),
        ("\ufffe", ("config.json is damaged",)),
        ("[]", ("has no format field: it is not a checkpoint",)),
        ("{}", ("has no format field",)),
    ],
)
def test_damaged_description(text: str, parts: tuple[str, ...], tmp_path: Path) -> None:
    save(language_model(), tmp_path / "model")
    (tmp_path / "model" / CONFIG).write_text(text)
    with refused(*parts):
        load(tmp_path / "model")


@pytest.mark.parametrize("how", ["cut", "one bit", "empty", "pickle"])
def test_damaged_tensors(how: str, tmp_path: Path) -> None:
    save(language_model(), tmp_path / "model")
    path = tmp_path / "model" / TENSORS
    data = bytearray(path.read_bytes())
    if how == "one bit":
        data[-3] ^= 16
    path.write_bytes({"cut": data[: len(data) // 2], "one bit": data, "empty": b"", "pickle": b"\x80\x04N."}[how])
    with refused("model.safetensors is damaged or from another save", "restore both files from one save"):
        load(tmp_path / "model")


def test_names_and_shapes_that_do_not_fit(tmp_path: Path) -> None:
    save(language_model(), tmp_path / "model")
    path = tmp_path / "model" / CONFIG
    description = json.loads(path.read_text())

    def load_changed(**change: Any) -> None:
        arguments = {"config": {**description["arguments"]["config"], **change}}
        path.write_text(json.dumps({**description, "arguments": arguments}))
        load(tmp_path / "model")

    with refused("do not fit the LanguageModel", "of another shape: embedding.weight (23, 12) for (29, 12), to_logits"):
        load_changed(vocab_size=29)
    with refused("missing: transformer.stack.branches.4", "more", "restore config.json"):
        load_changed(depth=4)
    with refused("unknown: transformer.stack.branches.2"):
        load_changed(depth=1)


@pytest.mark.parametrize(
    ("config", "rank", "says"),
    [
        ({"r": 2, "lora_alpha": 4}, 3, "does not fit the weight"),
        ({"lora_alpha": 4}, 2, "r must be a positive integer and lora_alpha a number, got None and 4"),
        ({"r": 0, "lora_alpha": 4}, 2, "got 0 and 4"),
        ({"r": 2}, 2, "got 2 and None"),
    ],
    ids=str,
)
def test_damaged_adapters(config: dict[str, Any], rank: int, says: str, tmp_path: Path) -> None:
    model, layer = language_model(), "transformer.stack.branches.0.layer.to_q"
    save(model, tmp_path / "model")
    width, dim = model.get_submodule(layer).weight.shape
    names = (f"base_model.model.model.{layer}.lora_{part}.weight" for part in "AB")
    tensors = dict(zip(names, (torch.zeros(rank, dim), torch.zeros(width, 2)), strict=True))
    save_file(tensors, tmp_path / "model/adapter_model.safetensors")
    (tmp_path / "model/adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    with pytest.raises(ValueError, match=says):
        load(tmp_path / "model")


def test_stored_apart_but_one_in_the_model(tmp_path: Path) -> None:
    model = MODELS["shared projection"]()
    second = model.transformer.stack.branches[2].layer.mechanism
    own: Mechanism = build_mechanism("linformer", 3, 4, rank=4, max_length=31, bias=True, share_projection=True)
    second.keys = second.values = own.keys
    save(model, tmp_path / "model")
    with refused("stored separately, but tied in the model: transformer.stack.branches.2.layer.mechanism.keys"):
        load(tmp_path / "model")


def test_replacing_for_files_of_any_kind(tmp_path: Path) -> None:
    with replace_folder(tmp_path / "run", ("a", "b")) as partial:
        (partial / "a").write_text("1")
    assert (committed_folder(tmp_path / "run") / "a").read_text() == "1"
    with pytest.raises(FileNotFoundError), replace_folder(tmp_path / "run", ("a", "b")) as partial:
        (partial / "a" / "not a folder").write_text("2")
    assert (tmp_path / "run" / "a").read_text() == "1"
    assert os.listdir(tmp_path) == ["run"]


KILLER = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from longspan.models.checkpoint import load, save
from longspan.models.config import AttentionConfig, ModelConfig
from longspan.models.transformer import LanguageModel

torch.set_num_threads(1)
folder = Path(sys.argv[1])
attention = AttentionConfig(num_heads=2, mechanism="performer")
models = [LanguageModel(ModelConfig(dim=8, depth=1, attention=attention, vocab_size=size)) for size in (5, 2003)]


def which(model):
    # The index of the saved model that this one is, to the bit.
    for i, m in enumerate(models):
        if model.config == m.config:
            pairs = zip(model.state_dict().values(), m.state_dict().values(), strict=True)
            assert all(torch.equal(x, y) for x, y in pairs), "not what was saved"
            return i
    raise AssertionError("neither of the two")


def child(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return pid


def die_at(count, after):
    # Dies before or after the count-th call that changes the disk.
    left = [count]
    for name in ("mkdir", "rename", "fsync", "unlink", "rmdir"):
        def call(*args, do=getattr(os, name), **how):
            left[0] -= 1
            if left[0] == 0 and not after:
                os._exit(9)
            try:
                return do(*args, **how)
            finally:
                if left[0] == 0:
                    os._exit(9)
        setattr(os, name, call)
    save(models[1], folder)


def save_for_ever(first):
    while True:
        save(models[first], folder)
        first = 1 - first


# Every place a save can be cut off between two calls, one after the other.
places = set()
for after in (False, True):
    for count in range(1, 100):
        save(models[0], folder)
        _, status = os.waitpid(child(lambda: die_at(count, after)), 0)
        found = which(load(folder))
        places.add((found, *sorted(os.listdir(folder.parent))))
        if status == 0:
            assert found == 1
            break
    assert 5 < count < 99, count

# And at random, each from whatever the last one left.
random.seed(7)
began = time.monotonic()
save(models[0], folder)
once, end = time.monotonic() - began, time.monotonic() + 2
seen, trials, found = [0, 0], 0, 0
while time.monotonic() < end or trials < 30:
    pid = child(lambda: save_for_ever(1 - found))
    time.sleep(random.uniform(0, 4 * once))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found = which(load(folder))
    seen[found] += 1
    trials += 1
save(models[1], folder)
assert which(load(folder)) == 1
print(len(places), trials, *seen, *os.listdir(folder.parent))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """Children are killed while they save: at every call that changes the disk in turn, then at random moments."""
    command = [sys.executable, "-W", "ignore", "-c", KILLER, str(tmp_path / "model")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    places, trials, old, new, *left = run.stdout.split()
    assert int(places) >= 6, "the cuts did not reach every stage of a swap"
    assert min(int(old), int(new)) > 0
    assert int(old) + int(new) == int(trials) >= 30
    assert left == ["model"]


WRITER = """
import sys, torch
from longspan.models.checkpoint import save
from longspan.models.config import ModelConfig
from longspan.models.transformer import Transformer
models = [Transformer(ModelConfig(dim=8, depth=depth)) for depth in (1, 2)]
print("ready", flush=True)
while True:
    for model in models:
        save(model, sys.argv[1])
"""


def test_contents_of_the_next_save_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new folder is found just before it takes the place of the old one, and read when the next save has begun."""
    folder, new = tmp_path / "model", tmp_path / ".model.new"
    for path in (folder, new):
        path.mkdir()
    (folder / "x").write_text("complete")
    found = [new]
    real = checkpoint.committed_folder
    monkeypatch.setattr(checkpoint, "committed_folder", lambda path: found.pop() if found else real(path))
    assert checkpoint.read_committed(folder, lambda path: (path / "x").read_text()) == "complete"


def test_loading_while_another_process_saves(tmp_path: Path) -> None:
    save(Transformer(ModelConfig(dim=8, depth=1)), tmp_path / "model")
    command = [sys.executable, "-c", WRITER, str(tmp_path / "model")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline().strip() == "ready"
            depths: list[int] = []
            while len(depths) < 100 or (len(set(depths)) < 2 and len(depths) < 3000):
                depths.append(load(tmp_path / "model").config.depth)
        finally:
            writer.kill()
    assert set(depths) == {1, 2}
