"""Draw the figures of the documentation from the code and from benchmarks/results, into docs/figures.

    python tools/figures.py

What a figure shows is in the metadata of its SVG file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from svg_style import COLORS, STYLE, figure_to_svg

from longspan import build_mechanism
from longspan.bench import jsonl, sweep_report, tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "figures"
TOKENS = 24
# Small windows and ranks, so that 24 tokens show them.
SEEN: dict[str, dict[str, Any]] = {
    "softmax": {},
    "local": {"window": 6},
    "linear": {},
    "performer": {"num_features": 64},
    "linformer": {"rank": 4, "max_length": TOKENS},
    "decay": {"gate": "fixed"},
    "delta": {"gate": "none"},
}
LENGTHS = [2**power for power in range(4, 15)]
Data = dict[str, Any]


def weights(name: str) -> Data:
    """How much every query (row) takes from every key (column): outputs for values that are unit vectors."""
    torch.manual_seed(0)
    mechanism = build_mechanism(name, 1, 16, value_dim=TOKENS, **SEEN[name]).double().eval()
    q, k = torch.randn(2, 1, TOKENS, 1, 16, dtype=torch.float64)
    v = torch.eye(TOKENS, dtype=torch.float64)[None, :, None]
    gates = torch.zeros(1, TOKENS, 1, mechanism.num_gates, dtype=torch.float64) if mechanism.num_gates else None
    with torch.no_grad():
        found = mechanism(q, k, v, gates=gates, causal=True)[0, :, 0].abs()
    return {"weights": [[round(x, 3) for x in row] for row in (found / found.amax(1, keepdim=True)).tolist()]}


def draw_weights(data: Data, figure: Figure) -> None:
    """A square per pair of query and key, transparent where nothing is taken."""
    figure.set_size_inches(2, 2)
    axes = figure.add_subplot()
    color = matplotlib.colors.to_rgb(COLORS[0])
    axes.imshow([[(*color, value) for value in row] for row in data["weights"]], interpolation="none")
    axes.set(xticks=[], yticks=[], xlabel="keys", ylabel="queries")


def state_sizes() -> Data:
    """Numbers in the state of a head after n tokens, with the default options."""
    found: Data = {"lengths": LENGTHS}
    for name in SEEN:
        mechanism = build_mechanism(name, 1, 64, **({"max_length": LENGTHS[-1]} if name == "linformer" else {}))
        state, sizes, written = mechanism.new_state(1), [], 0
        for length in LENGTHS:
            new = length - written
            k = torch.zeros(1, new, 1, 64)
            gates = torch.zeros(1, new, 1, mechanism.num_gates) if mechanism.num_gates else None
            with torch.no_grad():
                state = mechanism.write(state, k, k, gates=gates)
            written = length
            sizes.append(sum(x.numel() for x in state.tensors().values() if x.is_floating_point()))
        found[name] = sizes
    return found


def draw_lines(data: Data, figure: Figure, y_label: str) -> None:
    """A line per name over the lengths, on logarithmic axes; lines below others are thicker."""
    axes = figure.add_subplot()
    names = [name for name in data if name != "lengths"]
    for i, name in enumerate(names):
        points = [(x, y) for x, y in zip(data["lengths"], data[name], strict=True) if y is not None]
        kind = name.split(",")[0].replace("PyTorch SDPA", "softmax")
        style = {"color": COLORS[list(SEEN).index(kind)], "linewidth": 1.5 + 0.7 * (len(names) - i - 1)}
        axes.plot(*zip(*points, strict=True), "o-", markersize=4, label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_xticks(data["lengths"][:: max(1, len(data["lengths"]) // 5)])
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_yscale("log")
    axes.set_ylim(10 ** math.floor(math.log10(axes.get_ylim()[0])))
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.yaxis.set_minor_formatter("")
    axes.set(xlabel="tokens", ylabel=y_label)
    figure.legend(loc="outside lower center", ncols=4 if len(names) > 4 else 2, fontsize=9)


def rows(file: str) -> list[dict[str, Any]]:
    """The successful rows of a results file."""
    found = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["rows"]
    return [row for row in found if row["status"] == "ok"]


def step_times(file: str, names: tuple[str, ...]) -> Data:
    """Nanoseconds of forward and backward for a token of a head, by the length; level lines are linear time."""
    measured: dict[tuple[str, int], float] = {}
    for row in rows(file):
        case = row["case"]
        if row["name"] in names and case["head_dim"] == 64 and row.get("forward_backward_ms"):
            tokens = case["batch_size"] * case["num_heads"] * case["length"]
            measured.setdefault((row["name"], case["length"]), round(row["forward_backward_ms"] * 1e6 / tokens, 3))
    lengths = sorted({length for _, length in measured})
    return {"lengths": lengths, **{n: [measured.get((n, length)) for length in lengths] for n in names}}


def decode_speeds() -> Data:
    """Tokens per second of one sequence after a short and a very long prompt."""
    found: Data = {}
    for row in rows("h200-generate"):
        if row["case"]["batch_size"] == 1 and row.get("state_bytes") and row.get("token_tokens_per_second"):
            speed = round(row["token_tokens_per_second"])
            found.setdefault(row["name"], {})[str(row["case"]["length"])] = speed
    return found


def position_losses() -> Data:
    """Mean loss of a linearized model and its teacher up to each length, from half of it on."""
    found = json.loads((RESULTS / "h200-linearize.json").read_text(encoding="utf-8"))["positions"]
    late = {name: [bucket for bucket in buckets if bucket["from"] >= 64] for name, buckets in found.items()}
    lengths = [bucket["to"] + 1 for bucket in late["teacher"]]
    return {"lengths": lengths, **{name: [bucket["loss"] for bucket in buckets] for name, buckets in late.items()}}


def draw_losses(data: Data, figure: Figure) -> None:
    """A line for each model over the positions."""
    axes = figure.add_subplot()
    for i, name in enumerate(name for name in data if name != "lengths"):
        axes.plot(data["lengths"], data[name], "o-", markersize=4, label=name, color=COLORS[i])
    axes.set_xscale("log", base=2)
    axes.set_xticks(data["lengths"][::2], [f"{length:,}" for length in data["lengths"][::2]])
    axes.set(xlabel="position in the text, tokens", ylabel="loss of a token, nats", ylim=(0, None))
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)


def decode_costs() -> Data:
    """Milliseconds of a decoded token, and MiB of the cache, of a linearized model and its teacher by the length."""
    found = json.loads((RESULTS / "h200-linearize.json").read_text(encoding="utf-8"))["decode"]
    data: Data = {"lengths": [row["length"] for row in found["teacher"]]}
    for label, key, unit in (("ms per token", "ms", 1), ("cache, MiB", "bytes", 2**20)):
        data |= {f"{label}; {name}": [round(row[key] / unit, 2) for row in found[name]] for name in found}
    return data


def draw_costs(data: Data, figure: Figure) -> None:
    """A panel per cost, with a line for each model over the lengths."""
    figure.set_size_inches(6.4, 3)
    panels: dict[str, dict[str, list[float]]] = {}
    for name, values in data.items():
        if name != "lengths":
            label, model = name.split("; ")
            panels.setdefault(label, {})[model] = values
    for axes, (label, lines) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for i, (model, values) in enumerate(lines.items()):
            axes.plot(data["lengths"], values, "o-", markersize=4, label=model, color=COLORS[i])
        axes.set_xscale("log", base=2)
        axes.set_xticks(data["lengths"], [f"{length:,}" for length in data["lengths"]], rotation=30)
        axes.set(xlabel="tokens before", ylabel=label, ylim=(0, None))
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)


def draw_speeds(data: Data, figure: Figure) -> None:
    """Two bars per model."""
    figure.set_size_inches(5, 3.4)
    axes = figure.add_subplot()
    lengths = list(next(iter(data.values())))
    for i, length in enumerate(lengths):
        places = [y + 0.4 * i for y in range(len(data))]
        label = f"after {int(length):,} tokens"
        axes.barh(places, [speeds.get(length, 0) for speeds in data.values()], 0.38, color=COLORS[i], label=label)
    axes.set_yticks([y + 0.2 for y in range(len(data))], list(data))
    axes.invert_yaxis()
    axes.set_xlabel("tokens per second")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)


def loads(file: str) -> Data:
    """Times to the first and to each further token of a server by percentile, for each load."""
    labels = {"first_token_ms": "ms to the first token", "token_ms": "ms per further token"}
    return {
        f"{label}, load {row['load']:g}": {f"p{p}": round(ms, 2) for p, ms in row[key].items()}
        for key, label in labels.items()
        for row in rows(file)
    }


def draw_loads(data: Data, figure: Figure) -> None:
    """A panel per kind of time, with a bar per load and percentile."""
    figure.set_size_inches(6.4, 3)
    panels: dict[str, dict[str, Data]] = {}
    for name, found in data.items():
        label, load = name.split(", ")
        panels.setdefault(label, {})[load] = found
    for axes, (label, bars) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        for i, (load, found) in enumerate(bars.items()):
            places = [x + 0.8 * (i - (len(bars) - 1) / 2) / len(bars) for x in range(len(found))]
            axes.bar(places, list(found.values()), 0.72 / len(bars), color=COLORS[i], label=load)
            axes.set_xticks(range(len(found)), list(found))
        axes.set_ylabel(label)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)


def causal_sweep(file: str) -> Data:
    """Times of causal mechanisms relative to full attention, over lengths and head dimensions."""
    found = sweep_report.panels(jsonl.read(RESULTS / f"{file}.jsonl"))
    return {title: cells for title, cells in found.items() if title.endswith(", causal")}


def training_curves(file: str) -> Data:
    """Minutes of training, millions of tokens and held-out bits per byte of each run, along its curve."""
    found: Data = {}
    for row in jsonl.read(RESULTS / f"{file}.jsonl"):
        if row["status"] == "ok":
            tokens, seconds, bits = zip(*row["held_out_curve"], strict=True)
            minutes = [round(x / 60, 3) for x in seconds]
            found[f"{row['candidate']}, seed {row['seed']}"] = [minutes, [x / 1e6 for x in tokens], list(bits)]
    return found


def draw_curves(data: Data, figure: Figure) -> None:
    """Bits per byte over minutes and over tokens, with a line for each run."""
    figure.set_size_inches(6.4, 3)
    left, right = figure.subplots(1, 2, sharey=True)
    for i, (name, (minutes, tokens, bits)) in enumerate(data.items()):
        for axes, along in ((left, minutes), (right, tokens)):
            axes.plot(along, bits, "o-", markersize=3, label=name, color=COLORS[i])
    left.set(xlabel="minutes of training", ylabel="bits per byte, held out")
    right.set(xlabel="million tokens")
    if len(data) > 1:
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)


H200 = ("PyTorch SDPA", "linear, softmax map", "performer, 256 features")
CPU = ("linear, softmax map", "performer, 256 features", "local, 256 keys", "linformer, rank 256")
TIME = "ns per token and head"
PLOTS: dict[str, tuple[Callable[[], Data], Callable[[Data, Figure], None]]] = {
    **{f"sees-{name}": (lambda name=name: weights(name), draw_weights) for name in SEEN},
    "state": (state_sizes, lambda data, figure: draw_lines(data, figure, "numbers per head")),
    "time-h200": (lambda: step_times("h200-causal", H200), lambda data, figure: draw_lines(data, figure, TIME)),
    "time-cpu": (lambda: step_times("cpu-causal-growth", CPU), lambda data, figure: draw_lines(data, figure, TIME)),
    "decode-h200": (decode_speeds, draw_speeds),
    "linearize-h200": (position_losses, draw_losses),
    "linearize-decode-h200": (decode_costs, draw_costs),
    "serve-cpu": (lambda: loads("cpu-serve"), draw_loads),
    "serve-h200": (lambda: loads("h200-serve"), draw_loads),
    "sweep-cpu": (lambda: causal_sweep("cpu-sweep"), sweep_report.draw_panels),
    "sweep-h200": (lambda: causal_sweep("h200-sweep"), sweep_report.draw_panels),
}
if (RESULTS / f"{tables.BASE}.jsonl").exists():
    PLOTS[tables.BASE_FIGURE] = lambda: training_curves(tables.BASE), draw_curves


def main() -> None:
    """Draw all figures."""
    FIGURES.mkdir(exist_ok=True)
    for name, (collect, draw) in PLOTS.items():
        data = collect()
        with matplotlib.rc_context(STYLE):
            figure = Figure()
            draw(data, figure)
            text = figure_to_svg(figure, name, data)
        (FIGURES / f"{name}.svg").write_text(text, encoding="utf-8")
        print(f"docs/figures/{name}.svg", f"{len(text) / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
