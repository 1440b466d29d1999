"""Linformer on one GPU: checked first, then timed beside the older packages' layers, with the same weights and options.

    python benchmarks/gpu_linformer.py results.json

Layers bidirectionally, of bfloat16 and by autocast, and the mechanism alone; causally too, which no package has. All in
one process, by the subjects and the clock of `longspan bench`: as called from Python, and replayed from a CUDA graph,
which leaves the launches out. The kernels of one step of ours stand beside its times.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from longspan.bench.environment import commit, machine, versions
from longspan.bench.report import Group, save
from longspan.bench.runner import Case, Effort, Row, Run, Subject, one_line
from longspan.bench.subjects.layers import LAYERS, OurLayer, TheirLayer
from longspan.bench.subjects.mechanisms import Ours
from longspan.bench.subjects.peers import peers
from longspan.bench.timing import cuda_ms, replayed, warm_up
from longspan.bench.worker import alone, take

SHAPES = [(1, 65536), (4, 4096)]
ROUNDS, REPEATS, ONCE = 3, 20, Effort(rounds=1, repeats=1)
ATTENTION, WITH_FEED_FORWARD = (name for name, layer in LAYERS.items() if layer.mechanism == "linformer")
# Forward and forward + backward ms at 1 × 65536 in bfloat16.
TARGETS = {ATTENTION: (0.29, 0.91), WITH_FEED_FORWARD: (1.0, 3.8)}


class Nothing(ModuleType):
    """In the place of matplotlib, which linformer-pytorch imports with everything else."""

    def __getattr__(self, name: str) -> Any:
        return Nothing(name)


def without_matplotlib() -> None:
    try:
        import matplotlib.pyplot  # noqa: F401
    except ImportError:
        sys.modules.update({name: Nothing(name) for name in ("matplotlib", "matplotlib.pyplot", "matplotlib.colors")})


def subjects(name: str, autocast: bool) -> list[Subject]:
    return [OurLayer(f"longspan for {name}", name, autocast=autocast), TheirLayer(name, name, autocast)]


def compare(subjects: list[Subject], case: Case) -> list[Row]:
    """Each checked alone; then timed in turns, so that a host that drifts drifts for all, as called and replayed."""
    rows, steps = [], []
    for subject in subjects:
        unfit = subject.unfit(case)
        try:
            found = take(subject, case, ONCE) if unfit is None else Run(*unfit)
            steps.append(calls(subject, case) if found.status == "ok" else {})
        except Exception as error:
            found, steps = Run("error", one_line(error)), [*steps, {}]
        rows.append(Row(subject, case, [replace(found, times={}) for _ in range(ROUNDS)]))
    for number in range(ROUNDS):
        for row, each in zip(rows, steps, strict=True):
            for name, call in each.items():
                # Replayed, the host has next to nothing to do.
                warm_up(call, seconds=0 if name.endswith("replayed") else 0.05 if number else 0.2)
                row.runs[number].times[name] = cuda_ms(call, REPEATS)
    return rows


def calls(subject: Subject, case: Case) -> dict[str, Callable[[], Any]]:
    """Its steps, and after them the same from graphs."""
    found: dict[str, Callable[[], Any]] = {name: partial(alone, step) for name, step in subject.work(case).items()}
    # linformer-pytorch copies a number to the device on its way, which no graph takes.
    if subject.package != "linformer-pytorch":
        found |= {f"{name}_replayed": replayed(call) for name, call in found.items()}
    return found


def kernels(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds of each kernel of one call, the longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    found = {event.key[:100]: event.device_time_total / 3e3 for event in profile.key_averages()}
    return {key: ms for key, ms in sorted(found.items(), key=lambda pair: -pair[1])[:16] if ms > 1e-3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="where to write the JSON")
    path = parser.parse_args().results
    without_matplotlib()
    groups: list[Group] = []
    about: dict[str, Any] = {
        "machine": machine("cuda"),
        "versions": versions(),
        "commit": commit(),
        "targets_ms": {name: {"forward": pair[0], "forward_backward": pair[1]} for name, pair in TARGETS.items()},
        "kernels_ms": {},
    }
    causal = Case(SHAPES[0][1], dtype="bfloat16", device="cuda")
    both_ways = replace(causal, causal=False)
    plan: list[tuple[str, Case, list[Subject]]] = [
        ("mechanism, causal", causal, [Ours("linformer, rank 256", "linformer")]),
        (
            "mechanism, bidirectional",
            both_ways,
            [Ours("linformer, rank 256", "linformer"), *peers("linformer", both_ways)],
        ),
    ]
    for B, n in SHAPES:
        case = Case(n, B, causal=False, dtype="bfloat16", device="cuda")
        for name in TARGETS:
            plan += [(f"{name}, {how}", case, subjects(name, how == "autocast")) for how in ("bfloat16", "autocast")]
    for title, case, rivals in plan:
        group = Group(title, case, compare(rivals, case))
        groups.append(group)
        place = f"{title}, {case.batch_size} × {case.length}"
        if group.rows[0].failure is None and case.length == causal.length and "autocast" not in title:
            about["kernels_ms"][place] = kernels(rivals[0].work(case)["forward_backward"].call)
        save(path, groups, about)
        for row in group.rows:
            times = [f"{row.ms(step):.3f}" for step in row.steps] if row.failure is None else [row.failure.message]
            print(f"{place:<90}{row.subject.package:<20}{' / '.join(times)}", flush=True)
    for place, found in about["kernels_ms"].items():
        print(place, *(f"  {ms:.4f} {key}" for key, ms in found.items()), sep="\n")


if __name__ == "__main__":
    main()
