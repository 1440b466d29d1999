"""Graphs of a language model for other runtimes: torch.export programs and ONNX files with explicit states."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from longspan.models.residual import StackState
from longspan.models.transformer import LanguageModel
from longspan.utils import check_integer

EXTEND, STEP, STATE, DESCRIPTION = "extend.onnx", "step.onnx", "state.safetensors", "graphs.json"


class ExtendGraph(nn.Module):
    """`LanguageModel.extend`: tokens (B, C), key_mask (B, C) and a state to logits (B, C, V) and the state after."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, key_mask: Tensor, state: StackState) -> tuple[Tensor, StackState]:
        return self.model.extend(tokens, state, key_mask=key_mask)


class StepGraph(nn.Module):
    """One token (B,) and a state to logits (B, V) and the state after."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, state: StackState) -> tuple[Tensor, StackState]:
        logits, state = self.model.extend(tokens[:, None], state)
        return logits[:, 0], state


def export_programs(
    model: LanguageModel, *, chunk: int, batch_size: int = 1, max_length: int | None = None
) -> tuple[Any, Any]:
    """Return `torch.export` programs of `ExtendGraph` and `StepGraph`, in PyTorch's own operations.

    Args:
        model: A causal language model on the CPU.
        chunk: Number of tokens C that `ExtendGraph` reads; key_mask hides the end of a shorter chunk.
        batch_size: B.
        max_length: Number of tokens that the state can hold; needed by `softmax`, whose state has a slot for each.

    Raises:
        ValueError: The model is not a causal language model, or a size is below 1.
    """
    if not isinstance(model, LanguageModel) or not model.config.causal:
        raise ValueError(f"only causal language models are exported with their state, got a {type(model).__name__}")
    check_integer("chunk", chunk, 1)
    check_integer("batch_size", batch_size, 1)
    tokens = torch.zeros(batch_size, chunk, dtype=torch.int64)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            state = model.new_state(batch_size, max_length=max_length)
            extend = torch.export.export(ExtendGraph(model), (tokens, torch.ones_like(tokens, dtype=torch.bool), state))
            state = model.new_state(batch_size, max_length=max_length)
            step = torch.export.export(StepGraph(model), (tokens[:, 0].clone(), state))
    finally:
        model.train(training)
    return extend, step


def write_onnx(
    model: LanguageModel, folder: Path, *, chunk: int, batch_size: int = 1, max_length: int | None = None
) -> None:
    """Write `extend.onnx` and `step.onnx`, the empty state, and the sizes.

    Inputs are tokens, for `extend.onnx` key_mask, and the tensors of the state as `state.<name>`; outputs are logits
    and `new_state.<name>`. `state.safetensors` has the empty state.

    Args:
        model: As for `export_programs`.
        folder: An existing folder.
        chunk: As for `export_programs`.
        batch_size: As for `export_programs`.
        max_length: As for `export_programs`.

    Raises:
        ValueError: As for `export_programs`, or a package is missing.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ValueError(f"ONNX graphs require {error.name}: pip install 'longspan[export]'") from None
    with _quiet():
        programs = export_programs(model, chunk=chunk, batch_size=batch_size, max_length=max_length)
    empty = model.new_state(batch_size, max_length=max_length).tensors()
    states = [f"state.{name}" for name in empty]
    outputs = ["logits", *(f"new_{name}" for name in states)]
    for file, program, inputs in zip((EXTEND, STEP), programs, (["tokens", "key_mask"], ["tokens"]), strict=True):
        with _quiet():
            graph = torch.onnx.export(
                program, dynamo=True, verbose=False, input_names=[*inputs, *states], output_names=outputs
            )
        assert graph is not None
        for output, name in zip(graph.model.graph.outputs, outputs, strict=True):
            output.name = name  # PyTorch 2.10 names equal results after the last of them.
        graph.save(folder / file)
    save_file({name: x.contiguous().clone() for name, x in empty.items()}, folder / STATE)
    sizes = {"batch_size": batch_size, "chunk": chunk, "max_length": max_length, "vocab_size": model.config.vocab_size}
    (folder / DESCRIPTION).write_text(json.dumps(sizes, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what torch.onnx says about packages that are not needed, and its use of deprecated parts of PyTorch."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
