"""Generation: read a prompt in parallel chunks, then decode one token at a time from a state of constant size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import index

import torch
from torch import Tensor

from longspan.generation.decode import DecodeLoop, evaluating
from longspan.generation.sampling import Sampling, SeededSampler
from longspan.generation.session import Session, check_tokens, to_tokens
from longspan.layout import lengths_to_mask
from longspan.models.residual import StackState
from longspan.models.transformer import EncoderDecoder, LanguageModel
from longspan.utils import check_integer

Prompt = Tensor | Sequence[int] | Sequence[Sequence[int]]
_AHEAD = 32  # steps on a GPU between two checks of whether every sequence has ended


@dataclass
class Generated:
    """Generated sequences.

    Attributes:
        tokens: The tokens of each sequence, without the prompt and the stop token.
        log_probabilities: The log-probability of each of these tokens.
    """

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
    """Generate up to `max_tokens` tokens after each prompt.

    Args:
        model: A causal language model, or an encoder with a decoder. Runs in eval mode.
        prompt: Tokens or bytes of one sequence, or of several of any lengths, or the `Session` that `prefill` returned.
        max_tokens: The most tokens to generate for a sequence.
        sampling: How tokens are chosen; by default drawn from the model's distribution.
        stop: Tokens that end a sequence.
        stop_strings: Byte strings that end a sequence of bytes; they are part of the result.
        seed: Sequence i draws from seed + i, or from the i-th of several seeds, whatever else is in the batch.
        source: (B, S) tokens that an `EncoderDecoder` encodes.

    Returns:
        The tokens of each sequence and their log-probabilities.

    Raises:
        TypeError: If the prompt is text, or not integers.
        ValueError: If the prompt is empty, the model is not causal, the tokens exceed its table of positions, or the
            session is another model's.
    """
    endings = _endings(stop_strings)
    check_integer("max_tokens", max_tokens, 0)
    steps = stream(model, prompt, max_tokens, sampling=sampling, stop=stop, seed=seed, source=source)
    B = steps.batch_size
    result = Generated([[] for _ in range(B)], [[] for _ in range(B)])
    live = [True] * B
    # Reading tokens waits for the GPU, so several steps run before each check, and a few tokens are discarded.
    on_cpu = next(model.parameters()).device.type == "cpu"
    ahead = 1 if on_cpu else _AHEAD if stop or endings else max_tokens
    for start in range(0, max_tokens, max(ahead, 1)):
        for tokens, logs in zip(*steps.take(min(ahead, max_tokens - start)), strict=True):
            for i, (token, log) in enumerate(zip(tokens, logs, strict=True)):
                live[i] = live[i] and token >= 0
                if live[i]:
                    result.tokens[i].append(token)
                    result.log_probabilities[i].append(log)
                    live[i] = not any(result.tokens[i][-len(e) :] == list(e) for e in endings)
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
    """Generate tokens one step at a time.

    Args:
        model: As in `generate`.
        prompt: As in `generate`.
        max_tokens: The most steps; None for no limit.
        sampling: As in `generate`.
        stop: As in `generate`.
        seed: As in `generate`.
        source: As in `generate`.

    Returns:
        An iterator over steps.

    Raises:
        TypeError: As `generate`.
        ValueError: As `generate`.
    """
    sampling = Sampling() if sampling is None else sampling
    if not isinstance(sampling, Sampling):
        raise TypeError(f"sampling must be a Sampling, got {sampling!r}")
    decoder = _decoder(model)
    if isinstance(prompt, Session):
        prompt.check_model(decoder)
    else:
        prompt = prefill(model, prompt, max_tokens=max_tokens, source=source, window=sampling.repetition_window)
    return Stream(model, prompt, max_tokens, sampling, stop, seed)


class Stream:
    """An iterator over decode steps, returned by `stream`.

    Each step is a pair of lists, the token and its log-probability for each sequence; the token is −1 once a sequence
    has ended. On a GPU a step, sampling included, is one replayed CUDA graph.
    """

    def __init__(
        self,
        model: LanguageModel | EncoderDecoder,
        session: Session,
        max_tokens: int | None,
        sampling: Sampling,
        stop: Sequence[int],
        seed: int | Sequence[int],
    ) -> None:
        if max_tokens is not None:
            check_integer("max_tokens", max_tokens, 0)
        self.batch_size = len(session.logits)
        self._model = _decoder(model)
        ends = to_tokens("stop", stop)
        check_tokens("stop", ends, self._model)
        seeds = _seeds(seed, self.batch_size)
        self._sampler = SeededSampler(sampling, session.recent, ends.tolist(), seeds)
        state = session.state.reserve(max_tokens)
        self._loop = DecodeLoop(self._model, state, session.logits, self._sampler)
        self._max_tokens, self._steps, self._ended = max_tokens, 0, False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> tuple[list[int], list[float]]:
        if self._steps == self._max_tokens or self._ended:
            raise StopIteration
        tokens, logs = self.take(1)
        self._ended = all(token < 0 for token in tokens[0])
        return tokens[0], logs[0]

    @torch.inference_mode()
    def take(self, number: int) -> tuple[list[list[int]], list[list[float]]]:
        """Run several steps and wait for the device once.

        Args:
            number: How many steps to run; fewer if `max_tokens` is reached.

        Returns:
            Tokens and log-probabilities, a list over sequences for each step.
        """
        check_integer("number", number, 0)
        number = number if self._max_tokens is None else min(number, self._max_tokens - self._steps)
        answers = []
        with evaluating(self._model), self._loop.single_thread():
            for _ in range(number):
                self._loop.step()
                answers.append(self._sampler.answer.clone())
                self._steps += 1
        found = torch.stack(answers).tolist() if answers else []  # (number, 2, B) float64, exact for any token
        return [[int(token) for token in tokens] for tokens, _ in found], [logs for _, logs in found]

    @property
    def session(self) -> Session:
        """A copy of everything read and generated so far, to continue later."""
        with torch.no_grad(), evaluating(self._model):
            return Session(*self._loop.state_and_logits(), self._sampler.recent.clone(), self._model)


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
    """Read a prompt in chunks, in memory that does not grow with its length.

    Args:
        model: As in `generate`.
        prompt: Tokens or bytes of one sequence, or of several of any lengths.
        max_tokens: How many tokens will follow. If given, positions beyond the model's table are refused here.
        chunk: Tokens per chunk: by default 4096, and on a GPU 65536 over all sequences.
        source: As in `generate`.
        window: How many of the latest tokens to keep for the repetition penalty.

    Returns:
        The session after the prompt.

    Raises:
        TypeError: As `generate`.
        ValueError: If a prompt is empty, the model is not causal, or the tokens exceed its table of positions.
    """
    decoder = _decoder(model)
    sequences = _sequences(prompt)
    if min((len(tokens) for tokens in sequences), default=0) == 0:
        raise ValueError("every prompt must have at least one token: there is nothing to continue")
    check_integer("window", window, 1)
    for name, value, minimum in (("max_tokens", max_tokens, 0), ("chunk", chunk, 1)):
        if value is not None:
            check_integer(name, value, minimum)
    if not decoder.config.causal:
        raise ValueError("only a causal model can generate: build it with causal=True")
    device = next(model.parameters()).device
    lengths = torch.tensor([len(tokens) for tokens in sequences], device=device)
    longest = int(lengths.max())
    tokens = torch.zeros(len(sequences), longest, dtype=torch.int64, device=device)
    for i, own in enumerate(sequences):
        tokens[i, : len(own)] = own.to(device)
    check_tokens("prompt", tokens, decoder)
    mask = lengths_to_mask(lengths, longest)
    reach = None if max_tokens is None else longest + max_tokens
    with evaluating(model):
        state = _new_state(model, len(sequences), reach, source)
        logits, state = read_prompt(decoder, state, tokens, mask, chunk)
    place = lengths[:, None] - window + torch.arange(window, device=device)
    recent = tokens.gather(1, place.clamp(min=0)).masked_fill(place < 0, -1)
    return Session(state, logits, recent, decoder)


@torch.no_grad()
def read_prompt(
    model: LanguageModel, state: StackState, tokens: Tensor, mask: Tensor, chunk: int | None = None
) -> tuple[Tensor, StackState]:
    """Extend a state by a padded batch of prompts, chunk by chunk.

    Args:
        model: A causal language model.
        state: The state of B sequences; without gradients it is consumed.
        tokens: (B, T).
        mask: (B, T) bool, True for real tokens: one contiguous span in each row.
        chunk: Tokens per chunk; see `prefill`.

    Returns:
        The logits (B, V) after each row's last real token, and the state.
    """
    B, T = tokens.shape
    if chunk is None:
        chunk = max(1024, 65536 // B) if tokens.device.type == "cuda" else 4096
    ragged = not bool(mask.all())
    final = (mask * torch.arange(1, T + 1, device=tokens.device)).argmax(1)  # (B,) each row's last real slot
    last = tokens.new_zeros(B, model.config.dim, dtype=next(model.parameters()).dtype)
    for start in range(0, T, chunk):
        piece, seen = tokens[:, start : start + chunk], mask[:, start : start + chunk]
        hidden, state = model.extend_hidden(piece, state, key_mask=seen if ragged else None)
        slot = final - start
        here = (slot >= 0) & (slot < piece.shape[1])
        found = hidden[torch.arange(B, device=tokens.device), slot.clamp(0, piece.shape[1] - 1)]
        last = torch.where(here[:, None], found, last)
    return model.logits(last[:, None])[:, 0], state


def _new_state(
    model: LanguageModel | EncoderDecoder, batch_size: int, max_length: int | None, source: Tensor | None
) -> StackState:
    if isinstance(model, LanguageModel):
        if source is not None:
            raise ValueError("source is for an EncoderDecoder; a language model has only a prompt")
        return model.new_state(batch_size, max_length=max_length)
    if source is None:
        raise ValueError("an EncoderDecoder generates from a source: pass source=, tokens of shape (B, S)")
    if not isinstance(source, Tensor) or source.ndim != 2 or len(source) != batch_size:
        got = tuple(source.shape) if isinstance(source, Tensor) else f"a {type(source).__name__}"
        raise ValueError(f"source must be tokens of shape ({batch_size}, S), one row for each prompt, got {got}")
    context, mask = model.encode(source)
    return model.decoder.new_state(batch_size, max_length=max_length, context=context, context_mask=mask)


@torch.no_grad()
def beam_search(
    model: LanguageModel, prompt: Prompt | Session, max_tokens: int, *, num_beams: int = 4, stop: Sequence[int] = ()
) -> Generated:
    """Search for the likeliest continuation of one prompt, by total log-probability.

    Args:
        model: A causal language model. Runs in eval mode.
        prompt: Tokens of one sequence, or a `Session` of one.
        max_tokens: The most tokens to generate.
        num_beams: How many continuations to keep at each step.
        stop: Tokens that end a continuation.

    Returns:
        The best continuation found.

    Raises:
        ValueError: If there is more than one prompt.
    """
    check_integer("max_tokens", max_tokens, 0)
    check_integer("num_beams", num_beams, 1)
    session = prompt if isinstance(prompt, Session) else prefill(model, prompt, max_tokens=max_tokens)
    session.check_model(model)
    check_tokens("stop", to_tokens("stop", stop), model)
    if len(session.logits) != 1:
        raise ValueError(f"beam search takes one prompt at a time, got {len(session.logits)}")
    state, logs = session.state.reserve(max_tokens), session.logits.log_softmax(1)
    beams: list[Beam] = [Beam(0.0, [], [])]
    done: list[Beam] = []
    for _ in range(max_tokens):
        totals = (torch.tensor([beam.score for beam in beams], device=logs.device)[:, None] + logs).flatten()
        best = totals.topk(min(num_beams * 2, totals.numel()))
        parents: list[int] = []
        grown: list[Beam] = []
        for score, place in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            parent, token = divmod(place, logs.shape[1])
            beam = beams[parent]
            if token in stop:
                done.append(replace(beam, score=score))
            elif len(grown) < num_beams:
                parents.append(parent)
                grown.append(Beam(score, [*beam.tokens, token], [*beam.logs, float(logs[parent, token])]))
        beams, done = grown, sorted(done, key=lambda beam: -beam.score)[:num_beams]
        # Totals only fall: ended continuations that score above every live one stay above.
        if not beams or (len(done) == num_beams and done[-1].score >= beams[0].score):
            break
        with evaluating(model):
            latest = torch.tensor([beam.tokens[-1] for beam in beams], device=logs.device)
            out, state = model.extend(latest[:, None], state.select(parents))
        logs = out[:, -1].log_softmax(1)
    best_beam = max([*done, *beams], key=lambda beam: beam.score)
    return Generated([best_beam.tokens], [best_beam.logs])


@dataclass(frozen=True)
class Beam:
    """A continuation: its total log-probability, its tokens and the log-probability of each."""

    score: float
    tokens: list[int]
    logs: list[float]


def _decoder(model: LanguageModel | EncoderDecoder) -> LanguageModel:
    if not isinstance(model, LanguageModel | EncoderDecoder):
        raise TypeError(f"model must be a LanguageModel or an EncoderDecoder, got a {type(model).__name__}")
    return model.decoder if isinstance(model, EncoderDecoder) else model


def _sequences(prompt: Prompt) -> list[Tensor]:
    """Return the prompts, each (T,) int64."""
    if hasattr(prompt, "ndim"):
        several = prompt.ndim > 1
    else:
        several = isinstance(prompt, list | tuple) and len(prompt) > 0 and hasattr(prompt[0], "__len__")
    return [to_tokens("prompt", tokens) for tokens in prompt] if several else [to_tokens("prompt", prompt)]


def _seeds(seed: int | Sequence[int], batch_size: int) -> list[int]:
    try:
        if isinstance(seed, Sequence | Tensor):
            seeds = [index(x) for x in seed]
        else:
            seeds = [index(seed) + i for i in range(batch_size)]
    except TypeError:
        raise TypeError(f"seed must be an integer or a sequence of integers, got {seed!r}") from None
    if len(seeds) != batch_size:
        raise ValueError(f"seed must be one number or one for each of {batch_size} sequences, got {len(seeds)}")
    if not all(-(2**63) <= x < 2**64 for x in seeds):
        raise ValueError(f"seeds must be from -2**63 to 2**64 - 1, got {seed}")
    return seeds


def check_stop_strings(stop_strings: Sequence[bytes | str]) -> None:
    """Raise TypeError or ValueError unless these are strings or bytes that a sequence can end with."""
    if isinstance(stop_strings, str | bytes) or not all(isinstance(s, str | bytes) for s in stop_strings):
        raise TypeError(f"stop_strings must be a sequence of strings or bytes, got {stop_strings!r}")
    if not all(stop_strings):
        raise ValueError("stop_strings has an empty string, which every sequence ends with: leave it out")


def _endings(stop_strings: Sequence[bytes | str]) -> list[bytes]:
    check_stop_strings(stop_strings)
    return [s.encode() if isinstance(s, str) else s for s in stop_strings]
