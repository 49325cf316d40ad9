"""A SARIF log has the form that version 2.1.0 of the specification gives it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from urllib.parse import unquote, urlsplit

import jsonschema
import pytest
from reports import bad_report, cache_fault, good_report, loss_fault, table_fault, write_model
from sarif_form import SCHEMA, Json

from duoka.errors import Faults
from duoka.report import sarif
from duoka.report.check_report import CheckReport, Fault, FaultKind, Place


def log_of(report: CheckReport, root: Path) -> Json:
    log: Json = json.loads(sarif.dumps(report, root))
    jsonschema.Draft202012Validator(SCHEMA).validate(log)
    return log


def run_of(report: CheckReport, root: Path) -> Json:
    run: Json = log_of(report, root)["runs"][0]
    return run


def result_of(fault: Fault, root: Path) -> Json:
    [result] = run_of(CheckReport(model="m", devices=("cuda:0",), faults=(fault,)), root)["results"]
    found: Json = result
    return found


def locations(value: Any) -> Iterator[Json]:
    """Every physical location in a log."""
    if isinstance(value, dict):
        if "artifactLocation" in value:
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from locations(item)


@pytest.mark.parametrize("make", [bad_report, good_report])
def test_the_form(make: Any, tmp_path: Path) -> None:
    log_of(make(tmp_path), tmp_path)
    log_of(make(tmp_path), tmp_path / "elsewhere")


def test_nothing_wrong_is_no_result(tmp_path: Path) -> None:
    run = run_of(good_report(tmp_path), tmp_path)
    assert run["results"] == []
    assert run["invocations"] == [{"executionSuccessful": True}]


def test_every_kind_of_fault_has_a_rule(tmp_path: Path) -> None:
    fault = table_fault(write_model(tmp_path))
    rules = run_of(good_report(tmp_path), tmp_path)["tool"]["driver"]["rules"]
    for kind in get_args(FaultKind):
        result = result_of(replace(fault, kind=kind), tmp_path)
        assert result["ruleId"] == kind == rules[result["ruleIndex"]]["id"]


def test_levels_and_what_has_no_line(tmp_path: Path) -> None:
    run = run_of(bad_report(tmp_path), tmp_path)
    found = [(result["ruleId"], result["level"]) for result in run["results"]]
    assert found == [
        ("mixed-devices", "error"),
        ("mixed-devices", "error"),
        ("hard-coded-device", "warning"),
        ("memory", "error"),
    ]
    [invocation] = run["invocations"]
    assert invocation["executionSuccessful"] is False
    [incomplete] = invocation["toolConfigurationNotifications"]
    assert "encoder.layers.0-27.weight" in incomplete["message"]["text"]
    [stopped] = invocation["toolExecutionNotifications"]
    assert "NoneType" in stopped["message"]["text"]
    assert stopped["locations"]


def test_regions_hold_the_expression(tmp_path: Path) -> None:
    file = write_model(tmp_path)
    lines = file.read_text(encoding="utf-8").splitlines()
    for fault in (cache_fault(file), loss_fault(file), table_fault(file)):
        region = result_of(fault, tmp_path)["locations"][0]["physicalLocation"]["region"]
        line = lines[region["startLine"] - 1]
        # §3.30.5 to 3.30.8: from 1 on, and the end is behind the last character.
        assert line[region["startColumn"] - 1 : region["endColumn"] - 1] == fault.source


def test_files_under_the_root_are_relative(tmp_path: Path) -> None:
    folder = tmp_path / "a b#é"
    folder.mkdir()
    log = log_of(bad_report(folder), tmp_path)
    found = [each["artifactLocation"] for each in locations(log)]
    assert found
    # §3.4.3: a relative reference; §3.10.1: characters that a URI doesn't have are encoded.
    assert {each["uri"] for each in found} == {"a%20b%23%C3%A9/modeling_tiny.py"}
    assert {each["uriBaseId"] for each in found} == {"%SRCROOT%"}
    assert str(tmp_path) not in json.dumps(log)


def test_other_files_are_absolute(tmp_path: Path) -> None:
    log = log_of(bad_report(tmp_path), tmp_path / "elsewhere")
    for each in locations(log):
        parts = urlsplit(each["artifactLocation"]["uri"])
        assert parts.scheme == "file"
        assert Path(unquote(parts.path)) == tmp_path / "modeling_tiny.py"
        assert "uriBaseId" not in each["artifactLocation"]


def test_a_line_alone_has_no_columns(tmp_path: Path) -> None:
    fault = replace(table_fault(write_model(tmp_path)), place=Place(file="x.py", line=3))
    region = result_of(fault, tmp_path)["locations"][0]["physicalLocation"]["region"]
    assert region == {"startLine": 3}


def test_messages_name_the_tensors_and_the_error(tmp_path: Path) -> None:
    text = result_of(cache_fault(write_model(tmp_path)), tmp_path)["message"]["text"]
    assert "torch.cat of tensors on cuda:0 and cuda:1" in text
    assert "Expected all tensors to be on the same device" in text
    assert "caches is on cuda:0" in text


def test_the_root_is_by_default_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = json.loads(sarif.dumps(bad_report(tmp_path)))
    assert next(locations(log))["artifactLocation"]["uri"] == "modeling_tiny.py"


def test_every_name_at_fault_is_told(tmp_path: Path) -> None:
    found = Faults(missing=("a",), unknown=("b",), doubled=("c",), split=("d",), misplaced=("e",))
    run = run_of(CheckReport(model="m", devices=("cuda:0",), completeness=found), tmp_path)
    [told] = run["invocations"][0]["toolConfigurationNotifications"]
    assert told["message"]["text"] == (
        "The device map is incomplete: no device for a; not there b; two devices for c; split in "
        "two d; no such device for e."
    )
