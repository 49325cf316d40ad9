from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import schemas
import tiny
from tiny import MIB

import duoka.planner.plan
from duoka import Device, Fleet, Link, Plan, Workload
from duoka.errors import FleetError, FormatError
from duoka.hardware.gpu_generation import GpuGeneration
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    profile = tiny.made_up([30 * MIB] * 5, tiny.Costs(cache=512))
    workload = Workload(prompt_tokens=300, new_tokens=20, dtype="bfloat16")
    problem = PlanProblem(fleet=tiny.fleet(120, 100), workload=workload)
    return replace(find_plan(profile, problem), source="模型/glm")


def test_a_plan_survives_its_json_form(plan: Plan) -> None:
    assert len(plan.devices) == 2
    assert Plan.from_json(plan.to_json()) == plan
    data = json.loads(plan.to_json())
    assert (data["format"], data["version"], data["source"]) == ("duoka.plan", 9, "模型/glm")
    assert "模型" in plan.to_json()


def test_a_plan_is_printed_as_its_table(plan: Plan) -> None:
    lines = str(plan).splitlines()
    assert lines[0] == f"{plan.model} on 2 of 2 GPUs"
    assert any(line.split()[:1] == [plan.devices[0]] for line in lines)
    assert repr(plan).startswith(f"<Plan: {plan.model} on {plan.devices[0]}, ")
    assert "\n" not in repr(plan)


def test_a_plan_survives_a_file(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert Plan.load(str(path)) == plan
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def changed(plan: Plan, **values: Any) -> str:
    data = json.loads(plan.to_json())
    for path, value in values.items():
        *parents, name = path.split("__")
        place: Any = data
        for parent in parents:
            place = place[int(parent)] if parent.isdigit() else place[parent]
        name = int(name) if name.isdigit() else name
        if value is ...:
            del place[name]
        else:
            place[name] = value
    return json.dumps(data)


@pytest.mark.parametrize("version", [1, 8, None, "9", True, 10])
def test_another_version_is_refused(plan: Plan, version: Any) -> None:
    with pytest.raises(FormatError, match="reads version 9") as caught:
        Plan.from_json(changed(plan, version=version))
    newer = "update duoka, or " if version == 10 else ""
    assert caught.value.hint == f"{newer}make the plan again"


def test_the_most_new_tokens_change_no_plan(plan: Plan) -> None:
    limited = replace(plan, request=replace(plan.request, most_new_tokens=7))
    assert Plan.from_json(limited.to_json()).request.most_new_tokens == 7
    assert limited == plan


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
        ({"fleet__devices__0__name": "vgpu:9"}, ": its devices"),
        ({"forecast__devices": []}, ": its devices"),
        ({"workload__prefill_chunk_tokens": "auto"}, ": its devices"),
        ({"fingerprint": "another"}, ": its devices"),
        ({"binding_device": "cuda:7"}, ": its devices"),
        ({"offloaded": ["block.99"]}, ": its devices"),
        ({"fleet__devices__0__budget_bytes": 2**63}, ".fleet.devices[0].budget_bytes: expected an"),
        ({"forecast__devices__0__weight_bytes": 10**400}, ".forecast.devices[0].weight_bytes: exp"),
    ],
)
def test_a_damaged_plan_is_refused_with_the_place(
    plan: Plan, values: dict[str, Any], where: str
) -> None:
    with pytest.raises(FormatError) as caught:
        Plan.from_json(changed(plan, **values))
    assert f"Plan{where}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "JSON") for text in ("", "{", "\x00\x01", "[" * 100_000, "[]", "3", "NaN")),
        ('{"format": "duoka.plan", ', "JSON"),
        ("{}", "not a duoka plan"),
        ('{"format": "duoka.profile", "version": 1}', "not a duoka plan"),
    ],
)
def test_what_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Plan.from_json(text)


def test_hostile_json_is_refused(plan: Plan) -> None:
    twice = plan.to_json().replace('"version": 9', '"version": 9, "version": 9')
    for text in (twice, changed(plan, value=float("nan"))):
        with pytest.raises(FormatError):
            Plan.from_json(text)


