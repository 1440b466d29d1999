"""Generation as the older wrappers offer it, from a state in place of the whole prefix."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longspan.generation.generate import Sampling
from longspan.models.transformer import LanguageModel

Filter = Callable[..., Tensor]  # (logits (B, V), thres=) -> logits (B, V)


def top_k(logits: Tensor, thres: float = 0.9) -> Tensor:
    """Logits (B, V) with all but the likeliest share 1 − thres of the vocabulary at −∞; at least one stays."""
    return _only(logits, Sampling(top_k=max(1, int((1 - thres) * logits.shape[-1]))))


def top_p(logits: Tensor, thres: float = 0.9) -> Tensor:
    """Logits (B, V) with all but the likeliest tokens that together reach 1 − thres (so the older libraries) at −∞."""
    return _only(logits, Sampling(top_p=max(1 - thres, 1e-9)))


def repetition_penalty_fn(logits: Tensor, ctx: Tensor, theta: float = 1.2) -> Tensor:
    """Logits (B, V) of the tokens in ctx (B, T) divided by theta if positive, multiplied if negative."""
    return Sampling(repetition_penalty=theta).penalized(logits, ctx)


def sampler(filter_logits_fn: Filter, filter_thres: float, temperature: float) -> Callable[[Tensor], Tensor]:
    """A function that draws a token (B, 1) from logits (B, V); at temperature 0 the likeliest."""

    def draw(logits: Tensor) -> Tensor:
        if temperature == 0:
            return logits.argmax(1, keepdim=True)
        return torch.multinomial((filter_logits_fn(logits, thres=filter_thres) / temperature).softmax(-1), 1)

    return draw


@torch.no_grad()
def decode(
    start: Tensor,
    number: int,
    choose: Callable[[Tensor, Tensor], Tensor],
    *,
    window: int,
    mask: Tensor | None = None,
    stop: int | None = None,
    model: LanguageModel | None = None,
    recompute: Callable[[Tensor, Tensor], Tensor],
    **context: Any,
) -> Tensor:
    """Up to `number` tokens (B, ≤ number) after start (B, T).

    choose: (logits (B, V), all tokens so far (B, t)) -> (B, 1). mask: (B, T), True for real tokens. stop: ends it when
    every row says it at once. model: streams, at a constant cost a token, while no more than `window` tokens are held;
    beyond that, or without it, recompute(tokens, mask) gives logits (B, t, V) of the last `window` tokens.
    context: for `LanguageModel.new_state`.
    """
    mask = torch.ones_like(start, dtype=torch.bool) if mask is None else mask.bool()
    tokens, state = start, None
    latest = start
    cropped = False
    for _ in range(number):
        if model is not None and tokens.shape[1] <= window:
            seen = mask[:, -latest.shape[1] :]
            if state is None:
                state = model.new_state(len(start), **context)
            hidden, state = model.extend_hidden(latest, state, key_mask=None if bool(seen.all()) else seen)
            logits = model.logits(_last(hidden, seen)[:, None])[:, 0]
        else:
            if tokens.shape[1] > window and not cropped:
                cropped = True
                warnings.warn(
                    f"generation has passed max_seq_len ({window}): each token now recomputes the last {window}, as in "
                    "the original; a larger max_seq_len streams at a constant cost",
                    stacklevel=3,
                )
            held, seen = _closed(tokens[:, -window:], mask[:, -window:])
            logits = _last(recompute(held, seen), seen)
        latest = choose(logits, tokens)
        tokens = torch.cat([tokens, latest], 1)
        mask = torch.cat([mask, torch.ones_like(latest, dtype=torch.bool)], 1)
        if stop is not None and bool((latest == stop).all()):
            break
    return tokens[:, start.shape[1] :]


def _closed(tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows whose padding lies between a prompt and what was said after it, with that padding before them instead."""
    gaps = ((mask[:, :-1] & ~mask[:, 1:]).any(1) & mask[:, -1])[:, None]
    order = torch.where(gaps, mask.int().argsort(dim=1, stable=True), torch.arange(mask.shape[1], device=mask.device))
    return tokens.gather(1, order), mask.gather(1, order)


def _last(x: Tensor, mask: Tensor) -> Tensor:
    """(B, T, …) at each row's last real token."""
    index = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).argmax(1)
    return x[torch.arange(len(x), device=x.device), index]


def _only(logits: Tensor, sampling: Sampling) -> Tensor:
    left = sampling.probabilities(logits, logits.new_empty(len(logits), 0, dtype=torch.int64))
    return logits.masked_fill(left == 0, float("-inf"))
