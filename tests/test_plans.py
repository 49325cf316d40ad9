from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from duoka import Plan, Workload
from duoka.errors import FormatError
from duoka.planner import Question, solve
from duoka.plans import write_whole

from . import tiny
from .tiny import MIB


@pytest.fixture(scope="module")
def plan() -> Plan:
    profile = tiny.made_up([30 * MIB] * 5, tiny.Costs(cache=512))
    workload = Workload(prompt_tokens=300, new_tokens=20, dtype="bfloat16")
    question = Question(fleet=tiny.fleet(120, 100), workload=workload)
    return solve(profile, question, source="模型/glm")


def test_a_plan_survives_its_json_form(plan: Plan) -> None:
    assert len(plan.devices) == 2
    assert Plan.from_json(plan.to_json()) == plan


def test_the_json_form_has_a_format_and_a_version(plan: Plan) -> None:
    data = json.loads(plan.to_json())
    assert (data["format"], data["version"]) == ("duoka.plan", 1)
    assert data["source"] == "模型/glm"
    assert "模型" in plan.to_json()


def test_a_plan_survives_a_file(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert Plan.load(str(path)) == plan
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_device_map_for_transformers(plan: Plan) -> None:
    assert plan.device_map == dict(plan.placement.entries)
    assert tuple(dict.fromkeys(plan.device_map.values())) == plan.devices


def changed(plan: Plan, **values: Any) -> str:
    data = json.loads(plan.to_json())
    for path, value in values.items():
        *parents, name = path.split("__")
        place = data
        for parent in parents:
            place = place[int(parent)] if parent.isdigit() else place[parent]
        if value is ...:
            del place[name]
        else:
            place[name] = value
    return json.dumps(data)


@pytest.mark.parametrize("version", [0, 2, None, "1", True])
def test_another_version_is_refused(plan: Plan, version: Any) -> None:
    with pytest.raises(FormatError, match="reads version 1") as caught:
        Plan.from_json(changed(plan, version=version))
    assert caught.value.hint == "make the plan again"


@pytest.mark.parametrize("text", ["{}", '{"format": "duoka.profile", "version": 1}'])
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="no plan"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"fleet__devices__0__budget_bytes": "24GiB"}, ".fleet.devices[0].budget_bytes"),
        ({"fleet__devices__0__budget_bytes": -1}, ".fleet.devices[0]"),
        ({"fleet": ...}, ".fleet"),
        ({"surprise": 1}, ".surprise"),
        ({"workload__dtype": "int3"}, ".workload.dtype"),
        ({"value": None}, ".value"),
        ({"placement__entries": []}, ".placement"),
        ({"fleet__devices__0__name": "vgpu:9"}, ": the fleet has no device vgpu:0"),
        ({"forecast__devices": []}, ": the forecast is for other devices"),
        ({"workload__prefill_chunk_tokens": "auto"}, ": the workload or the placement"),
        ({"fingerprint": "another"}, ": the workload or the placement"),
    ],
)
def test_a_damaged_plan_is_refused_with_the_place(
    plan: Plan, values: dict[str, Any], where: str
) -> None:
    with pytest.raises(FormatError) as caught:
        Plan.from_json(changed(plan, **values))
    assert f"Plan{where}" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"format": "duoka.plan", ', "\x00\x01", "[" * 100_000, "[]", "3", "NaN"],
    ids=["empty", "open", "cut", "binary", "deep", "list", "number", "nan"],
)
def test_a_cut_file_is_refused(text: str) -> None:
    with pytest.raises(FormatError, match="JSON"):
        Plan.from_json(text)


def test_hostile_json_is_refused(plan: Plan) -> None:
    text = plan.to_json()
    with pytest.raises(FormatError):
        Plan.from_json(text.replace('"version": 1', '"version": 1, "version": 1'))
    with pytest.raises(FormatError):
        Plan.from_json(changed(plan, value=float("nan")))


def test_a_file_that_is_not_there_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="can't be read"):
        Plan.load(tmp_path / "nothing.json")
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FormatError, match="can't be read"):
        Plan.load(binary)


def test_a_plan_is_written_whole_or_not_at_all(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    before = path.read_bytes()

    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            replace(plan, source="another").save(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_text_that_cannot_be_encoded_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_whole(tmp_path / "file", "half \ud800")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_a_users_mistake(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        plan.save(tmp_path / "nowhere" / "plan.json")
