"""The command `longspan generate`: continue a text."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from tyro.conf import UseAppendAction

from longspan.cli import worded
from longspan.cli.arguments import check_at_least, parse
from longspan.generation.generate import Stream, prefill, stream
from longspan.generation.sampling import Sampling
from longspan.generation.session import Session
from longspan.generation.tokenization import TextCodec
from longspan.models.adapter import ADAPTER_CONFIG
from longspan.models.checkpoint import CONFIG, find_checkpoint, load, read_committed
from longspan.models.transformer import LanguageModel
from longspan.utils import choose_device, format_bytes, printable, read_json

MAX_PROMPT = 1 << 28  # bytes


@dataclass(frozen=True)
class GenerateFlags:
    """Generate text with a saved model and stream it; speed and state size are printed to standard error."""

    model: Path
    """Checkpoint folder, or the folder of a run."""
    prompt: str | None = None
    """Text to continue; standard input by default."""
    prompt_file: Path | None = None
    """File with the text to continue."""
    batch: int = 1
    """Number of continuations of the prompt, each with its own seed."""
    max_tokens: int = 256
    """Maximum number of new tokens."""
    temperature: float = 0.8
    """Sampling temperature; 0 selects the most likely token."""
    top_k: int | None = None
    """Sample from the k most likely tokens."""
    top_p: float | None = None
    """Sample from the most likely tokens with this total probability."""
    min_p: float | None = None
    """Sample from tokens at least this fraction as likely as the most likely one."""
    repetition_penalty: float = 1.0
    """Penalty on tokens that have occurred; 1 disables."""
    stop: UseAppendAction[tuple[str, ...]] = ()
    """Stop after this text."""
    seed: int = 0
    """Seed of the sampling."""
    state: Path | None = None
    """File to save the session to at the end."""
    resume: Path | None = None
    """Saved session to continue, before the prompt if there is one."""
    device: str | None = None
    """cpu or cuda; cuda by default if there is a GPU."""

    def __post_init__(self) -> None:
        check_at_least(1, batch=self.batch)
        check_at_least(0, max_tokens=self.max_tokens)
        if self.prompt is not None and self.prompt_file is not None:
            raise ValueError("--prompt and --prompt-file exclude each other: give one of them")
        if "" in self.stop:
            raise ValueError("--stop is empty, which every text ends with: give the text to stop after")
        if self.state is not None and (self.state.is_dir() or not self.state.parent.is_dir()):
            problem = "is a folder" if self.state.is_dir() else f"there is no folder {self.state.parent}"
            raise ValueError(f"--state {self.state}: {problem}; give a file in an existing folder")


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    flags = parse(GenerateFlags, argv, "generate")
    sampling = Sampling(flags.temperature, flags.top_k, flags.top_p, flags.min_p, flags.repetition_penalty)
    model = load_model(flags.model, choose_device(flags.device))
    codec = load_codec(flags.model, model)
    session = _prefill(flags, model, codec)
    _check_batch(flags.batch, session)
    rows = torch.zeros(flags.batch, dtype=torch.int64)
    steps = stream(model, session.select(rows), flags.max_tokens, sampling=sampling, seed=flags.seed)
    start = time.perf_counter()
    number = _print(steps, codec, flags.batch, flags.stop)
    elapsed = max(time.perf_counter() - start, 1e-9)
    print(
        f"\n{number} tokens in {elapsed:.1f} s, {number / elapsed:.0f} tokens/s; "
        f"state of one sequence: {format_bytes(model.state_size())}",
        file=sys.stderr,
    )
    if flags.state is not None:
        steps.session.save(flags.state)
        state = printable(str(flags.state))
        print(f"session saved to {state}; continue with --resume {state}", file=sys.stderr)


def load_model(folder: Path, device: torch.device | None = None) -> LanguageModel:
    """Load the language model of a checkpoint or run folder, or of a decoder that transformers wrote.

    The adapters that `longspan linearize --adapters separate` writes beside the checkpoint of a run are merged.

    Raises:
        ValueError: If there is none.
    """
    try:
        found = find_checkpoint(folder)
        if is_decoder(found):
            adapter = folder / "adapter"
            return _load_decoder(found, device, adapter if (adapter / ADAPTER_CONFIG).is_file() else None)
        model = load(found, device=device)
    except OSError as error:
        raise ValueError(worded(error)) from None
    if not isinstance(model, LanguageModel):
        raise ValueError(f"{folder} contains a {type(model).__name__}; this command needs a LanguageModel")
    return model.eval()


def is_decoder(folder: Path) -> bool:
    """Return whether a folder is of another model than longspan's, such as one that `swap_attention` changed."""
    path = folder / CONFIG
    described = read_json(path) if path.is_file() else {}
    return isinstance(described, dict) and described.get("model_type", "longspan") != "longspan"


