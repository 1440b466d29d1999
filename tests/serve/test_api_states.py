"""Saved states over HTTP: continue, fork, download, upload, refuse."""

from __future__ import annotations

import json
import os

import pytest
import torch
from safetensors.torch import load, save
from serve_cases import language_model
from server_cases import serving

from longspan import Sampling
from longspan.generation.generate import generate
from longspan.generation.session import Session
from longspan.serve import Engine, Request
from longspan.serve.openai_protocol import APIError
from longspan.serve.state_store import StateFiles, StateStore

AND = "<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
HYBRID = ["softmax", {"mechanism": "linear", "feature_map": "softmax"}]


MODELS = {"split": {}, "hybrid": {"mechanism": HYBRID}, "n-grams": {"ngrams": (2, 3)}}


@pytest.fixture(scope="module", params=[*MODELS])
def api(request, tmp_path_factory):
    torch.manual_seed(0)
    model = language_model(**MODELS[request.param])
    with serving(model, tmp_path_factory.mktemp("states"), engine={"slots": 3, "max_length": 307}) as found:
        yield found


def complete(api, **body):
    response = api.client.post("/v1/completions", json={"max_tokens": 7, "seed": 5, **body})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def header(content):
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size])


def upload(api, content, **query):
    return api.client.post(
        "/v1/states", content=content, params=query, headers={"Content-Type": "application/octet-stream"}
    )


def test_continue_is_the_engines(api):
    first = complete(api, prompt="Once upon", keep_state=True)
    body = {"prompt": " a time", "previous_state": first["state"]}
    (own,) = api.engine.submit(Request(b"Once upon", 7, Sampling(), seed=5, keep_state=True)).result()
    (wanted,) = api.engine.submit(Request(b" a time", 7, Sampling(), seed=5, previous_state=own.session)).result()
    assert complete(api, **body)["text"] == wanted.text
    response = api.client.post("/v1/completions", json={"max_tokens": 7, "seed": 5, "stream": True, **body})
    lines = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    assert "".join(line["choices"][0]["text"] for line in lines) == wanted.text
    assert complete(api, prompt="", previous_state=first["state"])["text"] != wanted.text


def test_states_have_a_constant_size(api):
    sizes = set()
    for prompt, tokens in (("a", 1), ("a story " * 23, 67)):
        name = complete(api, prompt=prompt, max_tokens=tokens, keep_state=True)["state"]
        sizes.add(len(api.client.get(f"/v1/states/{name}/content").content))
    assert len(sizes) == 1


def test_download_upload_and_command_line(api, tmp_path):
    state = complete(api, prompt="Once upon", keep_state=True)["state"]
    response = api.client.get(f"/v1/states/{state}/content")
    path = tmp_path / "state.safetensors"
    path.write_bytes(response.content)
    info = api.client.get(f"/v1/states/{state}").json()
    assert info["bytes"] == len(response.content)
    session = Session.load(path, api.engine.model)
    assert generate(api.engine.model, session, 3, sampling=Sampling(0)).tokens  # as `longspan generate --resume` does
    name = f"mine-{api.engine.model.state_size()}"
    found = upload(api, response.content, name=name)
    assert found.status_code == 200, found.text
    assert found.json()["id"] == name
    texts = [complete(api, prompt="x", previous_state=own)["text"] for own in (state, name)]
    assert texts[0] == texts[1]
    assert name in [item["id"] for item in api.client.get("/v1/states").json()["data"]]


def test_fork_copy_and_delete(api):
    state = complete(api, prompt="Once upon", keep_state=True)["state"]
    fork = api.client.post(f"/v1/states/{state}/fork").json()["id"]
    copy = api.client.post("/v1/states", json={"source": state, "name": "a.copy_1"}).json()["id"]
    assert copy == "a.copy_1"
    wanted = complete(api, prompt="x", previous_state=state)["text"]
    assert api.client.delete(f"/v1/states/{state}").json() == {"id": state, "object": "state", "deleted": True}
    assert api.client.get(f"/v1/states/{state}").status_code == 404
    assert api.client.delete(f"/v1/states/{state}").status_code == 404
    for name in (fork, copy):
        assert complete(api, prompt="x", previous_state=name)["text"] == wanted
    taken = api.client.post("/v1/states", json={"source": fork, "name": copy})
    assert taken.status_code == 409
    assert "delete it first" in taken.json()["error"]["message"]
    api.client.delete(f"/v1/states/{copy}")


def test_chat_goes_on(api):
    messages = [{"role": "user", "content": "Hi"}]
    options = {"max_tokens": 7, "seed": 5, "keep_state": True}
    first = api.client.post("/v1/chat/completions", json={"messages": messages, **options}).json()["choices"][0]
    more = {"messages": [{"role": "user", "content": "And?"}], "previous_state": first["state"], **options}
    found = api.client.post("/v1/chat/completions", json=more).json()
    assert found["usage"]["prompt_tokens"] == len(AND)
    text = complete(api, prompt=AND, previous_state=first["state"], stop="<|im_end|>")
    assert found["choices"][0]["message"]["content"] == text["text"]


