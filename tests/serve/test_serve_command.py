"""`longspan serve`: its flags, the folders it opens, and the process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager

import httpx
import pytest
import tokenizers
import torch
import transformers
from serve_cases import language_model

import longspan
from longspan import Sampling, load, save
from longspan.cli import main
from longspan.cli.arguments import parse
from longspan.cli.serve import ServeFlags, _announce, build_server, parse_bytes
from longspan.compat.local_attention import LocalTransformer
from longspan.generation.generate import generate
from longspan.models.transformer import LanguageModel
from longspan.serve.quantize import bits_per_token

LOCAL = {"num_tokens": 256, "max_seq_len": 97, "dim": 12, "depth": 1, "heads": 2, "dim_head": 4}
LOCAL |= {"local_attn_window_size": 5}
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {{ eos_token }} {% endfor %}bot"
WORDS = ["[UNK]", "user", "system", "bot", "hello", "world", "</s>", "assistant"]


@contextmanager
def started(*words):
    """Yield a client of the server that flags describe."""
    with build_server(parse(ServeFlags, [*map(str, words), "--port", "0"], "serve")) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60, verify=False) as client:
                yield client, server
        finally:
            server.stop(timeout=0)
            thread.join(30)
            assert not thread.is_alive()


def run_folder(folder):
    save(language_model(), folder / "checkpoint")


def converted(folder):
    torch.save(LocalTransformer(**LOCAL).state_dict(), folder.with_suffix(".pt"))
    folder.with_suffix(".json").write_text(json.dumps(LOCAL))
    words = [folder.with_suffix(".pt"), folder, "--from", "local-attention", "--config", folder.with_suffix(".json")]
    main(["convert", *map(str, words)])


def hf(folder):
    from longspan.hf import LongspanConfig, LongspanForCausalLM

    LongspanForCausalLM(LongspanConfig(language_model().config)).save_pretrained(folder)


def test_decoders_of_transformers(tmp_path):
    """A model that `swap_attention` changed, with its own tokenizer."""
    from longspan.hf import swap_attention

    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), num_hidden_layers=2, bos_token_id=0, eos_token_id=6, **sizes
    )
    model = transformers.LlamaForCausalLM(config).eval()
    swap_attention(model, "linear", layers=[1])
    model.save_pretrained(tmp_path / "swapped")
    write_tokenizer(tmp_path / "swapped")
    tokens = [1, 4, 5]
    with torch.no_grad():
        for _ in range(7):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    with started("--model", tmp_path / "swapped") as (client, server):
        body = {"prompt": "user hello world", "max_tokens": 7, "temperature": 0, "logprobs": 0, "ignore_eos": True}
        found = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]["tokens"]
        assert found == [WORDS[token] for token in tokens[3:]]
        assert [*server.model.ends] == [6]


@pytest.mark.parametrize("make", [run_folder, converted, hf], ids=lambda make: make.__name__)
def test_kinds_of_folders(make, tmp_path):
    torch.manual_seed(0)
    make(tmp_path / "model")
    wanted = generate(longspan.load(tmp_path / "model").eval(), b"Once upon", 13, sampling=Sampling(0)).tokens[0]
    with started("--model", tmp_path / "model") as (client, server):
        body = {"prompt": "Once upon", "max_tokens": 13, "temperature": 0, "logprobs": 0}
        found = client.post("/v1/completions", json=body).json()
        assert client.get("/v1/models").json()["data"][0]["id"] == "model"
        assert server.model.engine._reader._agree  # compared before the first request
    names = [chr(token) if token < 128 else f"bytes:\\x{token:02x}" for token in wanted]
    assert found["choices"][0]["logprobs"]["tokens"] == names
    assert found["choices"][0]["text"] == bytes(wanted).decode(errors="replace")


def write_tokenizer(folder):
    """Write a tokenizer of words, with a chat template and a token that ends texts."""
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": {"content": "</s>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_tokenizer_with_a_template_and_an_end(tmp_path):
    torch.manual_seed(0)
    words_model = tmp_path / "words"
    save(language_model(vocab_size=len(WORDS)), words_model)
    write_tokenizer(words_model)
    messages = [{"role": "user", "content": "hello world"}]
    with started("--model", words_model) as (client, server):
        chat = {"messages": messages, "max_tokens": 97, "seed": 1, "logprobs": True, "keep_state": True}
        found = client.post("/v1/chat/completions", json=chat).json()
        assert found["usage"]["prompt_tokens"] == 5  # user hello world </s> bot
        choice = found["choices"][0]
        assert choice["finish_reason"] == "stop"
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert "</s>" not in tokens
        assert choice["message"]["content"].split() == tokens
        more = {"messages": [{"role": "user", "content": "world"}], "previous_state": choice["state"], "max_tokens": 1}
        assert client.post("/v1/chat/completions", json=more).json()["usage"]["prompt_tokens"] == 4
        endless = client.post("/v1/chat/completions", json={**chat, "ignore_eos": True}).json()["choices"][0]
        assert endless["finish_reason"] == "length"
        assert len(endless["logprobs"]["content"]) == 97
    (tmp_path / "other.jinja").write_text("hello")
    with started("--model", words_model, "--chat-template", tmp_path / "other.jinja") as (client, server):
        found = client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
        assert found["usage"]["prompt_tokens"] == 1


def test_flags_reach_the_server(tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    save(language_model(), tmp_path / "model")
    (tmp_path / "keys").write_text("one\ntwo\n")
    (tmp_path / "text").write_text("some text to measure " * 9)
    monkeypatch.setenv("LONGSPAN_API_KEY", "three")
    words = ["--model", tmp_path / "model", "--name", "mine", "--api-key", "zero", "--api-key-file", tmp_path / "keys"]
    words += ["--allowed-hosts", "a.example,127.0.0.1", "--slots", 3, "--max-queue", 5, "--max-length", 211]
    words += ["--max-prompt", 101, "--max-tokens", 13, "--max-body", "1000kB", "--max-streams", 7, "--timeout", 50]
    words += ["--max-connections", 11, "--read-timeout", 3, "--drain-timeout", 2, "--chunk", 32, "--cache", "3MiB"]
    words += ["--cache-dir", tmp_path / "cache", "--cache-disk", "5MB", "--state-dir", tmp_path / "states"]
    words += ["--state-disk", "1GiB", "--state-dtype", "bfloat16", "--quantize", "int8", "--speculation", "ngram"]
    words += ["--quantize-text", tmp_path / "text", "--threads", 1, "--trusted-proxies", "127.0.0.1", "--log-prompts"]
    with started(*words, "--device", "cpu") as (client, server):
        options, engine, model = server.options, server.model.engine, server.model
        assert options.api_keys == ("zero", "one", "two", "three")
        assert (options.max_body, options.max_streams, options.max_connections) == (1_000_000, 7, 11)
        assert (options.read_timeout, options.drain_timeout, options.log_prompts) == (3, 2, True)
        assert (engine.slots, engine.max_queue, engine.max_length, engine.chunk) == (3, 5, 211, 32)
        assert (engine.cache.budget, engine.cache.disk.budget) == (3 << 20, 5_000_000)
        assert (engine.state_codec.kind, engine.speculation) == ("bfloat16", "ngram")
        assert (model.limits.prompt, model.limits.tokens, model.limits.timeout) == (101, 13, 50)
        assert model.states.folder == tmp_path / "states"
        assert model.states.budget == 1 << 30
        client.headers["Authorization"] = "Bearer two"
        assert client.get("/v1/models", headers={"Host": "a.example:80"}).json()["data"][0]["id"] == "mine"
        assert client.get("/v1/models", headers={"Host": "b.example"}).status_code == 421
        assert client.post("/v1/completions", json={"prompt": "x" * 64, "keep_state": True}).status_code == 200
    assert list((tmp_path / "cache").glob("*.safetensors"))
    assert list((tmp_path / "states").glob("*.safetensors"))
    said = capsys.readouterr().err
    assert f"loading {tmp_path / 'model'}\n" in said
    assert re.search(r"[\d.]+ bits per byte on text; [\d.]+ with --quantize int8 --state-dtype bfloat16: [+-]", said)


def test_the_loss_of_a_model_with_a_tokenizer_is_per_byte(tmp_path, capsys):
    torch.manual_seed(0)
    save(language_model(vocab_size=len(WORDS)), tmp_path / "words")
    write_tokenizer(tmp_path / "words")
    text = "hello world " * 53
    (tmp_path / "text").write_text(text)
    words = ["--model", tmp_path / "words", "--quantize", "int8", "--quantize-text", tmp_path / "text"]
    with started(*words) as (_, server):
        codec = server.model.codec
        model = load(tmp_path / "words")
    tokens = codec.encode(text.encode())
    bits = bits_per_token(model, torch.tensor(tokens)) * (len(tokens) - 1) / len(codec.decode(tokens[1:]).encode())
    assert f"{bits:.4f} bits per byte on text; " in capsys.readouterr().err


@pytest.mark.parametrize("host", [None, "0.0.0.0"])
def test_other_machines_reach_the_server_only_if_told_so(tmp_path, capsys, host):
    save(language_model(), tmp_path / "model")
    flags = ServeFlags(tmp_path / "model", port=0, **({} if host is None else {"host": host}))
    with build_server(flags) as server:
        assert server.address[0] == (host or "127.0.0.1")
        _announce(server, flags)
    assert ("every client that reaches this address can use" in capsys.readouterr().err) == (host is not None)


def test_draft_model(tmp_path):
    save(language_model(), tmp_path / "model")
    save(language_model("linear"), tmp_path / "draft")
    with started("--model", tmp_path / "model", "--speculation", tmp_path / "draft") as (client, server):
        assert isinstance(server.model.engine.speculation, LanguageModel)
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


@pytest.mark.parametrize(("text", "number"), [
    ("0", 0), ("4096", 4096), ("2GiB", 2 << 30), ("1.5 MiB", 3 << 19), ("500MB", 500_000_000), ("7k", 7000),
    ("3TiB", 3 << 40),
])  # fmt: skip
def test_sizes(text, number):
    assert parse_bytes("--cache", text) == number


@pytest.mark.parametrize(("words", "text"), [
    (["--cache", "much"], "--cache must be a number of bytes such as 2GiB"),
    (["--max-body", "-1"], "--max-body must be a number of bytes"),
    (["--slots", "0"], "--slots must be at least 1"),
    (["--port", "70000"], "--port must be at most 65535"),
    (["--timeout", "0"], "--timeout must be above 0 and at most 1,000,000 seconds, got 0"),
    (["--read-timeout", "nan"], "--read-timeout must be above 0"),
    (["--api-key", ""], "--api-key is empty"),
    (["--api-key-file", "nowhere"], "--api-key-file nowhere cannot be read"),
    (["--quantize", "int3"], "int3"),
    (["--model", "nowhere"], "nowhere"),
    (["--speculation", "nowhere"], "nowhere"),
    (["--chat-template", "nowhere"], "nowhere"),
    (["--quantize", "int8", "--quantize-text", "nowhere"], "nowhere"),
    (["--quantize-text", "text"], "--quantize-text measures the loss of --quantize or --state-dtype"),
    (["--host", "256.1.1.1", "--port", "0"], "cannot listen on 256.1.1.1:0"),
    (["--max-length", "99999999999"], "max_length must be at most"),
])  # fmt: skip
def test_refusals(words, text, tmp_path, capsys):
    save(language_model(), tmp_path / "model")
    with pytest.raises(SystemExit) as stopped:
        main(["serve", "--model", str(tmp_path / "model"), *words])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert text in said
    assert "Traceback" not in said


def process(*words):
    """Start a server in a process of its own; return it and a client."""
    command = [sys.executable, "-m", "longspan", "serve", "--port", "0", *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    said = child.stderr.readline() + child.stderr.readline()
    address = re.search(r"at (http://127\.0\.0\.1:\d+) with 8 slots on cpu; state of one sequence: ", said)
    assert address, said + child.stderr.read()
    return child, httpx.Client(base_url=address[1], timeout=60, verify=False)


@pytest.mark.slow
def test_kill_and_restart_with_a_disk_cache(tmp_path):
    save(language_model(), tmp_path / "model")
    flags = ["--model", tmp_path / "model", "--cache-dir", tmp_path / "cache", "--state-dir", tmp_path / "states"]
    prompts = [f"{i} Once upon a time there was " * 19 for i in range(29)]
    answers, killed_at = {}, (5, 13, 29)
    for last in killed_at:
        child, client = process(*flags)
        with client:
            for prompt in prompts[:last]:
                body = {"prompt": prompt, "max_tokens": 5, "seed": 1, "logprobs": 1, "keep_state": True}
                found = client.post("/v1/completions", json=body).json()["choices"][0]
                answers.setdefault(prompt, found["logprobs"])
                assert found["logprobs"] == answers[prompt]
            child.kill()
        child.communicate()
    damaged = sorted((tmp_path / "cache").glob("*.safetensors"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-9])
    child, client = process(*flags)
    with client:
        cached = 0
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": 5, "seed": 1, "logprobs": 1}
            found = client.post("/v1/completions", json=body).json()
            assert found["choices"][0]["logprobs"] == answers[prompt]
            cached += found["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 0
        assert len(client.get("/v1/states").json()["data"]) == sum(killed_at)
        child.terminate()
    child.communicate()
    assert child.returncode == 0
