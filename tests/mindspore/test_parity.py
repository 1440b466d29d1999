"""The same weights and inputs give the same outputs and gradients as PyTorch (in float64), to 1e-5."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
import pytest
from cases import ATTENTION, HEADED, LENGTHS, MODELS, TOKENS, attention_options, headed_options, model_options, split
from mindspore import Tensor, nn, ops
from safetensors.numpy import load_file, save_file

from longspan.mindspore import LocalAttention, LocalMHA, LocalTransformer
from longspan.mindspore.weights import from_torch, load_torch, save_torch

TOLERANCE = 1e-5


def part(found: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): value for name, value in found.items() if name.startswith(prefix)}


def close(ours: Any, found: dict[str, np.ndarray], name: str) -> None:
    """To 1e-5 of PyTorch's float64, relative where values are above one; where PyTorch's own float32 is no nearer than
    half of that, within twice as far as it is.
    """
    ours, theirs = ours.asnumpy(), found[name]
    assert ours.shape == theirs.shape, name
    apart, largest = np.abs(ours - theirs).max(initial=0), np.abs(theirs).max(initial=0)
    assert apart <= max(TOLERANCE * max(1.0, largest), 2 * found[f"rounding.{name}"]), f"{name} is {apart} apart"


def compare(cell: nn.Cell, path: Path, tmp_path: Path) -> None:
    """One file of PyTorch's: outputs, then the gradients of everything that has one there."""
    found = load_file(path)
    weights = part(found, "weight.")
    if weights:
        save_file(weights, tmp_path / "weights.safetensors")
        load_torch(cell, tmp_path / "weights.safetensors")
    inputs = {name: Tensor(value) for name, value in part(found, "input.").items()}
    cell.set_train(False)
    out = cell(**inputs)
    if "mask" in inputs:
        # What stands at hidden tokens is nobody's.
        kept = inputs["mask"].reshape((out.shape[0], *[1] * (out.ndim - 3), -1, 1))
        out = ops.where(kept, out, ops.zeros_like(out))
    close(out, found, "output")

    theirs = part(found, "gradient.input.")
    moving = [inputs[name] for name in theirs]
    fixed = {name: value for name, value in inputs.items() if name not in theirs}
    parameters = cell.trainable_params()

    def total(*moved: Tensor) -> Tensor:
        if "loss" in found:
            return cell(**fixed, return_loss=True)
        return (cell(**dict(zip(theirs, moved, strict=True)), **fixed) * Tensor(found["pull"])).sum()

    value, gradients = ms.value_and_grad(total, tuple(range(len(moving))) or None, parameters or None)(*moving)
    ours, of_weights = gradients if moving and parameters else (gradients, ()) if moving else ((), gradients)
    ours = (ours,) if isinstance(ours, Tensor) else ours  # MindSpore's answer for one input is no tuple
    if "loss" in found:
        close(value, found, "loss")
    for name, gradient in zip(theirs, ours, strict=True):
        close(gradient, found, f"gradient.input.{name}")
    # MindSpore's names of the weights, and PyTorch's.
    names = from_torch({name: Name(name, value.ndim) for name, value in part(found, "gradient.weight.").items()})
    assert {parameter.name for parameter in parameters} == set(names)
    for parameter, gradient in zip(parameters, of_weights, strict=True):
        close(gradient, found, f"gradient.weight.{names[parameter.name].text}")


class Name(NamedTuple):
    """Goes through the converter in a tensor's place."""

    text: str
    ndim: int


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str, n: int, parity: Path, tmp_path: Path) -> None:
    options, _, _ = split(ATTENTION[name])
    cell = LocalAttention(**attention_options(options))
    compare(cell, parity / f"attention-{name}-{n}.safetensors", tmp_path)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", HEADED)
def test_heads(name: str, n: int, parity: Path, tmp_path: Path) -> None:
    options, _, _ = split(HEADED[name])
    cell = LocalMHA(**headed_options(options))
    compare(cell, parity / f"headed-{name}-{n}.safetensors", tmp_path)


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, n: int, parity: Path, tmp_path: Path) -> None:
    options, _, _ = split(MODELS[name])
    compare(LocalTransformer(**model_options(options)), parity / f"model-{name}-{n}.safetensors", tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_weights_go_back(name: str, parity: Path) -> None:
    """PyTorch's half then loads these and compares the outputs."""
    options, _, _ = split(MODELS[name])
    cell = LocalTransformer(**model_options(options))
    for parameter in cell.get_parameters():
        parameter.set_data(parameter + 0.1 * ops.randn(parameter.shape))
    x = ops.randn((2, 13, cell.layers[0][0].branch.to_out.weight.shape[0])) if "num_tokens" in options else None
    if x is None:
        x = Tensor(np.arange(26).reshape(2, 13) * 7 % TOKENS)
    path = parity / f"mindspore-{name}.safetensors"
    save_torch(cell, path)
    cell.set_train(False)
    save_file({**load_file(path), "input.x": x.asnumpy(), "output": cell(x).asnumpy()}, path)
