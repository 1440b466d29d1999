"""`longspan eval --data`: a saved model's bits per byte, and whether it uses what is far back in its context."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from longspan.generation.tokenization import TOKENIZER
from longspan.models.checkpoint import CONFIG, load
from longspan.models.transformer import LanguageModel
from longspan.train.data.batches import Shape
from longspan.train.data.readers import Reading, find_source
from longspan.train.data.token_store import Plan, open_store
from longspan.train.evaluation import by_position
from longspan.train.objectives import wrap
from longspan.train.report.plots import positions
from longspan.train.run_checkpoint import FOLDER
from longspan.train.setup import RUN

Record = dict[str, Any]


def score(
    model: Path,
    data: Sequence[str],
    context: int | None,
    sizes: tuple[int, int],
    extensions: tuple[str, ...],
    device: str | None,
) -> Record:
    """The figures of a model over data. sizes: rows in a batch, and about how many tokens to score."""
    folder = model / FOLDER if not (model / CONFIG).exists() and (model / FOLDER).exists() else model
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    built = load(folder, device=where)
    if not isinstance(built, LanguageModel) or not built.config.causal:
        raise ValueError(f"{folder} holds a {type(built).__name__}; bits per byte are of causal language models")
    context = context or _context(folder)
    tokenizer = folder / TOKENIZER if (folder / TOKENIZER).exists() else None
    reading = Reading(extensions)
    with tempfile.TemporaryDirectory() as held:
        sources = tuple(find_source(text, reading) for text in data)
        store = open_store(Path(held), Plan(sources, (), reading, tokenizer, context, 0.0))
        if store.vocab_size > (built.config.vocab_size or 0):
            raise ValueError(
                f"the data has tokens up to {store.vocab_size - 1}, the model knows {built.config.vocab_size}"
            )
        if store.train.longest < 2:
            raise ValueError("the data is too small: no document has two tokens")
        context = min(context, store.train.longest - 1)
        shape = Shape(context, sizes[0])
        found = by_position(wrap(built, context), store, store.train, shape, sizes[1], where)
    return {
        "model": str(model),
        "data": list(data),
        "sha256": store.about["sha256"],
        "context": context,
        "tokens": int(found.count.sum()),
        "loss": found.loss,
        "perplexity": float(torch.tensor(found.loss, dtype=torch.float64).exp()),
        "bits_per_byte": found.bits_per_byte,
        "positions": found.buckets(),
    }


def print_scores(found: Record) -> None:
    """A table of positions, and the whole."""
    table = Table("position", "tokens", "loss", "bits per byte", box=None)
    for bucket in found["positions"]:
        bits = "–" if bucket["bits_per_byte"] is None else f"{bucket['bits_per_byte']:.4f}"
        where = str(bucket["from"]) if bucket["from"] == bucket["to"] else f"{bucket['from']}–{bucket['to']}"
        table.add_row(where, f"{bucket['tokens']:,}", f"{bucket['loss']:.4f}", bits)
    console = Console(highlight=False)
    console.print(table)
    bits = "" if found["bits_per_byte"] is None else f"{found['bits_per_byte']:.4f} bits per byte, "
    console.print(
        f"{found['tokens']:,} tokens in windows of {found['context']}: {bits}perplexity {found['perplexity']:.3f}"
    )


def write_scores(found: Record, out: Path) -> list[Path]:
    """The figures, and a plot of them by position."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    plot = out.with_suffix(".png")
    plot.write_bytes(positions({Path(found["model"]).name: found["positions"]}))
    return [out, plot]


def _context(folder: Path) -> int:
    """The context of the run a checkpoint belongs to; 4096 if nobody knows."""
    try:
        about = json.loads((folder.resolve().parent / RUN).read_text(encoding="utf-8"))
        return int(about["settings"]["train"]["context"])
    except (FileNotFoundError, KeyError, ValueError):
        return 4096
