"""Random wrong arguments to the public functions and classes: a right answer, or an error that names the argument.

Each call is one that works, with one argument replaced. An answer is right if its tensors have the shapes of the
correct call's and hold no NaN; an error is right if it is a ValueError or TypeError whose message names the argument.
"""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import longspan
from longspan import AttentionConfig, FeedForwardConfig, LegacyConfig, ModelConfig, Packing, Sampling
from longspan.generation.generate import prefill

CALLS = 700  # for each seed
B, T, H, D, V, DIM = 2, 7, 2, 6, 13, 12
NUMBERS: list[Any] = [-1, 0, 2.5, float("nan"), float("inf"), -0.5, "3", None, [1], {}, b"2", 1j, object()]
OTHERS: list[Any] = [None, 3, 0.5, "text", [1, 2], {"a": 1}, object(), np.ones((2, 3)), (), b""]
# Words by which a message may name an argument, beside its own name.
WORDS: dict[str, tuple[str, ...]] = {
    "q": ("q must", "q,", "q and", "q of", "queries", "the input"),
    "k": ("k must", "k and", "keys", "the input"),
    "v": ("v must", "and v", "values", "the input"),
    "prompt": ("prompt", "tokens"),
    "x": ("x must", "input", "vectors"),
    "index": ("index", "rows"),
    "tokens": ("tokens", "prompt"),
    "source": ("source", "tokens"),
    "source_mask": ("source_mask", "key_mask"),
    "target": ("target", "tokens", "labels"),
    "offsets": ("offsets", "lengths"),
    "later": ("later", "merge"),
    "folder": ("folder", "PathLike"),
    "rows": ("rows", "state"),
    "past": ("past", "state"),
    "max_tokens": ("max_tokens", "number"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "local": {"window": 3, "look_back": 1, "xpos": 2.0, "scale": 0.5, "dropout": 0.0, "query_offset": 2},
    "linear": {"feature_map": "elu", "normalize": "query"},
    "performer": {"num_features": 5, "redraw_interval": 3, "epsilon": 0.0},
    "linformer": {"max_length": 16, "rank": 3},
}


@dataclasses.dataclass
class Call:
    """A call that works. kinds: how each argument is made wrong."""

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    kinds: dict[str, str]


def wrong(draw: random.Random, kind: str, value: Any) -> Any:
    """Return another value in the place of a right one."""
    if kind == "number":
        return draw.choice(NUMBERS)
    if kind == "object" or draw.random() < 0.2:
        return draw.choice(OTHERS)
    if kind == "name":
        return draw.choice(["nonsense", "", 3, None, ["elu"], 0.5, object()])
    assert isinstance(value, Tensor)
    if kind == "tokens":
        changes: list[Callable[[], Any]] = [
            lambda: value.float(),
            lambda: value[0],
            lambda: value[:, :, None],
            lambda: value.bool(),
            lambda: value.clone().fill_(V + 5),
            lambda: value.clone().fill_(-3),
            lambda: value.tolist(),
            lambda: value.repeat(1, 9),
            lambda: value[:0],
        ]
    elif kind == "mask":
        changes = [
            lambda: value.float(),
            lambda: value[:, 1:],
            lambda: value[0],
            lambda: value[:, None],
            lambda: value.tolist(),
            lambda: value[:1],
            lambda: value.int(),
        ]
    else:
        changes = [
            lambda: value[0],
            lambda: value[..., :-1],
            lambda: value[:, :-1],
            lambda: value[:1],
            lambda: value.unsqueeze(0),
            lambda: value.long(),
            lambda: value.bool(),
            lambda: value.to(torch.complex64),
            lambda: value.tolist(),
            lambda: value.numpy(),
            lambda: value[:, :0],
            lambda: value.repeat(2, *[1] * (value.ndim - 1)),
        ]
    return draw.choice(changes)()


def mechanisms() -> Iterator[Call]:
    q, k, v = (torch.randn(B, T, H, D) for _ in range(3))
    mask = torch.arange(T) < torch.tensor([[T], [T - 2]])
    tensors = {"q": "tensor", "k": "tensor", "v": "tensor", "key_mask": "mask"}
    for name, options in OPTIONS.items():
        given = {"num_heads": H, "head_dim": D, "num_kv_heads": H, "value_dim": D, **options}
        kinds = {option: "name" if isinstance(x, str) else "number" for option, x in given.items()}
        yield Call(f"build_mechanism({name})", lambda name=name, **x: longspan.build_mechanism(name, **x), given, kinds)
        mechanism = longspan.build_mechanism(name, H, D, **options).eval()
        state = mechanism.extend(mechanism.new_state(B, max_length=16), q, k, v)[1]
        made = {"q": q, "k": k, "v": v, "key_mask": mask}
        yield Call(f"{name}.forward", lambda m=mechanism, **x: m(**x), made, tensors)
        yield Call(f"{name}.forward causal", lambda m=mechanism, **x: m(**x, causal=True), made, tensors)
        packing = {"q": q[:1], "k": k[:1], "v": v[:1], "packing": Packing.from_lengths([3, 4])}
        yield Call(
            f"{name}.forward packed", lambda m=mechanism, **x: m(**x, causal=True), packing,
            {"q": "tensor", "k": "tensor", "v": "tensor", "packing": "object"},
        )  # fmt: skip
        extended = {"state": state, **{n: x for n, x in made.items() if n != "key_mask"}}
        kinds = {"state": "object", "q": "tensor", "k": "tensor", "v": "tensor"}
        yield Call(f"{name}.extend", lambda m=mechanism, **x: m.extend(**x), extended, kinds)
        first = {n: x[:, :1] for n, x in extended.items() if n != "state"} | {"state": state}
        yield Call(f"{name}.step", lambda m=mechanism, **x: m.step(**x), first, kinds)
        yield Call(
            f"{name}.write", lambda m=mechanism, **x: m.write(**x), {"state": state, "k": k, "v": v, "key_mask": mask},
            {"state": "object", "k": "tensor", "v": "tensor", "key_mask": "mask"},
        )  # fmt: skip
        if name != "local":
            yield Call(
                f"{name}.read", lambda m=mechanism, **x: m.read(**x), {"state": state, "q": q},
                {"state": "object", "q": "tensor"},
            )  # fmt: skip
        yield Call(
            f"{name}.new_state",
            lambda m=mechanism, **x: m.new_state(**x),
            {"batch_size": B, "max_length": 16, "start": 2},
            {"batch_size": "number", "max_length": "number", "start": "number"},
        )
        other = mechanism.extend(mechanism.new_state(B, start=state.end, max_length=16), q[:, :3], k[:, :3], v[:, :3])[
            1
        ]
        yield Call(f"{name} State.merge", lambda s=state, **x: s.merge(**x), {"later": other}, {"later": "object"})
        yield Call(f"{name} State.select", lambda s=state, **x: s.select(**x), {"index": [1]}, {"index": "object"})
        replaced = {"index": [1], "rows": state.select([0])}
        yield Call(
            f"{name} State.put", lambda s=state, **x: s.put(**x), replaced, {"index": "object", "rows": "object"}
        )


def models(folder: Path) -> Iterator[Call]:
    for cls in (AttentionConfig, FeedForwardConfig, LegacyConfig, ModelConfig):
        fields = {f.name: getattr(cls(), f.name) for f in dataclasses.fields(cls)}
        yield Call(cls.__name__, lambda cls=cls, **x: cls(**x), fields, dict.fromkeys(fields, "number"))
    attention = AttentionConfig(num_heads=H, mechanism="linear")
    config = ModelConfig(
        dim=DIM, depth=1, attention=attention, vocab_size=V, causal=True, positions="learned", max_length=30
    )
    tokens, mask = torch.randint(1, V, (B, T)), torch.arange(T) < torch.tensor([[T], [T - 2]])
    model = longspan.LanguageModel(config).eval()
    taken, kinds = {"tokens": tokens, "key_mask": mask}, {"tokens": "tokens", "key_mask": "mask"}
    yield Call("LanguageModel", lambda **x: model(**x), taken, kinds)
    yield Call(
        "LanguageModel.loss", lambda **x: model.loss(**x), taken | {"labels": tokens}, kinds | {"labels": "tokens"}
    )
    state = model.extend(tokens, model.new_state(B))[1]
    yield Call(
        "LanguageModel.extend", lambda **x: model.extend(**x), {"tokens": tokens, "state": state},
        {"tokens": "tokens", "state": "object"},
    )  # fmt: skip
    vectors = dataclasses.replace(config, vocab_size=None, positions="none", max_length=None)
    transformer = longspan.Transformer(vectors).eval()
    x = torch.randn(B, T, DIM)
    yield Call(
        "Transformer",
        lambda **given: transformer(**given),
        {"x": x, "key_mask": mask},
        {"x": "tensor", "key_mask": "mask"},
    )
    layer = longspan.Attention(DIM, attention, causal=True).eval()
    yield Call(
        "Attention", lambda **given: layer(**given), {"x": x, "key_mask": mask}, {"x": "tensor", "key_mask": "mask"}
    )
    both = longspan.EncoderDecoder(
        dataclasses.replace(config, causal=False), dataclasses.replace(config, cross=attention)
    ).eval()
    pair = {"source": tokens, "target": tokens, "source_mask": mask}
    yield Call(
        "EncoderDecoder", lambda **given: both(**given),
        pair, {"source": "tokens", "target": "tokens", "source_mask": "mask"},
    )  # fmt: skip
    asked = {"model": model, "prompt": tokens, "max_tokens": 3}
    kinds = {"model": "object", "prompt": "tokens", "max_tokens": "number"}
    seeded = asked | {"seed": 1, "sampling": Sampling(temperature=0.5)}
    for name, function in (("generate", longspan.generate), ("stream", lambda **given: list(longspan.stream(**given)))):
        yield Call(name, lambda f=function, **x: f(**x), seeded, kinds | {"seed": "number", "sampling": "object"})
    yield Call(
        "prefill", lambda **given: prefill(given["model"], given["prompt"], chunk=given["chunk"]).logits,
        {"model": model, "prompt": tokens, "chunk": 3}, {"model": "object", "prompt": "tokens", "chunk": "number"},
    )  # fmt: skip
    sampled = {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}
    sampled = {name: x for name, x in sampled.items() if name in {f.name for f in dataclasses.fields(Sampling)}}
    yield Call("Sampling", lambda **given: Sampling(**given), sampled, dict.fromkeys(sampled, "number"))
    longspan.save(model, folder / "model")
    yield Call(
        "save", lambda **given: longspan.save(**given), {"model": model, "folder": folder / "copy"}, {"model": "object"}
    )
    yield Call("load", lambda **given: longspan.load(**given), {"folder": folder / "model"}, {"folder": "object"})
    yield Call(
        "Packing.from_lengths",
        lambda **given: Packing.from_lengths(**given),
        {"lengths": [3, 4]},
        {"lengths": "object"},
    )


def tensors(answer: Any) -> list[Tensor]:
    """Return the floating tensors of an answer: tensors, states, and containers of them."""
    if isinstance(answer, Tensor):
        return [answer] if answer.is_floating_point() else []
    if isinstance(answer, longspan.State):
        return []  # A state may hold −∞ where nothing was written.
    if isinstance(answer, Mapping):
        return [x for part in answer.values() for x in tensors(part)]
    return [x for part in answer for x in tensors(part)] if isinstance(answer, list | tuple) else []


def problem(call: Call, argument: str, value: Any) -> str | None:
    """Return what is wrong with the answer to a call with a wrong argument."""
    try:
        answer = call.function(**{**call.arguments, argument: value})
    except (ValueError, TypeError) as error:
        # Of tensors that do not fit together, an error may name either.
        tensors_given = [name for name, kind in call.kinds.items() if kind != "number"]
        names = {argument, *(tensors_given if argument in tensors_given else ())}
        words = [word for name in names for word in WORDS.get(name, (name,))]
        named = any(word in str(error) for word in words)
        return None if named else f"{type(error).__name__} without its name: {error}"
    except FileNotFoundError as error:
        return None if argument == "folder" else str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "an answer with NaN" if any(x.isnan().any() for x in tensors(answer)) else None


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_wrong_arguments(seed: int, tmp_path: Path) -> None:
    draw, found = random.Random(seed), {}
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = [*mechanisms(), *models(tmp_path)]
        for call in calls:
            call.function(**call.arguments)
        for _ in range(CALLS):
            call = draw.choice(calls)
            argument = draw.choice(list(call.kinds))
            value = wrong(draw, call.kinds[argument], call.arguments[argument])
            if (why := problem(call, argument, value)) is not None:
                shown = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, Tensor) else repr(value)[:60]
                found.setdefault(f"{call.name}: {argument} = {shown}", why[:200])
    listed = "\n".join(f"{what}: {why}" for what, why in sorted(found.items()))
    assert not found, f"{len(found)} of {CALLS} calls:\n{listed}"
