"""Generation: a prompt is read in parallel chunks, then tokens come one at a time from a state of constant size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from longspan.generation.decode import DecodeLoop
from longspan.generation.decode import Sampling as Sampling
from longspan.generation.session import Session
from longspan.models.transformer import EncoderDecoder, LanguageModel

Prompt = Tensor | Sequence[int] | Sequence[Sequence[int]]
_BLOCK = 1024  # random numbers drawn at a time
_AHEAD = 32  # steps before the device is asked whether a row has ended


@dataclass
class Generated:
    """What came after each prompt: tokens, without the prompt or the stop token, and their log-probabilities."""

    tokens: list[list[int]] = field(default_factory=list)
    log_probabilities: list[list[float]] = field(default_factory=list)


def generate(
    model: LanguageModel | EncoderDecoder,
    prompt: Prompt | Session,
    max_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop: Sequence[int] = (),
    stop_strings: Sequence[bytes | str] = (),
    seed: int | Sequence[int] = 0,
    source: Tensor | None = None,
) -> Generated:
    """Up to max_tokens after each prompt; a row ends at a token of `stop` or when its bytes end with a stop string.

    prompt: tokens (or bytes), of one sequence or of several that may differ in length, or what `prefill` gave.
    seed: row i draws from seed + i, or from the i-th of several, so that it does not matter with whom it is batched.
    source: what an `EncoderDecoder` reads.
    """
    endings = [s.encode() if isinstance(s, str) else bytes(s) for s in stop_strings]
    steps = stream(model, prompt, max_tokens, sampling=sampling, stop=stop, seed=seed, source=source)
    rows = len(prompt.logits) if isinstance(prompt, Session) else len(_rows(prompt))
    result = Generated([[] for _ in range(rows)], [[] for _ in range(rows)])
    live = [True] * rows
    # Where nothing stops a row the device is asked once; otherwise seldom, and a few tokens are made in vain.
    near = next(model.parameters()).device.type == "cpu"
    ahead = 1 if near else _AHEAD if stop or endings else max_tokens
    for begun in range(0, max_tokens, max(ahead, 1)):
        for tokens, logs in zip(*steps.take(min(ahead, max_tokens - begun)), strict=True):
            for row, (token, log) in enumerate(zip(tokens, logs, strict=True)):
                live[row] = live[row] and token >= 0
                if live[row]:
                    result.tokens[row].append(token)
                    result.log_probabilities[row].append(log)
                    live[row] = not any(result.tokens[row][-len(e) :] == list(e) for e in endings)
        if not any(live):
            break
    return result


def stream(
    model: LanguageModel | EncoderDecoder,
    prompt: Prompt | Session,
    max_tokens: int | None = None,
    *,
    sampling: Sampling | None = None,
    stop: Sequence[int] = (),
    seed: int | Sequence[int] = 0,
    source: Tensor | None = None,
) -> Stream:
    """Tokens as they come: an iterator of steps. max_tokens: None goes on for ever. The rest is as in `generate`."""
    sampling = Sampling() if sampling is None else sampling
    if not isinstance(prompt, Session):
        prompt = prefill(model, prompt, max_tokens=max_tokens, source=source, window=sampling.repetition_window)
    return Stream(model, prompt, max_tokens, sampling, stop, seed)


class Stream:
    """An iterator of (tokens, log-probabilities): one for each row at each step, −1 once a row has ended.

    On a GPU a step is one replayed CUDA graph, the choice of its token included.
    """

    def __init__(
        self,
        model: LanguageModel | EncoderDecoder,
        memory: Session,
        max_tokens: int | None,
        sampling: Sampling,
        stop: Sequence[int],
        seed: int | Sequence[int],
    ) -> None:
        rows = len(memory.logits)
        seeds = [seed + row for row in range(rows)] if isinstance(seed, int) else list(seed)
        if len(seeds) != rows:
            raise ValueError(f"seed must be one number or one for each of {rows} rows, got {len(seeds)}")
        self._model = model.decoder if isinstance(model, EncoderDecoder) else model
        self._loop = DecodeLoop(self._model, memory, sampling, stop)
        self._max_tokens, self._steps, self._over = max_tokens, 0, False
        self._generators = [torch.Generator().manual_seed(s) for s in seeds]

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> tuple[list[int], list[float]]:
        if self._steps == self._max_tokens or self._over:
            raise StopIteration
        tokens, logs = self.take(1)
        self._over = all(token < 0 for token in tokens[0])
        return tokens[0], logs[0]

    @torch.inference_mode()
    def take(self, number: int) -> tuple[list[list[int]], list[list[float]]]:
        """As many steps, tokens and log-probabilities of each row at each: the device is waited for once."""
        number = number if self._max_tokens is None else min(number, self._max_tokens - self._steps)
        taken = []
        with _evaluating(self._model), self._loop.alone():
            for _ in range(number):
                if self._steps % _BLOCK == 0:
                    self._loop.fill([torch.rand(_BLOCK, generator=g, dtype=torch.float64) for g in self._generators])
                taken.append(self._loop.step())
                self._steps += 1
        found = torch.stack(taken).tolist()  # (number, 2, B) float64, exact for any token
        return [[int(token) for token in tokens] for tokens, _ in found], [logs for _, logs in found]

    @property
    def memory(self) -> Session:
        """What was read and said so far, from which a later stream can go on."""
        with torch.no_grad(), _evaluating(self._model):
            return self._loop.memory()


@torch.no_grad()
def prefill(
    model: LanguageModel | EncoderDecoder,
    prompt: Prompt,
    *,
    max_tokens: int | None = None,
    chunk: int | None = None,
    source: Tensor | None = None,
    window: int = 64,
) -> Session:
    """A prompt read in chunks of so many tokens, in memory that does not grow with it.

    chunk: 4096 unless given; on a GPU, which waits for the next launch rather than for numbers, 65536 over all rows.
    max_tokens: how many will follow; with it, positions beyond the model's reach are refused now, not later.
    """
    rows = _rows(prompt)
    if min(len(row) for row in rows) == 0:
        raise ValueError("every prompt must have at least one token: there is nothing to continue")
    decoder = model.decoder if isinstance(model, EncoderDecoder) else model
    if not decoder.config.causal:
        raise ValueError("only a causal model can generate: build it with causal=True")
    if chunk is None:
        on_gpu = next(model.parameters()).device.type == "cuda"
        chunk = max(1024, 65536 // len(rows)) if on_gpu else 4096
    with _evaluating(model):
        return _prefill(model, decoder, rows, max_tokens, chunk, source, window)


def _prefill(
    model: LanguageModel | EncoderDecoder,
    decoder: LanguageModel,
    rows: list[Tensor],
    max_tokens: int | None,
    chunk: int,
    source: Tensor | None,
    window: int,
) -> Session:
    device = next(model.parameters()).device
    lengths = torch.tensor([len(row) for row in rows], device=device)
    longest = int(lengths.max())
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64, device=device)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row.to(device)
    reach = None if max_tokens is None else longest + max_tokens
    if isinstance(model, EncoderDecoder):
        if source is None:
            raise ValueError("an EncoderDecoder generates from a source: pass source=, tokens of shape (B, S)")
        context, mask = model.encode(source)
        state = decoder.new_state(len(rows), max_length=reach, context=context, context_mask=mask)
    else:
        if source is not None:
            raise ValueError("source is for an EncoderDecoder; a language model has only a prompt")
        state = decoder.new_state(len(rows), max_length=reach)
    last = tokens.new_zeros(len(rows), decoder.config.dim, dtype=next(model.parameters()).dtype)
    ragged = bool((lengths < longest).any())
    for start in range(0, longest, chunk):
        piece = tokens[:, start : start + chunk]
        seen = torch.arange(start, start + piece.shape[1], device=device) < lengths[:, None] if ragged else None
        hidden, state = decoder.extend_hidden(piece, state, key_mask=seen)
        index = (lengths - 1 - start).clamp(0, piece.shape[1] - 1)
        here = ((lengths - 1 >= start) & (lengths - 1 < start + piece.shape[1]))[:, None]
        last = torch.where(here, hidden[torch.arange(len(rows), device=device), index], last)
    place = lengths[:, None] - window + torch.arange(window, device=device)
    recent = tokens.gather(1, place.clamp(min=0)).masked_fill(place < 0, -1)
    return Session(state, decoder.logits(last[:, None])[:, 0], recent)


@torch.no_grad()
def beam_search(
    model: LanguageModel, prompt: Prompt | Session, max_tokens: int, *, num_beams: int = 4, stop: Sequence[int] = ()
) -> Generated:
    """The likeliest continuation of one prompt that `num_beams` beams find, by total log-probability."""
    memory = prompt if isinstance(prompt, Session) else prefill(model, prompt, max_tokens=max_tokens)
    if len(memory.logits) != 1:
        raise ValueError(f"beam search takes one prompt at a time, got {len(memory.logits)}")
    state, logs = memory.state, memory.logits.log_softmax(1)
    beams: list[Beam] = [Beam(0.0, [], [])]
    done: list[Beam] = []
    for _ in range(max_tokens):
        totals = (torch.tensor([beam.score for beam in beams], device=logs.device)[:, None] + logs).flatten()
        best = totals.topk(min(num_beams * 2, totals.numel()))
        rows: list[int] = []
        grown: list[Beam] = []
        for score, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            row, token = divmod(place, logs.shape[1])
            if token in stop:
                done.append(replace(beams[row], score=score))
            elif len(grown) < num_beams:
                rows.append(row)
                tokens, each = [*beams[row].tokens, token], [*beams[row].logs, float(logs[row, token])]
                grown.append(Beam(score, tokens, each))
        beams, done = grown, sorted(done, key=lambda beam: -beam.score)[:num_beams]
        # Totals only fall: once enough have ended above the best that is left, they stay above.
        if not beams or (len(done) == num_beams and done[-1].score >= beams[0].score):
            break
        with _evaluating(model):
            latest = torch.tensor([beam.tokens[-1] for beam in beams], device=logs.device)
            out, state = model.extend(latest[:, None], state.select(rows))
        logs = out[:, -1].log_softmax(1)
    best_beam = max([*done, *beams], key=lambda beam: beam.score)
    return Generated([best_beam.tokens], [best_beam.logs])


@dataclass(frozen=True)
class Beam:
    """One of the continuations that are kept: its total, its tokens and the log-probability of each."""

    score: float
    tokens: list[int]
    logs: list[float]


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode, and then as it was."""
    training = model.training
    if training:
        model.eval()
    try:
        yield
    finally:
        if training:
            model.train()


def _rows(prompt: Prompt) -> list[Tensor]:
    """The prompts, each (T,)."""
    if isinstance(prompt, Tensor):
        return list(prompt[None] if prompt.ndim == 1 else prompt)
    if len(prompt) and isinstance(prompt[0], int):
        return [torch.tensor(list(prompt))]
    return [torch.tensor(list(row), dtype=torch.int64) for row in prompt]  # type: ignore[arg-type]
