"""Evaluate held-out data during a run, and any data by position in the context: loss, perplexity, bits per byte."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from longspan.generation.tokenization import TOKENIZER
from longspan.models.checkpoint import find_checkpoint, load, read_committed
from longspan.models.transformer import LanguageModel
from longspan.ops.loss import IGNORE_INDEX
from longspan.train.config import TrainConfig
from longspan.train.data.batches import (
    Batch,
    BatchShape,
    derive_seed,
    evaluation_batches,
    labeled_evaluation_batches,
)
from longspan.train.data.readers import ReadOptions, find_source
from longspan.train.data.token_store import StoreSpec, TokenStore, temporary_store
from longspan.train.loggers import Record
from longspan.train.objectives import Classification, Objective, mask_tokens, wrap_model
from longspan.train.run_folder import RUN
from longspan.utils import choose_device, plot_path, read_json, write_atomically


def evaluate_held_out(
    objective: Objective, store: TokenStore, shape: BatchShape, train: TrainConfig, accelerator: Accelerator
) -> Record:
    """Evaluate the held-out data of a run.

    Returns:
        `eval_loss` (nats per target), `eval_tokens`, and accuracy or perplexity and bits per byte; empty if nothing
        is held out.
    """
    if not len(store.held_out):
        return {}
    total, count, correct = 0.0, 0, 0
    training = objective.training
    objective.eval()
    classify = isinstance(objective, Classification)
    classes = isinstance(objective, Classification) and objective.task.kind in ("classify", "multilabel", "tag")
    batches = labeled_evaluation_batches if classify else evaluation_batches
    with torch.no_grad(), accelerator.autocast():
        for number, batch in enumerate(batches(store, store.held_out, shape, train.eval_tokens)):
            if train.objective == "masked" and batch.num_targets:
                batch = mask_tokens(batch, train.mask_rate, store.vocab_size, [derive_seed(shape.process, number)])
            batch = batch.to(accelerator.device)
            total += float(objective.losses(batch).double().sum())
            count += batch.num_targets
            if isinstance(objective, Classification) and classes:
                correct += int(objective.correct(batch).sum())
    objective.train(training)
    ranks = objective.ranks_per_batch  # Each has summed its part of the losses and counted all targets.
    sums = torch.tensor([total, count / ranks, correct / ranks], dtype=torch.float64, device=accelerator.device)
    total, count, correct = (accelerator.reduce(sums) if accelerator.num_processes > 1 else sums).tolist()
    loss = total / max(count, 1)
    found = {"eval_loss": loss, "eval_tokens": int(count)}
    if classify:
        return found | ({"eval_accuracy": correct / max(count, 1)} if classes else {})
    found["eval_perplexity"] = math.exp(min(loss, 700))
    bits = store.bits_per_byte(loss)
    return found if bits is None or train.objective != "causal" else found | {"eval_bits_per_byte": bits}


def losses_by_position(
    objective: Objective, store: TokenStore, shape: BatchShape, limit: int, device: torch.device
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Evaluate the training segments of a store in windows of the context.

    Args:
        objective: The model.
        store: The data.
        shape: Sizes of a batch.
        limit: Approximate number of tokens to evaluate.
        device: Where the model is.

    Returns:
        The summed loss in nats and the number of targets at each position, both (context,).
    """
    total, count = np.zeros(shape.context), np.zeros(shape.context, np.int64)
    objective.eval()
    with torch.no_grad():
        for batch in evaluation_batches(store, store.train, shape, limit):
            losses = objective.losses(batch.to(device)).double().cpu()
            counted = batch.targets != IGNORE_INDEX
            position = _positions(batch)[counted].numpy()
            total += np.bincount(position, losses[counted].numpy(), shape.context)
            count += np.bincount(position, minlength=shape.context)
    return total, count


def _buckets(total: NDArray[np.float64], count: NDArray[np.int64], store: TokenStore) -> list[Record]:
    """Return the mean loss of positions 0, 1, 2–3, 4–7, …"""
    found, start, end = [], 0, 1
    while start < len(total):
        tokens = int(count[start:end].sum())
        if tokens:
            loss = float(total[start:end].sum()) / tokens
            last, bits = min(end, len(total)) - 1, store.bits_per_byte(loss)
            found.append({"from": start, "to": last, "tokens": tokens, "loss": loss, "bits_per_byte": bits})
        start, end = end, 2 * end
    return found


