"""Hooks of `mkdocs build`: formulas as MathML, notebooks as pages, figures inline, the commands with their flags."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from command_help import command_reference
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

COMMANDS = "<!-- commands -->"
# As pymdownx.arithmatex writes them.
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
FIGURE = re.compile(r'<img alt="([^"]*)" src="([^"]*figures/[\w-]+\.svg)" ?/?>')


def on_config(config: Any) -> Any:
    """Leave out the page of an HTTP server for missing ones: its links need the address of the site."""
    config.theme.static_templates.discard("404.html")
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for every notebook; the notebook itself can be downloaded."""
    for path in sorted(Path(config.docs_dir).rglob("*.ipynb")):
        name = path.relative_to(config.docs_dir)
        page = notebook_to_markdown(json.loads(path.read_text(encoding="utf-8")), path.name)
        files.append(File.generated(config, name.with_suffix(".md").as_posix(), content=page))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the flags of the commands in the place that is marked for them, and link to the pages of notebooks."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, command_reference())
    return re.sub(r"\]\(([\w/.-]+)\.ipynb\)(?!\{)", r"](\1.md)", markdown)


def on_page_content(content: str, page: Any, config: Any, **_: Any) -> str:
    """Write formulas as MathML and put figures into the page."""
    content = FORMULA.sub(lambda match: to_mathml(html.unescape(match[2]), match[1] == "div"), content)
    folder = Path(config.docs_dir) / page.file.src_uri
    return FIGURE.sub(lambda match: inline_figure(folder, match[2], match[1]), content)


def to_mathml(formula: str, block: bool) -> str:
    r"""Return a formula as MathML. Parts of a display that \quad separates may stand below each other on a phone."""
    if not block:
        return convert(formula)
    parts = [part.strip() for part in re.split(r"\\q?quad", formula)]
    return f'<div class="formulas">{"".join(convert(part, display="block") for part in parts)}</div>'


def inline_figure(page: Path, source: str, description: str) -> str:
    """Return the SVG of a figure, whose text then has the color of the page, in light and in dark."""
    name = Path(source).name
    svg = (next(p for p in page.parents if (p / "figures").is_dir()) / "figures" / name).read_text(encoding="utf-8")
    svg = svg[svg.index("<svg") :].replace("<svg", f'<svg class="figure" role="img" aria-label="{description}"', 1)
    return re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)


def notebook_to_markdown(notebook: dict[str, Any], name: str) -> str:
    """Return the cells of a notebook with their stored outputs."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        shell = all(line.startswith("!") for line in source.splitlines())
        language, code = ("sh", re.sub(r"^!", "", source, flags=re.MULTILINE)) if shell else ("python", source)
        parts.append(f"```{language}\n{code}\n```")
        parts += [_output(output) for output in cell["outputs"]]
    parts.append(f"[Download this page as a notebook]({name}){{: download }}")
    return "\n\n".join(parts)


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/svg+xml" in data:
        return '<div class="output">\n' + "".join(data["image/svg+xml"]) + "\n</div>"
    text = "".join(output.get("text") or data["text/plain"]).rstrip("\n")
    return f"``` {{ .text .output .no-copy }}\n{text}\n```"
