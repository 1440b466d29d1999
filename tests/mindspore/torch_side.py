"""PyTorch's half of the comparison: run by the environment that has torch, in a process of its own.

python tests/mindspore/torch_side.py write FOLDER    weights, inputs, outputs and gradients, for MindSpore to match
python tests/mindspore/torch_side.py check FOLDER    what MindSpore wrote there gives the same outputs here
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from cases import (
    ATTENTION,
    DIM,
    DIM_HEAD,
    HEADED,
    HEADS,
    LENGTHS,
    MODELS,
    TOKENS,
    attention_options,
    bias_shape,
    headed_options,
    model_options,
    split,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from longspan.compat.local_attention import LocalAttention, LocalMHA, LocalTransformer

TOLERANCE = 1e-5


def write(folder: Path) -> None:
    torch.manual_seed(7)
    for name, case in ATTENTION.items():
        options, masked, biased = split(case)
        cell = LocalAttention(**attention_options(options))
        for n in LENGTHS:
            inputs = {x: torch.randn(2, HEADS, n, DIM_HEAD) for x in ("q", "k", "v")}
            extra = _extra(n, masked, biased, options)
            _save(folder / f"attention-{name}-{n}.safetensors", cell, inputs, extra)
    for name, case in HEADED.items():
        options, masked, biased = split(case)
        cell = _disturbed(LocalMHA(**headed_options(options)))
        for n in LENGTHS:
            extra = _extra(n, masked, biased, options)
            _save(folder / f"headed-{name}-{n}.safetensors", cell, {"x": torch.randn(2, n, DIM)}, extra)
    for name, case in MODELS.items():
        options, masked, _ = split(case)
        model = _disturbed(LocalTransformer(**model_options(options)))
        for n in LENGTHS:
            extra = _extra(n, masked, False, options, left=int("num_tokens" in options))
            if "num_tokens" in options:
                _save(folder / f"model-{name}-{n}.safetensors", model, {"x": torch.randn(2, n, DIM)}, extra)
            else:
                ids = torch.randint(TOKENS, (2, n))
                _save(folder / f"model-{name}-{n}.safetensors", model, {}, {"x": ids, **extra}, loss=n > 1)


def check(folder: Path) -> None:
    """Weights that MindSpore saved under PyTorch's names, with what it computed from them."""
    files = sorted(folder.glob("mindspore-*.safetensors"))
    if len(files) != len(MODELS):
        raise SystemExit(f"{len(files)} files of {len(MODELS)} models in {folder}")
    for path in files:
        found = load_file(path)
        options, _, _ = split(MODELS[path.stem.removeprefix("mindspore-")])
        model = LocalTransformer(**model_options(options))
        x, out = found.pop("input.x"), found.pop("output")
        model.load_state_dict(found)
        apart = (model.eval()(x) - out).abs().max().item()
        if not apart <= TOLERANCE:
            raise SystemExit(f"{path.name}: outputs are {apart} apart")
    print(f"{len(files)} models with weights from MindSpore give the same outputs in PyTorch")


def _extra(n: int, masked: bool, biased: bool, options: dict, left: int = 1) -> dict[str, Tensor]:
    extra = {}
    if masked:
        slot = torch.arange(n)
        # The first row is padded on the left, the second on the right; a loss is of rows padded on the right.
        extra["mask"] = torch.stack([slot >= min(n - 1, 2) * left, slot < max(1, n - 3)])
    if biased:
        extra["attn_bias"] = torch.randn(bias_shape(options.get("causal", False), options.get("look_backward", 1)))
    return extra


def _disturbed(module: nn.Module) -> nn.Module:
    """Weights that are zero or one at first (norms, streams) would hide a mistake in where they go."""
    with torch.no_grad():
        for weight in module.parameters():
            weight += torch.randn_like(weight) * 0.1
    return module.eval()


def _save(
    path: Path, module: nn.Module, inputs: dict[str, Tensor], extra: dict[str, Tensor], loss: bool = False
) -> None:
    """One file: weights, inputs, and results in float64, rounded once; beside each how far float32 is from it here."""
    found = {f"weight.{name}": x for name, x in module.state_dict().items()}
    found |= {f"input.{name}": x for name, x in {**inputs, **extra}.items()}
    pull = None
    if not loss:
        pull = found["pull"] = torch.randn(module(**inputs, **extra).shape)
        if isinstance(module, LocalTransformer):
            pull /= pull.numel() ** 0.5  # about one in all, as a loss is
        if "mask" in extra:
            pull *= extra["mask"].reshape(len(pull), *[1] * (pull.ndim - 3), -1, 1)
    exact = _results(module, inputs, extra, pull, torch.float64)
    plain = _results(module, inputs, extra, pull, torch.float32)
    found |= exact | {f"rounding.{name}": (exact[name] - plain[name]).abs().max() for name in exact}
    narrow = {name: x.float() if x.is_floating_point() else x for name, x in found.items()}
    save_file({name: x.detach().contiguous() for name, x in narrow.items()}, path)


def _results(
    module: nn.Module, inputs: dict[str, Tensor], extra: dict[str, Tensor], pull: Tensor | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The output, and the gradients of its product with `pull`; without one, of the loss."""
    module = copy.deepcopy(module).to(dtype)
    inputs = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
    extra = {name: x.to(dtype) if x.is_floating_point() else x for name, x in extra.items()}
    out = module(**inputs, **extra)
    found = {"output": out}
    if "mask" in extra:
        # What stands at hidden tokens is nobody's.
        found["output"] = out.masked_fill(~extra["mask"].reshape(len(out), *[1] * (out.ndim - 3), -1, 1), 0)
    if pull is None:
        total = found["loss"] = module(**extra, return_loss=True)
    else:
        total = (out * pull.to(dtype)).sum()
    total.backward()
    found |= {f"gradient.input.{name}": x.grad for name, x in inputs.items()}
    found |= {f"gradient.weight.{name}": x for name, x in _gradients(module).items()}
    return {name: x.detach() for name, x in found.items()}


def _gradients(module: nn.Module) -> dict[str, Tensor]:
    """The gradients under the names of a checkpoint: for a moment they stand in the weights' place."""
    weights = {x: x.detach().clone() for x in module.parameters()}
    with torch.no_grad():
        for x in weights:
            x.copy_(torch.zeros_like(x) if x.grad is None else x.grad)
        found = {name: x.detach().clone() for name, x in module.state_dict().items() if not name.endswith("inv_freq")}
        for x, weight in weights.items():
            x.copy_(weight)
    return found


if __name__ == "__main__":
    action, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    {"write": write, "check": check}[action](folder)
