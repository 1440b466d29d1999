"""Generation: a prompt is read in parallel chunks, then tokens come one at a time from a state of constant size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from longspan.memory import Memory
from longspan.models import EncoderDecoder, LanguageModel

Prompt = Tensor | Sequence[int] | Sequence[Sequence[int]]
_BLOCK = 1024  # random numbers drawn at a time


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from its logits.

    temperature: 0 takes the likeliest. top_k: only the k likeliest. top_p: the likeliest that together reach p.
    min_p: those at least min_p times as likely as the likeliest. repetition_penalty: logits of the row's last
    repetition_window tokens are divided by it if positive, multiplied if negative.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    repetition_window: int = 64

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {value}")
        if self.repetition_penalty <= 0 or self.repetition_window < 1:
            raise ValueError(
                "repetition_penalty must be positive (1 is none) and repetition_window at least 1, got "
                f"{self.repetition_penalty} and {self.repetition_window}"
            )

    def probabilities(self, logits: Tensor, recent: Tensor) -> Tensor:
        """logits (B, V), recent (B, window) tokens, −1 where none -> (B, V) that sum to one."""
        logits = self.penalised(logits.to(torch.promote_types(logits.dtype, torch.float32)), recent)
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter(1, logits.argmax(1, keepdim=True), 1)
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[1]:
            least = logits.topk(self.top_k, 1).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        probabilities = logits.softmax(1)
        if self.min_p is not None:
            probabilities = probabilities * (probabilities >= self.min_p * probabilities.amax(1, keepdim=True))
        if self.top_p is not None:
            ordered, order = probabilities.sort(1, descending=True)
            # A token stays if those likelier than it do not reach p; the likeliest always does.
            before = ordered.cumsum(1) - ordered
            kept = torch.zeros_like(probabilities).scatter(1, order, ordered * (before < self.top_p))
            probabilities = kept
        return probabilities / probabilities.sum(1, keepdim=True)

    def penalised(self, logits: Tensor, recent: Tensor) -> Tensor:
        """Logits (B, V) after the repetition penalty for the tokens in recent, −1 where none."""
        if self.repetition_penalty == 1:
            return logits
        seen = torch.zeros(len(logits), logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
        seen = seen.scatter(1, recent.masked_fill(recent < 0, logits.shape[1]), True)[:, :-1]
        weaker = torch.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
        return torch.where(seen, weaker, logits)


@dataclass
class Generated:
    """What came after each prompt: tokens, without the prompt or the stop token, and their log-probabilities."""

    tokens: list[list[int]] = field(default_factory=list)
    log_probabilities: list[list[float]] = field(default_factory=list)


def generate(
    model: LanguageModel | EncoderDecoder,
    prompt: Prompt | Memory,
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
    result: Generated | None = None
    for tokens, logs in stream(model, prompt, max_tokens, sampling=sampling, stop=stop, seed=seed, source=source):
        if result is None:
            result = Generated([[] for _ in tokens], [[] for _ in tokens])
            live = [True] * len(tokens)
        for row, (token, log) in enumerate(zip(tokens, logs, strict=True)):
            live[row] = live[row] and token >= 0
            if live[row]:
                result.tokens[row].append(token)
                result.log_probabilities[row].append(log)
                live[row] = not any(result.tokens[row][-len(e) :] == list(e) for e in endings)
        if not any(live):
            break
    if result is None:
        rows = len(prompt.logits) if isinstance(prompt, Memory) else len(_rows(prompt))
        result = Generated([[] for _ in range(rows)], [[] for _ in range(rows)])
    return result


def stream(
    model: LanguageModel | EncoderDecoder,
    prompt: Prompt | Memory,
    max_tokens: int | None = None,
    *,
    sampling: Sampling | None = None,
    stop: Sequence[int] = (),
    seed: int | Sequence[int] = 0,
    source: Tensor | None = None,
) -> Stream:
    """Tokens as they come: an iterator of steps. max_tokens: None goes on for ever. The rest is as in `generate`."""
    sampling = Sampling() if sampling is None else sampling
    if not isinstance(prompt, Memory):
        prompt = prefill(model, prompt, max_tokens=max_tokens, source=source, window=sampling.repetition_window)
    return Stream(model, prompt, max_tokens, sampling, stop, seed)


class Stream:
    """An iterator of (tokens, log-probabilities): one for each row at each step, −1 once a row has ended.

    memory: what was read and said so far, from which a later stream can go on.
    """

    def __init__(
        self,
        model: LanguageModel | EncoderDecoder,
        memory: Memory,
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
        self._sampling, self._max_tokens, self._steps = sampling, max_tokens, 0
        self._generators = [torch.Generator().manual_seed(s) for s in seeds]
        device = memory.logits.device
        self._stop = torch.tensor(list(stop), dtype=torch.int64, device=device)
        self._ended = torch.zeros(rows, dtype=torch.bool, device=device)
        self._memory = Memory(memory.state.clone(), memory.logits, memory.recent)
        self._said: Tensor | None = None  # chosen, not yet read by the model

    def __iter__(self) -> Stream:
        return self

    @torch.no_grad()
    def __next__(self) -> tuple[list[int], list[float]]:
        if self._steps == self._max_tokens or bool(self._ended.all()):
            raise StopIteration
        memory = self.memory
        if self._steps % _BLOCK == 0:
            blocks = [torch.rand(_BLOCK, generator=g, dtype=torch.float64) for g in self._generators]
            self._drawn = torch.stack(blocks).to(memory.logits.device)
        probabilities = self._sampling.probabilities(memory.logits, memory.recent)
        token = _pick(probabilities, self._drawn[:, self._steps % _BLOCK])
        logs = probabilities.gather(1, token[:, None]).log()[:, 0]
        self._ended = self._ended | torch.isin(token, self._stop)
        self._said, self._steps = token, self._steps + 1
        return token.masked_fill(self._ended, -1).tolist(), logs.tolist()

    @property
    def memory(self) -> Memory:
        if self._said is not None:
            with torch.no_grad(), _evaluating(self._model):
                out, state = self._model.extend(self._said[:, None], self._memory.state)
            recent = torch.cat([self._memory.recent[:, 1:], self._said[:, None]], 1)
            self._memory, self._said = Memory(state, out[:, -1], recent), None
        return self._memory


@torch.no_grad()
def prefill(
    model: LanguageModel | EncoderDecoder,
    prompt: Prompt,
    *,
    max_tokens: int | None = None,
    chunk: int = 4096,
    source: Tensor | None = None,
    window: int = 64,
) -> Memory:
    """A prompt read in chunks of so many tokens, in memory that does not grow with it.

    max_tokens: how many will follow; with it, positions beyond the model's reach are refused now, not later.
    """
    rows = _rows(prompt)
    if min(len(row) for row in rows) == 0:
        raise ValueError("every prompt must have at least one token: there is nothing to continue")
    decoder = model.decoder if isinstance(model, EncoderDecoder) else model
    if not decoder.config.causal:
        raise ValueError("only a causal model can generate: build it with causal=True")
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
) -> Memory:
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
    return Memory(state, decoder.logits(last[:, None])[:, 0], recent)


@torch.no_grad()
def beam_search(
    model: LanguageModel, prompt: Prompt | Memory, max_tokens: int, *, num_beams: int = 4, stop: Sequence[int] = ()
) -> Generated:
    """The likeliest continuation of one prompt that `num_beams` beams find, by total log-probability."""
    memory = prompt if isinstance(prompt, Memory) else prefill(model, prompt, max_tokens=max_tokens)
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


def _pick(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """(B,) the token at which the cumulative probability passes a uniform number of (B,)."""
    cumulative = probabilities.double().cumsum(1)
    token = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]
    # A number that rounds up to the total would fall past the last token that can be had.
    last = probabilities.shape[1] - 1 - (probabilities > 0).flip(1).int().argmax(1)
    return torch.minimum(token, last)


def _rows(prompt: Prompt) -> list[Tensor]:
    """The prompts, each (T,)."""
    if isinstance(prompt, Tensor):
        return list(prompt[None] if prompt.ndim == 1 else prompt)
    if len(prompt) and isinstance(prompt[0], int):
        return [torch.tensor(list(prompt))]
    return [torch.tensor(list(row), dtype=torch.int64) for row in prompt]  # type: ignore[arg-type]
