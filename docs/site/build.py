"""Build the documentation site: `make docs`.

The pages are written for GitHub: they lie where the repository has them, link each other by
relative paths, and have a Chinese twin ``X.zh-CN.md`` beside ``X.md``. This program copies those
that the navigation of ``zensical.toml`` names to ``build/docs``, once for each language, with their
links rewritten; lets Zensical build both sites; joins them in ``build/site``; and fails if a link,
an anchor or a docstring is broken, or if a page would fetch something from another host.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
SETTINGS = HERE / "zensical.toml"
STAGE = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"
CHINESE = ".zh-CN.md"
# A page without a Chinese twin, on the Chinese site.
ENGLISH_ONLY = "\n\n!!! note \"本页只有英文\"\n\n    这一页还没有中文版，以下是英文原文。\n"

# Code is copied as it is; elsewhere links and images are rewritten.
_CODE_OR_LINK = re.compile(
    r"(?P<code>^(?P<indent> *)(?P<fence>```+|~~~+).*?^(?P=indent)(?P=fence)[ \t]*$|(?P<tick>`+).+?(?P=tick))"
    r"|(?P<comment><!--.*?-->\n*)"
    r"|(?P<before>\]\(|(?:src|href)=\")(?P<target>[^)\s\"]+)(?P<after>[)\"])",
    re.DOTALL | re.MULTILINE,
)
# Links to the same page in the other language, with those in the same parentheses: the site has
# menus for both.
_SWITCH = re.compile(
    r"[(（]\[(?:English|中文\w*)\]\([^)]*\)(?: · \[[^]]*\]\([^)]*\))*[)）][。.]?"
    r"|^\[(?:English|中文\w*)\]\([^)]*\)$",
    re.MULTILINE,
)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_CODE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Language:
    """One of the two sites: ``code`` is that of the theme, ``folder`` where the site lies."""

    code: str
    folder: str
    name: str

    @property
    def stage(self) -> Path:
        """Directory in which Zensical builds the site."""
        return STAGE / self.code


LANGUAGES = (Language("en", "", "English"), Language("zh", "zh/", "简体中文"))


def read_settings() -> dict[str, Any]:
    """Read ``zensical.toml``."""
    return tomllib.loads(SETTINGS.read_text(encoding="utf-8"))


def pages_in(nav: object) -> Iterator[str]:
    """Yield the paths in a navigation, in order."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for entry in nav.values():
            yield from pages_in(entry)
    elif isinstance(nav, list):
        for entry in nav:
            yield from pages_in(entry)


def site_path(page: str) -> str:
    """Return where the site has a page of the repository: ``docs/run.md`` is ``run.md``."""
    page = page.replace(CHINESE, ".md")
    if page == "README.md":
        return "overview.md"
    if "/" not in page:
        return page.lower()
    path = PurePosixPath(page.removeprefix("docs/"))
    return str(path.with_name("index.md") if path.name == "README.md" else path)


def twin(page: str) -> str:
    """Return the Chinese page that belongs to an English one."""
    return page.removesuffix(".md") + CHINESE


@dataclass(slots=True)
class Stage:
    """Copies the pages of one language to where Zensical builds them."""

    language: Language
    pages: list[str]
    repository: str
    files: set[str] = field(default_factory=set)

    def source(self, page: str) -> str:
        """Return the file of the repository that is shown for a page of the navigation."""
        chinese = twin(page)
        return chinese if self.language.code == "zh" and (ROOT / chinese).exists() else page

    def run(self) -> None:
        """Write all pages, and the files that they show."""
        for page in self.pages:
            source = self.source(page)
            text = (ROOT / source).read_text(encoding="utf-8")
            text = self.rewrite(_SWITCH.sub("", text), source, page)
            if self.language.code == "zh" and source == page:
                heading, _, rest = text.partition("\n")
                text = f"{heading}{ENGLISH_ONLY}{rest}"
            target = self.language.stage / "docs" / site_path(page)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")

    def rewrite(self, text: str, source: str, page: str) -> str:
        """Return the text of a page with its links as the site has them."""

        def replaced(found: re.Match[str]) -> str:
            if found["code"] is not None:
                return found[0]
            if found["comment"] is not None:
                return ""
            return found["before"] + self.link(found["target"], source, page) + found["after"]

        return _CODE_OR_LINK.sub(replaced, text)

    def link(self, link: str, source: str, page: str) -> str:
        """Return a link of a page as the site has it.

        A page of the site stays a relative link, an image is copied, and any other file of the
        repository is shown by the host of the code.
        """
        parts = urlsplit(link)
        if parts.scheme or link.startswith("#"):
            return link
        path = os.path.normpath(os.path.join(os.path.dirname(source), unquote(parts.path)))
        if not (ROOT / path).exists():
            sys.exit(f"{source} links to {link}, which does not exist")
        anchor = unquote(parts.fragment)
        english = path.replace(CHINESE, ".md")
        start = os.path.dirname(site_path(page))
        if english in self.pages:
            shown = self.source(english)
            if anchor and shown != path:  # of the same heading in the other language
                anchor = anchors(shown)[anchors(path).index(anchor)]
            target = os.path.relpath(site_path(english), start or ".")
            return f"{target}#{anchor}" if anchor else target
        if PurePosixPath(path).suffix in (".svg", ".png", ".gif"):
            target = site_path(path)
            copied = self.language.stage / "docs" / target
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, copied)
            return os.path.relpath(target, start or ".")
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"{self.repository}/{kind}/main/{path}" + (f"#{anchor}" if anchor else "")


