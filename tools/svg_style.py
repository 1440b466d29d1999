"""Plots as SVG that are readable on light and dark pages: text and axes have the color of the page's text."""

from __future__ import annotations

import io
import json
import re
from typing import Any

import matplotlib
from matplotlib.figure import Figure

COLORS = ["#3f7fd9", "#e0702f", "#2f9e62", "#b565c9", "#c9a227", "#d64f68", "#2aa5b5", "#8c8c8c"]
_TEXT = "#010203"  # stands for the color of the page's text
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "figure.figsize": (5.0, 3.0),
    "figure.constrained_layout.use": True,
    "savefig.transparent": True,
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.prop_cycle": f"cycler('color', {COLORS})",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    **dict.fromkeys(["text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"], _TEXT),
}
# What matplotlib writes and a page does not need: styles of the whole page, names of groups, far decimals of
# coordinates, rotations by nothing, groups of one text, indentation.
_SHORTER = {
    r"<metadata>.*?</metadata>\s*<defs>\s*<style.*?</style>\s*</defs>": "",
    r"<svg ": '<svg stroke-linejoin="round" ',
    r'<g id="[^"]*"': "<g",
    r"font-family: [^;\"]*": "font-family: inherit",
    r"font: ([\d.]+)px [^;\"]*": r"font-size: \1px; font-family: inherit",
    r"(\d\.\d\d)\d+(?=[^<>]*>)": r"\1",
    r' transform="rotate\(-?0 [^"]*\)"': "",
    r"<g>\s*(<text[^>]*>[^<]*</text>)\s*</g>": r"\1",
    r" \n": " ",
    r"\n +": "\n",
}
# Texts of one style that follow each other.
_TEXTS = r'(?:<text style="([^"]*)"[^>]*>[^<]*</text>\s*)(?:<text style="\1"[^>]*>[^<]*</text>\s*)+'


def figure_to_svg(figure: Figure, name: str, data: Any = None) -> str:
    """Return a figure as SVG.

    Args:
        figure: A figure drawn with `STYLE`.
        name: Makes identifiers unique among the figures of a page.
        data: What the figure shows, as JSON in its metadata.
    """
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :].replace(_TEXT, "currentColor")
    for pattern, replacement in _SHORTER.items():
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    text = re.sub(_TEXTS, lambda found: f'<g style="{found[1]}">{_without_style(found)}</g>', text)
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    return text if data is None else text.replace(">", f">\n<metadata>{json.dumps(data)}</metadata>", 1)


def _without_style(found: re.Match[str]) -> str:
    return found[0].replace(f' style="{found[1]}"', "")
