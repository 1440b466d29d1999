"""The command `longspan bench`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from longspan.bench.options import COMPILE_MODES, DEVICES, DTYPES, SUBJECTS, SUITES, BenchOptions
from longspan.bench.suite import failed, run
from longspan.bench.tables import update

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def bench(
    subject: Annotated[
        str,
        typer.Argument(help=f"{', '.join([*SUBJECTS, *SUITES])}; or tables: update the documents."),
    ] = "mechanisms",
    mechanisms: Annotated[
        str, typer.Option(help="Mechanisms, separated by commas. By default those that have peers.")
    ] = "",
    lengths: Annotated[str, typer.Option(help="Sequence lengths, separated by commas.")] = "",
    heads: Annotated[int, typer.Option(min=1)] = 8,
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    batch: Annotated[int, typer.Option(min=1)] = 1,
    depth: Annotated[int, typer.Option(min=1, help="Layers of a model.")] = 6,
    compile: Annotated[str, typer.Option(help=f"torch.compile mode: {', '.join(COMPILE_MODES)}.")] = "off",
    autocast: Annotated[bool, typer.Option(help="Layers in half precision by autocast.")] = False,
    causal: Annotated[
        bool | None, typer.Option("--causal/--bidirectional", help="By default causal; the suite all measures both.")
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "float32",
    device: Annotated[str, typer.Option(help=f"One of {', '.join(DEVICES)}.")] = "cpu",
    memory_limit: Annotated[
        float | None, typer.Option(help="GB that a measurement may allocate. By default 85 % of the free memory.")
    ] = None,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="Measure other packages too.")] = True,
    rounds: Annotated[int | None, typer.Option(min=1, help="Processes per subject: 3, on CUDA 1.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Samples per process: 5, on CUDA 30.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. By default the number of cores.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds per measurement: 900, on CUDA 180.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Time budget of the run.")] = None,
    sections: Annotated[str, typer.Option(help="Sections of a suite, separated by commas.")] = "",
    data: Annotated[str | None, typer.Option(help="For quality: the text to train on.")] = None,
    train_seconds: Annotated[float, typer.Option(help="For quality: training time of each model.")] = 90.0,
    out: Annotated[Path | None, typer.Option(help="The JSON file of the results, or the folder of a suite.")] = None,
) -> None:
    """Measure mechanisms, layers and models beside other packages: time, memory and ratios in the same run."""
    if subject == "tables":
        update(Path.cwd())
        return
    names = {"mechanisms": _words(mechanisms), "sections": _words(sections), "lengths": _lengths(lengths)}
    given = {key: value for key, value in locals().items() if key in BenchOptions.__dataclass_fields__}
    try:
        results = run(BenchOptions(**{**given, **names}))
    except ValueError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted; what was measured before is written", status=130)
    if failed(results):
        raise typer.Exit(1)


def main() -> None:
    """Run the command and answer wrong arguments in one line."""
    try:
        sys.exit(app(standalone_mode=False))
    except Exception as error:
        # typer gives its parser's errors no public name.
        if not hasattr(error, "format_message"):
            raise
        _fail(f"{error.format_message().rstrip('.')}; see --help")


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _lengths(text: str) -> tuple[int, ...]:
    words = _words(text)
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        _fail(f"--lengths takes positive whole numbers separated by commas, got {text!r}")
    return tuple(int(word) for word in words)


def _fail(message: str, status: int = 2) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(status)
