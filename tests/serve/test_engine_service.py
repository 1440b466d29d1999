"""An engine used from another process: what crosses the connection, and what happens when either side ends."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe

import httpx
import pytest
import torch
from serve_cases import language_model
from server_cases import serving

from longspan import Sampling, save
from longspan.generation.chat_template import ChatTemplate
from longspan.serve import Engine, EngineClosedError, QueueFullError, Request
from longspan.serve.engine_service import EngineInfo, EngineService, RemoteEngine, RemoteStates
from longspan.serve.openai_protocol import APIError
from longspan.serve.request import SavedState
from longspan.serve.state_store import StateStore

LONG = {"prompt": "Once upon", "max_tokens": 4000, "stream": True}


@pytest.fixture
def remote(tmp_path):
    """An engine, and the same one through a connection."""
    torch.manual_seed(0)
    with Engine(language_model(), slots=2, max_queue=1) as engine:
        states = StateStore(tmp_path / "states", engine, 1 << 30)
        own, other = Pipe()
        service = EngineService(engine, states, own)
        thread = threading.Thread(target=service.run)
        thread.start()
        info = EngineInfo.of(engine, states)
        found = RemoteEngine(other, info)
        found.listen(lambda *message: None, lambda: None)
        yield engine, found, RemoteStates(found, info)
        with socket.socket(fileno=os.dup(other.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        assert not thread.is_alive()


def result(stream):
    stream._reply.result(10)
    return stream.result()


def test_results_are_those_of_the_engine(remote):
    engine, there, _ = remote
    request = Request(b"Once upon", 23, Sampling(0.8), seed=3, n=2, logprobs=2, echo=True, stop_strings=["zz"])
    wanted, stream = engine.submit(request).result(), there.submit(request)
    assert result(stream) == wanted
    assert stream.completion_tokens == sum(len(choice.tokens) - 9 for choice in wanted)
    for _ in range(2):
        stream = there.submit(Request(b"Once upon", 1))
        assert result(stream)[0].finish_reason == "length"
    assert stream.cached_tokens == 8  # read by the one before
    assert not there._streams
    assert there.stats().requests == 4
    assert there.state_bytes == engine.model.state_size()


def test_errors_are_those_of_the_engine(remote):
    _, there, _ = remote
    with pytest.raises(ValueError, match="prompt has the token 256"):
        result(there.submit(Request([256], 1)))
    streams = [there.submit(Request(b"x", 100_000, seed=i)) for i in range(3)]
    with pytest.raises(QueueFullError, match="the limit is 1") as full:
        result(there.submit(Request(b"x", 1)))
    assert full.value.retry_after >= 1
    for stream in streams:
        stream.cancel()
    assert {choice.finish_reason for stream in streams for choice in result(stream)} == {"cancelled"}
    assert not there._streams
    there.close(drain=False)
    with pytest.raises(EngineClosedError, match="takes no more requests"):
        result(there.submit(Request(b"x", 1)))


def test_sessions_stay_with_the_engine(remote):
    engine, there, states = remote
    (own,) = engine.submit(Request(b"Once upon", 5, Sampling(0), keep_state=True)).result()
    (wanted,) = engine.submit(Request(b" a time", 5, Sampling(0), previous_state=own.session)).result()
    (first,) = result(there.submit(Request(b"Once upon", 5, Sampling(0), keep_state=True)))
    assert isinstance(first.session, str)
    saved = states.load(first.session)
    assert saved == SavedState(first.session, 14, [*b"Once upon", *first.tokens])
    (second,) = result(there.submit(Request(b" a time", 5, Sampling(0), previous_state=saved)))
    assert second.tokens == wanted.tokens
    assert states.copy(first.session, "mine").name == "mine"
    with pytest.raises(APIError, match="already is a state"):
        states.copy(first.session, "mine")
    with pytest.raises(APIError, match="no state 'other'"):
        result(there.submit(Request(b"x", 1, previous_state=SavedState("other", 1, []))))
    with states.new_file() as path:
        path.write_bytes(b"nothing")
        with pytest.raises(APIError, match="cannot be used"):
            states.add(path)
    with pytest.raises(TypeError, match="a Session of this process"):
        engine.submit(Request(b"x", 1, previous_state=saved))


def test_a_request_is_cancelled_while_its_state_is_read(remote, monkeypatch):
    engine, there, states = remote
    (first,) = result(there.submit(Request(b"Once upon", 5, keep_state=True)))
    saved, read = states.load(first.session), threading.Event()
    load = StateStore.load
    monkeypatch.setattr(StateStore, "load", lambda store, name: read.wait(10) and load(store, name))
    stream = there.submit(Request(b"x", 1_000_000, previous_state=saved))
    stream.cancel()
    there.stats()  # The message before it has been received.
    read.set()
    assert result(stream)[0].finish_reason == "cancelled"
    assert engine.stats().running == 0


def test_choices_go_on_while_the_state_of_another_is_saved(remote, monkeypatch):
    engine, there, _ = remote
    request = Request(b"Once upon", 100, seed=1, n=2, stop=range(0, 256, 16), keep_state=True)
    wanted, save_state = engine.submit(request).result(), StateStore.save
    assert len({len(choice.tokens) for choice in wanted}) == 2
    monkeypatch.setattr(StateStore, "save", lambda *given: time.sleep(0.2) or save_state(*given))
    assert [(x.tokens, x.text) for x in result(there.submit(request))] == [(x.tokens, x.text) for x in wanted]


def test_a_state_that_cannot_be_saved_ends_one_stream(remote, monkeypatch):
    _, there, _ = remote
    monkeypatch.setattr(StateStore, "_make_space", lambda store, size: 1 / 0)
    with pytest.raises(RuntimeError, match=r"^ZeroDivisionError$"):
        result(there.submit(Request(b"Once upon", 100, seed=1, n=2, stop=range(0, 256, 16), keep_state=True)))
    for _ in range(3):
        assert result(there.submit(Request(b"x", 1)))[0].finish_reason == "length"


def test_unexpected_errors_are_logged_without_their_text(remote, monkeypatch, caplog):
    _, there, states = remote
    monkeypatch.setattr(StateStore, "list", lambda store: 1 / 0)
    (choice,) = result(there.submit(Request(b"Once upon", 1)))
    assert choice.finish_reason == "length"
    with pytest.raises(RuntimeError, match=r"^ZeroDivisionError$"):
        result(there.submit(Request(b"Once upon", 1, keep_state=True)))
    assert "ZeroDivisionError in the engine:" in caplog.text
    assert "division by zero" not in caplog.text


def test_a_failing_engine(tmp_path, monkeypatch):
    with serving(language_model(), tmp_path) as api:
        monkeypatch.setattr(api.engine._loop, "step", lambda: 1 / 0)
        for _ in range(2):
            found = api.client.post("/v1/completions", json={"prompt": "x"})
            assert found.status_code == 500
            assert found.json()["error"]["message"] == "the engine failed"
        assert api.client.get("/health").status_code == 500
        assert api.client.get("/v1/models").status_code == 200


def test_pickles(tmp_path):
    full = pickle.loads(pickle.dumps(QueueFullError(3, 5, 7.0)))
    assert (str(full), full.retry_after) == (str(QueueFullError(3, 5, 7.0)), 7.0)
    error = APIError(429, "no", kind="k", param="p", code="c", headers={"a": "b"})
    found = pickle.loads(pickle.dumps(error))
    assert vars(found) == vars(error)
    assert str(found) == "no"
    request = Request([1, 2, 3], 5, Sampling(0.5), seed=3, stop=[7], stop_strings=["x"], client="me")
    again = pickle.loads(pickle.dumps(request))
    assert again.tokens.tolist() == [1, 2, 3]
    assert len(pickle.dumps(Request(bytes(100_000), 1))) < 101_000
    for tokens in ([0, 255], [256], [1 << 40, 0], [-5, 300], [-(1 << 40)], []):
        given = Request(tokens, 1, previous_state=SavedState("x", 1, []))
        assert pickle.loads(pickle.dumps(given)).tokens.equal(given.tokens)
    assert (again.sampling, again.stop, again.client) == (request.sampling, request.stop, request.client)
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}!{% endfor %}")
    template = pickle.loads(pickle.dumps(ChatTemplate(None, tmp_path / "own.jinja")))
    assert template.render([{"role": "user", "content": "a"}]) == "a!"


def start(folder, *words):
    """Start `longspan serve`; return the process, its address and the number of the process that answers HTTP."""
    command = [sys.executable, "-m", "longspan", "serve", "--port", "0", "--model", str(folder), *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines = [process.stderr.readline() for _ in range(2)]
    url = lines[-1].partition(" at ")[2].partition(" with ")[0]
    with open(f"/proc/{process.pid}/task/{process.pid}/children") as children:
        (child,) = map(int, children.read().split())
    return process, url, child


def has_ended(number):
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs /proc")
@pytest.mark.parametrize("killed", ["server", "child", "child while it starts"])
def test_no_process_outlives_the_other(tmp_path, killed):
    save(language_model(), tmp_path / "model")
    process, url, child = start(tmp_path / "model")
    if killed == "child while it starts":
        os.kill(child, signal.SIGKILL)
    else:
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60, verify=False) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(process.pid if killed == "server" else child, signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                list(lines)
    process.communicate(timeout=30)
    assert process.returncode == (-signal.SIGKILL if killed == "server" else 1)
    until(lambda: has_ended(child))
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/health", verify=False)


def test_a_signal_to_both_processes_drains(tmp_path):
    save(language_model(), tmp_path / "model")
    process, url, child = start(tmp_path / "model")
    body = LONG | {"max_tokens": 997}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60, verify=False) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(child, signal.SIGTERM)  # as systemd does
        process.send_signal(signal.SIGTERM)
        found = [line for line in lines if line]
    assert found[-1] == "data: [DONE]"
    assert json.loads(found[-2][6:])["choices"][0]["finish_reason"] == "length"
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0, said
    assert "draining: 1 requests" in said
    assert "997 written" in said
    assert "nanobind" not in said
