"""The page's files, without a browser: nothing inline, nothing from elsewhere, both languages."""

from __future__ import annotations

import hashlib
import re
from html.parser import HTMLParser

from page_server import PAGE

LIBRARIES = ("highlight.min.js", "katex.min.js", "marked.esm.js", "purify.min.js")
SCRIPTS = sorted(path for path in PAGE.glob("*.js") if path.name not in LIBRARIES)
TEXT_LINE = re.compile(r'^  (\w+): \[\s*"(.*?)",\s*"(.*?)",?\s*\],', re.MULTILINE | re.DOTALL)


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] in ("script", "style") and data.strip():
            self.inline.append(data)


def elements() -> _Elements:
    parser = _Elements()
    parser.feed((PAGE / "index.html").read_text(encoding="utf-8"))
    return parser


def texts() -> dict[str, tuple[str, str]]:
    table = (PAGE / "texts.js").read_text(encoding="utf-8").split("TEXTS = {")[1].split("\n};")[0]
    return {name: (english, chinese) for name, english, chinese in TEXT_LINE.findall(table)}


def test_nothing_is_inline() -> None:
    parser = elements()
    assert len(parser.elements) > 50
    assert parser.inline == []
    for tag, attributes in parser.elements:
        assert tag != "style"
        assert not [name for name in attributes if name == "style" or name.startswith("on")]


def test_every_file_is_here() -> None:
    named = [
        value
        for _, attributes in elements().elements
        for name, value in attributes.items()
        if name in ("src", "href") and value is not None and not value.startswith("#")
    ]
    assert all(name.startswith("/page/") for name in named)
    imported = [
        name
        for script in SCRIPTS
        for name in re.findall(r'from "\./(.+)"', script.read_text(encoding="utf-8"))
    ]
    files = {name.removeprefix("/page/") for name in named} | set(imported)
    assert {path.name for path in SCRIPTS} <= files
    assert [name for name in files if not (PAGE / name).is_file()] == []


def test_no_address_but_the_servers_own() -> None:
    written = [PAGE / "index.html", PAGE / "page.css", *SCRIPTS]
    addresses = [
        address
        for path in written
        for address in re.findall(r"https?://[\w.]+|url\(.*", path.read_text(encoding="utf-8"))
    ]
    assert set(addresses) == {"http://www.w3.org"}  # the name of SVG


def test_libraries_are_as_they_were_published() -> None:
    lines = (PAGE / "LIBRARIES.txt").read_text(encoding="utf-8").splitlines()[2:]
    rows = [line.split() for line in lines]
    assert sorted(row[3] for row in rows) == sorted(LIBRARIES)
    for name, version, _, file, digest, licence in rows:
        data = (PAGE / file).read_bytes()
        number = re.escape(version)
        assert re.search(rf'{name} v?{number}\b|version:"{number}"', data.decode())
        assert hashlib.sha256(data).hexdigest() == digest
        assert len((PAGE / licence).read_text(encoding="utf-8")) > 1000


def test_every_text_has_both_languages() -> None:
    table = texts()
    assert len(table) > 80
    source = (PAGE / "texts.js").read_text(encoding="utf-8")
    assert len(table) == len(re.findall(r"^  \w+: \[", source, re.MULTILINE))
    for name, (english, chinese) in table.items():
        assert sorted(re.findall(r"{\w+}", english)) == sorted(re.findall(r"{\w+}", chinese)), name
        assert english.isascii() or set(re.sub(r"[ -~]", "", english)) <= set("…·中文"), name
        # A name of a program or a language is the same in both.
        assert re.search("[一-鿿]", chinese) or name in ("version", "otherLanguage"), name


def test_every_text_is_used() -> None:
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    in_page = set(re.findall(r'data-(?:text|label|placeholder)="(\w+)"', page))
    assert in_page <= set(texts())
    scripts = [path.read_text(encoding="utf-8") for path in SCRIPTS if path.name != "texts.js"]
    in_scripts = {name for script in scripts for name in re.findall(r'"(\w+)"', script)}
    legend = {"weights", "kvCache", "rest", "free"}  # texts, and classes of the sheet
    assert legend <= in_scripts
    assert set(texts()) - in_page - in_scripts == set()
