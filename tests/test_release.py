"""The checks of a release find what is wrong; see scripts/release_check.py."""

from __future__ import annotations

import tomllib
from pathlib import Path

import licenses
import pytest
import release_check
from licenses import Package
from release_check import CheckError, Release

ROOT = Path(__file__).resolve().parents[1]
CHANGELOG = "\n\n".join(
    [
        "# Changelog",
        "## [Unreleased]",
        "## [1.2.0] - 2026-12-01",
        "- New.",
        "## [1.1.0] - 2026-01-01\n",
    ]
)
CITATION = 'version: 1.2.0\ndate-released: "2026-12-01"\n'


def package(name: str = "six", text: str = "MIT", extras: tuple[str, ...] = ()) -> Package:
    return Package(name=name, version="1.0", license=text, extras=extras)


def test_the_working_tree_has_one_version() -> None:
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in release_check.VERSIONS}
    recorded = release_check.recorded_versions(texts)
    assert "none" not in recorded.values()
    assert len(set(recorded.values())) == 1, recorded


def test_another_version_is_found() -> None:
    recorded = {"a.py": "1.2.0", "b.cff": "1.1.0"}
    pages = {
        "run.md": "pip install duoka==1.2.0",
        "deploy.md": "image: duoka:1.1.0, duoka[serve]==1.0.0, transformers==5.0.0",
    }
    assert release_check.version_faults("1.2.0", recorded, pages) == [
        "b.cff has version 1.1.0, not 1.2.0",
        "deploy.md mentions version 1.0.0, not 1.2.0",
        "deploy.md mentions version 1.1.0, not 1.2.0",
    ]


def test_the_changelog_of_a_release() -> None:
    assert release_check.changelog_faults("1.2.0", CHANGELOG, CITATION) == []
    assert release_check.changelog_faults("1.3.0", CHANGELOG, CITATION) == [
        "a section '## [1.3.0] - YYYY-MM-DD' is missing"
    ]
    undated = CHANGELOG.replace(" - 2026-12-01", "")
    assert len(release_check.changelog_faults("1.2.0", undated, CITATION)) == 1
    late = CHANGELOG.replace("[Unreleased]\n", "[Unreleased]\n\n- Later.\n")
    assert release_check.changelog_faults("1.2.0", late, CITATION) == [
        "[Unreleased] is not empty: move its entries to [1.2.0]"
    ]
    assert release_check.changelog_faults("1.2.0", CHANGELOG, "") == [
        "CITATION.cff has another date than the changelog's 2026-12-01"
    ]


def test_the_contents_of_wheels() -> None:
    sources = ["duoka/__init__.py", "duoka/forecast/_memory.c", "duoka/forecast/_allocator.h"]
    pure = ["duoka/__init__.py", "duoka-1.2.0.dist-info/METADATA"]
    compiled = [*pure, "duoka/forecast/", "duoka/forecast/_memory.abi3.so"]
    assert release_check.wheel_faults(pure, sources, is_compiled=False) == []
    assert release_check.wheel_faults(compiled, sources, is_compiled=True) == []
    assert release_check.wheel_faults(pure, sources, is_compiled=True) == [
        "it lacks duoka/forecast/_memory.abi3.so"
    ]
    assert release_check.wheel_faults(
        [*compiled[1:], "tests/tiny.py", "duoka/forecast/_memory.c"], sources, is_compiled=True
    ) == [
        "it lacks duoka/__init__.py",
        "it contains duoka/forecast/_memory.c",
        "it contains tests/tiny.py",
    ]


def test_the_contents_of_an_sdist() -> None:
    root = ["pyproject.toml", "hatch_build.py", "constraints.txt", "LICENSE", "README.md"]
    tracked = [*root, "src/duoka/a.py", "src/duoka/b.c", ".ci/run"]
    files = [*root, "src/duoka/a.py", "src/duoka/b.c", "PKG-INFO"]
    assert release_check.sdist_faults(files, tracked) == []
    wrong = [*files, "src/duoka/b.so"]
    wrong.remove("src/duoka/b.c")
    assert release_check.sdist_faults(wrong, tracked) == [
        "it lacks src/duoka/b.c",
        "it contains src/duoka/b.so",
    ]


