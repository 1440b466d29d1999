"""The HTTP API: OpenAI's formats, streams, errors, limits and shutdown."""

from __future__ import annotations

import json
import re
import time

import openai
import pytest
import torch
from pydantic import ValidationError
from serve_cases import language_model
from server_cases import serving

from longspan import Sampling
from longspan.serve import Request
from longspan.serve.openai_protocol import APIError, CompletionBody, parse_body
from longspan.serve.serving_completion import Limits

HELLO = {"messages": [{"role": "user", "content": "x"}]}
IMAGE = {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}
PROMPT = "Once upon a time there was a model of bytes. " * 3


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    torch.manual_seed(0)
    engine = {"slots": 5, "max_queue": 7, "chunk": 64}
    with serving(language_model(), tmp_path_factory.mktemp("states"), engine=engine, limits=Limits(977, 523)) as found:
        yield found


def post(api, path="completions", **body):
    return api.client.post(f"/v1/{path}", json=body)


def error(response, status):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    return response.json()["error"]


def events(response):
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_completion_is_the_engines(api):
    body = {"prompt": PROMPT, "max_tokens": 11, "seed": 3, "temperature": 0.7, "top_p": 0.9, "n": 2, "logprobs": 2}
    found = post(api, **body).json()
    wanted = api.engine.submit(Request(PROMPT.encode(), 11, Sampling(0.7, top_p=0.9), seed=3, n=2, logprobs=2)).result()
    assert found["object"] == "text_completion"
    assert found["model"] == "tiny"
    for choice, expected in zip(found["choices"], wanted, strict=True):
        assert choice["text"] == expected.text
        assert choice["logprobs"]["token_logprobs"] == expected.log_probabilities
        assert [len(top) for top in choice["logprobs"]["top_logprobs"]] == [2] * 11
        assert choice["finish_reason"] == "length"
    usage = post(api, **body).json()["usage"]
    assert usage["prompt_tokens"] == len(PROMPT)
    assert usage["completion_tokens"] == 22
    assert usage["total_tokens"] == len(PROMPT) + 22
    assert usage["prompt_tokens_details"] == {"cached_tokens": len(PROMPT) - 1}


@pytest.mark.parametrize("option", [
    {"temperature": 0.3}, {"top_p": 0.2}, {"top_k": 3}, {"min_p": 0.5}, {"repetition_penalty": 3.0}, {"seed": 5},
    {"max_tokens": 7}, {"stop": "v"}, {"stop_token_ids": list(range(128, 256))}, {"echo": True},
])  # fmt: skip
def test_options_change_the_answer(api, option):
    body = {"prompt": PROMPT, "max_tokens": 29, "seed": 4}
    plain, changed = (post(api, **options).json()["choices"][0]["text"] for options in (body, body | option))
    assert plain != changed


def test_stop_ends_the_text_before_it(api):
    whole = post(api, prompt=PROMPT, max_tokens=29, seed=4).json()["choices"][0]["text"]
    stop = whole[9:11]
    found = post(api, prompt=PROMPT, max_tokens=29, seed=4, stop=[stop, "never to be found"]).json()["choices"][0]
    assert found["text"] == whole[: whole.index(stop)]
    assert found["finish_reason"] == "stop"