def headings(page: str) -> list[str]:
    """Return the headings of a page."""
    return _HEADING.findall(_CODE.sub("", (ROOT / page).read_text(encoding="utf-8")))


def anchors(page: str) -> list[str]:
    """Return the anchors of a page's headings, as code hosts make them."""
    return [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings(page)]


def translated(value: Any, words: dict[str, str]) -> Any:
    """Return settings with the words of a language in the place of English ones."""
    if isinstance(value, dict):
        return {words.get(key, key): translated(entry, words) for key, entry in value.items()}
    if isinstance(value, list):
        return [translated(entry, words) for entry in value]
    return words.get(value, value) if isinstance(value, str) else value


def titled(nav: Any, stage: Stage) -> Any:
    """Return a navigation with the site's paths, and with a title for each page."""
    if isinstance(nav, list):
        return [titled(entry, stage) for entry in nav]
    if isinstance(nav, dict):
        return {
            title: site_path(entry) if isinstance(entry, str) else titled(entry, stage)
            for title, entry in nav.items()
        }
    return {headings(stage.source(nav))[0].partition(":")[0].partition("：")[0]: site_path(nav)}


def settings_for(settings: dict[str, Any], stage: Stage) -> dict[str, Any]:
    """Return the settings with which Zensical builds the site of a language."""
    language = stage.language
    chinese = settings["chinese"]
    words = chinese["titles"] if language.code == "zh" else {}
    project = translated(settings["project"], words)
    project["nav"] = titled(project["nav"], stage)
    project |= {"docs_dir": "docs", "site_dir": "site"}
    up = "../" if language.folder else ""
    project["extra"] = {
        "alternate": [
            {"name": each.name, "lang": each.code, "link": up + each.folder or "./"}
            for each in LANGUAGES
        ]
    }
    project["site_url"] += language.folder
    if language.code == "zh":
        project["site_description"] = chinese["site_description"]
        project["theme"]["language"] = "zh"
    project["theme"]["custom_dir"] = "overrides"
    project["extra_css"] = ["assets/site.css"]
    python = project["plugins"]["mkdocstrings"]["handlers"]["python"]
    python["paths"] = [str(ROOT / path) for path in python["paths"]]
    return project


def build(settings: dict[str, Any], language: Language) -> None:
    """Build the site of one language."""
    project = settings["project"]
    stage = Stage(language, list(pages_in(project["nav"])), project["repo_url"])
    stage.run()
    shutil.copytree(HERE / "overrides", language.stage / "overrides")
    shutil.copytree(HERE / "assets", language.stage / "docs" / "assets", dirs_exist_ok=True)
    # JSON is YAML, too; Zensical reads the form of MkDocs.
    written = json.dumps(settings_for(settings, stage), ensure_ascii=False, indent=1)
    file = language.stage / "mkdocs.yml"
    file.write_text(written, encoding="utf-8")
    zensical = Path(sys.executable).with_name("zensical")
    done = subprocess.run([zensical, "build", "--strict", "-f", file], check=False)
    if done.returncode:
        sys.exit(done.returncode)
    shutil.copytree(language.stage / "site", SITE / language.folder, dirs_exist_ok=True)


def check_docstrings(names: list[str]) -> list[str]:
    """Return what griffe finds wrong in the docstrings of public names."""
    import griffe

    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("griffe").addHandler(handler)
    package = griffe.load("duoka", search_paths=[ROOT / "src"], docstring_parser="numpy")
    assert isinstance(package, griffe.Module)

    def parse(entry: griffe.Object | griffe.Alias) -> None:
        if entry.docstring:
            _ = entry.docstring.parsed
        for member in entry.members.values():
            if not member.is_alias and member.is_public:
                parse(member)

    for name in names:
        parse(package[name.removeprefix("duoka.")])
    return found


class Page(HTMLParser):
    """Anchors, links and loaded files of one built page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what an element links to, and its anchor."""
        values = {name: value for name, value in attrs if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag in ("img", "script", "iframe", "source") and "src" in values:
            self.loaded.append(values["src"])
        elif tag == "link" and values.get("rel") in ("stylesheet", "icon", "preconnect"):
            self.loaded.append(values.get("href", ""))


def check_links(site: Path, site_url: str) -> list[str]:
    """Return the links of the built pages that lead nowhere, and what comes from other hosts."""
    pages = {file: Page(file) for file in sorted(site.rglob("*.html"))}
    faults = []
    for file, page in pages.items():
        name = file.relative_to(site)
        faults += [f"{name} loads {each}" for each in page.loaded if urlsplit(each).netloc]
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or link == "#":
                continue
            if link.startswith("/"):  # of the page for what isn't found
                target = site / unquote(parts.path.removeprefix(urlsplit(site_url).path))
            else:
                target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                faults.append(f"{name} links to {link}")
            elif parts.fragment and target in pages:
                anchor = unquote(parts.fragment)
                if anchor not in pages[target].anchors and anchor != "__skip":
                    faults.append(f"{name} links to {link}: no such anchor")
    return faults


def stop_at(faults: list[str]) -> None:
    """End the program if there are faults."""
    if faults:
        sys.exit("\n".join([*faults, f"{len(faults)} faults"]))


def main() -> None:
    """Build and check the site."""
    shutil.rmtree(STAGE, ignore_errors=True)
    shutil.rmtree(SITE, ignore_errors=True)
    settings = read_settings()
    for language in LANGUAGES:
        build(settings, language)
    stop_at(check_links(SITE, settings["project"]["site_url"]))


if __name__ == "__main__":
    main()
