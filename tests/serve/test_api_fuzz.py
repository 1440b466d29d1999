"""Random requests: an answer or an error in OpenAI's shape, and a server that goes on."""

from __future__ import annotations

import json
import random
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import pytest
import torch
from serve_cases import language_model
from server_cases import serving

from longspan.serve.serving_completion import Limits

PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/states", "/v1/models", "/v1/states/x/fork", "/health", "/metrics",
    "/", "/v1/models/..%2f..%2fetc%2fpasswd", "/v1/states/%2e%2e%2f%2e%2e/content", "/v1/states/%00", "//", "/%ff",
    "/v1/completions/../states", "/openapi.json", "/v1/states/" + "a" * 300,
)  # fmt: skip
NAMES = (
    "prompt", "messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "seed", "n", "stop", "stop_token_ids", "ignore_eos", "stream", "stream_options", "timeout",
    "previous_state", "keep_state", "echo", "logprobs", "top_logprobs", "best_of", "suffix", "tools", "user", "source",
    "name", "__class__", "",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 7, 63, 64, 65, 2**31, 2**53, 2**63, -(2**63), 2**64, 10**400, 0.5, -0.0, 1e-300, 1e300, 1.5)
TEXTS = ("", "x", "abc", "../../etc/passwd", "\0", "é", "\ud800", "𝄞" * 3, "{{ 7 * 7 }}", "a" * 300, "state-0", "tiny")
CONTENT = (
    b"", b"{", b"null", b"[]", b'"x"', b"\xff\xfe", b'{"prompt": "\xc3"}', b'{"prompt": NaN}', b"[" * 5000,
    b'{"prompt": 1e999}', b'{"a":' * 2000 + b"1" + b"}" * 2000, b'{"prompt": "x", "prompt": 5}', b"\0" * 100,
    b'{"seed": ' + b"9" * 6000 + b"}", b'{"prompt": "\\ud800\\ud800"}', b"{'prompt': 'x'}",
)  # fmt: skip


def value(rng, depth=0):
    kind = rng.randrange(8 if depth < 3 else 5)
    if kind < 2:
        return rng.choice(NUMBERS)
    if kind < 4:
        return rng.choice(TEXTS)
    if kind == 4:
        return rng.choice((None, True, False))
    if kind == 5:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return [rng.randrange(-2, 300) for _ in range(rng.randrange(70))]
    return {
        rng.choice((*NAMES, "role", "content", "type", "text")): value(rng, depth + 1) for _ in range(rng.randrange(3))
    }


def body(rng):
    """Return a body that is valid but for some of its options."""
    found = {"prompt": rng.choice(TEXTS)} if rng.random() < 0.5 else {}
    if rng.random() < 0.3:
        roles = ("user", "assistant", "system", "tool")
        found["messages"] = [{"role": rng.choice(roles), "content": value(rng, 2)} for _ in range(rng.randrange(4))]
    for _ in range(rng.randrange(4)):
        found[rng.choice(NAMES)] = value(rng)
    if rng.random() < 0.5:
        found["max_tokens"] = rng.randrange(9)
    return found


def call(client, port, seed):
    """Send a random request; check the answer."""
    rng = random.Random(seed)
    if rng.random() < 0.1:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(
                rng.choice((b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")) + rng.randbytes(rng.randrange(200))
            )
        return
    method = rng.choice(("POST", "POST", "POST", "POST", "POST", "POST", "GET", "DELETE", "PUT", "HEAD", "OPTIONS"))
    path = rng.choice(PATHS[:2]) if method == "POST" and rng.random() < 0.8 else rng.choice(PATHS)
    content = rng.choice(CONTENT) if rng.random() < 0.2 else json.dumps(body(rng)).encode()
    if rng.random() < 0.1:
        place = rng.randrange(len(content) + 1)
        content = content[:place] + rng.randbytes(rng.randrange(4)) + content[place + 1 :]
    kinds = ("application/json", "text/plain", "application/octet-stream", "")
    kind = "application/json" if rng.random() < 0.9 else rng.choice(kinds)
    response = client.request(method, path, content=content, headers={"Content-Type": kind})
    assert response.status_code < 500, (seed, path, content[:300], response.text)
    if response.status_code >= 400 and method != "HEAD":
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}, (seed, response.text)
    elif path in PATHS[:2] and method == "POST" and b"data: " not in response.content[:6]:
        assert response.json()["choices"], (seed, response.text)


@pytest.mark.parametrize("number", [200, pytest.param(4000, marks=pytest.mark.slow)])
def test_random_requests(number, tmp_path):
    torch.manual_seed(0)
    options = {"limits": Limits(257, 31), "engine": {"slots": 3, "max_queue": 40}, "max_body": 1 << 16}
    with serving(language_model(), tmp_path / "states", **options) as api:
        wanted = api.client.post("/v1/completions", json={"prompt": "abc", "seed": 1, "logprobs": 1}).json()["choices"]
        with httpx.Client(base_url=api.url, timeout=60, verify=False) as client, ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(call, client, api.server.port, seed) for seed in range(number)]:
                done.result()
        found = api.client.post("/v1/completions", json={"prompt": "abc", "seed": 1, "logprobs": 1}).json()["choices"]
        assert found == wanted
        assert api.engine.is_alive
        assert api.engine.stats().running == api.engine.stats().waiting == 0
        assert api.active() == 0
    assert {path.name for path in tmp_path.iterdir()} == {"states"}
