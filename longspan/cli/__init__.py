"""The command line. Commands are imported when they are called: `--help` and `run` need neither torch nor tyro."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import NoReturn

from longspan.utils import choose, is_disk_full, is_out_of_memory, printable

# The module of each command below this package, and a summary.
COMMANDS = {
    "train": ("train", "Train a model on files, folders or globs; resumes interrupted runs."),
    "eval": ("evaluate", "Evaluate a model by position in the context, or mechanisms on synthetic tasks."),
    "predict": ("predict", "Predict classes, numbers or labels with a trained model, CSV in, CSV out."),
    "report": ("report", "Write an HTML report of one or several training runs."),
    "generate": ("generate", "Generate text with a saved model."),
    "serve": ("serve", "Serve a model over HTTP, with OpenAI's API and a playground page."),
    "run": ("run", "Run an unmodified script of an older library with longspan in its place."),
    "linearize": ("linearize", "Turn a pretrained softmax model into one with a state of constant size."),
    "convert": ("convert", "Convert a checkpoint of an older library."),
    "estimate": ("estimate", "Estimate time, memory and traffic of training on many GPUs."),
    "export": ("export", "Write the model of a run, sharded or not, to a safetensors folder."),
    "bench": ("bench", "Benchmark mechanisms, layers and models against other packages."),
    "info": ("info", "Show versions, devices, kernels, mechanisms with their options, and a model's size."),
}

HELP = """usage: longspan COMMAND [OPTIONS]

Sequence mixing in linear time: train, generate, measure.

commands:
{commands}

`longspan COMMAND --help` lists the options of a command. --debug shows the traceback of an error.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command.

    Args:
        argv: The command and its options; `sys.argv[1:]` by default.

    Raises:
        SystemExit: If the command fails; the status is 2 for wrong input.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    _open_closed_streams()
    if words and words[0] == "run":
        import_module("longspan.cli.run").main(words[1:])  # Errors of the script keep their traceback.
        return
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # Names of files need not be text.
    debug = "--debug" in words
    try:
        with _interrupted_by(signal.SIGTERM, getattr(signal, "SIGHUP", None)):
            try:
                _run([word for word in words if word != "--debug"], debug)
            except SystemExit:
                sys.stdout.flush()
                raise
            sys.stdout.flush()
    except KeyboardInterrupt as error:
        print("longspan: interrupted", file=sys.stderr)
        raise SystemExit(128 + next(iter(error.args), signal.SIGINT)) from None
    except BrokenPipeError:
        _discard_output()
        raise SystemExit(141) from None  # As a shell reports a program that SIGPIPE ended.
    except Exception as error:
        if debug:
            raise
        fail(error)


def _run(words: Sequence[str], debug: bool) -> None:
    if not words or words[0] in ("--help", "-h"):
        commands = [f"  {name:9} {summary}" for name, (_, summary) in COMMANDS.items()]
        print(HELP.format(commands="\n".join(commands)), end="")
        return
    if words[0] == "--version":
        from longspan import __version__

        print(f"longspan {__version__}")
        return
    name, *rest = words
    choose("command", name, COMMANDS)
    if not debug and name in ("train", "eval", "report", "linearize"):
        warnings.simplefilter("ignore")
    import_module(f"longspan.cli.{COMMANDS[name][0]}").main(rest)


def fail(error: Exception) -> NoReturn:
    """Print an error in one line and leave with its status."""
    status = getattr(error, "status", 2 if isinstance(error, ValueError) else 1)
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    if not getattr(error, "quiet", False):  # The main process prints an error of all processes.
        with suppress(OSError):
            print(f"longspan: {printable(' '.join(worded(error).split()))}", file=sys.stderr, flush=True)
    if "RANK" in os.environ:
        os._exit(status)  # Other processes may be waiting in a collective operation: do not wait for them.
    raise SystemExit(status) from None


def worded(error: Exception) -> str:
    """Return the message of an error: what happened, and where it is known, what to do."""
    text = str(error).strip() or type(error).__name__
    if hasattr(error, "status"):
        return text
    if isinstance(error, ModuleNotFoundError):
        extra = "serve" if error.name in ("fastapi", "uvicorn", "httptools") else "train"
        return f"{error.name} is not installed: pip install 'longspan[{extra}]' installs what the commands need"
    if is_disk_full(error):
        where = getattr(error, "filename", None)
        return (
            f"the disk is full{f', {where} cannot be written' if where else ''}: free space on it, or write elsewhere"
        )
    if is_out_of_memory(error):
        return f"out of memory: use a smaller model, batch or context ({text})"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ValueError | OSError | ImportError):
        return text
    return f"{type(error).__name__}: {text} (--debug shows the traceback)"


def _open_closed_streams() -> None:
    """Open the null device in place of standard streams that the caller closed, so that no file takes their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _discard_output() -> None:
    """Send what is left to print nowhere: Python would report the failure again when it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _interrupted_by(*numbers: int | None) -> Iterator[None]:
    """Raise KeyboardInterrupt for these signals too, so that temporary folders are removed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    main_thread = threading.current_thread() is threading.main_thread()
    handled = [x for x in numbers if x is not None and main_thread and signal.getsignal(x) == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
