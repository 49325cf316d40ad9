"""Build the documentation site: `make docs`.

The pages are written for GitHub: they lie where the repository has them, link each other by
relative paths, and have a Chinese twin ``X.zh-CN.md`` beside ``X.md``. This program copies those
that the navigation of ``zensical.toml`` names to ``build/docs``, once for each language, with their
links rewritten; lets Zensical build a site from each; joins them in ``build/site``; and fails if a
link, an anchor or a docstring is broken, or if a page loads something from another host.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STAGE = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"
HOME = "docs/index.md"
CHINESE = ".zh-CN.md"
PICTURES = (".svg", ".png", ".gif", ".jpg", ".webp")
# After the heading of a page that has no Chinese twin, on the Chinese site.
ENGLISH_ONLY = '\n\n!!! note "本页只有英文"\n\n    这一页还没有中文版，以下是英文原文。\n'
# The home page has no list of pages beside it.
WIDE = "---\nhide:\n  - navigation\n  - toc\n---\n\n"

# Code stays as it is, comments are left out, and the targets of links and pictures are rewritten.
_PARTS = re.compile(
    r"(?P<code>^(?P<indent> *)(?P<fence>```+).*?^(?P=indent)(?P=fence) *$|(?P<tick>`+).+?(?P=tick))"
    r"|(?P<comment>^ *<!--[^\n]*?-->\n+)"
    r"|(?P<before>\]\(|(?:src|href)=\")(?P<target>[^)\s\"]+)(?P<after>[)\"])",
    re.DOTALL | re.MULTILINE,
)
# Links to the same page in the other language, with others in the same parentheses: the site has
# menus for both.
_SWITCH = re.compile(
    r"[(（]\[(?:English|中文\w*)\]\([^)]*\)(?: · \[[^]]*\]\([^)]*\))*[)）][。.]?"
    r"|^\[(?:English|中文\w*)\]\([^)]*\)$",
    re.MULTILINE,
)
_FENCED = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_TICKED = re.compile("`[^`]+`")
_ITEM = re.compile(r" *(?:[-*+]|\d+\.) +")


@dataclass(frozen=True, slots=True)
class Language:
    """One of the two sites: the theme's code, where the site lies, and the name in the menu."""

    code: str
    folder: str
    name: str

    @property
    def stage(self) -> Path:
        """Directory in which Zensical builds the site."""
        return STAGE / self.code

    def source(self, page: str) -> str:
        """Return the file of the repository that the site shows for an English page."""
        chinese = page.removesuffix(".md") + CHINESE
        return chinese if self.code == "zh" and (ROOT / chinese).exists() else page


LANGUAGES = (Language("en", "", "English"), Language("zh", "zh/", "简体中文"))


def read_settings() -> dict[str, Any]:
    """Read ``zensical.toml``; the navigation has only pages that exist."""
    settings = tomllib.loads((HERE / "zensical.toml").read_text(encoding="utf-8"))
    settings["project"]["nav"] = existing(settings["project"]["nav"])
    return settings


def existing(nav: Any) -> Any:
    """Return a navigation without pages that don't exist."""
    if isinstance(nav, list):
        return [kept for entry in nav if (kept := existing(entry))]
    if isinstance(nav, dict):
        return {name: kept for name, entry in nav.items() if (kept := existing(entry))}
    return nav if (ROOT / nav).exists() else None


