"""Load on a server: arrivals, checks of every answer, percentiles; the real server in a slow test."""

from __future__ import annotations

import asyncio
import json
from contextlib import contextmanager

import pytest
import torch

from longspan import AttentionConfig, LanguageModel, ModelConfig
from longspan.bench import serve
from longspan.bench.serve import Answer, ServeBenchOptions
from longspan.models.checkpoint import save


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    attention = AttentionConfig(num_heads=2, mechanism="linear")
    path = tmp_path_factory.mktemp("model") / "small"
    save(LanguageModel(ModelConfig(dim=8, depth=1, causal=True, vocab_size=256, attention=attention)), path)
    return path


class Stub:
    """A server that echoes sums of the prompt, in chunked events; `fault` decides what goes wrong, by request."""

    def __init__(self, fault=lambda number: None):
        self.fault, self.number, self.paths = fault, 0, []

    async def answer(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        self.paths.append(head.split()[1])
        size = int(head.lower().split(b"content-length: ")[1].split()[0])
        body = json.loads(await reader.readexactly(size))
        fault, self.number = self.fault(self.number), self.number + 1
        texts = [f"{sum(body['prompt']) + body['seed']}-", f"{body['max_tokens']}" if fault != "wrong" else "other"]
        usage = {"completion_tokens": body["max_tokens"]}
        if fault == "refused":
            content = json.dumps({"error": {"message": "too many"}}).encode()
            writer.write(b"HTTP/1.1 429 No\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
        elif body.get("stream"):
            assert body["stream_options"] == {"include_usage": True}
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            events = [{"choices": [{"text": text}]} for text in texts] + [{"choices": [], "usage": usage}]
            content = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
            content += b"" if fault == "broken" else b"data: [DONE]\n\n"
            for part in (content[:11], content[11:]):  # an event in two chunks
                writer.write(b"%x\r\n" % len(part) + part + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        else:
            content = json.dumps({"choices": [{"text": "".join(texts)}], "usage": usage}).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
        await writer.drain()
        writer.close()


def run_against(stub, options, monkeypatch):
    """Run a load against a stub, in the event loops of the benchmark."""

    async def within(work):
        server = await asyncio.start_server(stub.answer, "127.0.0.1", 0)
        async with server:
            return await work("127.0.0.1", server.sockets[0].getsockname()[1])

    ask_alone, load_run = serve._ask_alone, serve._load_run
    monkeypatch.setattr(serve, "_ask_alone", lambda host, port, *more: within(lambda h, p: ask_alone(h, p, *more)))
    monkeypatch.setattr(serve, "_load_run", lambda host, port, *more: within(lambda h, p: load_run(h, p, *more)))
    seen = []

    @contextmanager
    def server(given, device):
        seen.append((given, device))
        yield "127.0.0.1", 0

    monkeypatch.setattr(serve, "_server", server)
    result = serve.run(options)
    assert seen == [(options, "cpu")]
    return result


@pytest.mark.parametrize("stream", [True, False])
def test_every_answer_is_checked(folder, tmp_path, monkeypatch, capsys, stream):
    faults = {7: "wrong", 8: "refused", 9: "broken" if stream else "refused"}
    options = ServeBenchOptions(
        folder,
        requests=13,
        distinct=5,
        rate=1000,
        prompt_tokens=(3, 7),
        max_tokens=(2, 5),
        stream=stream,
        device="cpu",
        out=tmp_path / "out.json",
    )
    stub = Stub(faults.get)
    result = run_against(stub, options, monkeypatch)
    assert (result.requests, result.lost, result.wrong, stub.number) == (13, 2, 1, 18)
    assert set(stub.paths) == {b"/v1/completions"}
    assert "too many" in result.errors
    assert ("EOFError: the stream broke off" in result.errors) == stream
    assert 0 < result.first_token_ms[50] <= result.first_token_ms[99]
    assert result.ratio == pytest.approx(result.tokens_per_second / result.generate_tokens_per_second)
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["result"]["lost"] == 2
    assert written["options"]["model"] == "small"
    assert (tmp_path / "out.png").stat().st_size > 1000
    shown = capsys.readouterr()
    assert "| requests, lost, wrong |" in shown.out
    assert "under load: 13 of 13" in shown.err


def test_requests_differ_in_length(folder):
    options = ServeBenchOptions(folder, distinct=50, prompt_tokens=(3, 11), max_tokens=(5, 7))
    bodies = serve._bodies(options, serve._load(folder, torch.device("cpu")))
    assert {len(body["prompt"]) for body in bodies} == set(range(3, 12))
    assert {body["max_tokens"] for body in bodies} == {5, 6, 7}
    assert len({body["seed"] for body in bodies}) == 50
    assert bodies == serve._bodies(options, serve._load(folder, torch.device("cpu")))


def test_percentiles():
    assert serve._percentiles(range(1, 101)) == {50: 50, 95: 95, 99: 99}
    assert serve._percentiles([3.0]) == {50: 3.0, 95: 3.0, 99: 3.0}
    answers = [Answer("a", 5, arrived=1.0, first=0.1, seconds=0.5), Answer("b", 1, arrived=2.0, first=0.2, seconds=0.2)]
    result = serve._result(answers, [Answer("a", 5), Answer("b", 1)], raw=10.0, rate=1.0)
    assert (result.tokens, result.seconds) == (6, pytest.approx(1.2))
    assert result.token_ms[50] == pytest.approx(100)


def test_wrong_options(folder, tmp_path):
    with pytest.raises(ValueError, match="requests must be at least 1, got 0"):
        ServeBenchOptions(folder, requests=0)
    with pytest.raises(ValueError, match=r"max_tokens must be a smallest and a largest number of at least 1, .* got 7"):
        ServeBenchOptions(folder, max_tokens=(7,))
    with pytest.raises(ValueError, match="rate must be a positive number of requests per second, got 0"):
        ServeBenchOptions(folder, rate=0)
    with pytest.raises(ValueError, match="nothing"):
        serve.run(ServeBenchOptions(tmp_path / "nothing"))


@pytest.mark.slow
def test_a_server_that_does_not_start(folder):
    options = ServeBenchOptions(folder, serve_arguments=("--no-such-flag",))
    with pytest.raises(ValueError, match=r"the server did not start: .*no-such-flag"), serve._server(options, "cpu"):
        pass


@pytest.mark.slow
def test_the_real_server(folder, tmp_path):
    options = ServeBenchOptions(
        folder,
        requests=300,
        distinct=7,
        prompt_tokens=(1, 65),
        max_tokens=(1, 17),
        device="cpu",
        out=tmp_path / "x.json",
    )
    result = serve.run(options)
    assert (result.requests, result.lost, result.wrong) == (300, 0, 0)
