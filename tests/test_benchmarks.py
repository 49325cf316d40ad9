"""The benchmark page: its tables are those of the kept results, and its links and commands exist.

Nothing is measured here.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
PAGE = BENCHMARKS / "README.md"
PAGES = [PAGE, *(ROOT / name for name in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md"))]
SCRIPTS = sorted(BENCHMARKS.glob("*.py"))


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found = set()
    is_code = False
    for line in text_of(path).splitlines():
        is_code ^= line.lstrip().startswith("```")
        if heading := re.match(r"#+ (.*)", line if not is_code else ""):
            words = re.sub(r"[^\w\- ]", "", heading[1].strip().lower())
            found.add(words.replace(" ", "-"))
    return found


def links(path: Path) -> list[tuple[Path, str]]:
    """Return the file and the anchor of each link to a file."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(path)):
        if not target.startswith(("http:", "https:")):
            file, _, anchor = target.partition("#")
            found.append(((path.parent / file).resolve() if file else path, anchor))
    return found


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    names = ("page_kept", "page_sections", "page_tables")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name in names:  # afterwards they are forgotten
        monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    return sys.modules["page_tables"]


@pytest.fixture
def sections(tables: ModuleType) -> ModuleType:
    return sys.modules["page_sections"]


def test_page_shows_the_kept_results(tables: ModuleType) -> None:
    page = text_of(PAGE)
    assert tables.render_page(page, BENCHMARKS / "results") == page, (
        "python benchmarks/run.py --render"
    )


def test_page_has_the_markers_of_each_section(tables: ModuleType, sections: ModuleType) -> None:
    begun = re.findall(r"<!-- begin ([\w-]+) -->", text_of(PAGE))
    ended = re.findall(r"<!-- end ([\w-]+) -->", text_of(PAGE))
    assert begun == ended
    assert sorted(begun) == sorted(tables.TABLES)
    assert {section.name for section in sections.SECTIONS} | set(tables.KEPT) == set(tables.TABLES)


def test_kept_results_say_when_and_how_they_were_measured(sections: ModuleType) -> None:
    scripts = {
        section.name: {command[0] for command in section.commands} for section in sections.SECTIONS
    }
    for path in (BENCHMARKS / "results").glob("*.json"):
        result = json.loads(text_of(path))
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", result["date"])
        assert {command[0] for command in result["commands"]} == scripts[path.stem]
        assert len(result["data"]) == len(result["commands"])


def test_commands_of_sections_name_scripts_that_write_json(sections: ModuleType) -> None:
    for section in sections.SECTIONS:
        for script, *options in section.commands:
            code = text_of(BENCHMARKS / script)
            named = [option for option in (*options, "--json") if option.startswith("--")]
            assert [option for option in named if f'"{option}"' not in code] == []


def test_links_and_anchors_exist() -> None:
    broken = [
        f"{page.name}: {file.name}#{anchor}"
        for page in (PAGE, BENCHMARKS / "archive" / "README.md")
        for file, anchor in links(page)
        if not file.exists() or (anchor and anchor not in anchors(file))
    ]
    assert broken == []


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_links_to_the_page_have_an_anchor_there(name: str) -> None:
    found = [anchor for file, anchor in links(ROOT / name) if file == PAGE]
    assert found
    assert set(found) - {""} <= anchors(PAGE)


def test_each_guarantee_of_the_readme_is_among_the_claims() -> None:
    guarantees = text_of(ROOT / "README.md").split("## Guarantees")[1].split("\n## ")[0]
    page = " ".join(text_of(PAGE).split("## Claims")[1].split("\n## ")[0].split()).lower()
    titles = re.findall(r"^- \*\*(.+?)\.\*\*", guarantees, flags=re.MULTILINE)
    assert len(titles) >= 5
    assert [title for title in titles if title.lower() not in page] == []


def test_named_scripts_exist() -> None:
    named = {
        name for page in PAGES for name in re.findall(r"benchmarks/([\w/]+\.py)", text_of(page))
    }
    named |= set(re.findall(r"`([\w/]+\.py)`", text_of(PAGE).split("## Other scripts")[1]))
    assert [name for name in sorted(named) if not (BENCHMARKS / name).exists()] == []


def test_each_script_is_named_on_the_page_or_used_by_another(sections: ModuleType) -> None:
    used = set(re.findall(r"(\w+)\.py", text_of(PAGE)))
    used |= {command[0][:-3] for section in sections.SECTIONS for command in section.commands}
    for path in SCRIPTS:
        for node in ast.walk(ast.parse(text_of(path))):
            if isinstance(node, ast.ImportFrom) and node.module:
                used.add(node.module)
            elif isinstance(node, ast.Import):
                used |= {each.name for each in node.names}
    assert [path.name for path in SCRIPTS if path.stem not in used] == []


def test_archive_lists_each_table() -> None:
    index = text_of(BENCHMARKS / "archive" / "README.md")
    tables = {path.name for path in (BENCHMARKS / "archive").glob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\(([\w.-]+\.md)\)", index)) == tables


def test_plots_have_a_white_background_and_no_date() -> None:
    for path in sorted((BENCHMARKS / "plots").glob("*.svg")):
        text = text_of(path)
        assert "fill: #ffffff" in text.lower()
        assert "<dc:date>" not in text
