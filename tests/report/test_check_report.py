"""A report's JSON form is what its schema says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import schemas
from reports import bad_report, good_report

from duoka.errors import Faults
from duoka.report.check_report import CheckReport, PeakMemory, Stop


def validator() -> Any:
    jsonschema.Draft202012Validator.check_schema(schemas.report_schema())
    return jsonschema.Draft202012Validator(schemas.report_schema())


def test_the_schema_in_the_package_is_the_dataclasses() -> None:
    written = json.loads(schemas.REPORT_FILE.read_text(encoding="utf-8"))
    assert written == schemas.report_schema(), "write it again: make schema"


@pytest.mark.parametrize("make", [bad_report, good_report])
def test_the_schema_takes_reports(make: Any, tmp_path: Path) -> None:
    report = make(tmp_path)
    data = json.loads(report.to_json())
    validator().validate(data)
    assert data["ok"] is report.ok
    assert "subject" not in data


def test_the_schema_refuses_other_things(tmp_path: Path) -> None:
    data = json.loads(bad_report(tmp_path).to_json())
    others: list[dict[str, Any]] = [
        {**data, "version": 99},
        {**data, "surprise": 1},
        {**data, "faults": [{**data["faults"][0], "kind": "bad luck"}]},
        {key: value for key, value in data.items() if key != "ok"},
    ]
    for other in others:
        assert not validator().is_valid(other)


def test_the_verdict() -> None:
    peak = PeakMemory(device="cuda:0", allocated_bytes=1, reserved_bytes=1)
    fine = {"model": "m", "devices": ("cuda:0",)}
    assert CheckReport(**fine, memory=(peak,)).ok
    for wrong in (
        {"completeness": Faults(missing=("a",))},
        {"stop": Stop(message="TypeError", place=None, phase="prefill")},
        {"memory": (PeakMemory(device="d", allocated_bytes=1, reserved_bytes=1, overflows=True),)},
    ):
        assert not CheckReport(**fine, **wrong).ok  # type: ignore[arg-type]
