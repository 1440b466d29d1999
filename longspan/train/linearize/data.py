"""Windows of concatenated documents, as a function of the seed and the step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.ops.loss import IGNORE_INDEX
from longspan.train.data.batches import derive_seed, permute_index
from longspan.train.data.readers import ReadOptions, find_source
from longspan.train.data.token_store import Segments, StoreSpec, TokenStore, open_store
from longspan.train.linearize.config import LinearizeConfig
from longspan.train.loggers import Logger

REPEAT_EVERY = 128  # tokens of a sequence for each passage that is repeated in it


class Windows:
    """Sequences of a text in shuffled order; each is read once before any is repeated.

    Args:
        tokens: The text.
        context: Tokens of a sequence.
        seed: Seed of the order.
    """

    def __init__(self, tokens: NDArray[np.int64], context: int, seed: int) -> None:
        self.tokens, self.context, self.seed = tokens, context, seed
        self.count = len(tokens) // context

    def batch(self, first: int, number: int) -> Tensor:
        """Return sequences first … first + number − 1 of the order: (number, context)."""
        rows = []
        for index in range(first, first + number):
            epoch, place = divmod(index, self.count)
            start = permute_index(place, self.count, derive_seed(self.seed, epoch)) * self.context
            rows.append(self.tokens[start : start + self.context])
        return torch.from_numpy(np.stack(rows))


class MixedWindows:
    """Sequences of two texts, the second one's evenly among the first one's.

    Args:
        windows: Of the first and of the second.
        share: Share of the second.
    """

    def __init__(self, windows: tuple[Windows, Windows], share: float) -> None:
        self.windows, self.share = windows, share

    def batch(self, first: int, number: int) -> Tensor:
        """Return sequences first … first + number − 1 of the order: (number, context)."""
        rows = []
        for index in range(first, first + number):
            before, after = int(index * self.share), int((index + 1) * self.share)
            second = after > before
            rows.append(self.windows[second].batch(before if second else index - before, 1))
        return torch.cat(rows)


def repeat_passages(tokens: Tensor, share: float, seed: int) -> Tensor:
    """Return sequences (B, T), in a share of which a few passages stand a second time, later than the first.

    A model can predict such a passage from its beginning if its memory recalls.
    """
    tokens, generator = tokens.clone(), np.random.default_rng(seed)
    T = tokens.shape[1]
    for row in tokens:
        if generator.random() >= share:
            continue
        for _ in range(-(-T // REPEAT_EVERY)):
            size = int(generator.integers(min(8, T // 2), min(64, T // 2) + 1))
            source = int(generator.integers(T - 2 * size + 1))
            target = int(generator.integers(source + size, T - size + 1))
            row[target : target + size] = row[source : source + size].clone()
    return tokens


def read_texts(settings: LinearizeConfig, tokenizer: Path, folder: Path, logger: Logger) -> TokenStore:
    """Open the token store of a run, building it if necessary.

    Raises:
        ValueError: The data cannot be read, or is too short.
        FileNotFoundError: A source does not exist.
    """
    options = ReadOptions()
    sources, eval_sources = (tuple(find_source(x, options) for x in d) for d in (settings.data, settings.eval_data))
    spec = StoreSpec(sources, eval_sources, options, tokenizer, settings.context, settings.held_out)
    try:
        store = open_store(folder, spec, logger.info)
    except ValueError as error:
        raise ValueError(str(error).replace("use --held-out 0", "give --eval-data")) from None
    needed = settings.long_context if settings.long_steps else settings.context
    if settings.data and store.train.total < needed:
        flag = "--long-context" if settings.long_steps else "--context"
        raise ValueError(
            f"--data has {store.train.total:,} tokens to train on, fewer than one sequence of {flag} {needed:,}: give "
            f"more text, or a shorter {flag}"
        )
    if store.held_out.total < 2:
        raise ValueError("there is no text to evaluate on: give more text, --eval-data, or a larger --held-out")
    return store


def concatenated(store: TokenStore, segments: Segments) -> NDArray[np.int64]:
    """Return the tokens of some segments, one after another."""
    spans = zip(segments.start.tolist(), segments.length.tolist(), strict=True)
    parts = [np.asarray(store.tokens[start : start + n], np.int64) for start, n in spans]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def mask_tokens(tokens: Tensor, mask_token: int, rate: float, seed: int) -> tuple[Tensor, Tensor]:
    """Mask a share of tokens (B, T), for an encoder; return the inputs, and the tokens to predict at masked places."""
    hidden = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed)) < rate
    hidden.view(-1)[seed % hidden.numel()] = True  # at least one
    return tokens.masked_fill(hidden, mask_token), tokens.masked_fill(~hidden, IGNORE_INDEX)


def next_tokens(tokens: Tensor) -> Tensor:
    """Return the token after each of (B, T), IGNORE_INDEX after the last."""
    return torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], IGNORE_INDEX)], 1)
