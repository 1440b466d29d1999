"""A sequence divided over ranks gives the outputs, losses and gradients of one process."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from longspan import AttentionConfig, LanguageModel, ModelConfig, Packing
from longspan.distributed import context_parallel

V, T = 11, 29
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
]
KINDS = ("plain", "left", "right", "packed")


def build(mechanism: dict[str, Any], causal: bool) -> LanguageModel:
    torch.manual_seed(0)
    rotary = "halves" if mechanism["mechanism"] in ("softmax", "local") else "none"
    conv, shift = (4, (0, 1)) if causal else (0, ())
    attention = AttentionConfig(num_heads=4, mechanism=mechanism, conv_size=conv, rotary=rotary)
    config = ModelConfig(dim=16, depth=2, causal=causal, vocab_size=V, token_shift=shift, attention=attention)
    return LanguageModel(config).double()


def arguments(kind: str, piece: slice) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of the whole, and of a rank."""
    if kind == "plain":
        return {}, {}
    if kind == "packed":
        packing = Packing.from_lengths([4, 1, 17, 7])
        return {"packing": packing}, {"packing": packing}
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[0, : 7 if kind == "left" else 0] = False
    mask[0, 20 if kind == "right" else T :] = False
    return {"key_mask": mask}, {"key_mask": mask[:, piece]}


def compare(mechanism: dict[str, Any], causal: bool, kind: str, piece: slice) -> float:
    """The largest difference between this rank's numbers and those of one process."""
    tokens = torch.randint(V, (1 if kind == "packed" else 2, T), generator=torch.Generator().manual_seed(1))
    whole, part = arguments(kind, piece)
    one, model = build(mechanism, causal), build(mechanism, causal)
    divided = context_parallel(model, dist.group.WORLD)
    visible = part.get("key_mask", torch.ones_like(tokens[:, piece], dtype=torch.bool))[..., None]
    expected, got = one(tokens, **whole)[:, piece] * visible, divided(tokens[:, piece], **part) * visible
    pairs: list[tuple[Tensor, Tensor]] = [(got, expected)]
    if causal:
        loss, exact = divided.loss(tokens[:, piece], **part), one.loss(tokens, **whole)
        loss.backward()
        exact.backward()
        divided.reduce_gradients()
        gradients = [(x.grad, y.grad) for x, y in zip(model.parameters(), one.parameters(), strict=True)]
        pairs += [(loss, exact), *((x, y) for x, y in gradients if x is not None and y is not None)]
    return max((float((x - y).detach().abs().max()) for x, y in pairs if x.numel()), default=0.0)


def run(rank: int, ranks: int, port: int, cases: list[tuple[int, bool, str]]) -> None:
    torch.set_num_threads(1)
    where, limit = f"tcp://127.0.0.1:{port}", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks, timeout=limit)
    piece = slice(*CUTS[ranks][rank : rank + 2])
    for number, causal, kind in cases:
        error = compare(MECHANISMS[number], causal, kind, piece)
        assert error < 1e-9, f"{MECHANISMS[number]}, causal {causal}, {kind}: {error} on rank {rank} of {ranks}"
    dist.destroy_process_group()


def spawn(function: Any, ranks: int, *rest: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(function, args=(ranks, port, *rest), nprocs=ranks)


GRID = [(number, causal, kind) for number in range(len(MECHANISMS)) for causal in (True, False) for kind in KINDS]


def test_ranks_equal_one_process() -> None:
    """Each mechanism, causal and not, in some of the layouts, over three ranks of which one has nothing."""
    spawn(run, 3, [case for i, case in enumerate(GRID) if i % 5 in (0, 3)])


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_layout_equals_one_process(ranks: int) -> None:
    spawn(run, ranks, GRID)


def check_arguments(rank: int, ranks: int, port: int) -> None:
    where, limit = f"tcp://127.0.0.1:{port}", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=ranks, timeout=limit)
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
    dist.destroy_process_group()


def test_arguments() -> None:
    spawn(check_arguments, 2)
