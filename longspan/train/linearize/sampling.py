"""Text that the teacher writes itself, to train on: data-free distillation (LLM-QAT, Liu et al., 2023)."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.generation.decode import DecodeLoop
from longspan.generation.generate import prefill
from longspan.generation.sampling import Sampling, SeededSampler
from longspan.hf.native import to_language_model, why_not_native
from longspan.hf.swap import swap_attention
from longspan.models.transformer import LanguageModel
from longspan.train.data.batches import derive_seed
from longspan.train.linearize.teacher import Teacher
from longspan.train.loggers import format_duration
from longspan.utils import replace_file

TOP_P = 0.95  # without unlikely tokens, after which a small model becomes incoherent
MOST_ROWS = 2048  # sequences that are written together
LONGEST_OPENING, LONGEST_QUOTE = 48, 16  # tokens of an opening, and of one that is taken from the text
MARK = "\N{OBJECT REPLACEMENT CHARACTER}"  # where the text of a user goes in a chat template
# Beginnings of many kinds of text, {} a word. None ends in a space, which tokens of words begin with.
OPENINGS = (
    *("The", "A", "In", "In 1998,", "When", "This", "He", "She", "It was", "Once upon a time", "“", "Dear", "How to"),
    *("{} is", "{} was", "{} (born", "The {} is a", "The history of {}", "{}, a", "What is {}?\n", "{}:", "{}\n\n"),
    *("# {}\n\n", "## {}\n\n", "= {} =\n\n", " = {} = \n \n", "<h1>{}</h1>\n", "**{}**", "Title: {}\n", "<p>"),
    *("Chapter 1\n\n", "Abstract\n\n", "Introduction\n\n", "Summary:", "Q:", "-", "*", "1.", "|", ">", "```\n"),
    *("def", "class", "import", "#include <", "function", "SELECT", "{{", "//", "$", "Theorem", "Proof.", "---\n"),
)


class Openings:
    """The first tokens of sequences: of several kinds, equally often, for what one kind misses another has.

    Nothing but the token that ends documents, so that one begins; one of `OPENINGS`; one token of the vocabulary, as
    LLM-QAT has; a few tokens of the text to train on; for a chat model, the turn of a user up to what that user says
    (Magpie, Xu et al., 2024).

    Args:
        teacher: The teacher.
        text: The text to train on; may be empty.
    """

    def __init__(self, teacher: Teacher, text: NDArray[np.int64]) -> None:
        tokenizer = teacher.tokenizer
        self._text, self._tokenizer = text, tokenizer
        start = tokenizer.bos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        self._start = [] if start is None else [int(start)]
        kinds: list[Callable[[np.random.Generator], list[int]]]
        kinds = [self._of_list, self._of_vocabulary]
        if len(text):
            kinds.append(self._of_text)
        if self._start:
            kinds.append(lambda _: self._start)
        chat = self._chat()
        if chat:
            kinds.append(lambda _: chat)
        self._kinds = kinds

    def draw(self, seed: int) -> list[int]:
        """Return the opening of a sequence."""
        generator = np.random.default_rng(seed)
        return self._kinds[generator.integers(len(self._kinds))](generator)[:LONGEST_OPENING]

    def _of_list(self, generator: np.random.Generator) -> list[int]:
        template = OPENINGS[generator.integers(len(OPENINGS))]
        word = self._tokenizer.decode([int(generator.integers(len(self._tokenizer)))]).strip()
        return self._start + self._encoded(template.format(word))

    def _of_vocabulary(self, generator: np.random.Generator) -> list[int]:
        return [*self._start, int(generator.integers(len(self._tokenizer)))]

    def _of_text(self, generator: np.random.Generator) -> list[int]:
        number = int(generator.integers(1, LONGEST_QUOTE + 1))
        first = int(generator.integers(max(1, len(self._text) - number)))
        return [int(token) for token in self._text[first : first + number]]

    def _encoded(self, words: str) -> list[int]:
        return list(self._tokenizer(words, add_special_tokens=False)["input_ids"])

    def _chat(self) -> list[int]:
        if not getattr(self._tokenizer, "chat_template", None):
            return []
        turn = [{"role": "user", "content": MARK}]
        words = self._tokenizer.apply_chat_template(turn, tokenize=False)
        found = self._encoded(words[: words.find(MARK)])
        return found if len(found) <= LONGEST_OPENING else []


def sample_text(
    teacher: Teacher,
    text: NDArray[np.int64],
    folder: Path,
    *,
    tokens: int,
    context: int,
    seed: int,
    device: torch.device,
    memory_gb: float,
    seconds: float,
    notify: Callable[[str], None],
) -> tuple[NDArray[np.int64], float]:
    """Return text that the teacher wrote, sampled from its distribution (top-p), and the time that this took.

    Batches are written to `folder`; those that are there already are read.

    Args:
        teacher: The teacher, a decoder, which stays as it is.
        text: Text to take some of the openings from.
        folder: Where the batches are.
        tokens: How many to write, rounded up to whole sequences.
        context: Tokens of a sequence.
        seed: Of openings and samples.
        device: Where to run.
        memory_gb: Budget for the caches of the sequences that are written together.
        seconds: After this time no further batch is begun.
        notify: Called with a message after each batch.

    Returns:
        (N,) the sequences one after another, and the seconds that were spent, also in earlier runs.
    """
    openings, writer = Openings(teacher, text), _Writer(teacher, context, device)
    needed, rows = -(-tokens // context), writer.rows(memory_gb)
    parts: list[NDArray[np.int64]] = []
    spent, first = 0.0, 0
    while first < needed and (spent < seconds or not parts):
        path, number = folder / f"{first:06d}.npz", min(rows, needed - first)
        if not path.exists():
            begun = time.perf_counter()
            seeds = [derive_seed(seed, index) for index in range(first, first + number)]
            written = writer.write([openings.draw(x)[: context // 2] for x in seeds], seeds)
            _save(path, written, time.perf_counter() - begun)
        with np.load(path) as found:
            parts.append(found["tokens"].astype(np.int64))
            spent += float(found["seconds"])
        first += len(parts[-1])
        notify(_progress(first * context, needed * context, spent))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return np.concatenate([part.reshape(-1) for part in parts]), spent


def _progress(done: int, wanted: int, spent: float) -> str:
    rate = done / max(spent, 1e-9)
    left = format_duration((wanted - done) / rate)
    return f"sample: {done:,} of {wanted:,} tokens, {rate:,.0f} tokens/s, ETA {left}"


def _save(path: Path, tokens: NDArray[np.int64], seconds: float) -> None:
    """Write a batch, complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as partial, open(partial, "wb") as file:
        np.savez(file, tokens=tokens.astype(np.uint32), seconds=np.float64(seconds))


