"""Plan files as somebody may have damaged or forged them."""

from __future__ import annotations

import io
import json
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import schemas
import tiny
from fuzzing import JSON, damaged, damaged_text, fuzz, told_of
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from duoka.errors import FleetError, FormatError, UsageError
from duoka.forecast.workload import Workload
from duoka.hardware.device import Device
from duoka.hardware.fleet import Fleet
from duoka.planner.plan import Plan
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan
from duoka.report.export import TOOLS, export
from duoka.report.terminal import render_plan

_PLAN = replace(
    find_plan(
        tiny.made_up([30 * tiny.MIB] * 5, tiny.Costs(cache=512)),
        PlanProblem(
            fleet=tiny.fleet(120, 100),
            workload=Workload(prompt_tokens=300, new_tokens=20, dtype="bfloat16"),
        ),
    ),
    source="模型/glm",
)
VALID: dict[str, Any] = json.loads(_PLAN.to_json())
SCHEMA = jsonschema.Draft202012Validator(schemas.plan_schema())


def as_read(told: Any, read: Any) -> Any:
    """A value with floats where the reader took them."""
    if isinstance(told, dict) and isinstance(read, dict):
        return {key: as_read(item, read.get(key)) for key, item in told.items()}
    if isinstance(told, list) and isinstance(read, list) and len(told) == len(read):
        return [as_read(*pair) for pair in zip(told, read, strict=True)]
    return float(told) if type(told) is int and type(read) is float else told


def accepted(text: str) -> Plan | None:
    """A plan, if it is one: then it says what the text says, and nothing contradicts itself."""
    try:
        plan = Plan.from_json(text)
    except FormatError as error:
        told_of(error, "", 2000)
        return None
    told = json.loads(text)
    # An integer of any length serves as a float, which keeps its first digits.
    assert json.loads(plan.to_json(), parse_float=str) == json.loads(
        json.dumps(as_read(told, json.loads(plan.to_json()))), parse_float=str
    )
    assert Plan.from_json(plan.to_json()) == plan
    SCHEMA.validate(told)
    names = {device.name for device in plan.fleet.devices}
    assert set(plan.devices) <= names
    assert len(names) == len(plan.fleet.devices)
    assert {device.device for device in plan.forecast.devices} == set(plan.devices)
    assert plan.placement.fingerprint == plan.fingerprint
    assert plan.binding_device in names
    shown(plan, 80)
    shown(plan, 20)
    here(plan)
    handed_out(plan)
    return plan


def shown(plan: Plan, columns: int) -> None:
    """Whatever it says, it can be looked at, in lines that fit."""
    console = Console(file=io.StringIO(), width=columns)
    console.print(render_plan(plan))
    assert isinstance(console.file, io.StringIO)
    assert max(map(cell_len, console.file.getvalue().splitlines())) <= columns


def handed_out(plan: Plan) -> None:
    """It is told to other tools, or refused."""
    for tool in TOOLS:
        with suppress(UsageError):
            done = export(plan, tool)
            notes = str(done).removesuffix(done.text)
            assert all(line.startswith("#") for line in notes.splitlines())


def here(plan: Plan) -> None:
    """It is moved to GPUs that are there, or refused."""
    gpus = tuple(Device(name=f"cuda:{index}", budget_bytes=2**34) for index in range(3))
    try:
        moved = plan.on_fleet(Fleet(devices=gpus))
    except FleetError:
        return
    assert set(moved.devices) <= set(moved.fleet.names)


@fuzz()
@given(damaged(VALID))
def test_parts_that_were_changed(told: Any) -> None:
    accepted(json.dumps(told))


@pytest.mark.slow
@fuzz()
@given(damaged(json.loads(_PLAN.to_json().replace("vgpu", "cuda"))))
def test_plans_for_gpus_that_were_changed(told: Any) -> None:
    accepted(json.dumps(told))


@fuzz()
@given(damaged_text(_PLAN.to_json()))
def test_text_that_was_changed(text: str) -> None:
    accepted(text)


@fuzz()
@given(JSON | st.fixed_dictionaries({"format": st.just("duoka.plan"), "version": JSON}))
def test_any_json(told: Any) -> None:
    assert accepted(json.dumps(told)) is None


@fuzz()
@given(st.text())
def test_any_text(text: str) -> None:
    assert accepted(text) is None


def test_what_is_valid_is_accepted() -> None:
    assert accepted(_PLAN.to_json()) == _PLAN


@pytest.mark.parametrize("depth", [10, 1000, 100_000])
def test_depth(depth: int) -> None:
    assert accepted('{"format": ' + "[" * depth + "]" * depth + "}") is None
