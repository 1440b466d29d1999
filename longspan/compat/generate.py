"""`generate` of the older libraries, on the decode loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import torch
from torch import Tensor, nn

from longspan.compat.state_dict import CompatModel
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
        start: (B, T) prompts, or a single one (T,).
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
        start = start if start.ndim == 2 else start[None]
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


def decode_model(net: CompatModel) -> LanguageModel | None:
    """Return the longspan model that generates for `net`, in eval mode; None, with a warning, if there is none."""
    try:
        model = net.to_longspan()
    except ValueError as error:
        warnings.warn(f"{error}: each token recomputes all tokens before it, as in the original", stacklevel=4)
        return None
    assert isinstance(model, LanguageModel)
    return model.eval()


@torch.no_grad()
def generate(
    net: nn.Module,
    start_tokens: Tensor,
    seq_len: int,
    sampler: Sampler,
    *,
    max_length: int,
    recompute: Recompute,
    model: LanguageModel | None = None,
    mask: Tensor | None = None,
    eos_token: int | None = None,
    keep_padding: bool = False,
    **context: Any,
) -> Tensor:
    """Generate up to seq_len tokens after padded prompts.

    Args:
        net: The module to put into eval mode.
        start_tokens: (B, T) prompts, or a single one (T,).
        seq_len: The largest number of tokens to generate.
        sampler: Chooses the tokens.
        max_length: The largest number of tokens that the model takes at once.
        recompute: Returns logits for tokens and a mask.
        model: Decodes from a state, at a constant cost per token, while there are at most max_length tokens. Beyond
            that, or without a model, each token is computed from the last max_length tokens by `recompute`.
        mask: The shape of start_tokens, True for real tokens; each row one contiguous span.
        eos_token: Generation ends when every row chooses this token in the same step.
        keep_padding: Without a model, continue padded prompts from their last slot, as the originals do, and not from
            their last real token.
        **context: For `LanguageModel.new_state`.

    Returns:
        (B, ≤ seq_len) tokens, or (≤ seq_len,) for a single prompt.
    """
    start = start_tokens if start_tokens.ndim == 2 else start_tokens[None]
    B, T = start.shape
    tokens = torch.cat([start, start.new_zeros(B, seq_len)], 1)
    real = torch.ones_like(tokens, dtype=torch.bool)
    if mask is not None:
        real[:, :T] = mask.reshape(start.shape)
    streamed = 0 if model is None else max(0, min(seq_len, max_length + 1 - T))

    def steps() -> Generator[Tensor, None, None]:
        """Yield the next token of each row; the caller writes it to `tokens`."""
        token = start.new_zeros(B)
        if model is not None and streamed:
            state = model.new_state(B, max_length=min(max_length, T + seq_len), **context)
            logits, state = read_prompt(model, state, start, real[:, :T])
            loop = DecodeLoop(model, state, logits, sampler)
            with loop.single_thread():
                for _ in range(streamed):
                    yield loop.step()
            token = loop.token
        for t in range(T + streamed, T + seq_len):
            if t == max(T, max_length + 1):
                warnings.warn(
                    f"generation has passed max_seq_len ({max_length}): each token now recomputes the last "
                    f"{max_length}, as in the original; a larger max_seq_len decodes at a constant cost per token",
                    stacklevel=5,
                )
            window, visible = (x[:, max(0, t - max_length) : t] for x in (tokens, real))
            if keep_padding:
                logits = recompute(window, visible)[:, -1]
            else:
                window, visible = _close_gaps(window, visible)
                logits = _last(recompute(window, visible), visible)
            sampler.sample(logits, token, append=t > T)
            yield token

    training, end = net.training, T
    net.eval()
    try:
        with closing(steps()) as chosen:  # restores the number of threads
            for token in chosen:
                tokens[:, end] = token
                end += 1
                if eos_token is not None and bool((token == eos_token).all()):
                    break
    finally:
        net.train(training)
    return tokens[:, T:end] if start_tokens.ndim == 2 else tokens[0, T:end]


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