@pytest.mark.parametrize("name", ["../x", "..", "a/b", "A", "", "x" * 65, "state-1", ".x", "é", "x\0", "x\n"])
def test_names_cannot_escape(api, name):
    state = complete(api, prompt="Once upon", keep_state=True)["state"]
    response = api.client.post("/v1/states", json={"source": state, "name": name})
    assert response.status_code == 400, response.text
    assert "name must have up to 64 of a-z" in response.json()["error"]["message"]
    assert api.client.post("/v1/completions", json={"prompt": "x", "previous_state": name}).status_code == 404
    path = name.encode().hex()
    escaped = "".join(f"%{path[i : i + 2]}" for i in range(0, len(path), 2))
    assert api.client.get(f"/v1/states/{escaped}/content").status_code in (400, 404)
    assert all(entry.name.endswith(".safetensors") for entry in api.served.states.folder.iterdir())


def test_uploads_are_checked(api, tmp_path):
    state = complete(api, prompt="Once upon", keep_state=True)["state"]
    good = api.client.get(f"/v1/states/{state}/content").content
    tensors, metadata = load(good), header(good)["__metadata__"]
    names = [name for name, x in tensors.items() if x.ndim == 4]
    length = [name for name in tensors if name.endswith("length")]

    def refused(content, text):
        response = upload(api, content)
        assert response.status_code == 400, response.text
        assert text in response.json()["error"]["message"]

    refused(b"", "the state cannot be used")
    refused(good[:-5], "the state cannot be used")
    refused(save(tensors, metadata | {"model": "0" * 64}), "another model")
    refused(save(tensors, {name: x for name, x in metadata.items() if name != "model"}), "does not say of which")
    refused(save({**tensors, names[0]: torch.full_like(tensors[names[0]], torch.nan)}, metadata), "not finite")
    refused(save({**tensors, names[0]: tensors[names[0]][..., :3].contiguous()}, metadata), "must be")
    refused(save({**tensors, names[0]: tensors[names[0]].double()}, metadata), "must be")
    refused(save({**tensors, names[0]: tensors[names[0]].repeat(2, 1, 1, 1)}, metadata), "of another model")
    for name in length:
        for value in (2**62, 1000, -7):
            refused(save({**tensors, name: torch.tensor([value])}, metadata), "")
    codes = tensors.get("state.recent", torch.empty(0))  # of the tokens before, for n-grams
    for value in (257, 2**62, -2) if codes.numel() else ():
        refused(save({**tensors, "state.recent": torch.full_like(codes, value)}, metadata), "recent")
    for name in metadata:
        if name.startswith("state.") and not name.endswith("max_length"):
            refused(save(tensors, metadata | {name: "77"}), "its options are not those of the model")
    refused(save({**tensors, "logits": torch.full_like(tensors["logits"], torch.inf)}, metadata), "not finite")
    assert upload(api, b"x" * (api.served.states.max_bytes + 1)).status_code == 413
    assert complete(api, prompt="x", previous_state=state)["text"]


def test_another_models_states_are_refused(api, tmp_path):
    other = language_model("decay")
    with serving(other, tmp_path) as second:
        state = complete(second, prompt="Once upon", keep_state=True)["state"]
        content = second.client.get(f"/v1/states/{state}/content").content
    assert "another model" in upload(api, content).json()["error"]["message"]


def test_budget(tmp_path):
    with serving(language_model(), tmp_path, budget=30_000) as api:
        names = [complete(api, prompt="Once upon", keep_state=True)["state"] for _ in range(9)]
        kept = [item["id"] for item in api.client.get("/v1/states").json()["data"]]
        assert names[-1] in kept
        assert names[0] not in kept
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 30_000
        for i in range(4):
            source = "n0" if i else names[-1]
            assert api.client.post("/v1/states", json={"source": source, "name": f"n{i}"}).status_code == 200
        full = api.client.post("/v1/states", json={"source": "n0", "name": "n4"})
        assert full.status_code == 507
        assert "delete some" in full.json()["error"]["message"]
        assert {item["id"] for item in api.client.get("/v1/states").json()["data"]} == {"n0", "n1", "n2", "n3"}


def test_what_does_not_fit_removes_nothing(tmp_path):
    sizes = {"state-1": 40, "mine": 60}
    for name, size in sizes.items():
        (tmp_path / f"{name}.safetensors").write_bytes(bytes(size))
    with Engine(language_model()) as engine:
        store = StateStore(tmp_path, engine, 105)
        with pytest.raises(APIError, match="named states take 60 of 105 bytes, and this one has 50"):
            store._make_space(50)
        assert {info.name: info.bytes for info in store.list()} == sizes
        store._make_space(45)
        assert [info.name for info in store.list()] == ["mine"]


def test_states_that_are_deleted_while_they_are_listed(tmp_path, monkeypatch):
    scan = os.scandir

    def scan_and_delete(folder):
        entries = list(scan(folder))
        (tmp_path / "a.safetensors").unlink()
        return entries

    for name in "ab":
        (tmp_path / f"{name}.safetensors").touch()
    monkeypatch.setattr(os, "scandir", scan_and_delete)
    assert [info.name for info in StateFiles(tmp_path, 1).list()] == ["b"]
