"""What context parallelism sends, and when: states of a fixed size, beside the work inside a piece."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import spawn
from torch import Tensor

from longspan import AttentionConfig, ModelConfig, Transformer
from longspan.distributed import collectives, context_parallel
from longspan.mechanisms import gated, linear
from longspan.mechanisms.linformer import LinformerAttention
from longspan.mechanisms.local import LocalAttention
from longspan.ops.gated import torch as gated_chunks
from longspan.ops.linear import torch as linear_chunks

B, DIM, H, HKV, D = 3, 20, 4, 2, 5
M, R, W = 7, 3, 11
# The number of elements that a rank sends in each layer, causal and bidirectional, as docs/distributed.md says.
SENT: list[tuple[dict[str, Any], int, int]] = [
    ({"mechanism": "linear"}, B * HKV * (D * (D + 1) + 1), B * HKV * (D * (D + 1) + 1)),
    ({"mechanism": "performer", "num_features": M}, *[B * HKV * (M * (D + 1) + 1)] * 2),
    ({"mechanism": "linformer", "rank": R, "max_length": 1 << 18}, B * HKV * R * 2 * D, B * HKV * R * 2 * D),
    ({"mechanism": "decay"}, B * HKV * (D * D + 1), 2 * B * HKV * (D * D + 1)),
    ({"mechanism": "decay", "gate": "channel"}, B * HKV * (D * D + D), 2 * B * HKV * (D * D + D)),
    ({"mechanism": "delta"}, B * HKV * 2 * D * D, 2 * B * HKV * 2 * D * D),
    ({"mechanism": "local", "window": W}, B * HKV * W * 2 * D, B * (HKV * 2 * D + 1) * (W - 1)),
]


def divided_model(mechanism: dict[str, Any], causal: bool, depth: int = 1) -> Any:
    torch.manual_seed(0)
    attention = AttentionConfig(num_heads=H, num_kv_heads=HKV, head_dim=D, mechanism=mechanism)
    model = Transformer(ModelConfig(dim=DIM, depth=depth, causal=causal, attention=attention))
    return context_parallel(model, dist.group.WORLD)


class Recorder:
    """Collectives of floating-point tensors: what they send, and when they start and are waited for."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.events: list[str] = []

    def wrap(self, name: str) -> Any:
        original = getattr(collectives, name)

        def call(out: Tensor, x: Tensor, *sizes: Any, **options: Any) -> Any:
            work = original(out, x, *sizes, **options)
            if not x.is_floating_point():
                return work
            assert options["async_op"], f"{name} blocks"
            self.sent.append(x.numel())
            self.events.append(f"start {name}")
            waiting = mock.Mock()
            waiting.wait.side_effect = lambda: (self.events.append(f"wait {name}"), work.wait())
            return waiting

        return mock.patch.object(collectives, name, call)

    def note(self, owner: Any, name: str, event: str = "work") -> Any:
        original = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            self.events.append(event)
            return original(*args, **options)

        return mock.patch.object(owner, name, call)


def check_sizes(rank: int, ranks: int, lengths: list[int]) -> None:
    for mechanism, causal_size, bidirectional_size in SENT:
        for causal, size in ((True, causal_size), (False, bidirectional_size)):
            model = divided_model(mechanism, causal, depth=2)
            for length in lengths:
                seen = Recorder()
                x = torch.randn(B, length, DIM)
                with torch.no_grad(), seen.wrap("_gather_into"), seen.wrap("_all_to_all"):
                    model(x)
                assert seen.sent == [size] * 2, f"{mechanism}, causal {causal}, {length} tokens: {seen.sent}"


def check_events(rank: int, ranks: int) -> None:
    for mechanism, causal in [(m, c) for m, *_ in SENT for c in (True, False)]:
        name = mechanism["mechanism"]
        if not causal and name in ("linear", "performer", "linformer", "local"):
            continue  # Beside the exchange only queries are projected.
        model, seen = divided_model(mechanism, causal), Recorder()
        x = torch.randn(B, 2 * W, DIM, requires_grad=True)
        work = [
            seen.note(linear, "causal_linear_out"),
            seen.note(gated, "gated_linear"),
            seen.note(gated, "gated_linear_out"),
            seen.note(LocalAttention, "_windowed"),
            seen.note(LinformerAttention, "_scores"),
        ]
        with seen.wrap("_gather_into"), work[0], work[1], work[2], work[3], work[4]:
            out = model(x)
        assert_between(seen.events, "_gather_into", mechanism)
        if name == "local":
            continue  # Its pieces of queries are independent: autograd may take either first.
        seen.events.clear()
        chunks = gated_chunks if name in ("decay", "delta") else linear_chunks
        with seen.wrap("_scatter_sum"), seen.note(chunks, "backward"):
            out.square().sum().backward()
        assert_between(seen.events, "_scatter_sum", mechanism)
        assert seen.sent[-1] == ranks * seen.sent[0], f"{mechanism}: {seen.sent}"


def assert_between(events: list[str], collective: str, mechanism: dict[str, Any]) -> None:
    start, wait = events.index(f"start {collective}"), events.index(f"wait {collective}")
    assert "work" in events[start:wait], f"{mechanism}: {events}"
    assert events.count(f"start {collective}") == 1, f"{mechanism}: {events}"


def check_queries(rank: int, ranks: int) -> None:
    """Where nothing else can run beside the exchange, queries are projected."""
    for mechanism, causal in (({"mechanism": "linear"}, False), ({"mechanism": "softmax"}, True)):
        model, seen = divided_model(mechanism, causal), Recorder()
        layer = model.model.stack.attention_layers()[0][1]
        handle = layer.to_q.register_forward_hook(lambda *_, events=seen.events: events.append("work"))
        with torch.no_grad(), seen.wrap("_gather_into"):
            model(torch.randn(B, 13, DIM))
        handle.remove()
        assert_between(seen.events, "_gather_into", mechanism)


def check_all(rank: int, ranks: int) -> None:
    check_sizes(rank, ranks, [W + 2, 131])
    check_events(rank, ranks)
    check_queries(rank, ranks)


def test_traffic_and_order() -> None:
    """What a rank sends does not depend on the length, and is sent beside the work inside a piece."""
    spawn(check_all, 2)


@pytest.mark.slow
def test_traffic_is_constant_up_to_64k_tokens() -> None:
    spawn(check_sizes, 2, [1 << 10, 1 << 16])
