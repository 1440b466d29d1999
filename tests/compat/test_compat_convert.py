"""`longspan convert`: what it writes, and what it says to inputs that cannot be converted."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import longspan
from longspan.cli import main
from longspan.compat.convert import LIBRARIES, convert_weights, read_weights
from longspan.compat.local_attention import LocalTransformer

ARGUMENTS = {"num_tokens": 11, "max_seq_len": 23, "dim": 12, "depth": 1, "heads": 2, "dim_head": 4}
ARGUMENTS |= {"local_attn_window_size": 5}


class Result(NamedTuple):
    status: int
    stdout: str
    stderr: str


def convert(checkpoint: Path, folder: Path, library: str = "local-attention", config: Path | None = None) -> Result:
    if config is None:
        config = checkpoint.with_name("config.json")
        config.write_text(json.dumps(ARGUMENTS))
    arguments = ["convert", checkpoint, folder, "--from", library, "--config", config]
    out, err, status = io.StringIO(), io.StringIO(), 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as stopped:
            status = int(stopped.code or 0)
    return Result(status, out.getvalue(), err.getvalue())


def refused(result: Result, *texts: str) -> None:
    """An answer, not a traceback; nothing on standard output."""
    assert result.status == 2, result
    for text in texts:
        assert text in result.stderr
    assert result.stdout == ""


@pytest.fixture
def model() -> LocalTransformer:
    return LocalTransformer(**ARGUMENTS).eval()


@pytest.fixture
def checkpoint(tmp_path: Path, model: LocalTransformer) -> Path:
    path = tmp_path / "old.pt"
    torch.save(model.state_dict(), path)
    return path


def logits(model: Any) -> Tensor:
    return model(torch.arange(20)[None] % 11)


def test_a_process_of_its_own(tmp_path: Path, checkpoint: Path, model: LocalTransformer) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(ARGUMENTS))
    command = [sys.executable, "-m", "longspan", "convert", checkpoint, tmp_path / "new"]
    command += ["--from", "local-attention", "--config", config]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"longspan generate --model {tmp_path / 'new'} reads it" in done.stdout
    assert torch.equal(logits(longspan.load(tmp_path / "new").eval()), logits(model.to_longspan()))


@pytest.mark.parametrize("inside", [None, "state_dict", "model_state_dict", "model", "net"])
@pytest.mark.parametrize("prefix", ["", "net.", "module.", "module.net."])
def test_where_training_scripts_put_weights(
    tmp_path: Path, model: LocalTransformer, inside: str | None, prefix: str
) -> None:
    held = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    torch.save(held if inside is None else {inside: held, "step": 5}, tmp_path / "old.pt")
    result = convert(tmp_path / "old.pt", tmp_path / "new")
    assert result.status == 0, result.stderr
    assert torch.equal(logits(longspan.load(tmp_path / "new").eval()), logits(model.to_longspan()))


def test_files_that_are_not_there(tmp_path: Path, checkpoint: Path) -> None:
    refused(convert(tmp_path / "none.pt", tmp_path / "new"), "none.pt", "No such file")
    refused(convert(checkpoint, tmp_path / "new", config=tmp_path / "none.json"), "none.json", "No such file")
    assert not (tmp_path / "new").exists()


class Anything:
    pass


@pytest.mark.parametrize(
    ("held", "text"),
    [
        ([1, 2], "has no state dict, keys with tensors, at the top level or under state_dict, model_state_dict"),
        ({"step": 3}, "has no state dict"),
        ({}, "has no state dict"),
        (Anything(), "contains objects that are not loaded for safety: save model.state_dict() instead"),
    ],
)
def test_files_that_hold_something_else(tmp_path: Path, held: Any, text: str) -> None:
    torch.save(held, tmp_path / "old.pt")
    refused(convert(tmp_path / "old.pt", tmp_path / "new"), str(tmp_path / "old.pt"), text)


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 and then nothing"])
def test_files_that_are_no_checkpoints(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "old.pt").write_bytes(content)
    refused(convert(tmp_path / "old.pt", tmp_path / "new"), str(tmp_path / "old.pt"))


def test_keys_that_do_not_fit_are_listed(tmp_path: Path, model: LocalTransformer) -> None:
    held = model.state_dict()
    held["layers.0.2.strange"] = torch.zeros(1)
    del held["layers.0.1.branch.4.weight"]
    held["token_emb.weight"] = torch.zeros(12, 12)
    torch.save(held, tmp_path / "old.pt")
    refused(
        convert(tmp_path / "old.pt", tmp_path / "new"),
        'Missing key(s) in state_dict: "layers.0.1.branch.4.weight"',
        'Unexpected key(s) in state_dict: "layers.0.2.strange"',
        "size mismatch for token_emb.weight: copying a param with shape torch.Size([12, 12]) from checkpoint",
    )
    assert not (tmp_path / "new").exists()


def test_a_library_there_is_not(tmp_path: Path, checkpoint: Path) -> None:
    refused(
        convert(checkpoint, tmp_path / "new", "local-atention"), "'local-atention'", "did you mean 'local-attention'"
    )


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("{", "cannot be read as JSON"),
        ("[" * 200_000, "nested too deeply"),
        ('{"class": 5}', "has no model 5"),
        ('{"num_tokens": 9, "dim": 200000, "depth": 2, "heads": 2, "max_seq_len": 64}', "and the checkpoint has"),
        ("[1]", 'must contain {"argument": value, …}, got a list'),
        (
            json.dumps(ARGUMENTS | {"widht": 3}),
            "cannot build LocalTransformer: LocalTransformer got an unexpected keyword argument 'widht'",
        ),
        ('{"dim": 12}', "cannot build LocalTransformer"),
        (json.dumps(ARGUMENTS | {"depth": 0}), "depth must be a positive integer, got 0"),
        ('{"class": "LocalTransfomer"}', "local-attention has no model 'LocalTransfomer'"),
        ('{"class": "LocalAttention", "window_size": 4}', "has no model 'LocalAttention'; give the class of the model"),
        (
            '{"class": "LocalMHA", "dim": 12, "window_size": 4}',
            "no model 'LocalMHA'; give the class of the model, not",
        ),
    ],
)
def test_configurations_that_cannot_be(tmp_path: Path, checkpoint: Path, config: str, text: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(config)
    refused(convert(checkpoint, tmp_path / "new", config=path), text)
    assert not (tmp_path / "new").exists()


def test_each_library_is_there_with_its_language_model() -> None:
    from importlib import import_module

    for module, name in LIBRARIES.values():
        assert isinstance(getattr(import_module(f"longspan.compat.{module}"), name), type)


def test_weights_are_read_without_running_anything(tmp_path: Path) -> None:
    mark = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (mark,)

    torch.save({"x": Trap()}, tmp_path / "trap.pt")
    with pytest.raises(ValueError, match="not loaded for safety"):
        read_weights(tmp_path / "trap.pt")
    assert not mark.exists()


def test_convert_weights_needs_no_file(model: LocalTransformer) -> None:
    converted = convert_weights(model.state_dict(), "local-attention", ARGUMENTS).eval()
    assert torch.equal(logits(converted), logits(model.to_longspan()))
    torch.testing.assert_close(logits(converted), logits(model), rtol=0, atol=2e-6)
