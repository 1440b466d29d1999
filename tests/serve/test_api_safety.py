"""The HTTP server against hostile, slow and vanishing clients."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from contextlib import suppress

import httpx
import pytest
import torch
from serve_cases import language_model
from server_cases import serving

from longspan.serve.serving_completion import Limits

LONG = {"prompt": "x", "max_tokens": 100_000, "stream": True}


def raw(api):
    return socket.create_connection(("127.0.0.1", api.server.port), timeout=30)


def finish(connection):
    """Return what the server sends until it closes the connection."""
    found = b""
    with connection, suppress(ConnectionResetError):
        while chunk := connection.recv(1 << 16):
            found += chunk
    return found


def message(**body):
    """Return the bytes of a request."""
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def until(condition, seconds=15):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    torch.manual_seed(0)
    options = {"read_timeout": 0.7, "max_streams": 5, "max_body": 9973}
    limits, engine = Limits(tokens=1 << 20), {"slots": 2, "max_queue": 2}
    with serving(language_model(), tmp_path_factory.mktemp("states"), limits=limits, engine=engine, **options) as found:
        yield found


def test_keys(tmp_path):
    with serving(language_model(), tmp_path, api_keys=("first", "sécond")) as api:
        assert api.client.get("/health").status_code == 200
        assert api.client.get("/").status_code == 200
        wrong = [{}, {"Authorization": "Bearer"}, {"Authorization": "Bearer firs"}, {"Authorization": "Basic first"}]
        wrong += [{"Authorization": b"Bearer \xff\xfe"}]
        for path in ("/v1/models", "/metrics", "/v1/states", "/v1/nothing", "/openapi.json"):
            for headers in wrong:
                response = api.client.get(path, headers=headers)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        for key in (b"first", "sécond".encode()):
            assert api.client.get("/v1/models", headers={"Authorization": b"Bearer " + key}).status_code == 200
        assert api.client.post("/v1/completions", json={"prompt": "x"}).status_code == 401


def test_full_queue_and_streams_per_client(api):
    with httpx.Client(base_url=api.url, timeout=60, verify=False) as client:
        streams = [client.stream("POST", "/v1/completions", json=LONG) for _ in range(4)]
        for stream in streams:
            assert stream.__enter__().status_code == 200
        full = client.post("/v1/completions", json={"prompt": "x"})
        assert full.status_code == 429
        assert full.json()["error"]["code"] == "queue_full"
        assert int(full.headers["retry-after"]) >= 1
        slow = raw(api)  # holds the fifth place
        slow.sendall(message(**LONG)[:-5])
        until(lambda: api.active() == 5)
        many = client.post("/v1/completions", json={"prompt": "x"})
        assert many.status_code == 429
        assert many.json()["error"]["code"] == "too_many_requests"
        assert many.headers["retry-after"] == "1"
        slow.close()
        for stream in streams:
            stream.__exit__(None, None, None)
    until(lambda: not api.active() and not api.engine.stats().running)
    assert api.client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_body_limit(api):
    response = api.client.post("/v1/completions", json={"prompt": "x" * 9973})
    assert response.status_code == 413
    assert "9973 bytes" in response.json()["error"]["message"]
    chunks = (b"x" * 1000 for _ in range(20))  # without a Content-Length
    response = api.client.post("/v1/completions", content=chunks, headers={"Content-Type": "application/json"})
    assert response.status_code == 413


def test_slow_headers_and_bodies_are_closed(api):
    silent, partial = raw(api), raw(api)
    partial.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
    reused = raw(api)
    reused.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):  # Head and body may arrive apart.
        answer += reused.recv(1000)
    assert answer.startswith(b"HTTP/1.1 200")
    reused.sendall(b"GET /hea")
    body = raw(api)
    body.sendall(message(**LONG)[:-5])
    assert api.client.get("/health").status_code == 200  # Other clients are not blocked.
    begun = time.monotonic()
    for connection in (silent, partial, reused):
        assert finish(connection) == b""
    assert b" 408 " in finish(body)
    assert time.monotonic() - begun < 10


def test_uploads_of_states_count_as_requests_of_a_client(api):
    head = "POST /v1/states HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n"
    slow = [raw(api) for _ in range(5)]
    for connection in slow:
        connection.sendall(f"{head}Content-Length: 99\r\n\r\nx".encode())
    until(lambda: api.active() == 5)
    binary = {"Content-Type": "application/octet-stream"}
    assert api.client.post("/v1/states", content=b"x", headers=binary).status_code == 429
    for connection in slow:
        assert b" 408 " in finish(connection)
    assert api.client.post("/v1/states", content=b"x", headers=binary).status_code == 400


def test_idle_connections_make_room_for_new_ones(tmp_path):
    with serving(language_model(), tmp_path, limits=Limits(tokens=1 << 20), max_connections=3) as api:
        silent = [raw(api) for _ in range(7)]
        with httpx.Client(base_url=api.url, verify=False) as client:
            assert client.get("/health").status_code == 200
            assert finish(silent[0]) == b""
            with client.stream("POST", "/v1/completions", json=LONG), raw(api) as second, raw(api) as third:
                for connection in (second, third):  # All three are used: none makes room.
                    connection.sendall(message(**LONG))
                    assert connection.recv(1000).startswith(b"HTTP/1.1 200")
                refused = httpx.get(f"{api.url}/health", verify=False)
                assert refused.status_code == 503
                assert refused.json()["error"]["code"] == "too_many_connections"
                assert refused.headers["retry-after"] == "1"
            until(lambda: api.engine.stats().running == 0)
            assert httpx.get(f"{api.url}/health", verify=False).status_code == 200
        for connection in silent:
            connection.close()


def test_headers_in_pieces_after_a_large_body(tmp_path):
    with serving(language_model(), tmp_path) as api, raw(api) as connection:
        for _ in range(2):
            content = message(prompt="x" * 100_000, max_tokens=1, n=0)
            connection.sendall(content[:20])
            time.sleep(0.05)
            connection.sendall(content[20:])
            found = b""
            while b"n must give 1 to 128 choices" not in found:
                received = connection.recv(1 << 16)
                assert received
                found += received


def test_endless_headers_are_refused(api):
    connection = raw(api)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
    with suppress(ConnectionError):
        for i in range(200):
            connection.sendall(b"X-%d: " % i + b"a" * 1000 + b"\r\n")
    assert b" 200 " not in finish(connection)


def test_not_http(api):
    connection = raw(api)
    connection.sendall(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
    found = finish(connection)
    assert found.startswith(b"HTTP/1.1 400")
    assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


@pytest.mark.slow
def test_client_that_does_not_read_is_dropped(api):
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    connection.connect(("127.0.0.1", api.server.port))
    connection.sendall(message(**LONG | {"logprobs": 20, "max_tokens": 1 << 20}))
    until(lambda: api.engine.stats().running == 1)
    assert api.client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    until(lambda: api.engine.stats().running == 0, 60)
    connection.close()


def test_clients_that_vanish_leave_nothing(api):
    def vanish(seed):
        rng = random.Random(seed)
        with raw(api) as connection:
            connection.sendall(message(**LONG | {"stream": rng.random() < 0.5})[: rng.randrange(400)])
            time.sleep(rng.random() / 10)

    threads = [threading.Thread(target=vanish, args=(seed,)) for seed in range(23)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: not api.active() and not api.engine.stats().running)
    assert api.engine.stats().waiting == 0


def test_drain(tmp_path):
    with serving(language_model(), tmp_path, limits=Limits(tokens=1 << 20)) as api:
        with api.client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 199}) as stream:
            lines = stream.iter_lines()
            next(lines)
            api.server.stop()
            until(lambda: httpx.get(f"{api.url}/health", verify=False).status_code == 503)
            for path in ("/health", "/v1/completions"):
                with httpx.Client(base_url=api.url, verify=False) as other:
                    call = other.get(path) if path == "/health" else other.post(path, json={"prompt": "x"})
                assert call.status_code == 503
                assert call.json()["error"]["code"] == "shutting_down"
                assert "retry-after" in call.headers
            assert list(lines)[-2] == "data: [DONE]"
        api.thread.join(20)
        assert not api.thread.is_alive()


def test_drain_timeout_cancels(tmp_path):
    with serving(language_model(), tmp_path, limits=Limits(tokens=1 << 20), drain_timeout=0.2) as api:
        with api.client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 1 << 20}) as stream:
            lines = stream.iter_lines()
            next(lines)
            api.server.stop()
            last = [line for line in lines if line][-1]
        assert json.loads(last[6:])["error"]["code"] == "shutting_down"
        api.thread.join(20)
        assert not api.thread.is_alive()


def test_proxies_and_hosts(tmp_path):
    options = {"trusted_proxies": ("127.0.0.1",), "allowed_hosts": ("models.example", "127.0.0.1"), "max_streams": 1}
    with serving(language_model(), tmp_path, limits=Limits(tokens=1 << 20), **options) as api:
        assert api.client.get("/v1/models", headers={"Host": "models.example:443"}).status_code == 200
        assert api.client.get("/v1/models", headers={"Host": "localhost"}).status_code == 421
        first, second = ({"X-Forwarded-For": address} for address in ("192.0.2.1", "192.0.2.2"))
        with api.client.stream("POST", "/v1/completions", json=LONG, headers=first) as stream:
            assert stream.status_code == 200
            assert api.client.post("/v1/completions", json={"prompt": "x"}, headers=first).status_code == 429
            assert api.client.post("/v1/completions", json={"prompt": "x"}, headers=second).status_code == 200


def test_logs_hold_no_prompts(tmp_path, caplog, capfd):
    secret = "the-secret-prompt"
    with caplog.at_level("DEBUG"):
        for log_prompts in (False, True):
            caplog.clear()
            with serving(language_model(), tmp_path, log_prompts=log_prompts) as api:
                for body in ({"prompt": secret}, {"prompt": secret, secret: 1}, {"prompt": [secret, 5]}):
                    api.client.post("/v1/completions", json=body)
                api.client.post(
                    "/v1/completions", content=b"{" + secret.encode(), headers={"Content-Type": "application/json"}
                )
                api.client.get("/health", params={"q": secret})
            own = [record.getMessage() for record in caplog.records if record.name.startswith("longspan")]
            said = capfd.readouterr().err  # by the process that answers HTTP
            assert "/v1/completions 200" in said
            assert not any(secret in line for line in own)
            assert (secret in said) == log_prompts
