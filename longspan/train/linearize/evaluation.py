"""Measure teacher and student: perplexity by position, retrieval, speed, memory, and what the memory contributes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.hf.swap import StateLayer
from longspan.ops.loss import IGNORE_INDEX
from longspan.train.linearize.config import LinearizeConfig
from longspan.train.linearize.data import mask_tokens
from longspan.train.linearize.student import without_memory

CHUNK = 512  # tokens that are read at once
STEPS = 16  # tokens that are timed
SAMPLE = 64  # tokens of a sample
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
NEEDLE = " The secret number of the lighthouse is 48213."
QUESTION = "\n\nThe secret number of the lighthouse is"
ANSWER = " 48213"


@torch.no_grad()
def perplexity(model: Any, tokens: Tensor, context: int, *, mask: tuple[int, float] | None = None) -> float:
    """Return exp of the mean loss of a text in windows that do not overlap.

    Args:
        model: A model of transformers.
        tokens: (N,) the text.
        context: Tokens of a window, of which all but the first are predicted; a shorter last window is read if it is
            the only one.
        mask: The mask token and the share of masked tokens, for an encoder.
    """
    device, total, count = next(model.parameters()).device, 0.0, 0
    windows = tokens[: max(1, len(tokens) // context) * context].split(context)
    for number, window in enumerate(windows):
        inputs, targets = window[None], torch.cat([window[1:], window.new_full((1,), IGNORE_INDEX)])[None]
        if mask is not None:
            inputs, targets = mask_tokens(window[None], *mask, seed=number)
        logits = (
            model(input_ids=inputs.to(device), use_cache=False).logits
            if mask is None
            else model(inputs.to(device)).logits
        )
        losses = F.cross_entropy(logits[0].float(), targets[0].to(device), reduction="sum", ignore_index=IGNORE_INDEX)
        total, count = total + float(losses), count + int((targets != IGNORE_INDEX).sum())
    return math.exp(min(total / max(count, 1), 700))


@torch.no_grad()
def losses_by_position(model: Any, tokens: Tensor) -> list[dict[str, float]]:
    """Return the mean loss at positions 1, 2–3, 4–7, … of one long text, read in chunks with a cache."""
    device, cache, losses = next(model.parameters()).device, None, []
    for chunk, after in zip(tokens[:-1].split(CHUNK), tokens[1:].split(CHUNK), strict=True):
        out = model(input_ids=chunk[None].to(device), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        losses.append(F.cross_entropy(out.logits[0].float(), after.to(device), reduction="none").cpu())
    found, start, every = [], 0, torch.cat(losses)
    while start < len(every):
        end = min(len(every), max(1, 2 * start))
        found.append({"from": start, "to": end - 1, "loss": float(every[start:end].mean())})
        start = end
    return found


@torch.no_grad()
def needle_accuracy(model: Any, tokenizer: Any, text: Tensor, length: int) -> float:
    """Return the share of depths at which a number hidden in `length` tokens of text is recalled, token by token."""
    needle, question, answer = (
        torch.tensor(tokenizer(words, add_special_tokens=False)["input_ids"]) for words in (NEEDLE, QUESTION, ANSWER)
    )
    room, right = length - len(needle) - len(question) - len(answer), 0
    for depth in DEPTHS:
        place = int(depth * room)
        prompt = torch.cat([text[:place], needle, text[place:room], question, answer])
        logits = _read(model, prompt[None])[0]
        right += int(bool((logits[-len(answer) - 1 : -1].argmax(-1).cpu() == answer).all()))
    return right / len(DEPTHS)


def _read(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits of the last chunk of (B, T), which has CHUNK tokens or more where there are as many."""
    device, cache = next(model.parameters()).device, None
    pieces = list(tokens.to(device).tensor_split(max(1, tokens.shape[1] // CHUNK), 1))
    for piece in pieces:
        out = model(input_ids=piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
    return out.logits


@torch.no_grad()
def decode_cost(model: Any, text: Tensor, length: int, batch: int) -> dict[str, float]:
    """Return milliseconds per step after `length` tokens, tokens per second, and bytes of one sequence's cache."""
    device, cache = next(model.parameters()).device, None
    tokens = text[:length].repeat(batch, 1).to(device)
    for piece in tokens.split(CHUNK, 1):
        cache = model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
    token, times = tokens[:, -1:], []
    for _ in range(STEPS):
        _synchronize(device)
        begun = time.perf_counter()
        out = model(input_ids=token, past_key_values=cache, use_cache=True)
        token = out.logits[:, -1:].argmax(-1)
        _synchronize(device)
        times.append(time.perf_counter() - begun)
    median = sorted(times)[len(times) // 2]
    return {
        "length": length,
        "batch": batch,
        "ms": 1000 * median,
        "tokens_per_second": batch / median,
        "bytes": cache_bytes(cache) / batch,
    }


def cache_bytes(cache: Any) -> int:
    """Return the bytes of all tensors of a cache of transformers."""
    total = 0
    for layer in cache.layers:
        tensors = [layer.keys, layer.values]
        if isinstance(layer, StateLayer):
            tensors = [] if layer.state is None else list(layer.state.tensors().values())
        total += sum(x.numel() * x.element_size() for x in tensors)
    return total


def evaluate(
    models: Mapping[str, Any],
    tokenizer: Any,
    text: Tensor,
    settings: LinearizeConfig,
    *,
    encoder: bool,
    notify: Callable[[str], None],
) -> dict[str, Any]:
    """Measure the models for the report.

    Args:
        models: The teacher and the student, by name.
        tokenizer: Their tokenizer.
        text: (N,) text that neither was trained on.
        settings: What to measure.
        encoder: Whether they are bidirectional.
        notify: Called with a message before each measurement.

    Returns:
        Values that JSON can hold; lengths for which the text is too short are left out.
    """
    mask = (tokenizer.mask_token_id, settings.mask_rate) if encoder else None
    part = text[: settings.eval_tokens]
    found: dict[str, Any] = {"eval_tokens": len(part), "context": settings.context}
    found["perplexity"] = {name: perplexity(model, part, settings.context, mask=mask) for name, model in models.items()}
    with without_memory(models["student"]) as has_memory:
        if has_memory:
            found["perplexity_without_memory"] = perplexity(models["student"], part, settings.context, mask=mask)
    if settings.report == "quick" or encoder:
        return found
    lengths = [length for length in settings.report_lengths if length <= len(text)]
    limit = getattr(models["teacher"].config, "n_positions", None)  # learned positions, which end somewhere
    lengths = [length for length in lengths if limit is None or length + STEPS <= limit]
    found["positions"], found["needle"], found["decode"], found["throughput"] = {}, {}, {}, {}
    for name, model in models.items():
        notify(f"measuring the {name}")
        if lengths:
            found["positions"][name] = losses_by_position(model, text[: max(lengths)])
        found["needle"][name] = {n: needle_accuracy(model, tokenizer, text, n) for n in lengths if n >= 64}
        found["decode"][name] = [decode_cost(model, text, length, 1) for length in lengths]
        if lengths:
            found["throughput"][name] = decode_cost(model, text, min(lengths), settings.report_batch)
    found["samples"] = _samples(models, tokenizer, text)
    return found


@torch.no_grad()
def _samples(models: Mapping[str, Any], tokenizer: Any, text: Tensor) -> list[dict[str, str]]:
    """Return greedy continuations of the same prompts."""
    found = []
    for start in range(0, min(len(text), 3 * 997), 997):
        prompt = text[start : start + 32]
        row = {"prompt": tokenizer.decode(prompt.tolist())}
        for name, model in models.items():
            cache, token, written = None, prompt[None].to(next(model.parameters()).device), []
            for _ in range(SAMPLE):
                out = model(input_ids=token, past_key_values=cache, use_cache=True)
                cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
                written.append(int(token))
            row[name] = tokenizer.decode(written)
        found.append(row)
    return found


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
