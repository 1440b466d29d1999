"""The playground page in a headless Chromium."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from browser import CHROMIUM, browser
from serve_cases import language_model
from server_cases import serving

from longspan.serve.serving_completion import Limits


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    torch.manual_seed(0)
    with serving(language_model(), tmp_path_factory.mktemp("states"), limits=Limits(tokens=1 << 20)) as found:
        yield found


def test_page_is_self_contained(api):
    response = api.client.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert not re.search(r"(src|href|url\()\s*=?\s*[\"'(]?(https?:)?//", response.text)
    assert not re.search(r"\s(style|on\w+)=", response.text)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


def fill(page, **values):
    for name, value in values.items():
        page.run(f"document.getElementById({name!r}).value = {value!r}")


def send(page, text, **values):
    fill(page, prompt=text, **values)
    page.run("document.getElementById('send').click()")


def answers(page):
    return page.run("[...document.querySelectorAll('.answer')].map(x => x.textContent)")


ENDED = "document.getElementById('stopper').hidden"


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_stream_stop_and_fork(api, page, width):
    page.open(api.url, width, 800)
    page.wait("document.getElementById('about').textContent.startsWith('tiny')")
    send(page, "Once upon a time " * 8, max_tokens="41", seed="7", temperature="1")
    page.wait(f"{ENDED} && document.querySelector('.figures').textContent")
    body = {"prompt": "Once upon a time " * 8, "max_tokens": 41, "seed": 7, "temperature": 1}
    wanted = api.client.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert answers(page) == [wanted]
    figures = page.run("document.querySelector('.figures').textContent")
    assert re.search(r"41 tokens, \d+ tokens/s · first after \d+ ms · 136 read, \d+ of them from the cache", figures)
    assert figures.endswith("KiB")

    send(page, " Then", max_tokens="500000")  # continues the state, until it is stopped
    page.wait("document.querySelectorAll('.answer')[1]?.textContent.length > 20")
    page.run("document.getElementById('stopper').click()")
    page.wait(ENDED)
    assert page.run("document.querySelectorAll('.figures')[1].textContent") == "stopped"

    page.run("document.querySelector('article button').click()")
    assert answers(page) == [wanted]
    send(page, " But", max_tokens="5")
    page.wait(f"{ENDED} && document.querySelectorAll('.figures')[1].textContent")
    assert "continued from the saved state" in page.run("document.querySelectorAll('.figures')[1].textContent")
    tabs = page.run("[...document.querySelectorAll('#branches button')].map(x => x.textContent)")
    assert tabs == ["1", "2 (fork of 1)"]
    page.run("document.querySelector('#branches button').click()")
    assert len(answers(page)) == 2
    assert len(answers(page)[1]) > 20
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    assert page.run("[...document.querySelectorAll('button:not([hidden])')].every(x => x.offsetHeight >= 32)")
    assert page.log == []
    pictures = os.environ.get("LONGSPAN_SCREENSHOTS")
    if pictures:
        page.screenshot(Path(pictures) / f"playground-{width}.png")


@pytest.mark.browser
def test_chat_and_retry(api, page):
    page.open(api.url)
    page.wait("document.getElementById('about').textContent.startsWith('tiny')")
    send(page, "Hi", mode="chat", max_tokens="9", seed="3")
    page.wait(f"{ENDED} && document.querySelector('.figures').textContent")
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "max_tokens": 9, "seed": 3, "temperature": 0.8}
    wanted = api.client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
    assert answers(page) == [wanted]
    page.run("[...document.querySelectorAll('article button')][1].click()")
    assert answers(page) == []
    assert page.run("document.getElementById('prompt').value") == "Hi"


@pytest.mark.browser
def test_errors_are_shown(api, page, tmp_path):
    page.open(api.url)
    page.wait("document.getElementById('about').textContent.startsWith('tiny')")
    send(page, "x", temperature="-3")
    page.wait(f"{ENDED} && document.querySelector('.error:not([hidden])')?.textContent.includes('temperature must be')")
    send(page, "x", temperature="1", max_tokens="3")
    page.wait(f"{ENDED} && document.querySelectorAll('.figures')[1].textContent")
    assert len(answers(page)) == 1
    assert "1 read," in page.run("document.querySelectorAll('.figures')[1].textContent")  # without what failed
    for state in api.client.get("/v1/states").json()["data"]:
        api.client.delete(f"/v1/states/{state['id']}")
    send(page, "y", max_tokens="3")  # reads the text again, since the state is gone
    page.wait(f"{ENDED} && document.querySelectorAll('.figures')[2].textContent.includes('read')")
    assert "saved state" not in page.run("document.querySelectorAll('.figures')[2].textContent")
    with serving(language_model(), tmp_path, api_keys=("secret",)) as locked:
        page.open(locked.url)
        page.wait("document.getElementById('error').textContent.includes('API key')")
        fill(page, key="secret")
        page.run("document.getElementById('key').dispatchEvent(new Event('change'))")
        page.wait("document.getElementById('about').textContent.startsWith('tiny')")
        assert page.run("document.getElementById('error').hidden")
    send(page, "x")
    page.wait("document.querySelector('article .error')?.textContent.includes('cannot be reached')")
