"""The documentation site has every page and every public name; `make docs` builds it."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import duoka

ROOT = Path(__file__).resolve().parents[1]
API = ROOT / "docs" / "api"


def imported(name: str) -> ModuleType:
    """A module of docs/site, which is no package."""
    spec = importlib.util.spec_from_file_location(
        f"docs_site_{name}", ROOT / "docs" / "site" / f"{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build, check = imported("build"), imported("check")
SETTINGS = build.read_settings()
NAV = list(build.pages_in(SETTINGS["project"]["nav"]))


def test_every_page_is_in_the_navigation_once() -> None:
    pages = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]
    pages += [page for page in ("SECURITY.md", "benchmarks/README.md") if (ROOT / page).exists()]
    pages += [
        str(page.relative_to(ROOT))
        for page in (ROOT / "docs").rglob("*.md")
        if not page.name.endswith(".zh-CN.md")
    ]
    assert Counter(NAV) == Counter(pages)


def test_entries_without_a_page_are_left_out() -> None:
    nav = [{"Start": ["README.md", "docs/none.md"]}, {"No": ["docs/none.md"]}, "docs/none.md"]
    assert build.existing(nav) == [{"Start": ["README.md"]}]


def test_every_chinese_page_belongs_to_an_english_one() -> None:
    chinese = [*ROOT.glob("*.zh-CN.md"), *(ROOT / "docs").rglob("*.zh-CN.md")]
    shown = {ROOT / build.LANGUAGES[1].source(page) for page in NAV}
    assert chinese
    assert shown >= set(chinese)


def test_pages_have_places_of_their_own() -> None:
    places = [build.site_path(page) for page in NAV]
    assert len(places) == len(set(places))
    assert places[0] == "index.md"


def test_titles_of_the_navigation_have_chinese_words() -> None:
    titles = re.findall(r'\{ "([^"]+)" =', (build.HERE / "zensical.toml").read_text("utf-8"))
    toggles = [each["toggle"]["name"] for each in SETTINGS["project"]["theme"]["palette"]]
    words = {*titles, *toggles, SETTINGS["project"]["site_description"]}
    assert words == SETTINGS["chinese"].keys()


def test_the_reference_has_every_public_name_once() -> None:
    # "::: duoka.plan", or the path of a function with its public name as the heading.
    names = re.compile(r"^(?:::: |      heading: )(duoka\.\w+)$", re.MULTILINE)
    shown = Counter(name for page in API.glob("*.md") for name in names.findall(page.read_text()))
    assert shown == Counter(f"duoka.{name}" for name in [*duoka.__all__, "testing"])


@pytest.mark.parametrize("language", build.LANGUAGES, ids=lambda language: language.code)
def test_links_stay_within_the_site(
    language: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each relative link of the copied pages leads to a copied page or picture."""
    monkeypatch.setattr(build, "STAGE", tmp_path)
    stage = build.Stage(language, NAV, SETTINGS["project"]["repo_url"])
    stage.write()
    pages = list((tmp_path / language.code / "docs").rglob("*.md"))
    assert len(pages) == len(NAV)
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert "<!--" not in re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)#]+)[)#]", build._FENCED.sub("", text)):
            if "://" not in target:
                assert (page.parent / target).exists(), (page, target)


def test_links_to_a_heading_follow_the_language(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    for name, text in (
        ("docs/a.md", "# A\n\n([中文](a.zh-CN.md))\n\n[b](b.md#what-it-is) and `[b](c.md)`\n"),
        ("docs/b.md", "# B\n\n## What it is?\n"),
        ("docs/b.zh-CN.md", "# B\n\n```sh\n# no heading\n```\n\n## 这是什么？\n"),
        ("src.py", ""),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
    pages = ["docs/a.md", "docs/b.md"]
    english, chinese = (build.Stage(each, pages, "https://host") for each in build.LANGUAGES)
    assert english.link("b.md#what-it-is", "docs/a.md", "docs/a.md") == "b.md#what-it-is"
    assert chinese.link("b.md#what-it-is", "docs/a.md", "docs/a.md") == "b.md#这是什么"
    assert english.link("../src.py", "docs/a.md", "docs/a.md") == "https://host/blob/main/src.py"
    text = (tmp_path / "docs/a.md").read_text(encoding="utf-8")
    rewritten = chinese.rewrite(build._SWITCH.sub("", text), "docs/a.md", "docs/a.md")
    assert rewritten.split() == ["#", "A", "[b](b.md#这是什么)", "and", "`[b](c.md)`"]
    text = "1. One\n\n   <!-- run -->\n   ```console\n   $ [b](c.md)\n   ```\n"
    assert chinese.rewrite(text, "docs/a.md", "docs/a.md") == text.replace("   <!-- run -->\n", "")
    with pytest.raises(SystemExit, match=r"links to c\.md, which does not exist"):
        english.link("c.md", "docs/a.md", "docs/a.md")


def test_faults_of_a_built_site_are_found(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "index.html").write_text('<h2 id="chat"></h2><a href="../">up</a>')
    home = tmp_path / "index.html"
    home.write_text('<a href="run/#chat"></a><a href="/d/run/"></a><a href="https://x.org"></a>')
    assert check.find_faults(tmp_path, "https://host/d/") == []
    home.write_text(
        '<a href="run/#tune"></a><a href="serve/"></a><script src="https://x.org/a.js"></script>'
        "<pre>```</pre><p>```sh\nduoka</p>"
    )
    assert check.find_faults(tmp_path, "https://host/d/") == [
        "index.html loads https://x.org/a.js",
        "index.html shows Markdown: ```sh",
        "index.html links to run/#tune: no such anchor",
        "index.html links to serve/, which does not exist",
    ]


def test_pages_are_adapted_to_python_markdown() -> None:
    text = """\
Text:
1. An item
   goes on:

   ```console
   $ duoka
     - no item
   ```
   - one of its own

10. Another
No item.

| a | b |
| `x\\|y` | 1. |
"""
    assert (
        build.adapt(text)
        == """\
Text:

1. An item
    goes on:

    ```console
    $ duoka
      - no item
    ```
    - one of its own

10. Another
No item.

| a | b |
| `x|y` | 1. |
"""
    )
