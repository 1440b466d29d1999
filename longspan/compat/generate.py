"""`generate` of the older libraries, on the decode loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from longspan.generation.decode import DecodeLoop
from longspan.generation.generate import read_prompt
from longspan.generation.sampling import Sampler, Sampling
from longspan.models.transformer import LanguageModel

Filter = Callable[..., Tensor]  # (logits (B, V), thres=) -> logits (B, V)
Recompute = Callable[[Tensor, Tensor], Tensor]  # (tokens (B, T), mask (B, T)) -> logits (B, T, V)


def top_k(logits: Tensor, thres: float = 0.9) -> Tensor:
    """Set all but the likeliest tokens, a share 1 − thres of the vocabulary and at least one, to −∞.

    Args:
        logits: (B, V).
        thres: The share of tokens to remove.
    """
    return _filter(logits, Sampling(top_k=max(1, int((1 - thres) * logits.shape[-1]))))


def top_p(logits: Tensor, thres: float = 0.9) -> Tensor:
    """Set all but the likeliest tokens that together reach probability 1 − thres to −∞.

    Args:
        logits: (B, V).
        thres: One minus the probability to keep, as in the older libraries.
    """
    return _filter(logits, Sampling(top_p=max(1 - thres, 1e-9)))


def repetition_penalty_fn(logits: Tensor, ctx: Tensor, theta: float = 1.2) -> Tensor:
    """Divide positive logits of the tokens in `ctx` by theta and multiply negative ones by it.

    Args:
        logits: (B, V).
        ctx: (B, T) tokens to penalize.
        theta: The penalty.
    """
    return Sampling(repetition_penalty=theta).penalize(logits, ctx)


class FilterSampler(Sampler):
    """Draws tokens as the older libraries do: filter, temperature, softmax, `torch.multinomial`.

    Args:
        start: (B, T) prompts.
        filter_logits_fn: Called with logits (B, V) and thres=filter_thres.
        filter_thres: The filter's threshold.
        temperature: 0 takes the likeliest token.
        repetition_penalty: 1 is no penalty.
        repetition_penalty_ctx: How many of the latest tokens are penalized; 0 for all of them.
    """

    def __init__(
        self,
        start: Tensor,
        filter_logits_fn: Filter,
        filter_thres: float,
        temperature: float,
        repetition_penalty: float = 1.0,
        repetition_penalty_ctx: int = 0,
    ) -> None:
        super().__init__(start[:, -repetition_penalty_ctx:] if repetition_penalty != 1 else start[:, :0])
        self._filter, self._thres, self._temperature = filter_logits_fn, filter_thres, temperature
        self._penalty, self._window = repetition_penalty, repetition_penalty_ctx

    def append(self, token: Tensor) -> None:
        if self._penalty != 1:
            self.recent = torch.cat([self.recent, token[:, None]], 1)[:, -self._window :]

    def choose(self, logits: Tensor) -> Tensor:
        logits = repetition_penalty_fn(logits, self.recent, theta=self._penalty)
        if self._temperature == 0:
            return logits.argmax(1)
        scores = self._filter(logits, thres=self._thres) / self._temperature
        return torch.multinomial(scores.softmax(-1), 1)[:, 0]


def generate(
    net: nn.Module,
    start_tokens: Tensor,
    seq_len: int,
    *,
    max_length: int,
    recompute: Recompute,
    model: LanguageModel | None = None,
    mask: Tensor | None = None,
    eos_token: int | None = None,
    temperature: float = 1.0,
    filter_logits_fn: Filter = top_k,
    filter_thres: float = 0.9,
    repetition_penalty: float = 1.0,
    repetition_penalty_ctx: int = 0,
    **context: Any,
) -> Tensor:
    """Generate up to seq_len tokens after start_tokens (T,) or (B, T), with net in eval mode.

    See `FilterSampler` and `decode` for the arguments.
    """
    start = start_tokens if start_tokens.ndim == 2 else start_tokens[None]
    sampler = FilterSampler(
        start, filter_logits_fn, filter_thres, temperature, repetition_penalty, repetition_penalty_ctx
    )
    training = net.training
    net.eval()
    try:
        out = decode(
            start,
            seq_len,
            sampler,
            window=max_length,
            mask=None if mask is None else mask.reshape(start.shape),
            stop=eos_token,
            model=model,
            recompute=recompute,
            **context,
        )
    finally:
        net.train(training)
    return out if start_tokens.ndim == 2 else out[0]


def shift_labels(labels: Tensor, mask: Tensor | None, ignore_index: int) -> tuple[Tensor, Tensor | None]:
    """Exclude labels (B, T) that are masked, or predicted from a masked token, from the loss.

    Args:
        labels: The tokens after those that the model reads.
        mask: (B, T) of the tokens that the model reads, or (B, T + 1) with that of the last label.
        ignore_index: The label that has no loss.

    Returns:
        The labels, and the mask (B, T) of the tokens that the model reads.
    """
    if mask is None:
        return labels, None
    mask = mask.bool()
    used = mask[:, 1:] & mask[:, :-1] if mask.shape[1] > labels.shape[1] else mask
    return labels.masked_fill(~used, ignore_index), mask[:, : labels.shape[1]]


@torch.no_grad()
def decode(
    start: Tensor,
    number: int,
    sampler: Sampler,
    *,
    window: int,
    mask: Tensor | None = None,
    stop: int | None = None,
    model: LanguageModel | None = None,
    recompute: Recompute,
    **context: Any,
) -> Tensor:
    """Generate up to `number` tokens after padded prompts.

    Args:
        start: (B, T) prompts.
        number: The most tokens to generate.
        sampler: Chooses the tokens.
        window: The most tokens that the model takes at once.
        mask: (B, T), True for real tokens; each row one contiguous span.
        stop: Generation ends when every row chooses this token in the same step.
        model: Decodes from a state, at a constant cost per token, while there are at most `window` tokens. Beyond that,
            or without a model, each token is computed from the last `window` tokens by `recompute`.
        recompute: Returns logits for tokens and a mask.
        **context: For `LanguageModel.new_state`.

    Returns:
        (B, ≤ number) tokens.
    """
    B, T = start.shape
    tokens = torch.cat([start, start.new_zeros(B, number)], 1)
    seen = torch.ones_like(tokens, dtype=torch.bool)
    if mask is not None:
        seen[:, :T] = mask
    streamed = 0 if model is None else max(0, min(number, window + 1 - T))

    def steps() -> Generator[Tensor, None, None]:
        """Yield the next token of each row; each is written to `tokens` before the next is asked for."""
        token = start.new_zeros(B)
        if model is not None and streamed:
            state = model.new_state(B, max_length=min(window, T + number), **context)
            logits, state = read_prompt(model, state, start, seen[:, :T])
            loop = DecodeLoop(model, state, logits, sampler)
            with loop.single_thread():
                for _ in range(streamed):
                    yield loop.step()
            token = loop.token
        for t in range(T + streamed, T + number):
            if t == max(T, window + 1):
                warnings.warn(
                    f"generation has passed max_seq_len ({window}): each token now recomputes the last {window}, as in "
                    "the original; a larger max_seq_len decodes at a constant cost per token",
                    stacklevel=6,
                )
            held, real = _close_gaps(*(x[:, max(0, t - window) : t] for x in (tokens, seen)))
            sampler.sample(_last(recompute(held, real), real), token, append=t > T)
            yield token

    with closing(steps()) as chosen:  # restores the number of threads
        for t, token in enumerate(chosen, T):
            tokens[:, t] = token
            if stop is not None and bool((token == stop).all()):
                return tokens[:, T : t + 1]
    return tokens[:, T:]


def _close_gaps(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move padding between a prompt and the tokens generated after it to the front of its row."""
    gaps = ((mask[:, :-1] & ~mask[:, 1:]).any(1) & mask[:, -1])[:, None]
    order = torch.where(gaps, mask.int().argsort(dim=1, stable=True), torch.arange(mask.shape[1], device=mask.device))
    return tokens.gather(1, order), mask.gather(1, order)


def _last(x: Tensor, mask: Tensor) -> Tensor:
    """Return x (B, T, …) at each row's last real token."""
    index = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)
    return x[torch.arange(len(x), device=x.device), index]


def _filter(logits: Tensor, sampling: Sampling) -> Tensor:
    left = sampling.probabilities(logits, logits.new_empty(len(logits), 0, dtype=torch.int64))
    return logits.masked_fill(left == 0, float("-inf"))