def test_several_prompts_and_tokens(api):
    texts = ["abc", "xyz"]
    single = [post(api, prompt=text, max_tokens=5, seed=1, n=2).json()["choices"] for text in texts]
    for prompt in (texts, [list(text.encode()) for text in texts]):
        both = post(api, prompt=prompt, max_tokens=5, seed=1, n=2).json()
        assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in both["choices"]] == [choice["text"] for own in single for choice in own]
        assert both["usage"]["prompt_tokens"] == 6
        streamed = ["", "", "", ""]
        for event in events(post(api, prompt=prompt, max_tokens=5, seed=1, n=2, stream=True)):
            streamed[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert streamed == [choice["text"] for own in single for choice in own]


def test_echo_scores_the_prompt(api):
    found = post(api, prompt="abé", max_tokens=0, echo=True, logprobs=0).json()["choices"][0]
    assert found["text"] == "abé"
    assert found["logprobs"]["tokens"] == ["a", "b", "bytes:\\xc3", "bytes:\\xa9"]
    assert found["logprobs"]["token_logprobs"][0] is None
    assert found["logprobs"]["text_offset"] == [0, 1, 2, 2]


def test_stream_adds_up(api):
    body = {"prompt": PROMPT, "max_tokens": 13, "seed": 2, "logprobs": 1}
    whole = post(api, **body).json()["choices"][0]
    found = events(post(api, **body, stream=True, stream_options={"include_usage": True}))
    *chunks, last = found
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [x for chunk in chunks for x in chunk["choices"][0]["logprobs"][name]] == whole["logprobs"][name]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 13
    assert "usage" not in events(post(api, **body, stream=True))[-1]


def test_openai_client(api):
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as client:
        assert client.models.list().data[0].id == "tiny"
        assert client.models.retrieve("tiny").id == "tiny"
        found = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, seed=1, user="me")
        parts = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=9, seed=1, stream=True)
        assert "".join(part.choices[0].text for part in parts) == found.choices[0].text
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
        chat = {"model": "tiny", "messages": messages, "max_completion_tokens": 9, "seed": 1}
        answer = client.chat.completions.create(**chat, logprobs=True, top_logprobs=3)
        assert answer.choices[0].message.role == "assistant"
        assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 3
        assert answer.usage.prompt_tokens_details.cached_tokens == 0
        parts = client.chat.completions.create(**chat, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == answer.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
            client.completions.create(model="../tiny", prompt="x")
        with pytest.raises(openai.BadRequestError, match="choices are not ranked"):
            client.completions.create(model="tiny", prompt="x", best_of=3)


def test_chat_is_the_template(api):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    chat = post(api, "chat/completions", messages=messages, max_tokens=9, seed=1).json()
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    plain = post(api, prompt=text, max_tokens=9, seed=1, stop="<|im_end|>").json()
    assert chat["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    assert chat["usage"]["prompt_tokens"] == len(text)


@pytest.mark.parametrize(("path", "body", "status", "text"), [
    ("completions", {}, 400, "prompt is missing"),
    ("completions", {"prompt": 5}, 400, "prompt must be text, or a list"),
    ("completions", {"prompt": ""}, 400, "at least one token"),
    ("completions", {"prompt": []}, 400, "at least one token"),
    ("completions", {"prompt": [256]}, 400, "the token 256, and this model has the tokens 0 to 255"),
    ("completions", {"prompt": [2**70]}, 400, "prompt must be"),
    ("completions", {"prompt": "x" * 978}, 400, "978 tokens, and the most is 977"),
    ("completions", {"prompt": "\ud800"}, 400, "half a pair"),
    ("completions", {"prompt": "x", "max_tokens": 524}, 400, "max_tokens must be from 0 to 523"),
    ("completions", {"prompt": "x", "max_tokens": True}, 400, "max_tokens must be an integer, got true"),
    ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature must be 0"),
    ("completions", {"prompt": "x", "temperature": "1"}, 400, 'temperature must be a number, got "1"'),
    ("completions", {"prompt": "x", "top_p": 0}, 400, r"top_p must be in \(0, 1\]"),
    ("completions", {"prompt": "x", "n": 0}, 400, "n must give 1 to 12 choices, got 0"),
    ("completions", {"prompt": ["x"] * 7, "n": 2}, 400, "n must give 1 to 12 choices, got 2 for each of 7 prompts"),
    ("completions", {"prompt": "x", "seed": 2**64}, 400, "seeds must be from"),
    ("completions", {"prompt": "x", "logprobs": 21}, 400, "logprobs must be at most 20"),
    ("completions", {"prompt": "x", "stop": ["a"] * 17}, 400, "at most 16 texts"),
    ("completions", {"prompt": "x", "stop": ""}, 400, "empty"),
    ("completions", {"prompt": "x", "timeout": 0}, 400, "timeout must be above 0 and at most 86,400 seconds, got 0"),
    ("completions", {"prompt": "x", "keep_state": True, "max_tokens": 0}, 400, "max_tokens must be at least 1"),
    ("completions", {"prompt": "x", "stop_token_ids": [2**70]}, 400, "stop must be integers"),
    ("completions", {"prompt": "x", "stop_token_ids": [256]}, 400, "stop has the token 256"),
    ("completions", {"prompt": "x", "best_of": 1}, 400, "best_of is not supported: choices are not ranked"),
    ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix is not supported"),
    ("completions", {"prompt": "x", "logit_bias": {"5": 1}}, 400, "logit_bias is not supported"),
    ("completions", {"prompt": "x", "presence_penalty": 1}, 400, "use repetition_penalty"),
    ("completions", {"prompt": "x", "temprature": 1}, 400, "did you mean 'temperature'"),
    ("completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "set stream to true too"),
    ("completions", {"prompt": "x", "stream": True, "stream_options": {"usage": True}}, 400, "unknown option 'usage'"),
    ("completions", {"prompt": "x", "previous_state": "../../etc/passwd"}, 404, "there is no state"),
    ("completions", {"prompt": "x", "model": "other"}, 404, "does not exist"),
    ("chat/completions", {"messages": []}, 400, "at least one message"),
    ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages.0.role"),
    ("chat/completions", IMAGE, 400, "type 'image_url' is not supported: models read text only"),
    ("chat/completions", HELLO | {"tools": [{}]}, 400, "tools are not supported"),
    ("chat/completions", HELLO | {"top_logprobs": 1}, 400, "needs logprobs"),
    ("chat/completions", HELLO | {"max_tokens": 1, "max_completion_tokens": 2},
     400, "are one option"),
])  # fmt: skip
def test_refusals_say_what_to_do(api, path, body, status, text):
    response = api.client.post(f"/v1/{path}", content=json.dumps(body), headers={"Content-Type": "application/json"})
    found = error(response, status)
    assert found["type"] in ("invalid_request_error", "not_found_error")
    assert re.search(text, found["message"]), found["message"]


@pytest.mark.parametrize(("content", "text"), [
    (b"", "is not JSON"),
    (b'{"prompt": "x"', "is not JSON"),
    (b"[]", "must be a JSON object, got a list"),
    (b'{"prompt": "\xff"}', "is not UTF-8"),
    (b'{"prompt": "x", "temperature": NaN}', "NaN is not a number"),
    (b'{"prompt": "x", "temperature": 1e999}', "too large"),
    (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "is not JSON"),
    (b"[" * 100_000, "nested too deeply|is not JSON"),
])  # fmt: skip
def test_malformed_bodies(api, content, text):
    response = api.client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert re.search(text, error(response, 400)["message"])


@pytest.mark.parametrize("prompt", [[{}] * 30_000, ["x", 1] * 30_000, [[1, "x"]] * 30_000, [1.5] * 30_000])
def test_long_wrong_lists_end_at_the_first_error(prompt):
    with pytest.raises(APIError, match="prompt must be text, or a list of texts"):
        parse_body(CompletionBody, json.dumps({"prompt": prompt}).encode())
    with pytest.raises(ValidationError) as caught:
        CompletionBody.model_validate({"prompt": prompt})
    assert caught.value.error_count() < 10


def test_other_refusals(api):
    client = api.client
    other = error(client.post("/v1/completions", content=b"{}", headers={"Content-Type": "text/plain"}), 415)
    assert "send the header Content-Type: application/json" in other["message"]
    assert [client.head(path).status_code for path in ("/", "/health")] == [200, 200]
    zipped = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert "compressed" in error(client.post("/v1/completions", content=b"{}", headers=zipped), 415)["message"]
    assert error(client.get("/v1/completions"), 405)
    assert error(client.get("/v1/nothing"), 404)
    assert error(client.get("/v1/models/..%2f..%2fetc"), 404)
    assert "--allowed-hosts" in error(client.get("/v1/models", headers={"Host": "evil.example"}), 421)["message"]


def test_neutral_and_ignored_options_are_accepted(api):
    neutral = {"logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "suffix": None, "best_of": None}
    ignored = {"user": "me", "metadata": {"a": "b"}, "store": False}
    found = post(api, prompt="abc", max_tokens=5, seed=1, **neutral, **ignored).json()
    assert found["choices"][0]["text"] == post(api, prompt="abc", max_tokens=5, seed=1).json()["choices"][0]["text"]


def test_timeout_ends_with_what_there_is(api):
    found = post(api, prompt="abc", max_tokens=523, timeout=0.05).json()["choices"][0]
    assert found["finish_reason"] == "timeout"


def test_disconnect_frees_the_slot(api):
    before = api.engine.stats().finished.get("cancelled", 0)
    body = {"prompt": "x", "max_tokens": 523, "stream": True}
    with api.client.stream("POST", "/v1/completions", json=body) as stream:
        next(stream.iter_bytes())
    deadline = time.monotonic() + 10
    while api.engine.stats().running and time.monotonic() < deadline:
        time.sleep(0.01)
    stats = api.engine.stats()
    assert stats.running == 0
    assert stats.finished.get("cancelled", 0) == before + 1


def test_metrics(api):
    text = api.client.get("/metrics").text
    assert api.client.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    stats = api.engine.stats()
    assert int(values["longspan_requests_total"]) == stats.requests
    assert int(values["longspan_generation_tokens_total"]) == stats.completion_tokens
    assert float(values["longspan_prefix_cache_hit_rate"]) == stats.cache.hit_tokens / stats.cache.query_tokens
    assert int(values["longspan_slots"]) == 5
    assert int(values["longspan_num_requests_active"]) == 0
    assert int(values['longspan_time_to_first_token_seconds_bucket{le="+Inf"}']) > 0
    assert int(values['longspan_http_responses_total{endpoint="/v1/completions",code="400"}']) > 0
