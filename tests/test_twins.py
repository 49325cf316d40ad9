"""The English and the Chinese pages say the same.

Each page with a twin, ``X.md`` beside ``X.zh-CN.md``, has the same headings, tables, code, commands
with their outputs, numbers and links. Commands are run for the English page alone: see
`test_readme`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TWINS = sorted(
    str(path.relative_to(ROOT)).replace(".zh-CN.md", ".md")
    for folder in (ROOT, ROOT / "docs")
    for path in (folder.glob if folder == ROOT else folder.rglob)("*.zh-CN.md")
)
_FENCE = re.compile(r"```.*?```", re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


def headings(path: Path) -> list[tuple[int, str]]:
    """The level and the anchor of each heading, as code hosts make anchors."""
    prose = _FENCE.sub("", path.read_text(encoding="utf-8"))
    return [
        (len(level), re.sub(r"[^\w -]", "", title).lower().replace(" ", "-"))
        for level, title in re.findall(r"^(#+) (.+)$", prose, re.MULTILINE)
    ]


def destination(link: str, path: Path) -> tuple[str, int | None]:
    """Where a link leads: to the English page, and to the n-th heading of it."""
    target, _, anchor = link.partition("#")
    if "://" in target:
        return link, None
    page = (path.parent / target).resolve() if target else path.resolve()
    number = [found for _, found in headings(page)].index(anchor) if anchor else None
    return str(page).replace(".zh-CN.", "."), number  # pictures, too


def shape(page: str) -> dict[str, list[object]]:
    """What a page and its twin have in common."""
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    prose = _FENCE.sub("", text)
    links = {destination(link, path) for link in _LINK.findall(prose)}
    links.discard((str(path).replace(".zh-CN.md", ".md"), None))  # the twin
    words = re.sub(r"`[^`]+`|\]\([^)]+\)|<!--.*?-->|^ *\d+\. ", " ", prose, flags=re.MULTILINE)
    return {
        "headings": [level for level, _ in headings(path)],
        "rows": re.findall(r"^ *\|", prose, re.MULTILINE),
        "code": sorted({re.sub(r"\s+", " ", code) for code in re.findall(r"`[^`]+`", prose)}),
        "blocks": [re.sub(r"(?<=\s)#.*|\s+", " ", block) for block in _FENCE.findall(text)],
        "marks": re.findall(r"<!--.*?-->", text),
        "numbers": sorted(set(re.findall(r"\d+(?:[.,]\d+)*", words))),
        "links": sorted(links, key=str),
    }


@pytest.mark.parametrize("page", TWINS)
def test_both_languages_say_the_same(page: str) -> None:
    assert shape(page) == shape(page.replace(".md", ".zh-CN.md"))


@pytest.mark.parametrize("page", TWINS)
def test_each_page_links_to_its_twin_and_chinese_pages_to_chinese_ones(page: str) -> None:
    english, chinese = ROOT / page, ROOT / page.replace(".md", ".zh-CN.md")
    assert f"]({chinese.name})" in english.read_text(encoding="utf-8")
    for link in _LINK.findall(_FENCE.sub("", chinese.read_text(encoding="utf-8"))):
        target = link.partition("#")[0]
        twin = (chinese.parent / target).with_suffix(".zh-CN.md")
        assert target == english.name or not twin.exists(), f"{link}: link to {twin.name}"
    assert f"]({english.name})" in chinese.read_text(encoding="utf-8")
