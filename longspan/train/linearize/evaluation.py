"""Measure teacher and student: perplexity by position, retrieval, speed, memory, and what the memory contributes."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan.generation.generate import generate, prefill, stream
from longspan.generation.sampling import Sampling
from longspan.hf.native import to_language_model, why_not_native
from longspan.hf.swap import StateLayer
from longspan.models.transformer import LanguageModel
from longspan.ops.loss import IGNORE_INDEX
from longspan.train.linearize.config import LinearizeConfig
from longspan.train.linearize.data import mask_tokens
from longspan.train.linearize.student import without_memory
from longspan.train.lora import lora_layers

CHUNK = 2048  # tokens of a sequence that are read at once
READ = 65536  # tokens of all sequences that are in memory together
WARM_UP, STEPS = 8, 24  # tokens that are decoded before, and that are timed
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
        logits = model(input_ids=inputs.to(device), **({"use_cache": False} if mask is None else {})).logits
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
def needle_accuracy(model: Any, tokenizer: Any, text: Tensor, length: int) -> float | None:
    """Return the share of depths at which a number hidden in `length` tokens of text is recalled, token by token.

    None if `length` is shorter than the needle, the question and the answer together.
    """
    needle, question, answer = (
        torch.tensor(tokenizer(words, add_special_tokens=False)["input_ids"]) for words in (NEEDLE, QUESTION, ANSWER)
    )
    filler = length - len(needle) - len(question) - len(answer)
    if filler < 0:
        return None
    places = [int(depth * filler) for depth in DEPTHS]
    prompts = torch.stack([torch.cat([text[:x], needle, text[x:filler], question, answer]) for x in places])
    right = 0
    for part in prompts.split(max(1, READ // length)):
        found = _read(model, part)[:, -len(answer) - 1 : -1].argmax(-1).cpu()
        right += int((found == answer).all(1).sum())
    return right / len(DEPTHS)


def _read(model: Any, tokens: Tensor) -> Tensor:
    """Return the logits of the last chunk of (B, T), which has CHUNK tokens or more where there are as many."""
    device, cache = next(model.parameters()).device, None
    pieces = list(tokens.to(device).tensor_split(max(1, tokens.shape[1] // CHUNK), 1))
    for piece in pieces:
        last = {} if piece is pieces[-1] else {"logits_to_keep": 1}
        out = model(input_ids=piece, past_key_values=cache, use_cache=True, **last)
        cache = out.past_key_values
    return out.logits


def fastest_form(model: Any) -> Any:
    """Return a copy to time: a longspan model where there is such a form; in bfloat16 on a GPU."""
    device = next(model.parameters()).device
    found = (
        copy.deepcopy(model) if lora_layers(model) or why_not_native(model) is not None else to_language_model(model)
    )
    return found.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


@torch.no_grad()
def decode_cost(model: Any, text: Tensor, length: int, batch: int) -> dict[str, float]:
    """Return milliseconds per step after `length` tokens, tokens per second, and bytes of one sequence's cache."""
    tokens = text[:length].repeat(batch, 1).to(next(model.parameters()).device)
    steps = _native_steps if isinstance(model, LanguageModel) else _transformers_steps
    step, size = steps(model, tokens)
    for _ in range(WARM_UP):
        step()
    times = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    median = sorted(times)[len(times) // 2]
    found = {"length": length, "batch": batch, "ms": 1000 * median}
    return found | {"tokens_per_second": batch / median, "bytes": size / batch}


def _native_steps(model: LanguageModel, tokens: Tensor) -> tuple[Callable[[], Any], int]:
    """Read tokens (B, T); return a function that decodes the next one, and the bytes of the state."""
    session = prefill(model, list(tokens), max_tokens=WARM_UP + STEPS)
    size = sum(x.numel() * x.element_size() for x in session.state.tensors().values())
    steps = stream(model, session, WARM_UP + STEPS, sampling=Sampling(temperature=0))
    return lambda: steps.take(1), size


def _transformers_steps(model: Any, tokens: Tensor) -> tuple[Callable[[], Any], int]:
    """The same for a model of transformers."""
    cache, token = None, tokens[:, -1:]
    for piece in tokens.split(CHUNK, 1):
        cache = model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values

    def step() -> None:
        nonlocal token
        token = model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        token.tolist()  # Wait for the GPU.

    return step, cache_bytes(cache)


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
    autocast: Callable[[], AbstractContextManager[Any]],
    notify: Callable[[str], None],
) -> dict[str, Any]:
    """Measure the models for the report.

    Args:
        models: The teacher and the student, by name.
        tokenizer: Their tokenizer.
        text: (N,) text that neither was trained on.
        settings: What to measure.
        encoder: Whether they are bidirectional.
        autocast: Makes a context in which quality is measured; time and memory are measured by `fastest_form`.
        notify: Called with a message before each measurement.

    Returns:
        Values that JSON can hold; lengths for which the text is too short are left out.
    """
    mask = (tokenizer.mask_token_id, settings.mask_rate) if encoder else None
    part, student = text[: settings.eval_tokens], models["student"]
    found: dict[str, Any] = {"eval_tokens": len(part), "context": settings.context}
    with autocast():
        found["perplexity"] = {name: perplexity(x, part, settings.context, mask=mask) for name, x in models.items()}
        with without_memory(student) as has_memory:
            if has_memory:
                found["perplexity_without_memory"] = perplexity(student, part, settings.context, mask=mask)
    if settings.report == "quick" or encoder:
        return found
    lengths = [length for length in settings.report_lengths if length <= len(text)]
    limit = getattr(models["teacher"].config, "n_positions", None)  # learned positions, which end somewhere
    lengths = [length for length in lengths if limit is None or length + WARM_UP + STEPS <= limit]
    found |= {"positions": {}, "needle": {}, "decode": {}, "throughput": {}}
    prompts = [text[start : start + 32] for start in range(0, min(len(text) - 31, 3 * 997), 997)]
    samples = {}
    for name, model in models.items():
        notify(f"measuring the {name}")
        with autocast():
            if lengths:
                found["positions"][name] = losses_by_position(model, text[: max(lengths)])
            needles = ((n, needle_accuracy(model, tokenizer, text, n)) for n in lengths)
            found["needle"][name] = {n: share for n, share in needles if share is not None}
        fast = fastest_form(model)
        found["decode"][name] = [decode_cost(fast, text, length, 1) for length in lengths]
        if lengths:
            found["throughput"][name] = decode_cost(fast, text, min(lengths), settings.report_batch)
        samples[name] = [tokenizer.decode(tokens) for tokens in continuations(fast, prompts)]
    shown = [tokenizer.decode(prompt.tolist()) for prompt in prompts]
    rows = zip(shown, *samples.values(), strict=True)
    found["samples"] = [dict(zip(("prompt", *samples), row, strict=True)) for row in rows]
    return found


@torch.no_grad()
def continuations(model: Any, prompts: Sequence[Tensor]) -> list[list[int]]:
    """Return greedy continuations of prompts of one length."""
    tokens = torch.stack(list(prompts)).to(next(model.parameters()).device)
    if isinstance(model, LanguageModel):
        return generate(model, list(tokens), SAMPLE, sampling=Sampling(temperature=0)).tokens
    cache, written = None, []
    for _ in range(SAMPLE):
        out = model(input_ids=tokens, past_key_values=cache, use_cache=True)
        cache, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)
        written.append(tokens)
    return torch.cat(written, 1).tolist()