def test_a_directory_whose_name_is_no_text(plan: Plan, tmp_path: Path) -> None:
    named = replace(plan, source=os.fsdecode(b"/data/gl\xfc"))
    named.save(tmp_path / "plan")
    assert os.fsencode(Plan.load(tmp_path / "plan").source) == b"/data/gl\xfc"


def test_a_file_that_cannot_be_a_plan_is_refused(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duoka.planner.plan, "_MAX_BYTES", 100)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    plan.save(tmp_path / "long")
    for path, message in (
        (tmp_path / "nothing", "can't be read"),
        (tmp_path / "binary", "can't be read"),
        (tmp_path / "long", "more than 100 bytes"),
        ("/dev/zero", "not a regular file"),
    ):
        with pytest.raises(FormatError, match=message):
            Plan.load(path)


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


# ── the schema ──


def test_the_schema_in_the_package_is_the_dataclasses() -> None:
    written = json.loads(schemas.PLAN_FILE.read_text(encoding="utf-8"))
    assert written == schemas.plan_schema(), "write it again: make schema"


def test_the_schema_takes_plans_and_refuses_what_from_json_refuses(plan: Plan) -> None:
    validator = jsonschema.Draft202012Validator(schemas.plan_schema())
    validator.check_schema(schemas.plan_schema())
    validator.validate(json.loads(plan.to_json()))
    for values in (
        {"fleet": ...},
        {"surprise": 1},
        {"version": 1},
        {"workload__dtype": "int3"},
        {"placement__entries__0": ["one"]},
        {"placement__entries__0": ["one", "cuda:0", "three"]},
        {"fleet__devices__0__budget_bytes": True},
    ):
        text = changed(plan, **values)
        assert not validator.is_valid(json.loads(text)), values
        with pytest.raises(FormatError):
            Plan.from_json(text)


# ── the same plan on the GPUs that are there now ──


def card(name: str, mib: int, uuid: str = "", product: str = "") -> Device:
    return Device(name=name, budget_bytes=mib * MIB, uuid=uuid, product=product)


@pytest.fixture(scope="module")
def detected() -> Plan:
    """A plan for two GPUs with an identity, out of three."""
    profile = tiny.made_up([30 * MIB] * 5, tiny.Costs(cache=512))
    fleet = Fleet(
        devices=(
            card("cuda:0", 120, "GPU-a", "RTX 4090"),
            card("cuda:1", 100, "GPU-b", "RTX 3060"),
            card("cuda:2", 20, "GPU-c", "GT 1030"),
        ),
        links=(
            Link(source="cuda:0", target="cuda:1", bytes_per_second=1e9, latency_seconds=0),
            Link(source="cuda:2", target="cuda:1", bytes_per_second=1e9, latency_seconds=0),
        ),
    )
    workload = Workload(prompt_tokens=300, new_tokens=20, dtype="bfloat16")
    plan = find_plan(profile, PlanProblem(fleet=fleet, workload=workload, gpus="0,1,2"))
    assert set(plan.devices) == {"cuda:0", "cuda:1"}
    return plan


def test_a_gpu_is_found_by_its_identity(detected: Plan) -> None:
    here = Fleet(devices=(card("cuda:0", 200, "GPU-b"), card("cuda:5", 200, "GPU-a")))
    now = detected.on_fleet(here)
    renamed = {"cuda:0": "cuda:5", "cuda:1": "cuda:0"}
    assert now.placement.entries == tuple((m, renamed[d]) for m, d in detected.placement.entries)
    assert [d.uuid for d in now.fleet.devices] == ["GPU-a", "GPU-b"]  # the unused third is gone
    assert [(link.source, link.target) for link in now.fleet.links] == [("cuda:5", "cuda:0")]
    assert now.binding_device == renamed[detected.binding_device]
    assert Plan.from_json(now.to_json()) == now


def test_no_more_than_the_planned_budget_is_used_and_no_more_than_there_is(detected: Plan) -> None:
    needed = detected.forecast.devices[1].allocated_bytes // MIB + 1
    here = Fleet(devices=(card("cuda:0", 500, "GPU-a"), card("cuda:1", needed, "GPU-b")))
    now = detected.on_fleet(here)
    assert [d.budget_bytes for d in now.fleet.devices] == [120 * MIB, needed * MIB]
    for forecast in now.forecast.devices:
        assert forecast.allocated_bytes <= forecast.reserved_bytes <= forecast.budget_bytes
        assert forecast.budget_bytes == now.fleet.device(forecast.device).budget_bytes


