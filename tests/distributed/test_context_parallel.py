"""A sequence divided over ranks gives the outputs, losses, gradients and states of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import spawn
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from longspan import AttentionConfig, LanguageModel, ModelConfig, Packing
from longspan.distributed import context_parallel

V, T, PAST = 11, 29, 7
# Pieces of a sequence: one is empty, one is shorter than a window and a convolution.
CUTS = {2: [0, 13, T], 3: [0, 13, 13, T], 4: [0, 3, 13, 16, T]}
MECHANISMS: list[dict[str, Any]] = [
    {"mechanism": "softmax"},
    {"mechanism": "local", "window": 5},
    {"mechanism": "local", "window": 4, "look_back": 1, "look_ahead": 1},
    {"mechanism": "linear"},
    {"mechanism": "linear", "feature_map": "softmax", "normalize": "feature"},
    {"mechanism": "performer"},
    {"mechanism": "linformer", "rank": 4, "max_length": 64},
    {"mechanism": "decay"},
    {"mechanism": "decay", "gate": "channel"},
    {"mechanism": "delta"},
    {
        "mechanism": "split",
        "parts": [{"mechanism": "local", "num_heads": 2, "window": 5}, {"mechanism": "delta", "num_heads": 2}],
    },
    {"mechanism": "linear", "feature_map": "identity", "normalize": "none"},
    {"mechanism": "linear", "feature_map": "softmax"},
    {"mechanism": "linear", "blind_spot": 3},
    {"mechanism": "performer", "kernel": "relu", "phantom": 0.5},
    {"mechanism": "local", "window": (3, 6), "xpos": 4.0},
    {"mechanism": "local", "window": 19, "shared_qk": True},
    {"mechanism": "linformer", "rank": 4, "max_length": 64, "projection": "convolution"},
    {"mechanism": "decay", "gate": "fixed"},
    {"mechanism": "delta", "gate": "none"},
]
CAUSAL = ("plain", "left", "right", "packed", "past", "past_left")
BIDIRECTIONAL = ("plain", "left", "right", "holes", "packed")
GRID = [(number, True, kind) for number in range(len(MECHANISMS)) for kind in CAUSAL]
GRID += [(number, False, kind) for number in range(len(MECHANISMS)) for kind in BIDIRECTIONAL]


def build(mechanism: dict[str, Any], causal: bool, depth: int = 1, **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    rotary = "halves" if mechanism["mechanism"] in ("softmax", "local") and "xpos" not in mechanism else "none"
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, mechanism=mechanism, conv_size=4, rotary=rotary)
    options = {"token_shift": (0, 1) if causal else (1, 0, -2, -1), **options}
    config = ModelConfig(dim=16, depth=depth, causal=causal, vocab_size=V, attention=attention, **options)
    return LanguageModel(config).double()


def arguments(kind: str, piece: slice) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the whole, and of a rank."""
    if kind in ("plain", "past"):
        return {}, {}
    if kind == "packed":
        packing = Packing.from_lengths([4, 1, 17, 7])
        return {"packing": packing}, {"packing": packing}
    mask = torch.ones(2, T, dtype=torch.bool)
    if kind in ("left", "past_left"):
        mask[0, :7] = mask[1, :14] = False
    elif kind == "right":
        mask[0, 20:] = mask[1, 2:] = False
    else:
        mask[0, 3:6] = mask[0, 12:15] = mask[1, 20:] = mask[1, 0] = False
    return {"key_mask": mask}, {"key_mask": mask[:, piece]}


def compare(mechanism: dict[str, Any], causal: bool, kind: str, piece: slice) -> float:
    """The largest difference between this rank's numbers and those of one process."""
    generator = torch.Generator().manual_seed(1)
    tokens, labels = torch.randint(V, (2, 1 if kind == "packed" else 2, T), generator=generator)
    whole, part = arguments(kind, piece)
    one, model = build(mechanism, causal), build(mechanism, causal)
    divided = context_parallel(model, dist.group.WORLD)
    visible = part.get("key_mask", torch.ones_like(tokens[:, piece], dtype=torch.bool))[..., None]
    if kind.startswith("past"):
        return largest(compare_past(one, divided, tokens, piece, whole, part))
    pairs = [(divided(tokens[:, piece], **part) * visible, one(tokens, **whole)[:, piece] * visible)]
    given = () if causal else (labels[:, piece],)
    loss, exact = (
        divided.loss(tokens[:, piece], *given, **part),
        one.loss(tokens, *([] if causal else [labels]), **whole),
    )
    loss.backward()
    exact.backward()
    return largest([*pairs, (loss, exact), *gradients(divided, one)])