def test_all_checks_run_after_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(release: Release) -> str:
        raise CheckError("no compiler", "exit code 1")

    release = Release(root=ROOT, version="1.2.0")
    checks = {"build": fail, "metadata": lambda _: "read", "git": lambda _: "clean"}
    failed = release_check.run_checks(release, checks, {"metadata": "build"})
    assert failed == ["build", "metadata"]
    assert capsys.readouterr().out == (
        "✗ build:\n    no compiler\n    exit code 1\n"
        "- metadata: not checked, because build failed\n"
        "✓ git: clean\n"
    )


@pytest.mark.parametrize(
    ("name", "expression", "field", "classifiers", "expected"),
    [
        ("a", "mit and Apache-2.0", "", [], "MIT AND Apache-2.0"),
        ("a", "", "Apache License, Version 2.0", ["MIT License"], "Apache-2.0"),
        ("a", "", "Copyright 2020 …", ["MIT License"], "MIT"),
        ("a", "", "", ["MIT License", "Apache Software License"], "Apache-2.0 AND MIT"),
        ("a", "", "BSD", ["BSD License"], "unknown"),
        ("a", "", "", ["OSI Approved"], "unknown"),
        ("a", "", "", [], "unknown"),
        ("sympy", "", "BSD", ["BSD License"], "BSD-3-Clause"),
    ],
)
def test_licenses_of_metadata(
    name: str, expression: str, field: str, classifiers: list[str], expected: str
) -> None:
    assert licenses.spdx(name, expression, field, classifiers) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("MIT", True),
        ("GPL-3.0-only", False),
        ("unknown", False),
        ("", False),
        ("MIT AND GPL-3.0-only", False),
        ("MIT OR GPL-3.0-only", True),
        ("(GPL-2.0-only OR MIT) AND Apache-2.0", True),
        ("(GPL-2.0-only OR (MIT AND AGPL-3.0-only)) AND Apache-2.0", False),
        ("Apache-2.0 WITH LLVM-exception AND MIT", True),
        ("GPL-2.0-only WITH Classpath-exception-2.0", False),
    ],
)
def test_allowed_licenses(expression: str, expected: bool) -> None:
    assert licenses.is_allowed(expression) is expected


def test_a_license_that_is_not_allowed_is_refused() -> None:
    nvidia = "LicenseRef-NVIDIA-Proprietary"
    packages = [
        package(),
        package("new", "unknown"),
        package("nvidia-cublas", nvidia),
        package("nvidia-ml-py", nvidia),
        package("other", nvidia),
    ]
    assert [fault.split()[0] for fault in licenses.license_faults(packages)] == [
        "new",
        "nvidia-ml-py",
        "other",
    ]


def test_the_page_is_compared_by_names_and_licenses() -> None:
    shown = [package(), package("gone"), package("nvidia-nccl-cu13", "Apache-2.0")]
    installed = [Package(name="six", version="2.0", license="MIT"), package("new", "ISC")]
    assert licenses.page_faults(shown, installed) == [
        "new (ISC) is not on the page",
        "gone (MIT) is on the page only",
    ]
    changed = [package(text="ISC"), package("gone")]
    assert len(licenses.page_faults(shown, changed)) == 2


def test_the_page_is_read_as_it_is_written() -> None:
    packages = [
        package(),
        package("peft", "Apache-2.0", ("bnb", "train")),
        package("triton"),
    ]
    assert sorted(licenses.parse_page(licenses.format_page(packages)), key=repr) == sorted(
        packages, key=repr
    )


def test_the_kept_page() -> None:
    text = licenses.PAGE.read_text(encoding="utf-8")
    packages = licenses.parse_page(text)
    assert licenses.format_page(packages) == text
    assert licenses.license_faults(packages) == []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {licenses.requirement_name(line) for line in project["dependencies"]}
    assert required <= {each.name for each in packages}, "run: make release-check UPDATE=--update"
