from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from duoka import Workload
from duoka.base.files import cache_directory
from duoka.forecast import profile_cache
from duoka.forecast.profile_cache import find_profile, keep_profile

PROFILE = tiny.made_up([1000, 500, 500, 1000], tiny.Costs(cache=64), tied_to={3: 0})
LOAD = Workload(prompt_tokens=100, new_tokens=10, dtype="bfloat16")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_a_profile_is_found_again(cache: Path) -> None:
    assert find_profile("made up", LOAD) is None
    keep_profile(PROFILE, LOAD)
    assert find_profile("made up", LOAD) == PROFILE
    assert len(files(cache)) == 1


def test_other_checkpoints_and_types_are_other_profiles() -> None:
    keep_profile(PROFILE, LOAD)
    assert find_profile("another", LOAD) is None
    other = Workload(prompt_tokens=100, new_tokens=10, dtype="float16")
    assert find_profile("made up", other) is None


def test_a_profile_for_one_workload_serves_that_one_alone() -> None:
    keep_profile(PROFILE, LOAD, alone=True)
    assert find_profile("made up", LOAD) == PROFILE
    longer = Workload(prompt_tokens=101, new_tokens=10, dtype="bfloat16")
    assert find_profile("made up", longer) is None


@pytest.mark.parametrize("package", ["torch", "transformers", "duoka"])
def test_other_versions_trace_again(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_profile(PROFILE, LOAD)
    real = profile_cache.version
    monkeypatch.setattr(
        profile_cache, "version", lambda name: "0.0.1" if name == package else real(name)
    )
    assert find_profile("made up", LOAD) is None


@pytest.mark.parametrize("damage", ["cut", "binary", "deep", "field", "empty"])
def test_a_damaged_profile_counts_as_none(cache: Path, damage: str) -> None:
    keep_profile(PROFILE, LOAD)
    (path,) = files(cache)
    text = path.read_text(encoding="utf-8")
    if damage == "cut":
        path.write_text(text[: len(text) // 2], encoding="utf-8")
    elif damage == "binary":
        path.write_bytes(b"\xff\x00" + text.encode())
    elif damage == "deep":
        path.write_text("[" * 100_000, encoding="utf-8")
    elif damage == "field":
        told = json.dumps({**json.loads(text), "surprise": 1})
        path.write_text(told, encoding="utf-8")
    else:
        path.write_text("", encoding="utf-8")
    assert find_profile("made up", LOAD) is None
    keep_profile(PROFILE, LOAD)
    assert find_profile("made up", LOAD) == PROFILE


def test_that_it_cannot_be_kept_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DUOKA_CACHE", str(tmp_path / "file"))
    keep_profile(PROFILE, LOAD)
    assert find_profile("made up", LOAD) is None


def test_where_profiles_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DUOKA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "duoka"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory() == tmp_path / ".cache" / "duoka"


def test_a_cached_profile_is_planned_without_torch() -> None:
    keep_profile(tiny.made_up([2**20] * 4, tiny.Costs(cache=64)), LOAD)
    code = """
import sys
from duoka import Fleet, Workload
from duoka.planner.request import PlanProblem
from duoka.forecast.profile_cache import find_profile
from duoka.planner.solve import find_plan

workload = Workload(prompt_tokens=100, new_tokens=10, dtype="bfloat16")
profile = find_profile("made up", workload)
plan = find_plan(profile, PlanProblem(fleet=Fleet.parse("virtual:2x1GiB"), workload=workload))
print(plan.devices)
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout == "('vgpu:0',)\n[]\n"
