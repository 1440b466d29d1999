"""The documentation site: it loads nothing from elsewhere, formulas are MathML, and its first page runs."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import CHROMIUM, browser

mkdocs_build = pytest.importorskip("mkdocs.commands.build", reason="pip install 'longspan[docs]' installs mkdocs")
hooks = pytest.importorskip("mkdocs_hooks", reason="pip install 'longspan[docs]' installs latex2mathml")

ROOT = Path(__file__).parents[2]
LOADED = {"src", "srcset", "poster", "data", "xlink:href"}  # attributes whose target a browser loads by itself
LINKS = {"stylesheet", "preload", "modulepreload", "prefetch", "preconnect", "dns-prefetch", "icon", "manifest"}
CSS = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")
SCRIPT = re.compile(r"""["'`](?:https?:)?//[\w.-]+/[^"'`\s]*\.(?:m?js|css|woff2?|json)\b""")


class Page(HTMLParser):
    """What a page loads from elsewhere, its text outside of code, and the names of its elements."""

    def __init__(self, text):
        super().__init__()
        self.external, self.words, self.tags, self.code = [], [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.tags.append(tag)
        self.code += tag in ("code", "script", "style")
        names = [name for name in LOADED if values.get(name)]
        if tag == "link" and LINKS & set((values.get("rel") or "").split()):
            names.append("href")
        found = [values[name] for name in names] + CSS.findall(values.get("style") or "")
        self.external += [url for url in found if re.match(r"(?:https?:)?//", url)]

    def handle_endtag(self, tag):
        self.code -= tag in ("code", "script", "style")

    def handle_data(self, data):
        if self.code:
            self.external += CSS.findall(data)
        else:
            self.words.append(data)


def external(folder):
    """Every resource that the files of a site load from elsewhere."""
    found = []
    # The theme loads mermaid for pages with diagrams of that kind, and only for them.
    diagrams = any('class="mermaid"' in path.read_text(encoding="utf-8") for path in folder.rglob("*.html"))
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".html":
            urls = Page(path.read_text(encoding="utf-8")).external
        elif path.suffix in (".css", ".svg"):
            urls = CSS.findall(path.read_text(encoding="utf-8"))
        elif path.suffix == ".js":
            urls = [url for url in SCRIPT.findall(path.read_text(encoding="utf-8")) if diagrams or "mermaid" not in url]
        else:
            urls = []
        found += [(path.name, url) for url in urls]
    return found


def build(folder, **options):
    from mkdocs.config import load_config

    mkdocs_build.build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True, **options))
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site without the docstrings, which take most of the time to build."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_MKDOCS_2_WARNING", "1")
        return build(tmp_path_factory.mktemp("site"), plugins=["search", "offline"])


def test_what_a_page_loads_from_elsewhere_is_found(tmp_path):
    (tmp_path / "x.html").write_text(
        '<link rel="stylesheet" href="https://a/x.css"><link rel="canonical" href="https://b"><a href="https://c">c</a>'
        '<script src="//d/x.js"></script><style>@import "https://e/x.css";</style><p style="background: url(http://f)">'
        '<img src="x.png"><code>src="https://g"</code>'
    )
    (tmp_path / "x.css").write_text("@font-face { src: url('https://h/x.woff') } p { background: url(x.png) }")
    (tmp_path / "x.js").write_text('import("https://i/x.js"); const link = "https://j/page";')
    assert re.findall(r"//(\w)", str(external(tmp_path))) == ["h", "a", "d", "e", "f", "i"]


def test_the_site_loads_nothing_from_elsewhere(site):
    assert len(list(site.rglob("*.html"))) > 25
    assert external(site) == []


def test_the_search_works_without_a_server(site):
    assert (site / "search" / "search_index.js").read_text(encoding="utf-8").startswith("var __index = {")
    assert "javascripts/iframe-worker.js" in (site / "index.html").read_text(encoding="utf-8")


def test_formulas_are_mathml(site):
    formulas = 0
    for path in sorted(site.rglob("*.html")):
        page = Page(path.read_text(encoding="utf-8"))
        formulas += page.tags.count("math")
        assert not re.search(r"\\(frac|sum|mathrm|top|sqrt|varphi|quad|left)\b|\$\$", "".join(page.words)), path.name
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")]
    assert formulas >= sum(text.count("$$") // 2 for text in sources) > 5


def test_parts_of_a_display_are_separate_formulas():
    text = hooks.to_mathml(r"a = \frac{b}{c}, \qquad d = \sum_i e_i", True)
    assert text.count("<math") == 2
    assert re.search(r"<mfrac>.*<mi>b</mi>.*<mi>c</mi>.*</mfrac>", text)
    assert hooks.to_mathml("a_1", False).count("<msub>") == 1


def test_every_flag_is_on_the_page_of_the_command_line(site):
    page = "".join(Page((site / "reference" / "cli.html").read_text(encoding="utf-8")).words)
    text = (site / "reference" / "cli.html").read_text(encoding="utf-8")
    assert "Peak learning rate." in page
    assert "<code>--lr FLOAT</code>" in text
    assert "<code>--model.attention.num-heads INT</code>" in text


def test_the_site_opens_with_an_installation_and_ten_lines_that_run(capsys):
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    first, second, *_ = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert first[0] == "sh"
    assert first[1].startswith('pip install "longspan[train]"')
    assert second[0] == "python"
    assert len([line for line in second[1].splitlines() if line]) == 10
    exec(second[1], {})
    loss, _, written = capsys.readouterr().out.partition(" ")
    assert float(loss) < 0.1
    assert written == "b'brown fox jumps over the lazy dog. '\n"


@pytest.mark.slow
def test_the_whole_site_builds_and_loads_nothing_from_elsewhere(tmp_path):
    folder = build(tmp_path / "site")
    assert external(folder) == []
    page = (folder / "reference" / "generation.html").read_text(encoding="utf-8")
    assert 'id="longspan.generate"' in page
    if CHROMIUM is not None:
        check_widths(folder, tmp_path / "browser")


WIDTHS = """(() => {
  const inside = [...document.querySelectorAll('.formulas')].filter((x) => x.scrollHeight > x.clientHeight + 1);
  const loaded = performance.getEntriesByType('resource').map((x) => x.name);
  return {
    scrolls: document.documentElement.scrollWidth > innerWidth,
    wide: innerWidth,
    formulas: inside.length,
    pictures: [...document.images].filter((x) => !x.naturalWidth).length,
    elsewhere: loaded.filter((x) => /^(https?|wss?):/.test(x)),
  };
})()"""


def check_widths(folder, profile):
    """On a phone and on a desk, no page is wider than its window, and none loads anything from elsewhere."""
    with browser(profile) as page:
        for path in sorted(folder.rglob("*.html")):
            for width in (375, 1280):
                page.open(path.as_uri(), width)
                expected = {"scrolls": False, "wide": width, "formulas": 0, "pictures": 0, "elsewhere": []}
                assert page.run(WIDTHS) == expected, f"{path.name} at {width}"
        assert page.log == []