def _load_decoder(folder: Path, device: torch.device | None, adapter: Path | None) -> LanguageModel:
    try:
        from transformers import AutoModelForCausalLM

        import longspan.hf  # noqa: F401  registers swapped models
        from longspan.hf.native import to_language_model
    except ImportError as error:
        raise ValueError(
            f"{folder} is a folder of transformers: pip install 'longspan[hf]' to open it ({error})"
        ) from None
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return to_language_model(model).to(device)


def _check_batch(batch: int, session: Session) -> None:
    """Raise ValueError if the states of a batch exceed the memory of the machine."""
    tensors = [*session.state.tensors().values(), session.logits]
    needed = sum(x.numel() * x.element_size() for x in tensors) // len(session.logits)
    if session.logits.is_cuda:
        memory = torch.cuda.mem_get_info(session.logits.device)[1]
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if batch * needed > memory:
        raise ValueError(
            f"--batch {batch} needs {batch * needed / 2**30:,.0f} GiB for its states, and this machine has "
            f"{memory / 2**30:,.0f}: use at most --batch {memory // (2 * needed)}"
        )


def load_codec(folder: Path, model: LanguageModel) -> TextCodec:
    """Load what encodes the text of a checkpoint or run folder.

    Raises:
        ValueError: If there is nothing that fits the model.
    """
    folder = find_checkpoint(folder)
    codec = read_committed(folder, TextCodec.from_checkpoint)
    if not codec.fits(model.config.vocab_size):
        raise ValueError(
            f"this model has {model.config.vocab_size} tokens: text needs 256 of them, as bytes, or the model's own "
            f"tokenizer.json in {folder}; use longspan.generate for tokens that are not text"
        )
    return codec


def _prefill(flags: GenerateFlags, model: LanguageModel, codec: TextCodec) -> Session:
    try:
        prompt = codec.encode(_read_prompt(flags))
        if flags.resume is not None:
            session = Session.load(flags.resume, model)
            return session.extend(model, prompt) if prompt else session
    except OSError as error:
        raise ValueError(worded(error)) from None
    if not prompt:
        raise ValueError("there is nothing to continue: give --prompt, --prompt-file or text on standard input")
    return prefill(model, prompt, max_tokens=flags.max_tokens)


def _read_prompt(flags: GenerateFlags) -> bytes:
    if flags.prompt is not None:
        return flags.prompt.encode(errors="surrogateescape")  # The bytes of the command line.
    if flags.prompt_file is None and flags.resume is not None:
        return b""
    with nullcontext(sys.stdin.buffer) if flags.prompt_file is None else open(flags.prompt_file, "rb") as file:
        prompt = file.read(MAX_PROMPT + 1)
    if len(prompt) > MAX_PROMPT:
        raise ValueError(f"the prompt is longer than {MAX_PROMPT:,} bytes")
    return prompt


def _print(steps: Stream, codec: TextCodec, batch: int, endings: Sequence[str]) -> int:
    """Stream the first sequence, then print the others; an interrupt stops generation and keeps the text."""
    decoders = [codec.stream_decoder() for _ in range(batch)]
    active = [True] * batch
    number = 0
    try:
        for tokens, _ in steps:
            number += sum(active)
            for row, token in enumerate(tokens):
                if active[row]:
                    piece, text = decoders[row].push(token), decoders[row].text
                    active[row] = not any(ending in text[-len(piece) - len(ending) :] for ending in endings)
                    if row == 0:
                        _write(piece)
            if not any(active):
                break
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
    _write(decoders[0].flush())
    for i, other in enumerate(decoders[1:], 2):
        other.flush()
        _write(f"\n\n--- {i} of {batch} ---\n{other.text}")
    return number


def _write(text: str) -> None:
    """Write generated text: as it is to a file or pipe, without control characters to a terminal."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