def compare_past(
    one: LanguageModel, divided: Any, tokens: Tensor, piece: slice, whole: dict[str, Any], part: dict[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """Continue from a state, whose gradients are compared too."""
    unused = ".z" if one.config.attention.mechanism.get("normalize") == "none" else "?"
    first = torch.randint(V, (2, PAST), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        state = one.extend(first, one.new_state(2), key_mask=torch.arange(PAST) < torch.tensor([[PAST], [3]]))[1]
    ours, theirs = (state._map(lambda x: x.clone().requires_grad_(has_gradient(x))) for _ in range(2))
    out, after = divided.extend(tokens[:, piece], ours, **part)
    expected, end = one.extend(tokens, theirs, **whole)
    visible = part.get("key_mask", torch.ones_like(tokens[:, piece], dtype=torch.bool))[..., None]
    pairs = [(out * visible, expected[:, piece] * visible)]
    weights = torch.linspace(-1, 1, V, dtype=torch.float64)
    total = (out * visible * weights).sum() + sum(
        x.square().sum() for x in floats(after, unused)
    ) / dist.get_world_size()
    whole_visible = whole.get("key_mask", torch.ones_like(tokens, dtype=torch.bool))[..., None]
    exact = (expected * whole_visible * weights).sum() + sum(x.square().sum() for x in floats(end, unused))
    total.backward()
    exact.backward()
    for mine in floats(ours, unused):
        mine.grad = torch.zeros_like(mine) if mine.grad is None else mine.grad
        dist.all_reduce(mine.grad)
    for (name, x), (_, y) in zip(after.tensors().items(), end.tensors().items(), strict=True):
        if name.endswith(unused):
            continue
        size = y.shape[2] if x.ndim == 4 else None  # a state of all tokens may have room for more
        assert x.shape == y.shape or not x[:, :, size:].any(), name
        pairs.append((x[:, :, :size] if size is not None else x, y))
    pairs += [
        (x.grad, y.grad)
        for x, y in zip(floats(ours, unused), floats(theirs, unused), strict=True)
        if y.grad is not None
    ]
    return pairs + gradients(divided, one)


def floats(state: Any, unused: str) -> list[Tensor]:
    return [x for name, x in state.tensors().items() if has_gradient(x) and not name.endswith(unused)]


def has_gradient(x: Tensor) -> bool:
    """Log scales, (B, Hkv), are constants."""
    return x.is_floating_point() and x.ndim > 2


def gradients(divided: Any, one: torch.nn.Module) -> list[tuple[Tensor, Tensor]]:
    divided.reduce_gradients()
    found = []
    for (name, x), y in zip(divided.model.named_parameters(), one.parameters(), strict=True):
        assert x.grad is not None
        if y.grad is None:
            assert not x.grad.any(), name
        else:
            found.append((x.grad, y.grad))
    return found


def largest(pairs: list[tuple[Tensor, Tensor]]) -> float:
    """The largest difference, relative to tensors that are larger than one."""
    numbers = [(x.detach(), y.detach()) for x, y in pairs if x.numel()]
    return max((float((x - y).abs().max() / y.abs().max().clamp(min=1)) for x, y in numbers), default=0.0)


def check_cases(rank: int, ranks: int, cases: list[tuple[int, bool, str]]) -> None:
    piece = slice(*CUTS[ranks][rank : rank + 2])
    for number, causal, kind in cases:
        try:
            error = compare(MECHANISMS[number], causal, kind, piece)
        except Exception as failure:
            raise AssertionError(f"{MECHANISMS[number]}, causal {causal}, {kind}, rank {rank} of {ranks}") from failure
        assert error < 1e-9, f"{MECHANISMS[number]}, causal {causal}, {kind}: {error} on rank {rank} of {ranks}"


def test_ranks_equal_one_process() -> None:
    """Each mechanism, causal and not, in one of the layouts in turn, over three ranks of which one has nothing."""
    causal = [(number, True, CAUSAL[number % len(CAUSAL)]) for number in range(11)]
    spawn(
        check_cases, 3, causal + [(number, False, BIDIRECTIONAL[number % len(BIDIRECTIONAL)]) for number in range(11)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_layout_equals_one_process(ranks: int) -> None:
    spawn(check_cases, ranks, GRID)


def check_arguments(rank: int, ranks: int) -> None:
    model = build({"mechanism": "linear"}, True)
    divided = context_parallel(model, init_device_mesh("cpu", (ranks,)))
    tokens = torch.randint(V, (1, 6), generator=torch.Generator().manual_seed(1))
    labels, piece = tokens.flip(1), slice(3 * rank, 3 * rank + 3)
    loss = divided.loss(tokens[:, piece], labels[:, piece])
    assert abs(float(loss) - float(model.loss(tokens, labels))) < 1e-9
    assert abs(float(loss) - float(divided.loss(tokens[:, piece]))) > 1e-3
    with pytest.raises(ValueError, match=r"takes a Transformer, LanguageModel, .* got a Linear"):
        context_parallel(torch.nn.Linear(2, 2), dist.group.WORLD)
    with pytest.raises(ValueError, match=r"pieces of the same sequences, got batch sizes \[1, 2\]"):
        divided(torch.zeros(1 + rank, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"packing must be that of the whole sequence, of 6 tokens, got \[6, 5\]"):
        divided(torch.zeros(1, 3, dtype=torch.int64), packing=Packing.from_lengths([6 - rank]))


def test_arguments() -> None:
    spawn(check_arguments, 2)
