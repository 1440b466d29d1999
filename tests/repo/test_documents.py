"""Documents that keep up: every mechanism has a page, and every option stands on it."""

import io
import re
import shlex
from contextlib import redirect_stdout, suppress
from functools import cache
from pathlib import Path

import pytest

from longspan.cli import COMMANDS, main
from longspan.mechanisms import list_mechanisms, mechanism_options

DOCS = Path(__file__).parents[2] / "docs"
SHAPE = {"num_kv_heads", "value_dim"}  # of every mechanism


@pytest.mark.parametrize("name", sorted(list_mechanisms()))
def test_a_mechanism_s_page_names_its_options_and_no_others(name):
    text = (DOCS / "mechanisms" / f"{name}.md").read_text()
    rows = re.findall(r"^\| (`.*?`) \|", text, re.MULTILINE)
    named = {option for row in rows for option in re.findall(r"`(\w+)`", row)}
    assert named == set(mechanism_options(name)) - SHAPE


def test_every_page_can_be_reached():
    listed = set(re.findall(r"[\w/-]+\.md", (DOCS.parent / "mkdocs.yml").read_text()))
    pages = [*DOCS.rglob("*.md"), *(path.with_suffix(".md") for path in DOCS.rglob("*.ipynb"))]
    assert listed == {str(path.relative_to(DOCS)) for path in pages}


def test_links_lead_somewhere():
    for path in [*DOCS.rglob("*.md"), DOCS.parent / "README.md", DOCS.parent / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} links to {target}"


def commands():
    """Every `longspan …` line of a shell block."""
    for path in [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]:
        for block in re.findall(r"^```sh\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if "longspan" in words and words[0] != "pip":
                    yield path.name, words[words.index("longspan") + 1 :]


@cache
def listed(*command):
    """The flags that a command's help lists."""
    with redirect_stdout(io.StringIO()) as out, suppress(SystemExit):
        main([*command, "--help-all" if command == ("train",) else "--help"])
    return {flag.replace("_", "-") for flag in re.findall(r"(--[\w.-]+)", out.getvalue())}


def test_commands_in_documents_exist_with_their_flags():
    found = list(commands())
    assert len(found) >= 10
    for where, (name, *words) in found:
        assert name in COMMANDS, f"{where}: longspan {name}"
        flags = listed(name, words[0]) if words[:1] in (["quality"], ["recall"], ["sweep"]) else listed(name)
        if name == "run":
            words = words[: 2 if words[0].startswith("--") else 0]  # the rest is the script's
        for word in words:
            flag = word.partition("=")[0].replace("_", "-")
            assert not word.startswith("--") or flag in flags, f"{where}: longspan {name} {word}"
