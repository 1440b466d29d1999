"""Commands around a saved model: `longspan info` and `longspan generate`."""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from rich.console import Console
from rich.table import Table

from longspan import __version__
from longspan.generation.generate import Stream, prefill, stream
from longspan.generation.sampling import Sampling
from longspan.generation.session import Session
from longspan.generation.tokenization import TextCodec
from longspan.mechanisms import mechanism_options, mechanisms
from longspan.models.checkpoint import load
from longspan.models.transformer import LanguageModel
from longspan.ops.common.dispatch import KERNELS, why_no_triton


def info(
    model: Annotated[Path | None, typer.Option(help="A checkpoint folder to describe too.")] = None,
) -> None:
    """Versions, devices, whether the GPU kernels can be used, mechanisms with their options, and a model's size."""
    console = Console()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    console.print(f"longspan {__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    console.print(f"devices: cpu ({torch.get_num_threads()} threads){''.join(f', {name}' for name in gpus)}")
    missing = why_no_triton()
    console.print(f"Triton kernels for {KERNELS}: {'usable' if missing is None else f'not used, {missing}'}")
    table = Table("mechanism", "causal", "cross", "options and defaults")
    for name, cls in mechanisms().items():
        options = ", ".join(f"{option}={default!r}" for option, default in mechanism_options(name).items())
        table.add_row(name, "yes" if cls.supports_causal else "no", "yes" if cls.supports_cross else "no", options)
    console.print(table)
    if model is not None:
        built = _open(model)
        console.print(f"{model}: {type(built).__name__} with {_parameters(built):,} parameters")
        if built.config.causal:
            console.print(f"state of one sequence: {_size(built.state_size())}")


def generate(
    model: Annotated[Path, typer.Option(help="A checkpoint folder.")],
    prompt: Annotated[str | None, typer.Option(help="The text to continue; without it, standard input.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file to continue.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Continuations of the one prompt, each from its own seed.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=0)] = 256,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option()] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    repetition_penalty: Annotated[float, typer.Option()] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="Text at which to end; may be given several times.")] = None,
    seed: Annotated[int, typer.Option()] = 0,
    state: Annotated[Path | None, typer.Option(help="Where to save the memory at the end.")] = None,
    resume: Annotated[Path | None, typer.Option(help="A saved memory to go on from, before the prompt if any.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default cuda where there is one.")] = None,
) -> None:
    """Streams text as it comes; tokens per second and the size of the memory go to standard error."""
    try:
        sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
        built = _open(model, device or ("cuda" if torch.cuda.is_available() else "cpu"))
        text = _text(model, built)
        memory = _read(built, text.encode(_prompt(prompt, prompt_file, resume)), resume, max_tokens)
        steps = stream(built, memory.select([0] * batch), max_tokens, sampling=sampling, seed=seed)
    except (ValueError, OSError) as error:
        _fail(str(error))
    began = time.perf_counter()
    number = _print(steps, text, batch, stop or [])
    elapsed = max(time.perf_counter() - began, 1e-9)
    typer.echo(
        f"\n{number} tokens in {elapsed:.1f} s, {number / elapsed:.0f} a second; "
        f"memory of a sequence {_size(built.state_size())}",
        err=True,
    )
    if state is not None:
        steps.session.save(state)
        typer.echo(f"memory saved to {state}; go on with --resume {state}", err=True)


def _prompt(prompt: str | None, prompt_file: Path | None, resume: Path | None) -> bytes:
    if prompt is not None and prompt_file is not None:
        raise ValueError("--prompt and --prompt-file exclude each other: give one of them")
    if prompt is not None:
        return prompt.encode()
    if prompt_file is not None:
        return prompt_file.read_bytes()
    return b"" if resume is not None else sys.stdin.buffer.read()


def _text(folder: Path, model: LanguageModel) -> TextCodec:
    text = TextCodec.from_checkpoint(_checkpoint(folder))
    if not text.fits(model.config.vocab_size):
        raise ValueError(
            f"this model has {model.config.vocab_size} tokens: text needs 256 of them, as bytes, or the model's own "
            f"tokenizer.json in {_checkpoint(folder)}; use longspan.generate with tokens that are no text"
        )
    return text


def _read(model: LanguageModel, prompt: list[int], resume: Path | None, max_tokens: int) -> Session:
    if resume is None:
        if not prompt:
            raise ValueError("there is nothing to continue: give --prompt, --prompt-file or text on standard input")
        return prefill(model, prompt, max_tokens=max_tokens)
    memory = Session.load(resume, model)
    return memory.extend(model, prompt) if prompt else memory


def _print(steps: Stream, text: TextCodec, batch: int, endings: list[str]) -> int:
    """The first row as it comes, the others afterwards; an interrupt ends it with what there is."""
    rows = [text.stream_decoder() for _ in range(batch)]
    live = [True] * batch
    number = 0
    try:
        for tokens, _ in steps:
            number += sum(live)
            for row, token in enumerate(tokens):
                if live[row]:
                    piece, said = rows[row].push(token), rows[row].text
                    live[row] = not any(ending in said[-len(piece) - len(ending) :] for ending in endings)
                    if row == 0:
                        sys.stdout.write(piece)
                        sys.stdout.flush()
            if not any(live):
                break
    except KeyboardInterrupt:
        typer.echo("\ninterrupted", err=True)
    sys.stdout.write(rows[0].flush())
    for i, other in enumerate(rows[1:], 2):
        other.flush()
        sys.stdout.write(f"\n\n--- {i} of {batch} ---\n{other.text}")
    sys.stdout.flush()
    return number


def _checkpoint(folder: Path) -> Path:
    run = folder / "checkpoint"  # where `longspan train` puts it
    return run if run.is_dir() else folder


def _open(folder: Path, device: str = "cpu") -> LanguageModel:
    try:
        model = load(_checkpoint(folder), device=device)
    except (ValueError, OSError) as error:
        _fail(str(error))
    if not isinstance(model, LanguageModel):
        _fail(f"{folder} holds a {type(model).__name__}; this command needs a LanguageModel")
    return model.eval()


def _parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _size(number: int) -> str:
    return f"{number / 1024:,.1f} KiB" if number < 1024**2 else f"{number / 1024**2:,.1f} MiB"


def _fail(message: str) -> NoReturn:
    typer.echo(f"longspan: {message}", err=True)
    raise typer.Exit(2)
