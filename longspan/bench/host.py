"""Host overhead of mechanisms, SDPA and a function that only allocates, timed in turn in one process."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from longspan.bench.arguments import check_device
from longspan.bench.environment import environment
from longspan.bench.jsonl import Row
from longspan.bench.subjects.base import Case, random_qkv
from longspan.bench.timing import cuda_graph, cuda_ms
from longspan.mechanisms import build_mechanism
from longspan.utils import write_atomically

Step = Callable[[], Any]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
SDPA = "PyTorch SDPA"
NOTHING = "a function that only allocates"


@dataclass(frozen=True)
class HostOptions:
    """Options of `longspan bench host` and `python -m longspan.bench` with the subject "host"."""

    lengths: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    """Sequence lengths."""
    batch: int = 2
    """Batch size."""
    heads: int = 16
    """Number of heads."""
    head_dim: int = 64
    """Dimension of a head."""
    device: str = "cuda"
    """cpu or cuda."""
    turns: int = 20
    """Turns, in each of which everything is called; medians are over them."""
    calls: int = 10
    """Calls of each step in a turn."""
    out: Path = Path("runs/host.json")
    """The JSON file of the results."""


class _Allocate(torch.autograd.Function):
    """Allocates results and gradients and computes nothing: what every PyTorch function written in Python costs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(v)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])


def subjects(case: Case) -> dict[str, tuple[str, Attend]]:
    """Return by name the mechanism and what is called, causal."""
    options: dict[str, tuple[str, dict[str, Any]]] = {
        "linear": ("linear", {}),
        "performer, 256 features": ("performer", {"num_features": 256}),
        "local, 256 keys": ("local", {"window": 256}),
    }
    found: dict[str, tuple[str, Attend]] = {}
    for name, (mechanism, given) in options.items():
        built = build_mechanism(mechanism, case.num_heads, case.head_dim, **given)
        found[name] = mechanism, partial(built.to(case.device, case.torch_dtype).eval(), causal=True)

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    found[SDPA] = "softmax", sdpa
    found[NOTHING] = "none", _Allocate.apply
    return found


def run(options: HostOptions) -> list[Row]:
    """Measure in bfloat16, write the results after each length, and return their rows.

    `host_*_us` is the time until the calls return, without waiting for a GPU; `*_ms` with waiting for the last one of a
    turn; `*_graph_ms` that of a CUDA graph.

    Raises:
        ValueError: If there is no such device.
    """
    check_device(options.device)
    about = {"format": 1, **environment(options.device), "options": {**asdict(options), "out": None}}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for length in options.lengths:
        rows += _measure(length, options)
        write_atomically(options.out, json.dumps({**about, "rows": rows}, indent=1) + "\n")
        for row in rows[-5:]:
            print(length, row["name"], {key: value for key, value in row.items() if key.endswith(("_us", "_ms"))})
    return rows


def _measure(length: int, options: HostOptions) -> list[Row]:
    sizes = {"batch_size": options.batch, "num_heads": options.heads, "head_dim": options.head_dim}
    case = Case(length, causal=True, dtype="bfloat16", device=options.device, **sizes)
    leaves = [x.requires_grad_() for x in random_qkv(case)]
    gradient = torch.randn_like(leaves[2])
    measured = subjects(case)
    steps = {name: _steps(attend, leaves, gradient) for name, (_, attend) in measured.items()}
    times: dict[str, dict[str, list[float]]] = {name: {} for name in steps}
    for turn in range(-2, options.turns):  # the first two compile and warm up
        for name, timed in steps.items():
            for key, microseconds in _turn(*timed, options).items():
                if turn >= 0:
                    times[name].setdefault(key, []).append(microseconds)
    rows: list[Row] = []
    for name, (mechanism, _) in measured.items():
        row: Row = {"mechanism": mechanism, "ratio_to": SDPA, "name": name, "case": asdict(case), "status": "ok"}
        row["package"] = "torch" if name in (SDPA, NOTHING) else "longspan"
        row |= {key: round(statistics.median(values), 4) for key, values in times[name].items()}
        if name != NOTHING and options.device == "cuda":
            forward, both = steps[name][1:]
            row["forward_graph_ms"] = round(statistics.median(cuda_ms(cuda_graph(forward), 20)), 4)
            row["forward_backward_graph_ms"] = round(statistics.median(cuda_ms(cuda_graph(both), 20)), 4)
        rows.append(row)
    (reference,) = (row for row in rows if row["name"] == SDPA)
    for row in rows:
        keys = [key for key in row if key.endswith(("_us", "_ms")) and key in reference]
        row["ratios"] = {key: row[key] / reference[key] for key in keys}
    return rows


def _steps(attend: Attend, leaves: list[Tensor], gradient: Tensor) -> tuple[Step, Step, Step]:
    """The forward pass with and without a graph for gradients, and both passes."""

    def without() -> Tensor:
        with torch.no_grad():
            return attend(*leaves)

    return lambda: attend(*leaves), without, lambda: torch.autograd.grad(attend(*leaves), leaves, gradient)


def _turn(forward: Step, without: Step, both: Step, options: HostOptions) -> dict[str, float]:
    """Time some calls of every kind."""
    found = {}
    for name, step in (("forward", forward), ("no_grad", without), ("forward_backward", both)):
        host, total = _time(step, options)
        found[f"host_{name}_us"] = host * 1e6
        if name != "no_grad":
            found[f"{name}_ms"] = total * 1e3
    with torch.autograd.set_multithreading_enabled(False):
        found["host_forward_backward_one_thread_us"] = _time(both, options)[0] * 1e6
    return found


def _time(step: Step, options: HostOptions) -> tuple[float, float]:
    """Return the seconds of a call until it returns, and until the GPU is done."""
    wait: Step = torch.cuda.synchronize if options.device == "cuda" else int
    wait()
    started = time.perf_counter()
    for _ in range(options.calls):
        step()
    returned = time.perf_counter()
    wait()
    return (returned - started) / options.calls, (time.perf_counter() - started) / options.calls
