"""The command line, run as a user runs it."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from longspan.generation.generate import generate
from longspan.generation.sampling import Sampling
from longspan.models.checkpoint import save
from longspan.models.config import AttentionConfig, ModelConfig
from longspan.models.transformer import LanguageModel

RUN = [sys.executable, "-m", "longspan"]


def longspan(*arguments, **how):
    return subprocess.run([*RUN, *map(str, arguments)], capture_output=True, timeout=120, **how)


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
    from longspan.models.checkpoint import load

    return bytes(generate(load(folder), list(prompt), number, **options).tokens[0])


def test_generate_streams_the_library_s_own_text(folder):
    done = longspan("generate", "--model", folder, "--prompt", "once", "--max-tokens", 20, "--temperature", 0)
    text = expected(folder, b"once", 20, sampling=Sampling(temperature=0))
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode() == text.decode("utf-8", "replace")
    assert b"20 tokens in" in done.stderr
    assert b"KiB" in done.stderr


def test_a_saved_memory_goes_on_and_standard_input_is_read(folder, tmp_path):
    common = ["--model", folder, "--temperature", 0]
    whole = longspan("generate", *common, "--max-tokens", 12, input=b"once").stdout
    memory = tmp_path / "memory.safetensors"
    first = longspan("generate", *common, "--max-tokens", 5, "--prompt", "once", "--state", memory)
    rest = longspan("generate", *common, "--max-tokens", 7, "--resume", memory)
    tokens = expected(folder, b"once", 12, sampling=Sampling(temperature=0))
    assert whole.decode() == tokens.decode("utf-8", "replace")
    assert b"--resume" in first.stderr
    assert (first.stdout + rest.stdout).decode() == tokens[:5].decode("utf-8", "replace") + tokens[5:].decode(
        "utf-8", "replace"
    )


def test_every_option_reaches_the_sampler(folder, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("once")
    base = ["generate", "--model", folder, "--prompt-file", prompt, "--max-tokens", 16, "--seed", 5]
    options = {"top_k": 3, "top_p": 0.2, "min_p": 0.5, "repetition_penalty": 1.5}
    for name, value in options.items():
        done = longspan(*base, f"--{name.replace('_', '-')}", value)
        text = expected(folder, b"once", 16, seed=5, sampling=Sampling(temperature=0.8, **{name: value}))
        assert done.stdout.decode() == text.decode("utf-8", "replace"), name
    text = expected(folder, b"once", 16, seed=5, sampling=Sampling(temperature=0.8))
    done = longspan(*base, "--batch", 2)
    second = expected(folder, b"once", 16, seed=6, sampling=Sampling(temperature=0.8))
    parts = [text.decode("utf-8", "replace"), second.decode("utf-8", "replace")]
    assert done.stdout.decode() == f"{parts[0]}\n\n--- 2 of 2 ---\n{parts[1]}"


def test_a_prompt_after_a_memory_and_a_stop_text(folder, tmp_path):
    memory = tmp_path / "memory.safetensors"
    common = ["generate", "--model", folder, "--temperature", 0]
    longspan(*common, "--max-tokens", 0, "--prompt", "once ", "--state", memory)
    rest = longspan(*common, "--max-tokens", 9, "--prompt", "upon", "--resume", memory)
    tokens = expected(folder, b"once upon", 9, sampling=Sampling(temperature=0))
    assert rest.stdout.decode() == tokens.decode("utf-8", "replace")
    text = longspan("generate", "--model", folder, "--prompt", "x", "--top-k", 200, "--max-tokens", 400).stdout.decode()
    ending = next(c for c in text if c.isascii() and c.isprintable())
    stopped = longspan(
        "generate", "--model", folder, "--prompt", "x", "--top-k", 200, "--max-tokens", 400, "--stop", ending
    )
    assert stopped.stdout.decode() == text[: text.index(ending) + 1]


def test_a_model_with_a_tokenizer_speaks_its_text(tmp_path):
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
    assert f"this model has {vocab_size} tokens".encode() in longspan(*common).stderr

    tokenizer.save(str(run / "checkpoint" / "tokenizer.json"))
    sampling = Sampling(temperature=0.8)
    prompt = tokenizer.encode("once upon ").ids
    said = [generate(model.eval(), prompt, 150, seed=seed, sampling=sampling).tokens[0] for seed in (2, 3)]
    texts = [tokenizer.decode(tokens, skip_special_tokens=False) for tokens in said]
    assert longspan(*common, "--batch", 2).stdout.decode() == f"{texts[0]}\n\n--- 2 of 2 ---\n{texts[1]}"
    # A stop text may end inside a token: what was said then ends with that token.
    token = next(token for token in said[0] if len(tokenizer.decode([token])) > 2)
    inside = tokenizer.decode([token])[:2]
    stopped = longspan(*common, "--stop", inside).stdout.decode()
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
        (["generate", "--model", "nowhere", "--prompt", "x"], b"nowhere"),
        (["generate", "--model", "FOLDER", "--prompt", ""], b"nothing to continue"),
        (["generate", "--model", "FOLDER", "--prompt", "x", "--prompt-file", "y"], b"exclude each other"),
        (["generate", "--model", "FOLDER", "--prompt-file", "missing.txt"], b"missing.txt"),
        (["generate", "--model", "FOLDER", "--prompt", "x", "--top-p", "2"], b"top_p must be in (0, 1], got 2.0"),
        (["generate", "--model", "FOLDER", "--resume", "missing.safetensors"], b"is not a saved session"),
    ],
)
def test_a_mistake_is_one_line_and_no_traceback(folder, arguments, message):
    done = longspan(*(folder if a == "FOLDER" else a for a in arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert b"Traceback" not in done.stderr


def test_info_says_what_there_is(folder):
    done = longspan("info", "--model", folder, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    words = "longspan", "Triton kernels", "bidirectional", "softmax", "blind_spot", "redraw_interval"
    for word in (*words, "state of one sequence"):
        assert word in done.stdout.decode()


def test_every_command_is_there_and_listed_without_torch():
    import typer

    from longspan.cli import COMMANDS, app

    group = typer.main.get_command(app)
    for name in COMMANDS:
        assert group.get_command(None, name).name == name
    code = "import sys, longspan.cli as c; c.app(['--help'], standalone_mode=False); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "False"
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
