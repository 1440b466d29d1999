"""Choosing the next token from logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.ops.decode import sample, sample_slots, why_not_triton_sample
from longspan.utils import check_integer

_BLOCK = 1024  # random numbers drawn at a time for each sequence
_SMALLEST = 1e-6  # a divisor of logits, so that they stay finite


@dataclass(frozen=True)
class Sampling:
    """Options for choosing a token from its logits.

    Filters apply in this order: repetition penalty, temperature, top-k, min-p, top-p.

    Args:
        temperature: Divisor of the logits; 0 takes the likeliest token.
        top_k: Keep only the k likeliest tokens.
        top_p: Keep only the likeliest tokens that together reach probability p.
        min_p: Keep only tokens at least min_p times as likely as the likeliest.
        repetition_penalty: Divisor of positive and factor of negative logits of recent tokens; 1 is no penalty.
        repetition_window: Number of recent tokens that the penalty covers.

    Raises:
        TypeError: If an option is not a number.
        ValueError: If an option is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    repetition_window: int = 64

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if not isinstance(value, Real) and (value is not None or name not in ("top_p", "min_p")):
                raise TypeError(f"{name} must be a number, got {value!r}")
        if self.temperature != 0 and not _SMALLEST <= self.temperature < math.inf:
            raise ValueError(
                f"temperature must be 0 (greedy) or finite and at least {_SMALLEST:g}, got {self.temperature}"
            )
        if self.top_k is not None:
            check_integer("top_k", self.top_k, 1)
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must be in (0, 1], got {value}")
        if not _SMALLEST <= self.repetition_penalty <= 1e12:
            raise ValueError(
                f"repetition_penalty must be positive, {_SMALLEST:g} to 1e+12 (1 is none), "
                f"got {self.repetition_penalty}"
            )
        check_integer("repetition_window", self.repetition_window, 1)

    def probabilities(self, logits: Tensor, recent: Tensor) -> Tensor:
        """Return the distribution that a token is drawn from.

        Args:
            logits: (B, V).
            recent: (B, window) recent tokens, −1 for none.

        Returns:
            (B, V) probabilities that sum to one, in float32 or float64.
        """
        logits = self.penalize(logits.to(torch.promote_types(logits.dtype, torch.float32)), recent)
        if self.temperature == 0:
            return torch.zeros_like(logits).scatter(1, logits.argmax(1, keepdim=True), 1)
        return _filter(logits, self.temperature, self.top_k, self.min_p, self.top_p)

    def penalize(self, logits: Tensor, recent: Tensor) -> Tensor:
        """Apply the repetition penalty.

        Args:
            logits: (B, V).
            recent: (B, window) tokens to penalize, −1 for none.

        Returns:
            (B, V) logits.
        """
        return logits if self.repetition_penalty == 1 else _penalize(logits, recent, self.repetition_penalty)


def _penalize(logits: Tensor, recent: Tensor, penalty: float | Tensor) -> Tensor:
    seen = torch.zeros(len(logits), logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
    seen = seen.scatter(1, recent.masked_fill(recent < 0, logits.shape[1]), True)[:, :-1]
    lower = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, lower, logits)