def test_every_difference_is_told_at_once(detected: Plan) -> None:
    here = Fleet(devices=(card("cuda:0", 10, "GPU-b"), card("cuda:1", 500, "GPU-x")))
    with pytest.raises(FleetError) as caught:
        detected.on_fleet(here)
    told = str(caught.value)
    assert "cuda:0 RTX 4090 GPU-a is missing, hidden, or full" in told
    assert "cuda:1 RTX 3060 GPU-b has 10.00 MiB available" in told
    assert told.endswith("are missing")
    assert str(caught.value.hint).splitlines() == [
        "plan for the GPUs of this machine: omit --gpus, or use --replan with a saved plan",
        "  cuda:0  GPU-b  has a budget of 10.00 MiB",
        "  cuda:1  GPU-x  has a budget of 500.00 MiB",
    ]


def test_declared_gpus_are_found_by_name_and_other_devices_stay(plan: Plan) -> None:
    assert plan.on_fleet(Fleet(devices=(card("cuda:0", 1),))) == plan  # it is on virtual GPUs
    declared = Plan.from_json(plan.to_json().replace("vgpu", "cuda"))
    here = Fleet(devices=(card("cuda:0", 200, "GPU-a"), card("cuda:1", 200, "GPU-b")))
    assert [d.uuid for d in declared.on_fleet(here).fleet.devices] == ["GPU-a", "GPU-b"]
    with pytest.raises(FleetError, match="cuda:1 is missing"):
        declared.on_fleet(Fleet(devices=(card("cuda:0", 200, "GPU-a"),)))


def test_a_plan_takes_the_generation_of_the_gpus_that_are_here(detected: Plan) -> None:
    old = replace(card("cuda:0", 500, "GPU-a"), has_bfloat16=False)
    new = replace(card("cuda:1", 500, "GPU-b"), workspace_bytes=32 * MIB)
    now = detected.on_fleet(Fleet(devices=(old, new)))
    assert now.workload.gpu_generation == GpuGeneration(32 * MIB, before_ampere=True)


def fails(message: str) -> Callable[[str | None], Fleet]:
    def detect(which: str | None = None) -> Fleet:
        raise FleetError(message)

    return detect


@pytest.mark.parametrize("tells", [True, False])
def test_where_nobody_tells_memory_declared_gpus_are_believed(
    plan: Plan, detected: Plan, tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = Plan.from_json(plan.to_json().replace("vgpu", "cuda"))
    monkeypatch.setattr(Fleet, "detect", fails("no GPU can be used"))
    monkeypatch.setattr(duoka.planner.plan, "reports_memory", lambda: tells)
    assert plan.on_this_machine() is plan  # it is on virtual GPUs
    if not tells:
        assert declared.on_this_machine() is declared
    for each in [detected, declared] if tells else [detected]:
        with pytest.raises(FleetError, match="no GPU can be used"):
            each.on_this_machine()


def test_a_smaller_card_than_the_declared_one(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = tiny.made_up([2000 * MIB] * 5, tiny.Costs(cache=512))
    workload = Workload(prompt_tokens=300, new_tokens=20, dtype="bfloat16")
    plan = find_plan(profile, PlanProblem(fleet=Fleet.parse("RTX 3090"), workload=workload))
    smaller = card("cuda:0", 7000, "GPU-a", "NVIDIA GeForce RTX 4060")
    monkeypatch.setattr(Fleet, "detect", lambda which=None: Fleet(devices=(smaller,)))
    with pytest.raises(FleetError, match=r"cuda:0 RTX 3090 has 6\.84 GiB available") as caught:
        plan.on_this_machine()
    assert "  cuda:0  NVIDIA GeForce RTX 4060  GPU-a  has a budget of 6.84 GiB" in str(
        caught.value.hint
    )


def test_another_checkpoint_is_refused(plan: Plan) -> None:
    plan.refuse_other(plan.fingerprint, "glm")
    with pytest.raises(FormatError, match="glm is not the checkpoint of the plan") as caught:
        plan.refuse_other("another", "glm")
    assert "--replan" in str(caught.value.hint)
