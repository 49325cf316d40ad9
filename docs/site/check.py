"""Check the documentation site: links, anchors and files of its pages, and docstrings."""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    import griffe

_DIRECTIVE = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)


# Markdown in the text of a page: what isn't as Python-Markdown wants it.
_UNREAD = re.compile(r"```|\]\(|^(console|sh|python|json|text)\n")


class BuiltPage(HTMLParser):
    """Anchors, links and loaded files of one built page, and its Markdown that wasn't read."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.unread: list[str] = []
        self._is_code = False
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what an element links to, and its anchor."""
        self._is_code |= tag in ("pre", "script")
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("img", "script", "iframe", "source") and "src" in values:
            self.loaded.append(values["src"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon", "preconnect"):
            self.loaded.append(values.get("href", ""))

    def handle_endtag(self, tag: str) -> None:
        """Notice the end of code."""
        self._is_code &= tag not in ("pre", "script")

    def handle_data(self, data: str) -> None:
        """Keep text that looks like Markdown."""
        if not self._is_code and _UNREAD.search(data):
            self.unread.append(data.partition("\n")[0])


def find_faults(site: Path, site_url: str) -> list[str]:
    """Return the faults of the built pages.

    Those are links that lead nowhere, files loaded from other hosts, and Markdown that wasn't read.
    """
    pages = {file: BuiltPage(file) for file in sorted(site.resolve().rglob("*.html"))}
    base = urlsplit(site_url).path
    faults = []
    for file, page in pages.items():
        name = file.relative_to(site.resolve())
        faults += [f"{name} loads {each}" for each in page.loaded if urlsplit(each).netloc]
        faults += [f"{name} shows Markdown: {each}" for each in page.unread]
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            path = unquote(parts.path)
            # The page for addresses that don't exist links by absolute paths.
            target = site.resolve() / path[len(base) :] if path.startswith(base) else None
            target = target or ((file.parent / path).resolve() if path else file)
            target = target / "index.html" if target.is_dir() else target
            anchor = unquote(parts.fragment)
            if not target.exists():
                faults.append(f"{name} links to {link}, which does not exist")
            elif anchor and target in pages and anchor not in pages[target].anchors | {"__skip"}:
                faults.append(f"{name} links to {link}: no such anchor")
    return faults


def find_docstring_faults(source: Path, pages: list[Path]) -> list[str]:
    """Return the faults of the docstrings that pages of the Python reference show.

    Those are griffe's warnings, objects and parameters without a description, and parameters or
    defaults other than those of the signature.
    """
    import griffe

    faults: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: faults.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("griffe").addHandler(handler)
    package = griffe.load("duoka", search_paths=[source], docstring_parser="numpy")
    names = [name for page in pages for name in _DIRECTIVE.findall(page.read_text("utf-8"))]
    for name in names:
        for entry in _public_objects(package[name.removeprefix("duoka.")]):
            faults += [f"{entry.path}: {fault}" for fault in _faults(entry)]
    return faults


def _public_objects(entry: griffe.Object | griffe.Alias) -> Iterator[griffe.Object]:
    """Yield an object and its public members, without fields of dataclasses and imports."""
    target = entry.final_target if entry.is_alias else entry
    yield target
    for member in target.members.values():
        is_shown = not member.is_alias and not member.name.startswith("_")
        if is_shown and (member.is_class or member.is_function or "property" in member.labels):
            yield from _public_objects(member)


def _faults(entry: griffe.Object) -> Iterator[str]:
    """Yield the faults of one docstring."""
    if not entry.docstring:
        yield "no docstring"
        return
    sections = [section for section in entry.docstring.parsed if section.kind.value == "parameters"]
    documented = {each.name.lstrip("*"): each for section in sections for each in section.value}
    if not documented or not (entry.is_function or entry.is_class):
        return
    signature = {
        each.name.lstrip("*"): each for each in entry.parameters if each.name not in ("self", "cls")
    }
    for name in sorted(documented.keys() ^ signature.keys()):
        yield f"{name} is only in the {'docstring' if name in documented else 'signature'}"
    for name in documented.keys() & signature.keys():
        if not documented[name].description:
            yield f"{name} has no description"
        shown, real = _literal(documented[name].default), _literal(signature[name].default)
        if shown != real and None not in (shown, real):
            yield f"the default of {name} is {real}, not {shown}"


def _literal(default: object) -> object:
    """Return the value of a default; None if there is none, or if it is an expression."""
    try:
        return ast.literal_eval(str(default))
    except (SyntaxError, ValueError):
        return None
