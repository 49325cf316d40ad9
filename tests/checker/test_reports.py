"""What a real check says has every form: printed, as JSON, as SARIF."""

from __future__ import annotations

import json

import jsonschema
import pytest
import schemas
import seeded
from rich.cells import cell_len
from sarif_form import SCHEMA

import duoka
from duoka.report import sarif
from duoka.report.terminal import render_plain, render_report

CASES = (
    "fault_cache_gathered_at_prefill",
    "fault_followup",
    "fault_function_gradient_device",
    "fault_hard_device_string",
    "fault_helper_in_another_file",
    "fault_lambda_fusion",
    "fault_multiline_cat",
    "fault_splice_masked_scatter",
    "fault_table_attribute",
    "warning_hard_device_right_here",
)


@pytest.mark.parametrize("name", CASES)
def test_every_form(name: str) -> None:
    case = seeded.load(seeded.path(name))
    report = duoka.check(case.build(), case.placement, inputs=case.inputs(), train=case.train)
    jsonschema.validate(json.loads(report.to_json()), schemas.report_schema())
    log = json.loads(sarif.dumps(report))
    jsonschema.validate(log, SCHEMA)
    found = (*report.faults, *report.warnings)
    assert len(log["runs"][0]["results"]) == len(found) > 0
    for width in (40, 80):
        text = render_plain(render_report(report), width)
        assert max(map(cell_len, text.splitlines())) <= width
    for fault in found:
        assert f":{fault.line}" in text
        assert fault.kind in {result["ruleId"] for result in log["runs"][0]["results"]}