def _positions(batch: Batch) -> Tensor:
    slots = torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens)
    if batch.offsets is None:
        return slots
    offsets = batch.offsets.long()
    return slots - offsets[torch.searchsorted(offsets[1:], slots.contiguous(), right=True)]


def evaluate_checkpoint(
    model: Path,
    data: Sequence[str],
    *,
    context: int | None = None,
    batch_size: int = 4,
    max_tokens: int = 2**20,
    options: ReadOptions | None = None,
    device: str | None = None,
) -> Record:
    """Evaluate a saved causal language model on data, in total and by position in the context.

    Args:
        model: A checkpoint folder, or the folder of a run.
        data: Files, folders or globs.
        context: Window length. Default: that of the run, or 4096.
        batch_size: Windows per forward pass.
        max_tokens: Approximate number of tokens to evaluate.
        options: How to read the data.
        device: Default: "cuda" if available, else "cpu".

    Raises:
        ValueError: The model is not a causal language model, or the data does not fit it.
    """
    folder = find_checkpoint(model)
    where = choose_device(device)
    loaded = load(folder, device=where)
    if not isinstance(loaded, LanguageModel) or not loaded.config.causal:
        raise ValueError(f"{folder} is a {type(loaded).__name__}; bits per byte require a causal language model")
    context = context or run_context(model)
    tokenizer = read_committed(folder, lambda path: path / TOKENIZER if (path / TOKENIZER).exists() else None)
    options = options or ReadOptions()
    sources = tuple(find_source(text, options) for text in data)
    with temporary_store(StoreSpec(sources, (), options, tokenizer, context, 0.0)) as store:
        vocab_size = loaded.config.vocab_size or 0
        if store.vocab_size > vocab_size:
            raise ValueError(f"the data needs a vocabulary of {store.vocab_size} tokens, the model has {vocab_size}")
        if store.train.longest < 2:
            raise ValueError("the data is too small: no document has two tokens")
        context = min(context, store.train.longest - 1)
        shape = BatchShape(context, batch_size)
        total, count = losses_by_position(wrap_model(loaded, context), store, shape, max_tokens, where)
    loss = float(total.sum() / max(1, count.sum()))
    return {
        "model": str(model),
        "data": list(data),
        "sha256": store.metadata["sha256"],
        "context": context,
        "tokens": int(count.sum()),
        "loss": loss,
        "perplexity": float(torch.tensor(loss, dtype=torch.float64).exp()),
        "bits_per_byte": store.bits_per_byte(loss),
        "positions": _buckets(total, count, store),
    }


def print_evaluation(result: Record) -> None:
    """Print the losses by position as a table, and the total."""
    table = Table("position", "tokens", "loss", "bits per byte", box=None)
    for bucket in result["positions"]:
        bits = "–" if bucket["bits_per_byte"] is None else f"{bucket['bits_per_byte']:.4f}"
        position = str(bucket["from"]) if bucket["from"] == bucket["to"] else f"{bucket['from']}–{bucket['to']}"
        table.add_row(position, f"{bucket['tokens']:,}", f"{bucket['loss']:.4f}", bits)
    console = Console(highlight=False)
    console.print(table)
    bits = "" if result["bits_per_byte"] is None else f"{result['bits_per_byte']:.4f} bits per byte, "
    total = f"{bits}perplexity {result['perplexity']:.3f}"
    console.print(f"{result['tokens']:,} tokens in windows of {result['context']}: {total}")


def write_evaluation(result: Record, out: Path) -> list[Path]:
    """Write the result as JSON and a plot beside it; return both paths."""
    from longspan.train.plots import plot_positions

    out.parent.mkdir(parents=True, exist_ok=True)
    plot = plot_path(out)
    write_atomically(plot, plot_positions({Path(result["model"]).name: result["positions"]}))
    write_atomically(out, json.dumps(result, indent=1) + "\n")
    return [out, plot]


def run_settings(model: Path) -> Record:
    """Return the training settings of the run that a checkpoint belongs to; empty if there is none."""
    try:
        found = read_json(find_checkpoint(model).resolve().parent / RUN)["settings"]["train"]
    except (OSError, KeyError, TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def run_context(model: Path) -> int:
    """Return the context length of the run that a checkpoint belongs to; 4096 if there is none."""
    context = run_settings(model).get("context")
    return context if isinstance(context, int) and context > 1 else 4096
