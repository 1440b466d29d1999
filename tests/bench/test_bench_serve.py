"""Load on a server: arrivals, checks of every answer, percentiles; the real server in a slow test."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
import torch

from longspan import AttentionConfig, LanguageModel, ModelConfig
from longspan.bench import serve
from longspan.bench.serve import ServeBenchOptions, latency, load
from longspan.bench.serve.client import Address, Answer, Client, running_server
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
        self.fault, self.number, self.paths, self.bodies, self.connections = fault, 0, [], [], 0

    async def answer(self, reader, writer):
        self.connections += 1
        with suppress(asyncio.IncompleteReadError):  # The client has closed the connection.
            while True:
                await self.answer_one(reader, writer)
        writer.close()

    async def answer_one(self, reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        self.paths.append(head.split()[1])
        if self.paths[-1] == b"/metrics":
            lines = ["# TYPE longspan_slots gauge", "longspan_slots 3", 'longspan_x_total{code="200"} 1']
            content = "\n".join(lines).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
            return
        size = int(head.lower().split(b"content-length: ")[1].split()[0])
        body = json.loads(await reader.readexactly(size))
        self.bodies.append(body)
        fault, self.number = self.fault(self.number), self.number + 1
        prompt = body["prompt"].encode() if isinstance(body["prompt"], str) else body["prompt"]
        texts = [f"{sum(prompt) + body.get('seed', 0)}-", f"{body['max_tokens']}" if fault != "wrong" else "other"]
        usage = {"completion_tokens": body["max_tokens"], "prompt_tokens_details": {"cached_tokens": 64}}
        if fault == "refused":
            content = json.dumps({"error": {"message": "too many"}}).encode()
            writer.write(b"HTTP/1.1 429 No\r\ncontent-length: %d\r\n\r\n" % len(content) + content)
        else:
            assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            events = [{"choices": [{"text": text}]} for text in texts] + [{"choices": [], "usage": usage}]
            content = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
            content += b"" if fault == "broken" else b"data: [DONE]\n\n"
            for part in (content[:11], content[11:]):  # an event in two chunks
                writer.write(b"%x\r\n" % len(part) + part + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        await writer.drain()


@contextmanager
def listening(stub):
    """Run a stub in a thread."""
    started, found = threading.Event(), {}

    async def main():
        server = await asyncio.start_server(stub.answer, "127.0.0.1", 0)
        found.update(port=server.sockets[0].getsockname()[1], loop=asyncio.get_running_loop(), end=asyncio.Event())
        started.set()
        async with server:
            await found["end"].wait()

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    started.wait()
    try:
        yield Address("127.0.0.1", found["port"])
    finally:
        found["loop"].call_soon_threadsafe(found["end"].set)
        thread.join()


def run_against(stub, options, monkeypatch):
    """Run a benchmark against a stub; return the result and the flags of the servers."""
    started = []

    @contextmanager
    def server(flags, arguments=()):
        started.append((flags, arguments))
        with listening(stub) as address:
            yield address

    for module in (load, latency):
        monkeypatch.setattr(module, "running_server", server)
    return serve.run(options), started


def test_connections_are_used_again():
    stub, body = Stub(lambda number: {1: "refused", 3: "broken"}.get(number)), {"prompt": [1, 2], "max_tokens": 3}

    async def ask(address):
        async with Client(address) as client:
            answers = [await client.ask(body) for _ in range(5)]
            assert await client.counters() == {"slots": 3}
            return answers

    with listening(stub) as address:
        answers = asyncio.run(ask(address))
    assert [bool(answer.error) for answer in answers] == [False, True, False, True, False]
    assert {answer.text for answer in answers if not answer.error} == {"3-3"}
    assert stub.connections == 2  # What broke off is not used again.


def test_a_connection_that_the_server_closed_is_not_used_again():
    class Closing(Stub):
        async def answer(self, reader, writer):
            self.connections += 1
            await self.answer_one(reader, writer)
            writer.close()

    async def ask(address):
        async with Client(address) as client:
            for _ in range(3):
                assert not (await client.ask({"prompt": [1], "max_tokens": 3})).error
                await asyncio.sleep(0.05)

    stub = Closing()
    with listening(stub) as address:
        asyncio.run(ask(address))
    assert stub.connections == 3


def test_every_answer_is_checked(folder, tmp_path, monkeypatch, capsys):
    faults = {7: "wrong", 8: "refused", 12: "broken"}
    options = ServeBenchOptions(
        folder,
        sections=("load",),
        requests=13,
        distinct=5,
        slots=3,
        loads=(0.5, 2),
        prompt_tokens=(3, 7),
        max_tokens=(2, 5),
        serve_arguments=("--threads=1",),
        cache="7MiB",
        device="cpu",
        out=tmp_path / "out.json",
    )
    monkeypatch.setattr(load, "generate_rate", lambda *_: 1000.0)
    stub = Stub(faults.get)
    result, started = run_against(stub, options, monkeypatch)
    assert [x.load for x in result.loads] == [0.5, 2]
    assert result.loads[1].rate == 4 * result.loads[0].rate
    assert [x.requests for x in result.loads] == [6, 7]
    assert (sum(x.lost for x in result.loads), sum(x.wrong for x in result.loads), stub.number) == (2, 1, 18)
    assert result.failed
    assert set(stub.paths) == {b"/v1/completions", b"/metrics"}
    ((flags, arguments),) = started
    assert (flags["model"], flags["device"], flags["slots"], flags["cache"]) == (folder, "cpu", 3, "7MiB")
    assert arguments == ("--threads=1",)
    errors = {error for x in result.loads for error in x.errors}
    assert {"too many", "EOFError: the stream broke off"} <= errors
    assert 0 < result.loads[0].first_token_ms[50] <= result.loads[0].first_token_ms[99]
    assert result.loads[1].ratio == pytest.approx(result.loads[1].tokens_per_second / 1000)
    written = json.loads((tmp_path / "out.json").read_text())
    assert [row["requests"] for row in written["rows"]] == [6, 7]
    assert written["options"]["model"] == "small"
    assert written["parameters"] > 100
    assert (tmp_path / "out.png").stat().st_size > 1000
    shown = capsys.readouterr()
    assert "| requests |" in shown.out
    assert "under load: 7 of 7" in shown.err


def test_single_streams(folder, tmp_path, monkeypatch, capsys):
    options = ServeBenchOptions(
        folder, sections=("prefix", "speculation"), prefix_tokens=97, device="cpu", out=tmp_path / "out.json"
    )
    stub = Stub()
    result, started = run_against(stub, options, monkeypatch)
    assert len(stub.bodies) == 10 + 2 * 3 * 10
    assert {len(body["prompt"]) for body in stub.bodies[:10]} == {97}
    assert {body["max_tokens"] for body in stub.bodies[:10]} == {1}
    assert [flags.get("speculation") for flags, _ in started] == [None, None, "ngram"]
    assert result.prefix.same
    assert not result.failed
    assert result.prefix.cached_tokens == 64
    assert 0 < result.prefix.hit_ms <= result.prefix.worst_hit_ms
    assert [x.same for x in result.speculation] == [True, True, True]
    assert all(x.ratio > 0 for x in result.speculation)
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["prefix"]["prompt_tokens"] == 97
    assert written["speculation"][0]["text"] == "repeated line, greedy"
    assert not (tmp_path / "out.png").exists()
    shown = capsys.readouterr().out
    assert "first token, cached, ms" in shown
    assert "with speculation" in shown
    result, _ = run_against(Stub({5: "wrong"}.get), replace(options, sections=("prefix",)), monkeypatch)
    assert result.failed


def test_int8_weights(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(latency, "_MEASURED", 67)
    options = ServeBenchOptions(folder, sections=("quantize",), device="cpu", out=tmp_path / "out.json")
    result, started = run_against(Stub(), options, monkeypatch)
    assert [flags.get("quantize") for flags, _ in started] == [None, "int8"]
    found = result.quantization
    assert found.bits_per_token != found.quantized_bits_per_token
    assert found.quantized_bits_per_token == pytest.approx(found.bits_per_token, rel=0.01)
    assert json.loads((tmp_path / "out.json").read_text())["quantization"]["ratio"] == found.ratio > 0
    assert "with int8 weights" in capsys.readouterr().out


def test_results_before_an_interruption_are_written(folder, tmp_path, monkeypatch):
    options = ServeBenchOptions(
        folder, sections=("load",), requests=4, distinct=2, loads=(5, 9), device="cpu", out=tmp_path / "out.json"
    )
    rates = iter([1e5])
    monkeypatch.setattr(load, "generate_rate", lambda *_: next(rates))
    with pytest.raises(RuntimeError):  # StopIteration in a generator
        run_against(Stub(), options, monkeypatch)
    assert [row["load"] for row in json.loads((tmp_path / "out.json").read_text())["rows"]] == [5]


def test_requests_are_divided_among_the_loads(folder):
    options = ServeBenchOptions(folder, requests=11)
    assert [n for _, n in load._numbers(options)] == [4, 3, 4]
    assert load._numbers(replace(options, rounds=2, loads=(0.5, 1)))[2:] == [(0.5, 2), (1, 3)]


def test_requests_differ_in_length(folder):
    options = ServeBenchOptions(folder, distinct=50, prompt_tokens=(3, 11), max_tokens=(5, 7))
    bodies = load.make_bodies(options, serve._load(folder, torch.device("cpu")))
    assert {len(body["prompt"]) for body in bodies} == set(range(3, 12))
    assert {body["max_tokens"] for body in bodies} == {5, 6, 7}
    assert len({body["seed"] for body in bodies}) == 50
    assert bodies == load.make_bodies(options, serve._load(folder, torch.device("cpu")))
    assert load.generate_rate(serve._load(folder, torch.device("cpu")), bodies, options) > 0


def test_percentiles():
    assert load.percentiles(range(1, 101)) == {50: 50, 95: 95, 99: 99}
    assert load.percentiles([3.0]) == {50: 3.0, 95: 3.0, 99: 3.0}
    answers = [Answer("a", 5, arrived=1.0, first=0.1, seconds=0.5), Answer("b", 1, arrived=2.0, first=0.2, seconds=0.2)]
    alone = [Answer("a", 5), Answer("b", 1)]
    rounds = [load.Round(answers, alone, raw, 1.0) for raw in (10.0, 20.0, 40.0)]
    result = load.summarize(0.3, rounds)
    assert (result.tokens, result.seconds) == (18, pytest.approx(3.6))
    assert (result.ratio, result.generate_tokens_per_second) == (pytest.approx(5 / 20), 20)
    assert result.token_ms[50] == pytest.approx(100)


def test_steady_time():
    events = [(1.25, 3), (1.75, 3), (2.25, 3), (2.75, 3)]  # 5 tokens each
    answers = [Answer("", 20, arrived=i, first=1.0, seconds=3.0, events=events) for i in range(7)]
    counted = [
        load.Sample(t, {"decode_steps_total": 4 * t, "generation_tokens_total": 20 * t, "prefill_seconds_total": t / 8})
        for t in (1, 2, 3, 5, 7)
    ]
    found = load.Round(answers, answers, raw=40.0, rate=1.0, samples=counted, client_seconds=1.8)
    assert found.window == (2, 6)  # From the time of a stream after the first request to the last request.
    assert (found.steady_seconds, found.steady_tokens) == (4, pytest.approx(10 * (1 + 2 + 2 + 2 + 1)))
    late = [replace(answer, events=[(1.0, 1), (2.9, 3)]) for answer in answers]
    assert found._replace(answers=late).steady_tokens == pytest.approx(15 + 20 + 20 + 20 + 5 + 5)
    result = load.summarize(1.0, [found])
    assert (result.steady_tokens_per_second, result.steady_ratio) == (pytest.approx(20), pytest.approx(0.5))
    assert (result.busy_slots, result.prefill_share) == (pytest.approx(5), pytest.approx(1 / 8))
    assert result.decode_share is None
    assert result.idle_share is None
    counted = [load.Sample(x.time, {**x.counters, "decode_seconds_total": x.time / 2}) for x in counted]
    assert load.summarize(1.0, [found._replace(samples=counted)]).idle_share == pytest.approx(3 / 8)
    assert result.client_share == pytest.approx(0.2)
    short = load.summarize(1.0, [load.Round(answers[:1], answers[:1], 40.0, 1.0)])
    assert (short.steady_seconds, short.steady_tokens_per_second, short.busy_slots) == (0, None, None)
    assert load.table([result, short]).rows[1][7:11] == ["–"] * 4


def test_wrong_options(folder, tmp_path):
    with pytest.raises(ValueError, match="requests must be at least 1, got 0"):
        ServeBenchOptions(folder, requests=0)
    with pytest.raises(ValueError, match=r"max_tokens must be a smallest and a largest number of at least 1, .* got 7"):
        ServeBenchOptions(folder, max_tokens=(7,))
    with pytest.raises(ValueError, match=r"loads must be positive numbers, got 0\.5, -1"):
        ServeBenchOptions(folder, loads=(0.5, -1))
    with pytest.raises(ValueError, match="requests must be at least 3, one for each round of each load, got 2"):
        ServeBenchOptions(folder, requests=2)
    with pytest.raises(ValueError, match=r"unknown section 'prefixes'; there is load, prefix, speculation, quantize"):
        ServeBenchOptions(folder, sections=("prefixes",))
    with pytest.raises(ValueError, match="nothing"):
        serve.run(ServeBenchOptions(tmp_path / "nothing"))


@pytest.mark.slow
def test_a_server_that_does_not_start(folder):
    arguments = ("--no-such-flag",)
    with (
        pytest.raises(ValueError, match=r"the server did not start: .*no-such-flag"),
        running_server({"model": folder}, arguments),
    ):
        pass


@pytest.mark.slow
def test_the_real_server(folder, tmp_path):
    options = ServeBenchOptions(
        folder,
        requests=300,
        distinct=7,
        prompt_tokens=(1, 65),
        max_tokens=(1, 17),
        prefix_tokens=1009,
        device="cpu",
        out=tmp_path / "x.json",
    )
    result = serve.run(options)
    assert not result.failed
    assert sum(x.requests for x in result.loads) == 300
    assert result.prefix.cached_tokens == 1008
