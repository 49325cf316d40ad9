"""Requirements: the table of extras is pyproject.toml's, and its packages can be asked for."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from duoka.base import requirements
from duoka.base.requirements import EXTRAS, missing_extras, require_package
from duoka.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
# Groups of other extras, and names of 0.1 for what is now installed in any case.
ALIASES = {"all", "dev", "serve", "grammar", "train"}


def test_each_extra_has_a_package_and_a_purpose() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert {extra for extra, _ in EXTRAS.values()} == extras.keys() - ALIASES
    for package, (extra, purpose) in EXTRAS.items():
        names = {Requirement(line).name.replace("-", "_") for line in extras[extra]}
        assert package in names
        assert purpose
    (combined,) = map(Requirement, extras["all"])
    assert combined.extras == {extra for extra, _ in EXTRAS.values()} - {"ray"}
    required = {Requirement(line).name for line in project["dependencies"]}
    assert {"fastapi", "uvicorn", "prometheus-client", "llguidance", "peft"} <= required


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda name: None)
    assert len(missing_extras()) == len(EXTRAS)
    with pytest.raises(UsageError, match="needs pyarrow, which isn't installed") as refused:
        require_package("pyarrow", "data.parquet needs")
    assert refused.value.hint == 'pip install "duoka[parquet]"'