class _Writer:
    """Samples sequences of `context` tokens from a teacher, in the fastest form that it has."""

    def __init__(self, teacher: Teacher, context: int, device: torch.device) -> None:
        self._teacher, self._context, self._device = teacher, context, device
        self._model: Any = None

    def rows(self, memory_gb: float) -> int:
        """Return how many sequences fit into memory with two copies of their keys and values, and their logits."""
        config = self._teacher.model.config.get_text_config()
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = 4 if self._device.type == "cpu" else 2
        each = 4 * heads * dim * config.num_hidden_layers * self._context * size + 16 * config.vocab_size
        return max(1, min(MOST_ROWS, int(memory_gb * 2**30 / each)))

    def write(self, openings: Sequence[Sequence[int]], seeds: Sequence[int]) -> NDArray[np.int64]:
        """Return a sequence for each opening and seed: of `context` tokens, a few less where learned positions end."""
        if self._model is None:
            self._model = self._fastest()
        shortest, longest = min(map(len, openings)), max(map(len, openings))
        limit = getattr(self._teacher.model.config, "n_positions", None) or self._context + LONGEST_OPENING
        number = min(self._context - shortest, limit - longest)
        write = self._decode if isinstance(self._model, LanguageModel) else self._generate
        new = write(openings, seeds, number).cpu().numpy()
        rows = [np.concatenate([np.asarray(x), y])[: shortest + number] for x, y in zip(openings, new, strict=True)]
        return np.stack(rows).astype(np.int64)

    def _fastest(self) -> Any:
        """Return a copy: a longspan model where there is such a form, whose windows cover a whole sequence."""
        model, dtype = self._teacher.model, torch.float32 if self._device.type == "cpu" else torch.bfloat16
        if why_not_native(model) is not None:
            return copy.deepcopy(model).to(self._device, dtype)
        windows = swap_attention(copy.deepcopy(model), {"mechanism": "local", "window": self._context})
        return to_language_model(windows).to(self._device, dtype)

    def _decode(self, openings: Sequence[Sequence[int]], seeds: Sequence[int], number: int) -> Tensor:
        session = prefill(self._model, openings)
        sampler = SeededSampler(Sampling(top_p=TOP_P), session.recent, (), seeds)
        loop = DecodeLoop(self._model, session.state.reserve(number), session.logits, sampler)
        del session  # The loop has a copy.
        return torch.stack([loop.step().clone() for _ in range(number)], 1)

    @torch.no_grad()
    def _generate(self, openings: Sequence[Sequence[int]], seeds: Sequence[int], number: int) -> Tensor:
        from transformers import GenerationConfig

        longest = max(map(len, openings))
        tokens = torch.tensor([[0] * (longest - len(x)) + list(x) for x in openings], device=self._device)
        mask = torch.tensor([[0] * (longest - len(x)) + [1] * len(x) for x in openings], device=self._device)
        self._model.generation_config = GenerationConfig(
            do_sample=True, top_k=0, top_p=TOP_P, max_new_tokens=number, pad_token_id=0, eos_token_id=None
        )
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seeds[0])
            found: Tensor = self._model.generate(tokens, attention_mask=mask)
        return found[:, longest:]