def _filter(
    logits: Tensor,
    temperature: float | Tensor,
    top_k: int | Tensor | None,
    min_p: float | Tensor | None,
    top_p: float | Tensor | None,
    renormalize: Tensor | None = None,
) -> Tensor:
    """Return the probabilities (B, V) that a token is drawn from; options are one for all rows, or (B, 1).

    renormalize: (B, 1) bool, the rows that min_p or top_p applies to; all unless given.
    """
    logits = logits if isinstance(temperature, float | int) and temperature == 1 else logits / temperature
    if isinstance(top_k, Tensor):
        least = logits.sort(1, descending=True).values.gather(1, top_k - 1)
        logits = logits.masked_fill(logits < least, float("-inf"))
    elif top_k is not None and top_k < logits.shape[1]:
        least = logits.topk(top_k, 1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probabilities = logits.softmax(1)
    if min_p is None and top_p is None:
        return probabilities
    if min_p is not None:
        probabilities = probabilities * (probabilities >= min_p * probabilities.amax(1, keepdim=True))
    if top_p is not None:
        ordered, order = probabilities.sort(1, descending=True)
        # A token stays if the likelier ones do not reach p; the likeliest always stays.
        before = ordered.cumsum(1) - ordered
        probabilities = torch.zeros_like(probabilities).scatter(1, order, ordered * (before < top_p))
    total = probabilities.sum(1, keepdim=True)
    return probabilities / (total if renormalize is None else total.masked_fill(~renormalize, 1))


class Sampler:
    """Chooses the next token of each sequence in a `DecodeLoop`. Subclasses implement `choose`.

    Attributes:
        recent: (B, window) int64, the latest tokens of each sequence, −1 for none. The window may be 0.
        capturable: Whether `sample` may be captured in a CUDA graph, i.e. runs no host code that matters.
    """

    capturable = False

    def __init__(self, recent: Tensor) -> None:
        self.recent = recent.clone()

    def choose(self, logits: Tensor) -> Tensor:
        """Return the next tokens (B,) int64 for logits (B, V)."""
        raise NotImplementedError

    def sample(self, logits: Tensor, token: Tensor, *, append: bool) -> None:
        """Replace `token` (B,) by the next tokens.

        Args:
            logits: (B, V).
            token: (B,) int64, overwritten.
            append: Whether to add the old content of `token` to `recent` first.
        """
        if append:
            self.append(token)
        token.copy_(self.choose(logits))

    def append(self, token: Tensor) -> None:
        """Add tokens (B,) to `recent`."""
        if self.recent.shape[1]:
            self.recent.copy_(torch.cat([self.recent[:, 1:], token[:, None]], 1))

    def prepare(self) -> None:
        """Run host code before a step, outside a CUDA graph."""

    def skip(self, token: Tensor) -> None:
        """Update counters as if tokens (B,) had been chosen."""

    def snapshot(self) -> Any:
        """Return what `restore` needs. A global random number generator is not part of it."""
        return self.recent.clone()

    def restore(self, saved: Any) -> None:
        """Return to a `snapshot`; a capturable sampler's tensors keep their addresses."""
        self.recent = saved.clone()


class SeededSampler(Sampler):
    """Draws tokens by the options of a `Sampling`, each sequence from its own seed, whatever else is in the batch.

    A token is where the cumulative probability passes a uniform number. These are drawn on the host, so that a seed
    gives the same numbers on any device.

    Args:
        sampling: The options.
        recent: (B, window) recent tokens, −1 for none.
        stop: Tokens that end a sequence.
        seeds: One for each sequence.

    Attributes:
        answer: (2, B) float64: the tokens chosen last, −1 for ended sequences, and their log-probabilities.
    """

    capturable = True

    def __init__(self, sampling: Sampling, recent: Tensor, stop: Sequence[int], seeds: Sequence[int]) -> None:
        super().__init__(recent)
        B, device = len(recent), recent.device
        self.answer = torch.zeros(2, B, dtype=torch.float64, device=device)
        self._sampling = sampling
        self._stop = torch.tensor(list(stop), dtype=torch.int64, device=device)
        self._ended = torch.zeros(B, dtype=torch.bool, device=device)
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._uniform = torch.zeros(B, _BLOCK, dtype=torch.float64, device=device)
        self._index = torch.zeros(B, dtype=torch.int64, device=device)  # of the next uniform number
        self._steps = 0
        self._fused: bool | None = None  # whether one kernel does all of `sample`

    def prepare(self) -> None:
        if self._steps % _BLOCK == 0:
            blocks = [torch.rand(_BLOCK, generator=g, dtype=torch.float64) for g in self._generators]
            self._uniform.copy_(torch.stack(blocks))
            self._index.zero_()
        self._steps += 1

    def sample(self, logits: Tensor, token: Tensor, *, append: bool) -> None:
        if self._fused is None:
            self._fused = why_not_triton_sample(logits) is None
        if self._fused:
            own = self.recent, token, self._uniform, self._index, self._stop, self._ended, self.answer
            sample(logits, *own, append=append, sampling=self._sampling)
            return
        super().sample(logits, token, append=append)

    def choose(self, logits: Tensor) -> Tensor:
        token = self._likeliest(logits) if self._sampling.temperature == 0 else self._draw(logits)
        if len(self._stop):
            self._ended.logical_or_(torch.isin(token, self._stop))
            self.answer[0].copy_(token.masked_fill(self._ended, -1))
        else:
            self.answer[0].copy_(token)
        return token

    def skip(self, token: Tensor) -> None:
        self._ended.logical_or_(torch.isin(token, self._stop))
        if self._sampling.temperature != 0:
            self._index.add_(1)

    def snapshot(self) -> Any:
        tensors = [x.clone() for x in self._tensors()]
        return tensors, self._steps, [generator.get_state() for generator in self._generators]

    def restore(self, saved: Any) -> None:
        tensors, self._steps, states = saved
        for x, kept in zip(self._tensors(), tensors, strict=True):
            x.copy_(kept)
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.recent, self._ended, self._uniform, self._index

    def _likeliest(self, logits: Tensor) -> Tensor:
        if self._sampling.repetition_penalty != 1:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return self._sampling.penalize(logits, self.recent).argmax(1)

    def _draw(self, logits: Tensor) -> Tensor:
        probabilities = self._sampling.probabilities(logits, self.recent)
        token = _pick(probabilities, self._uniform.gather(1, self._index[:, None])[:, 0])
        self.answer[1].copy_(probabilities.gather(1, token[:, None]).log()[:, 0])
        self._index.add_(1)
        return token


def _pick(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Return the tokens (B,) where the cumulative probability passes uniform numbers (B,)."""
    cumulative = probabilities.double().cumsum(1)
    total = cumulative[:, -1:]
    # A product that rounds up to the total would select a token past the last possible one.
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0]


class SlotSampler(Sampler):
    """Draws tokens of rows that begin and end at different times, each with its own `Sampling` and seed.

    A filter that no row uses is skipped, and one that a row does not use leaves its probabilities as they are, so that
    a row's tokens do not depend on the others. A seed gives the same uniform numbers as in `SeededSampler`. On a GPU
    one kernel does all of `sample`.

    Args:
        batch_size: Number of rows.
        vocab_size: V.
        window: The longest repetition window of a row.
        dtype: The dtype of the logits.
        device: Where the logits are.
    """

    def __init__(self, batch_size: int, vocab_size: int, window: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(torch.full((batch_size, window), -1, dtype=torch.int64, device=device))
        self.capturable = why_not_triton_sample(torch.empty(1, vocab_size, dtype=dtype, device=device)) is None
        self._vocab_size, self._dtype = vocab_size, torch.promote_types(dtype, torch.float32)
        self._generators = [torch.Generator()] * batch_size
        self._uniform = torch.zeros(batch_size, _BLOCK, dtype=torch.float64, device=device)
        self._index = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self._drawn = np.zeros(batch_size, dtype=np.int64)  # uniform numbers of the block that a row has used
        # Options by row: temperature, top_k, min_p, top_p, penalty, window.
        self._host_options = np.tile(self._row_of(Sampling(temperature=0)), (batch_size, 1))
        self._row_options = torch.zeros(batch_size, 6, dtype=torch.float32, device=device)
        self._options: dict[str, Tensor | None] = {}
        self._changed = True

    def put(
        self, rows: Sequence[int], sampling: Sequence[Sampling], seeds: Sequence[int], recent: list[Tensor]
    ) -> None:
        """Begin rows.

        Args:
            rows: The rows.
            sampling: Their options.
            seeds: Seeds of their random numbers.
            recent: (n,) of each, the tokens before the pending one.
        """
        window = self.recent.shape[1]
        before = torch.full((len(rows), window), -1, dtype=torch.int64)
        for i, (row, own, seed, tokens) in enumerate(zip(rows, sampling, seeds, recent, strict=True)):
            last = tokens[-window:]
            before[i, window - len(last) :] = last
            self._host_options[row] = self._row_of(own)
            self._generators[row] = torch.Generator().manual_seed(seed)
        self._changed = True
        self.recent.index_copy_(0, self._to_device(torch.tensor(rows)), self._to_device(before))
        self._refill(rows)

    def release(self, row: int) -> None:
        """End a row: what it draws from now on does not matter."""
        self._host_options[row], self._changed = self._row_of(Sampling(temperature=0)), True

    def prepare(self) -> None:
        if self._drawn.max() >= _BLOCK:
            self._refill(np.flatnonzero(self._drawn >= _BLOCK).tolist())
        self._drawn += 1
        self._update_options()

    def sample(self, logits: Tensor, token: Tensor, *, append: bool) -> None:
        if self.capturable:
            buffers = self.recent, token, self._uniform, self._index, self._row_options
            sample_slots(logits, *buffers, append=append)
        else:
            super().sample(logits, token, append=append)

    def choose(self, logits: Tensor) -> Tensor:
        token = self._choose(logits, self._options, self.recent, self._index[:, None])
        if self._options["greedy"] is not None:
            self._index.add_(1).remainder_(_BLOCK)
        return token

    def _choose(self, logits: Tensor, options: dict[str, Tensor | None], recent: Tensor, index: Tensor) -> Tensor:
        """Return the tokens (B · T,) of T positions of each row, given what they are chosen by.

        Args:
            logits: (B · T, V).
            options: As `_columns` returns them, for each position.
            recent: (B · T, window), the tokens before each position.
            index: (B, T), which of a row's random numbers each position takes.
        """
        logits = logits.to(self._dtype)
        penalty, window = options["penalty"], options["window"]
        if penalty is not None and window is not None:
            place = torch.arange(recent.shape[1], 0, -1, device=logits.device)
            logits = _penalize(logits, recent.masked_fill(place > window, -1), penalty)
        greedy, temperature = options["greedy"], options["temperature"]
        if greedy is None:
            return logits.argmax(1)
        filters = (options[name] for name in ("top_k", "min_p", "top_p", "renormalize"))
        probabilities = _filter(logits, 1 if temperature is None else temperature, *filters)
        token = _pick(probabilities, self._uniform.gather(1, index).flatten())
        return torch.where(greedy, logits.argmax(1), token)

    @property
    def draws_left(self) -> int:
        """The number of random numbers that every row has left: the most positions that `choose_several` takes."""
        return _BLOCK - int(self._drawn.max())

    def choose_several(self, logits: Tensor, tokens: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Choose tokens at several positions, as steps would as long as what they choose is what comes next.

        Args:
            logits: (B, T, V) after each of the tokens.
            tokens: (B, T), the pending token and draft tokens after it.
            sizes: (B,) how many of these a row has.

        Returns:
            Tokens (B, T), and how many of them (B,) steps would have chosen, up to the first that is not the draft.
        """
        (B, T), window = tokens.shape, self.recent.shape[1]
        self._update_options()
        own = self._columns(torch.from_numpy(self._host_options)) if self.capturable else self._options
        options = {name: None if x is None else x.repeat_interleave(T, 0) for name, x in own.items()}
        place, joined = torch.arange(T, device=logits.device), torch.cat([self.recent, tokens], 1)
        recent = joined.unfold(1, window, 1)[:, 1:].reshape(B * T, window)
        index = (self._index[:, None] + place) % _BLOCK
        found = self._choose(logits.flatten(0, 1), options, recent, index).view(B, T)
        right = (found[:, :-1] == tokens[:, 1:]) & (place[1:] < sizes[:, None])
        number = 1 + right.cumprod(1).sum(1)
        self._index.copy_((self._index + number) % _BLOCK)
        self.recent.copy_(joined.gather(1, number[:, None] + torch.arange(window, device=logits.device)))
        self._drawn += number.cpu().numpy()
        return found, number

    def _refill(self, rows: Sequence[int]) -> None:
        """Draw the next block of random numbers of rows."""
        blocks = [torch.rand(_BLOCK, generator=self._generators[row], dtype=torch.float64) for row in rows]
        where = self._to_device(torch.tensor(rows))
        self._uniform.index_copy_(0, where, self._to_device(torch.stack(blocks)))
        self._index.index_fill_(0, where, 0)
        self._drawn[rows] = 0

    def _row_of(self, x: Sampling) -> tuple[float, ...]:
        V, top_p = self._vocab_size, math.inf if x.top_p is None else x.top_p
        return (
            *(x.temperature, min(x.top_k or V, V), x.min_p or 0.0, top_p),
            *(x.repetition_penalty, min(x.repetition_window, self.recent.shape[1])),
        )

    def _to_device(self, x: Tensor) -> Tensor:
        """Copy a tensor of the host, without waiting for the device."""
        return x.pin_memory().to(self.recent.device, non_blocking=True) if self.recent.is_cuda else x

    def _update_options(self) -> None:
        """Copy the options of rows to the device, if they have changed."""
        if not self._changed:
            return
        self._changed, host = False, torch.from_numpy(self._host_options)
        if self.capturable:
            self._row_options.copy_(self._to_device(host.float()), non_blocking=True)
        else:
            self._options = self._columns(host)

    def _columns(self, host: Tensor) -> dict[str, Tensor | None]:
        """Return the options as (B, 1) tensors, None where no row uses one; greedy (B,) is None if all rows are."""

        def column(values: Tensor, unused: float, dtype: torch.dtype = self._dtype) -> Tensor | None:
            return None if bool((values == unused).all()) else self._to_device(values[:, None].to(dtype))

        temperature, top_k, min_p, top_p, penalty, window = host.unbind(1)
        greedy = temperature == 0
        filtered = ~greedy & ((min_p > 0) | (top_p < math.inf))
        return {
            "greedy": None if bool(greedy.all()) else self._to_device(greedy),
            "temperature": column(temperature.masked_fill(greedy, 1), 1),
            "top_k": column(top_k, self._vocab_size, torch.int64),
            "min_p": column(min_p, 0),
            "top_p": column(top_p, math.inf),
            "renormalize": column(filtered, False, torch.bool),
            "penalty": column(penalty, 1),
            "window": column(window, -1, torch.int64),
        }
