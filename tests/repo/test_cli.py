"""The command line, run as a user runs it."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib import import_module
from typing import get_type_hints

import pytest
import torch
from safetensors import SafetensorError

from longspan import __version__
from longspan.cli import COMMANDS, main
from longspan.cli.arguments import convert, flags, to_text
from longspan.cli.train import TrainFlags
from longspan.generation.generate import generate
from longspan.generation.sampling import Sampling
from longspan.models.checkpoint import load, save
from longspan.models.config import AttentionConfig, ModelConfig, Norm
from longspan.models.transformer import LanguageModel
from longspan.utils import printable

Mechanism, Rotary = (get_type_hints(AttentionConfig)[name] for name in ("mechanism", "rotary"))
RUN = [sys.executable, "-m", "longspan"]


def longspan(*arguments, **how):
    """Run a command in a process of its own, which takes seconds to start."""
    return subprocess.run([*RUN, *map(str, arguments)], capture_output=True, timeout=120, **how)


def run_main(capsys, *words):
    """Status, output and error of a command in this process."""
    status = 0
    try:
        main([str(word) for word in words])
    except SystemExit as stopped:
        status = stopped.code or 0
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(3)
    config = ModelConfig(
        dim=32, depth=2, causal=True, vocab_size=256, attention=AttentionConfig(num_heads=4, mechanism="linear")
    )
    path = tmp_path_factory.mktemp("models") / "model"
    save(LanguageModel(config), path)
    return path


def expected(folder, prompt, number, **options):
    return bytes(generate(load(folder), list(prompt), number, **options).tokens[0])


def test_generate_streams_the_library_s_own_text(folder):
    done = longspan("generate", "--model", folder, "--prompt", "once", "--max-tokens", 20, "--temperature", 0)
    text = expected(folder, b"once", 20, sampling=Sampling(temperature=0))
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == text.decode("utf-8", "replace")
    assert b"20 tokens in" in done.stderr
    assert b"KiB" in done.stderr


def test_a_saved_memory_goes_on_and_standard_input_is_read(folder, tmp_path, capsys):
    common = ["--model", folder, "--temperature", 0]
    whole = longspan("generate", *common, "--max-tokens", 12, input=b"once").stdout
    memory = tmp_path / "memory.safetensors"
    first = run_main(capsys, "generate", *common, "--max-tokens", 5, "--prompt", "once", "--state", memory)
    rest = run_main(capsys, "generate", *common, "--max-tokens", 7, "--resume", memory)
    tokens = expected(folder, b"once", 12, sampling=Sampling(temperature=0))
    assert whole.decode() == tokens.decode("utf-8", "replace")
    assert "--resume" in first[2]
    assert (first[1], rest[1]) == tuple(part.decode("utf-8", "replace") for part in (tokens[:5], tokens[5:]))


def test_every_option_reaches_the_sampler(folder, tmp_path, capsys):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("once")
    base = ["generate", "--model", folder, "--prompt-file", prompt, "--max-tokens", 16, "--seed", 5]
    options = {"top_k": 3, "top_p": 0.2, "min_p": 0.5, "repetition_penalty": 1.5}
    for name, value in options.items():
        out = run_main(capsys, *base, f"--{name.replace('_', '-')}", value)[1]
        text = expected(folder, b"once", 16, seed=5, sampling=Sampling(temperature=0.8, **{name: value}))
        assert out == text.decode("utf-8", "replace"), name
    text = expected(folder, b"once", 16, seed=5, sampling=Sampling(temperature=0.8))
    out = run_main(capsys, *base, "--batch", 2)[1]
    second = expected(folder, b"once", 16, seed=6, sampling=Sampling(temperature=0.8))
    parts = [text.decode("utf-8", "replace"), second.decode("utf-8", "replace")]
    assert out == f"{parts[0]}\n\n--- 2 of 2 ---\n{parts[1]}"


def test_a_prompt_after_a_memory_and_a_stop_text(folder, tmp_path, capsys):
    memory = tmp_path / "memory.safetensors"
    common = ["generate", "--model", folder, "--temperature", 0]
    run_main(capsys, *common, "--max-tokens", 0, "--prompt", "once ", "--state", memory)
    rest = run_main(capsys, *common, "--max-tokens", 9, "--prompt", "upon", "--resume", memory)[1]
    tokens = expected(folder, b"once upon", 9, sampling=Sampling(temperature=0))
    assert rest == tokens.decode("utf-8", "replace")
    long = ["generate", "--model", folder, "--prompt", "x", "--top-k", 200, "--max-tokens", 400]
    text = run_main(capsys, *long)[1]
    ending = next(c for c in text if c.isascii() and c.isprintable())
    assert run_main(capsys, *long, "--stop", ending)[1] == text[: text.index(ending) + 1]


def test_a_model_with_a_tokenizer_speaks_its_text(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=301, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["once upon a time, once upon a wave"] * 3, trainer)
    vocab_size = tokenizer.get_vocab_size()
    attention = AttentionConfig(num_heads=4, mechanism="linear")
    torch.manual_seed(3)
    model = LanguageModel(ModelConfig(dim=32, depth=1, causal=True, vocab_size=vocab_size, attention=attention))
    run = tmp_path / "run"
    save(model, run / "checkpoint")
    common = ["generate", "--model", run, "--prompt", "once upon ", "--max-tokens", 150, "--seed", 2]
    assert f"this model has {vocab_size} tokens" in run_main(capsys, *common)[2]

    tokenizer.save(str(run / "checkpoint" / "tokenizer.json"))
    sampling = Sampling(temperature=0.8)
    prompt = tokenizer.encode("once upon ").ids
    said = [generate(model.eval(), prompt, 150, seed=seed, sampling=sampling).tokens[0] for seed in (2, 3)]
    texts = [tokenizer.decode(tokens, skip_special_tokens=False) for tokens in said]
    assert run_main(capsys, *common, "--batch", 2)[1] == f"{texts[0]}\n\n--- 2 of 2 ---\n{texts[1]}"
    # A stop text may end inside a token: what was said then ends with that token.
    token = next(token for token in said[0] if len(tokenizer.decode([token])) > 2)
    inside = tokenizer.decode([token])[:2]
    stopped = run_main(capsys, *common, "--stop", inside)[1]
    assert inside in stopped
    assert texts[0].startswith(stopped)
    assert inside not in stopped[:-3]
    assert stopped != texts[0]


def test_an_interrupt_ends_cleanly_with_what_there_is(folder):
    process = subprocess.Popen(
        [*RUN, "generate", "--model", str(folder), "--prompt", "once", "--max-tokens", "100000000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # ignored where tests run behind
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert first
    assert b"interrupted" in err
    assert b"Traceback" not in err
    assert b"tokens in" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--model", "nowhere", "--prompt", "x"], "nowhere"),
        (["generate", "--model", "FOLDER", "--prompt", ""], "nothing to continue"),
        (["generate", "--model", "FOLDER", "--prompt", "x", "--prompt-file", "y"], "exclude each other"),
        (["generate", "--model", "FOLDER", "--prompt-file", "missing.txt"], "missing.txt"),
        (["generate", "--model", "FOLDER", "--prompt", "x", "--top-p", "2"], "top_p must be in (0, 1], got 2.0"),
        (["generate", "--model", "FOLDER", "--resume", "missing.safetensors"], "is not a saved session"),
    ],
)
def test_a_mistake_is_one_line_and_no_traceback(folder, arguments, message, capsys):
    status, _, err = run_main(capsys, *(folder if a == "FOLDER" else a for a in arguments))
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_info_says_what_there_is(folder, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    status, out, err = run_main(capsys, "info", "--model", folder)
    assert status == 0, err
    words = "longspan", "Triton kernels", "bidirectional", "softmax", "blind_spot", "redraw_interval"
    for word in (*words, "state of one sequence"):
        assert word in out


BLOCKED = """
import sys
from importlib.abc import MetaPathFinder

