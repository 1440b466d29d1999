"""The command: `longspan bench`."""

from __future__ import annotations

import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from longspan.bench.environment import commit, cores, machine, versions
from longspan.bench.report import Group, plot, remarks, save, table
from longspan.bench.runner import Case, Effort, Subject, compare
from longspan.bench.subjects.layers import LAYERS, layers
from longspan.bench.subjects.mechanisms import names, ours
from longspan.bench.subjects.memory import available_gb
from longspan.bench.subjects.models import MODELS, TASKS, our_models, their_models
from longspan.bench.subjects.peers import peers
from longspan.bench.summary import summary, write
from longspan.utils import choose

_DTYPES = ("float32", "float64", "bfloat16", "float16")
_DEVICES = ("cpu", "cuda")
_BROKEN = ("wrong", "error", "crashed")  # Running out of memory or time is a result; these, in ours, are not.

_INPUTS = {
    "mechanisms": "standard normal q, k, v; forward without gradients; gradients to q, k, v and parameters",
    "layers": "standard normal x; forward without gradients; gradients to x and parameters, of the dtype of x",
    "train": "random bytes; loss, backward and AdamW; half precision by autocast",
    "generate": "random bytes; greedy tokens after a prompt of so many; the older packages read it again for each",
}


class Part(NamedTuple):
    """A subject in one mode. name: of the files it is written to."""

    name: str
    what: str
    mechanisms: list[str]
    cases: list[Case]


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def bench(
    what: Annotated[
        str,
        typer.Argument(help=f"mechanisms, layers around them, whole models ({', '.join(TASKS)}), or all, one by one."),
    ] = "mechanisms",
    mechanisms: Annotated[
        str | None, typer.Option(help="Mechanisms, separated by commas. By default those that have peers.")
    ] = None,
    lengths: Annotated[str, typer.Option(help="Sequence lengths, separated by commas.")] = "8192,65536",
    heads: Annotated[int, typer.Option(min=1)] = 8,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    depth: Annotated[int, typer.Option(min=1, help="Layers of a model.")] = 6,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Our layer or training step by torch.compile.")
    ] = False,
    causal: Annotated[
        bool | None, typer.Option("--causal/--bidirectional", help="By default causal; bench all measures both.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(_DTYPES)}.")] = "float32",
    device: Annotated[str, typer.Option(help=f"One of {', '.join(_DEVICES)}.")] = "cpu",
    memory_limit: Annotated[
        float | None,
        typer.Option(help="GB that a measurement may allocate. By default most of what is free; on CUDA no limit."),
    ] = None,
    with_peers: Annotated[
        bool, typer.Option("--peers/--no-peers", help="Measure PyTorch's own and other packages too.")
    ] = True,
    rounds: Annotated[int, typer.Option(min=1, help="Processes per row; rows take turns.")] = 3,
    repeats: Annotated[int | None, typer.Option(min=1, help="Samples per process: 5 by default, 30 on CUDA.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="By default the cores there are.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which a measurement is given up.")] = 900.0,
    out: Annotated[
        Path | None, typer.Option(help="Where the JSON goes: runs/bench.json, or for all the folder runs/bench.")
    ] = None,
) -> None:
    """Times mechanisms and their peers in one run: forward, forward + backward, peak memory.

    `layers` times the older packages' layers and longspan in their place, `train` a training step of a whole model,
    `generate` reading a prompt of --lengths tokens and each token after it; `all` does all of it, both ways where there
    are two, and sums it up on one page. Each measurement is a process of its own, after a check that what it computes
    is right.
    """
    try:
        choose("subject", what, [*_INPUTS, "all"])
        if what in TASKS and causal is False:
            raise ValueError(f"bench {what} measures causal models: leave out --bidirectional")
        if compiled and what not in ("layers", "train", "all"):
            raise ValueError("--compile is for bench layers and bench train")
        wanted = _lengths(lengths)
        choose("dtype", dtype, _DTYPES)
        choose("device", device, _DEVICES)
        if device == "cuda" and not torch.cuda.is_available():
            raise ValueError("this PyTorch finds no CUDA device; there is cpu")
        if memory_limit is not None and memory_limit <= 0:
            raise ValueError(f"--memory-limit must be a positive number of GB, got {memory_limit:g}")
        case = Case(0, batch, heads, head_dim, causal is not False, dtype, device)
        parts = _parts(what, mechanisms, case, causal, wanted, depth)
        out = out or Path("runs/bench" if what == "all" else "runs/bench.json")
        folder = out if what == "all" else out.parent
        folder.mkdir(parents=True, exist_ok=True)
        files = [out / f"{part.name}.json" if what == "all" else out for part in parts]
        files[0].touch()
    except ValueError as error:
        _fail(str(error))
    except OSError as error:
        _fail(f"cannot write {out}: {error.strerror}")
    if memory_limit is None and device == "cpu":
        free = available_gb()
        memory_limit = None if free is None else round(0.85 * free, 1)
    effort = Effort(
        rounds=rounds,
        repeats=repeats or (30 if device == "cuda" else 5),
        timeout=timeout,
        threads=threads or cores(),
        memory_limit=memory_limit,
    )
    about: dict[str, Any] = {
        "format": 1,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(device),
        "versions": versions(),
        "commit": commit(),
        "arguments": {"what": what, "lengths": wanted, "peers": with_peers, "compile": compiled},
        "effort": vars(effort),
        "ratios": "a row's median divided by that of the first row of its mechanism and length",
    }
    load = about["machine"]["load"] or 0.0
    if load > cores() / 2:
        print(f"this machine is busy (load {load:g} on {cores()} cores): times will be noisy", file=sys.stderr)
    try:
        done = _measure(list(zip(parts, files, strict=True)), what == "all", compiled, with_peers, effort, about)
    except KeyboardInterrupt:
        _fail("interrupted; what was measured before is written", status=130)
    mine = [row for groups in done for group in groups for row in group.ours]
    if any(row.failure and row.failure.status in _BROKEN for row in mine):
        raise typer.Exit(1)


def main() -> None:
    """Runs the command; wrong arguments are answered in one line."""
    try:
        sys.exit(app(standalone_mode=False))
    except typer.Abort:
        _fail("interrupted before anything was measured", status=130)
    except Exception as error:
        # Of any release of the parser that typer stands on; it has no public name of its own.
        if not hasattr(error, "format_message"):
            raise
        _fail(f"{error.format_message().rstrip('.')}; see --help")


def _groups(what: str, name: str, case: Case, compiled: bool, with_peers: bool) -> list[list[Subject]]:
    """Ours, and then the peers, of one mechanism; ratios refer to the first of each list."""
    if what == "mechanisms":
        return [[*ours(name), *(peers(name, case) if with_peers else [])]]
    if what == "layers":
        return layers(name, compiled, with_peers)
    return [[*our_models(name, what, compiled and what == "train"), *(their_models(name, what) if with_peers else [])]]


def _measure(
    parts: list[tuple[Part, Path]],
    everything: bool,
    compiled: bool,
    with_peers: bool,
    effort: Effort,
    about: dict[str, Any],
) -> list[list[Group]]:
    """Each part with its table, JSON and plot, and then all of them on one page."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    done: dict[str, list[Group]] = {}
    titles = {part.name: _title(about, part) for part, _ in parts}
    for number, (part, file) in enumerate(parts, 1):
        plan = [
            (name, case, subjects)
            for name in part.mechanisms
            for case in part.cases
            for subjects in _groups(part.what, name, case, compiled, with_peers)
        ]
        own = {"arguments": about["arguments"] | {"what": part.what, "mechanisms": part.mechanisms}}
        label = f"{part.name} ({number} of {len(parts)})" if everything else part.name
        done[part.name] = _run(plan, effort, file, {**about, **own, "inputs": _INPUTS[part.what]}, label)
        _show(console, done[part.name], titles[part.name], file)
        if everything:
            # After each part: whoever ends the run early has a page of what there is.
            write(file.parent, done, about, titles)
    if everything:
        console.print(summary(done))
        page = parts[0][1].with_name("report.html")
        console.print(f"written to {page}", markup=False, highlight=False, soft_wrap=True)
    return list(done.values())


def _run(
    plan: list[tuple[str, Case, list[Subject]]], effort: Effort, out: Path, about: dict[str, Any], label: str
) -> list[Group]:
    """Every mechanism at every length; what is found is saved as it comes."""
    groups: list[Group] = []
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=sum(len(subjects) for *_, subjects in plan) * effort.rounds)
        done = 0
        for name, case, subjects in plan:

            def show(subject: Subject, number: int, case: Case = case) -> None:
                text = f"{label}, n = {case.length}, round {number}: {subject.name}"
                progress.update(task, description=text, advance=1)
                if not console.is_terminal:
                    console.print(text, highlight=False, soft_wrap=True)

            groups.append(Group(name, case, compare(subjects, case, effort, show)))
            save(out, groups, about)
            done += len(subjects) * effort.rounds
            progress.update(task, completed=done)
    return groups


def _show(console: Console, groups: list[Group], title: str, file: Path) -> None:
    """The table and the remarks below it; the plot is written beside the JSON."""
    console.print(title, highlight=False)
    console.print(table(groups))
    for remark in remarks(groups):
        console.print(remark, markup=False, highlight=False, soft_wrap=True)
    picture = file.with_suffix(".png")
    written = f"{file} and {picture}" if plot(picture, groups) else str(file)
    console.print(f"written to {written}", markup=False, highlight=False, soft_wrap=True)


def _title(about: dict[str, Any], part: Part) -> str:
    where, case = about["machine"]["gpu"]["name"] if about["machine"]["gpu"] else about["machine"]["cpu"], part.cases[0]
    mode = "causal" if case.causal else "bidirectional"
    sizes = f"batch {case.batch_size}, {case.num_heads} heads of {case.head_dim}, {case.dtype}, {mode}"
    sizes += f", {case.depth} layers" if part.what in TASKS else ""
    return f"{sizes}; {where}, threads: {about['effort']['threads']}, torch {about['versions']['torch']}"


def _parts(
    what: str, mechanisms: str | None, case: Case, causal: bool | None, lengths: list[int], depth: int
) -> list[Part]:
    """What is measured: one subject, or all of them, each both ways where it can be and neither was asked for."""
    with_layers = list(dict.fromkeys(layer.mechanism for layer in LAYERS.values()))
    asked = None if mechanisms is None else _names(mechanisms)
    found = []
    for subject in _INPUTS if what == "all" else [what]:
        known = {"mechanisms": names(), "layers": with_layers}.get(subject, list(MODELS))
        if asked is None:
            chosen = with_layers if subject == "layers" else list(MODELS)
        elif what == "all":
            chosen = [name for name in asked if choose("mechanism", name, names()) in known]
        else:
            chosen = [choose("mechanism", name, known) for name in asked]
        modes = [causal is not False]
        if what == "all" and subject not in TASKS and causal is None:
            modes = [True, False]
        for mode in modes:
            if chosen and (mode or subject not in TASKS):
                sized = replace(case, causal=mode, depth=depth if subject in TASKS else 1)
                cases = [replace(sized, length=length) for length in lengths]
                found.append(
                    Part(subject if mode or what != "all" else f"{subject}-bidirectional", subject, chosen, cases)
                )
    return found


def _names(text: str) -> list[str]:
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise ValueError(f"--mechanisms takes names separated by commas; there is {', '.join(names())}")
    return list(dict.fromkeys(found))


def _lengths(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"--lengths takes positive whole numbers separated by commas, got {text!r}")
    return sorted({int(part) for part in parts})


def _fail(message: str, status: int = 2) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(status)