def pages_in(nav: object) -> Iterator[str]:
    """Yield the paths in a navigation, in order."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        yield from pages_in(list(nav.values()))
    elif isinstance(nav, list):
        for entry in nav:
            yield from pages_in(entry)


def site_path(path: str) -> str:
    """Return where the site has a file of the repository: ``docs/run.md`` is ``run.md``."""
    if path == "README.md":
        return "overview.md"
    if "/" not in path:
        return path.lower()
    short = PurePosixPath(path.removeprefix("docs/"))
    return str(short.with_name("index.md") if short.name == "README.md" else short)


def headings(page: str) -> list[str]:
    """Return the headings of a page."""
    return _HEADING.findall(_FENCED.sub("", (ROOT / page).read_text(encoding="utf-8")))


def anchors(page: str) -> list[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    return [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings(page)]


def adapt(text: str) -> str:
    """Return a page as Python-Markdown reads it, which is stricter than GitHub.

    What belongs to an item of a list is indented by four spaces, not by the width of the item's
    marker; an empty line is before a list; and code in a table has no escaped bars.
    """
    lines: list[str] = []
    columns: list[int] = []  # where the text of each open item begins
    is_fenced = was_in_list = False
    for line in text.splitlines():
        item = None if is_fenced else _ITEM.match(line)
        while line and not is_fenced and columns and line[: columns[-1]].strip():
            columns.pop()
        if item and not columns and not was_in_list and lines and lines[-1]:
            lines.append("")
        start = columns[-1] if columns else 0
        adapted = " " * 4 * len(columns) + line[start:] if line else ""
        if line.startswith("|"):
            adapted = _TICKED.sub(lambda code: code[0].replace(r"\|", "|"), adapted)
        lines.append(adapted)
        if item:
            columns.append(item.end())
        was_in_list = bool(columns)
        is_fenced ^= line.lstrip().startswith("```")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Stage:
    """The pages of one language, and where Zensical finds them."""

    language: Language
    pages: list[str]
    repository: str

    def write(self) -> None:
        """Write all pages, and the pictures that they show."""
        for page in self.pages:
            source = self.language.source(page)
            text = (ROOT / source).read_text(encoding="utf-8")
            text = adapt(self.rewrite(_SWITCH.sub("", text), source, page))
            if self.language.code == "zh" and source == page:
                heading, _, rest = text.partition("\n")
                text = f"{heading}{ENGLISH_ONLY}{rest}"
            target = self.language.stage / "docs" / site_path(page)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text((WIDE if page == HOME else "") + text, encoding="utf-8")

    def rewrite(self, text: str, source: str, page: str) -> str:
        """Return the text of a page as the site has it."""

        def replace(found: re.Match[str]) -> str:
            if found["code"] is not None:
                return found[0]
            if found["comment"] is not None:
                return ""
            return found["before"] + self.link(found["target"], source, page) + found["after"]

        return _PARTS.sub(replace, text)

    def link(self, link: str, source: str, page: str) -> str:
        """Return a link of a page as the site has it.

        Pages of the site are linked by relative paths, pictures are copied, and the host of the
        code shows any other file.
        """
        parts = urlsplit(link)
        if parts.scheme or not parts.path:
            return link
        path = os.path.normpath(f"{PurePosixPath(source).parent}/{unquote(parts.path)}")
        if not (ROOT / path).exists():
            sys.exit(f"{source} links to {link}, which does not exist")
        anchor = unquote(parts.fragment)
        english = path.replace(CHINESE, ".md")
        folder = PurePosixPath(site_path(page)).parent
        if english in self.pages:
            shown = self.language.source(english)
            if anchor and shown != path:  # that of the same heading in the other language
                anchor = anchors(shown)[anchors(path).index(anchor)]
            link = os.path.relpath(site_path(english), folder)
        elif path.endswith(PICTURES):
            copy = self.language.stage / "docs" / site_path(path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, copy)
            return os.path.relpath(site_path(path), folder)
        else:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            link = f"{self.repository}/{kind}/main/{path}"
        return f"{link}#{anchor}" if anchor else link


def translate(settings: Any, words: dict[str, str]) -> Any:
    """Return settings with words of another language in the place of the English ones."""
    if isinstance(settings, dict):
        return {words.get(key, key): translate(each, words) for key, each in settings.items()}
    if isinstance(settings, list):
        return [translate(each, words) for each in settings]
    return words.get(settings, settings) if isinstance(settings, str) else settings


def title(nav: Any, language: Language) -> Any:
    """Return a navigation with the site's paths, and with a title for each page."""
    if isinstance(nav, list):
        return [title(each, language) for each in nav]
    if isinstance(nav, dict):
        return {
            name: site_path(each) if isinstance(each, str) else title(each, language)
            for name, each in nav.items()
        }
    # "Measure: top, doctor, selftest and bench" is "Measure".
    return {re.split("[:：]", headings(language.source(nav))[0])[0]: site_path(nav)}


def settings_for(settings: dict[str, Any], language: Language) -> dict[str, Any]:
    """Return the settings with which Zensical builds the site of a language."""
    words = settings["chinese"] if language.code == "zh" else {}
    project = translate(settings["project"], words)
    project["nav"] = title(project["nav"], language)
    project["site_url"] += language.folder
    project["theme"] |= {"language": language.code, "custom_dir": "overrides"}
    up = "../" if language.folder else ""
    project["extra"] = {
        "alternate": [
            {"name": each.name, "lang": each.code, "link": up + each.folder or "./"}
            for each in LANGUAGES
        ]
    }
    python = project["plugins"]["mkdocstrings"]["handlers"]["python"]
    python["paths"] = [str(ROOT / path) for path in python["paths"]]
    return project | {"docs_dir": "docs", "site_dir": "site", "extra_css": ["assets/site.css"]}


def build(settings: dict[str, Any], language: Language) -> None:
    """Build the site of one language."""
    project = settings["project"]
    Stage(language, list(pages_in(project["nav"])), project["repo_url"]).write()
    shutil.copytree(HERE / "overrides", language.stage / "overrides")
    shutil.copytree(HERE / "assets", language.stage / "docs" / "assets", dirs_exist_ok=True)
    # Settings in MkDocs' form: JSON is YAML, too.
    file = language.stage / "mkdocs.yml"
    file.write_text(json.dumps(settings_for(settings, language), indent=1), encoding="utf-8")
    zensical = [sys.executable, "-m", "zensical", "build", "--strict", "-f", file]
    done = subprocess.run(zensical, check=False)
    if done.returncode:
        sys.exit(f"the {language.name} site has not been built")
    shutil.copytree(language.stage / "site", SITE / language.folder, dirs_exist_ok=True)


def main() -> None:
    """Build and check the site."""
    from check import find_docstring_faults, find_faults

    settings = read_settings()
    for directory in (STAGE, SITE):
        shutil.rmtree(directory, ignore_errors=True)
    faults = find_docstring_faults(ROOT / "src", sorted((ROOT / "docs" / "api").glob("*.md")))
    for language in () if faults else LANGUAGES:
        build(settings, language)
    faults = faults or find_faults(SITE, settings["project"]["site_url"])
    if faults:
        sys.exit("\n".join([*faults, f"{len(faults)} faults"]))
    sys.stdout.write(f"the site is in {SITE.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