class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "tyro", "rich"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from longspan.cli import main
main(sys.argv[1:])
"""


def without_torch(*arguments):
    return subprocess.run([sys.executable, "-c", BLOCKED, *map(str, arguments)], capture_output=True, text=True)


def test_help_lists_every_command_where_torch_and_tyro_are_missing():
    for words in ([], ["--help"], ["-h"]):
        done = without_torch(*words)
        assert done.returncode == 0, done.stderr
        for name, (module, summary) in COMMANDS.items():
            assert f"  {name:9} {summary}\n" in done.stdout
            assert import_module(f"longspan.cli.{module}").main
    assert without_torch("--version").stdout == f"longspan {__version__}\n"
    assert "usage: longspan run" in without_torch("run", "--help").stdout


def test_a_mindspore_script_runs_where_torch_and_tyro_are_missing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys\ntry:\n    import mindspore\nexcept ImportError:\n    pass\nprint(sys.argv[1:])\n")
    words = ["--help", "--device", "x", "-h", "--debug", "--", "a=b"]
    for before in ([], ["--device", "cpu"], ["--device=cpu"]):
        done = without_torch("run", *before, script, *words)
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"{words}\n"
    for words, message in (
        (["run"], "longspan: give a script: longspan run SCRIPT [ARGUMENTS ...]\n"),
        (["run", "--device"], "longspan: --device needs a value: cpu or cuda\n"),
        (["run", "--devise", "cpu", script], "unknown flag --devise (did you mean '--device'?)"),
        (["run", tmp_path / "none.py"], "script not found"),
        (["rum", script], "unknown command 'rum'; there is train, eval, predict, report"),
    ):
        done = without_torch(*words)
        assert done.returncode == 2
        assert message in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "run"])
def test_every_command_has_help_and_refuses_unknown_flags_in_one_line(name, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert not stopped.value.code
    out = capsys.readouterr().out
    assert f"usage: longspan {name}" in out
    positional = {"convert": ["a", "b", "--from", "c", "--config", "d"], "report": ["a"], "generate": ["--model", "a"]}
    positional |= {"export": ["a", "b"], "serve": ["--model", "a"], "predict": ["--model", "a", "--data", "b"]}
    positional["linearize"] = ["--model", "a", "--data", "b", "--out", "c"]
    with pytest.raises(SystemExit) as stopped:
        main([name, *positional.get(name, []), "--modek", "x"])
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("longspan: unknown flag --modek")
    assert err.count("\n") == 1


def test_train_help_fits_two_screens(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")

    def lines(flag):
        with pytest.raises(SystemExit) as stopped:
            main(["train", flag])
        assert not stopped.value.code
        return capsys.readouterr().out.splitlines()

    brief, full = lines("--help"), lines("--help-all")
    assert len(brief) <= 100
    assert max(map(len, full[6:])) <= 100
    assert len(flags(TrainFlags)) > 90
    for name in flags(TrainFlags):
        (where,) = [i for i, line in enumerate(full) if re.match(rf"[│ ]+{re.escape(name)}[ ,]", line)]
        text = " ".join(full[where : where + 4])
        assert "(default: " in text or "(repeatable)" in text
        nested = name.startswith("--model.")
        assert any(re.match(rf"[│ ]+{re.escape(name)}[ ,]", line) for line in brief) != nested


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate"], "missing --model PATH Checkpoint folder"),
        (["generate", "--model"], "--model needs a value"),
        (["generate", "--model", "x", "--batch", "0"], "--batch must be at least 1, got 0"),
        (["generate", "--model", "x", "--top-k", "few"], "--top-k must be an integer or none, got 'few'"),
        (["eval", "--context", "1"], "--context must be at least 2, got 1"),
        (["eval", "text"], "'text' belongs to no flag; data is given with --data text"),
        (["report"], "give the folder of a run"),
        (
            ["train", "--data", "x", "--out", "y", "--model.attention.num_heads=0"],
            "num_heads must be a positive integer",
        ),
        (["train", "--data", "x", "--out", "y", "--lr"], "--lr needs a value"),
        (["convert", "a"], "missing FOLDER Folder for the longspan checkpoint."),
    ],
)
def test_wrong_command_lines_are_refused_in_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("longspan: ")
    assert message in err
    assert err.count("\n") == 1


def test_debug_shows_the_traceback(folder):
    done = longspan("generate", "--model", folder, "--prompt", "x", "--top-p", "2", "--debug")
    assert done.returncode == 1
    assert b"Traceback" in done.stderr
    assert b"top_p must be in (0, 1], got 2.0" in done.stderr


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("3", int, 3),
        ("none", int | None, None),
        ("1e-3", float | None, 1e-3),
        ("ON", bool, True),
        ("no", bool, False),
        ("rms", bool | Norm, "rms"),
        ("false", bool | Norm, False),
        ("0,-1", tuple[int, ...], (0, -1)),
        ("1", tuple[int, ...], (1,)),
        ("", tuple[str, ...], ()),
        ("linear", Mechanism, "linear"),
        ("linear, local", Mechanism, ("linear", "local")),
        ('{"mechanism": "local", "window": 5}', Mechanism, {"mechanism": "local", "window": 5}),
        ('["linear", {"mechanism": "local"}]', Mechanism, ["linear", {"mechanism": "local"}]),
        ("halves", Rotary, "halves"),
        ("halves,none", Rotary, ("halves", "none")),
        ('{"local": "halves"}', Rotary, {"local": "halves"}),
    ],
)
def test_values_are_read_by_type(text, kind, value):
    assert convert(text, kind) == value
    assert convert(to_text(value), kind) == value


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("1.5", int, "must be an integer, got '1.5'"),
        ("1.5", int | None, "must be an integer or none, got '1.5'"),
        ("fast", float, "must be a number, got 'fast'"),
        ("maybe", bool, "must be true or false, got 'maybe'"),
        ("layr", Norm, "there is layer, rms, scale (did you mean 'layer'?)"),
        ("1,x", tuple[int, ...], "must be an integer, got 'x'"),
        ("halfs", Rotary, "must be none, halves, interleaved or a list such as 1,2 or JSON"),
    ],
)
def test_wrong_values_are_refused(text, kind, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        convert(text, kind)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "nan"], "temperature must be 0 (greedy) or finite and at least 1e-06, got nan"),
        (["--temperature", "1e-45"], "temperature must be 0 (greedy) or finite and at least 1e-06, got 1e-45"),
        (["--repetition-penalty", "inf"], "repetition_penalty must be positive"),
        (["--device", "foo"], "unknown --device 'foo'; there is cpu"),
        (["--device", "cuda:97"], "unknown --device 'cuda:97'; there is cpu"),
        (["--state", "/nonexistent/x"], "there is no folder /nonexistent"),
        (["--state", "/"], "is a folder"),
        (["--stop", ""], "--stop is empty"),
        (["--seed", str(10**30)], "seeds must be from -2**63 to 2**64 - 1"),
        (["--batch", "1000000000000"], "use at most --batch"),
        (["--prompt-file", "/dev/zero"], "the prompt is longer than"),
        (["--prompt-file", "/"], "/: Is a directory"),
        (["--resume", "/dev/zero"], "is not a saved session: it is not a file"),
    ],
)
def test_generate_refuses_what_cannot_be_in_words(folder, capsys, words, message, monkeypatch):
    monkeypatch.setattr("longspan.cli.generate.MAX_PROMPT", 1009)
    prompt = [] if "--prompt-file" in words else ["--prompt", "hi"]
    status, out, err = run_main(capsys, "generate", "--model", folder, *prompt, "--max-tokens", 3, *words)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1
    assert out == ""


def test_a_session_of_another_model_of_the_same_shapes_is_refused(folder, tmp_path, capsys):
    memory, other = tmp_path / "memory", tmp_path / "other"
    torch.manual_seed(5)
    save(LanguageModel(ModelConfig(**vars(load(folder).config))), other)
    words = ["--prompt", "once", "--max-tokens", 2]
    assert run_main(capsys, "generate", "--model", folder, *words, "--state", memory)[0] == 0
    assert run_main(capsys, "generate", "--model", folder, *words, "--resume", memory)[0] == 0
    status, _, err = run_main(capsys, "generate", "--model", other, *words, "--resume", memory)
    assert status == 2
    assert "this session is of another model, whose weights differ" in err


def test_names_and_text_are_safe_on_a_terminal(folder, tmp_path, capsys, monkeypatch):
    name = "q[\x1b[31m[b]"
    shutil.copytree(folder, tmp_path / name)
    said = run_main(capsys, "info", "--model", tmp_path / name)[1]
    assert "q[\\x1b[31m[b]: LanguageModel with" in said.replace("\n", "")
    assert "\x1b" not in run_main(capsys, "generate", "--model", tmp_path / "\x1b[5m", "--prompt", "x")[2]
    words = ["generate", "--model", folder, "--prompt", "x", "--max-tokens", 300, "--temperature", 3]
    piped = run_main(capsys, *words)[1]
    assert re.search(r"[\x00-\x08\x0b-\x1f]", piped)
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda stream: True)
    shown = run_main(capsys, *words)[1]
    assert shown == printable(piped) != piped


def test_a_signal_removes_temporary_folders(folder, tmp_path, capsys, monkeypatch):
    from longspan.train import evaluation

    def stop(*args):
        assert os.listdir(tmp_path / "temporary")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    (tmp_path / "temporary").mkdir()
    (tmp_path / "text.txt").write_text("once upon a time " * 50)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(evaluation, "losses_by_position", stop)
    status, _, err = run_main(capsys, "eval", "--model", folder, "--data", tmp_path / "text.txt", "--device", "cpu")
    assert (status, err) == (128 + signal.SIGTERM, "longspan: interrupted\n")
    assert os.listdir(tmp_path / "temporary") == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "runs/x"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        SafetensorError('IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })'),
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"),
        OSError("100000 requested and 12784 written"),
    ],
)
def test_a_full_disk_is_said_in_words(error, folder, tmp_path, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("longspan.generation.session.write_atomically", fail)
    words = ["generate", "--model", folder, "--prompt", "x", "--max-tokens", 1, "--state", tmp_path / "memory"]
    status, _, err = run_main(capsys, *words)
    assert status == 1
    where = ", runs/x cannot be written" if getattr(error, "filename", None) else ""
    assert err.splitlines()[-1] == f"longspan: the disk is full{where}: free space on it, or write elsewhere"


def shell(words):
    script = f"set -o pipefail; {sys.executable} -m longspan {words}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, errors="replace", timeout=60)
    return done.returncode, done.stderr


def test_closed_and_full_streams(folder, capsys, monkeypatch):
    assert shell("--help > /dev/full") == (1, "longspan: the disk is full: free space on it, or write elsewhere\n")
    assert shell("--version >&- 2>&-") == (0, "")
    monkeypatch.setattr(sys, "stdin", None)
    status, _, err = run_main(capsys, "generate", "--model", folder)
    sys.stdin.close()
    assert status == 2
    assert "nothing to continue" in err


@pytest.mark.slow
def test_a_broken_pipe_ends_a_command_in_silence(folder):
    assert shell(f"generate --model {folder} --prompt x --max-tokens 1000000 | head -c 5") == (141, "")


def test_an_old_torch_is_refused_where_it_is_first_needed():
    script = """
import sys, types
torch = types.ModuleType("torch")
torch.__version__ = "{version}"
torch.Tensor = torch.nn = object
sys.modules["torch"] = torch
import longspan
try:
    import {module}
except ImportError as error:
    print(error)
except AttributeError:
    print("went on")
"""
    for version, module, answer in (
        (
            "2.9.1+cu128",
            "longspan.layout",
            "longspan needs torch 2.10 or newer, found 2.9.1+cu128: pip install 'torch>=2.10'",
        ),
        ("2.9.1", "longspan.ops.linear", "longspan needs torch 2.10 or newer, found 2.9.1"),
        ("2.10.0a0", "longspan.layout", ""),
    ):
        code = script.format(version=version, module=module)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert answer in done.stdout if answer else "needs torch" not in done.stdout + done.stderr
