"""Convert a report to SARIF 2.1.0, which code hosts show in pull requests.

Section numbers refer to OASIS, "Static Analysis Results Interchange Format (SARIF) Version 2.1.0".
Faults and memory overflows become results; an incomplete map, unchecked code and an early stop
become notifications.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from duoka.base.units import format_bytes

from .check_report import CheckReport, Fault, Place
from .terminal.words import describe_map_errors

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_ROOT = "%SRCROOT%"
_Json = dict[str, Any]


# Rules: identifier, short description, and full description.
_RULES = (
    (
        "mixed-devices",
        "An operation on tensors of several devices",
        "The tensors of one operation are on several devices, which CUDA rejects. Move the "
        "smaller tensor to the other device: other.to(x.device).",
    ),
    (
        "in-place",
        "A write into a tensor on another device",
        "The value is on another device than the tensor it is written to. Move it first: x[i] = "
        "value.to(x.device).",
    ),
    (
        "gradient",
        "A gradient on another device than its tensor",
        "A backward function returns a gradient on another device than its tensor. Move the "
        "gradient to the tensor's device before returning it.",
    ),
    (
        "hard-coded-device",
        "A hard-coded device",
        "Model code with a hard-coded device works on one placement only. Use the device of a "
        "tensor: device=x.device.",
    ),
    (
        "memory",
        "A device that exceeds its memory budget",
        "The peak memory of a device is above its budget; the result is at the line that sets "
        "the peak.",
    ),
)
_RULE_INDEX = {name: index for index, (name, *_) in enumerate(_RULES)}


def dumps(report: CheckReport, root: str | os.PathLike[str] | None = None) -> str:
    """Return a report as a SARIF log; paths below `root` (by default the cwd) are relative."""
    base = Path(root or ".").resolve()
    return json.dumps(_Log(report, base).to_dict(), indent=1, ensure_ascii=False)


class _Log:
    """Conversion of one report."""

    def __init__(self, report: CheckReport, root: Path) -> None:
        self._report = report
        self._root = root

    def to_dict(self) -> _Json:
        run = {
            "tool": {"driver": _driver()},
            "invocations": [self._invocation()],
            # The root's own path is omitted: it is specific to the checking machine (§3.14.14).
            "originalUriBaseIds": {_ROOT: {"description": {"text": "the top of the sources"}}},
            "columnKind": "unicodeCodePoints",
            "results": [*self._results()],
        }
        return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}

    def _invocation(self) -> _Json:
        """Describe the run, with its notifications (§3.20)."""
        report = self._report
        invocation: _Json = {"executionSuccessful": report.stop is None}
        if not report.complete:
            faults = describe_map_errors(report.completeness)
            names = "; ".join(f"{what} {', '.join(names)}" for what, names in faults)
            note = _notification("error", f"The device map is incomplete: {names}.")
            invocation["toolConfigurationNotifications"] = [note]
        notifications: list[_Json] = []
        if report.not_run:
            text = f"Not run, therefore not checked: {', '.join(report.not_run)}."
            notifications.append(_notification("warning", text))
        if (stop := report.stop) is not None:
            text = f"The model's code stopped in {stop.phase}: {stop.message}. {stop.hint}".strip()
            places = [] if stop.place is None else [self._location(stop.place)]
            notifications.append(_notification("error", text) | _if_any(locations=places))
        return invocation | _if_any(toolExecutionNotifications=notifications)

    def _results(self) -> Iterator[_Json]:
        """Yield a result for each fault, warning, and device over its budget."""
        for level, faults in (("error", self._report.faults), ("warning", self._report.warnings)):
            for fault in faults:
                result = self._result(fault.kind, level, _message(fault), fault.place)
                yield result | {"occurrenceCount": max(fault.count, 1)}
        for peak in self._report.memory:
            if peak.overflows and peak.place is not None:
                budget = peak.budget_bytes
                text = (
                    f"{peak.device} needs {format_bytes(peak.reserved_bytes)}"
                    f"{'' if budget is None else f' of {format_bytes(budget)}'}: the peak is here, "
                    f"in {peak.phase}."
                )
                yield self._result("memory", "error", text, peak.place)

    def _result(self, rule: str, level: str, text: str, place: Place) -> _Json:
        """Describe one fault or peak (§3.27)."""
        return {
            "ruleId": rule,
            "ruleIndex": _RULE_INDEX[rule],
            "level": level,
            "message": {"text": text},
            "locations": [self._location(place)],
        }

    def _location(self, place: Place) -> _Json:
        """Describe a place as a SARIF location."""
        physical = {"artifactLocation": self._artifact(place.file), "region": _region(place)}
        return {"physicalLocation": physical}

    def _artifact(self, file: str) -> _Json:
        """Describe a file by its URI: relative to the root if the file is below the root."""
        path = Path(file).resolve()
        if path.is_relative_to(self._root):
            return {"uri": quote(path.relative_to(self._root).as_posix()), "uriBaseId": _ROOT}
        return {"uri": path.as_uri()}


def _notification(level: str, text: str) -> _Json:
    """Build a notification of the run."""
    return {"level": level, "message": {"text": text}}


def _if_any(**items: list[_Json]) -> _Json:
    """Return the properties whose list isn't empty."""
    return {name: values for name, values in items.items() if values}


def _driver() -> _Json:
    """Describe duoka and its rules (§3.19)."""
    rules = [
        {
            "id": identifier,
            "shortDescription": {"text": short},
            "fullDescription": {"text": full},
            "help": {"text": full},
        }
        for identifier, short, full in _RULES
    ]
    installed = version("duoka")
    return {"name": "duoka", "rules": rules, "version": installed, "semanticVersion": installed}


def _region(place: Place) -> _Json:
    """Convert a place to SARIF: lines and columns from 1, exclusive end (§3.30)."""
    if not place.end_line:
        return {"startLine": place.line}
    return {
        "startLine": place.line,
        "startColumn": place.column + 1,
        "endLine": place.end_line,
        "endColumn": place.end_column + 1,
    }


def _message(fault: Fault) -> str:
    """Build the message of a fault: its tensors with their devices, and CUDA's error."""
    devices = " and ".join(fault.devices)
    tensors = dict.fromkeys(
        f"{operand.expression or operand.argument} is on {operand.device}"
        for operand in fault.operands
    )
    error = f" {'CUDA: ' * (fault.effect == 'raises')}{fault.message}" if fault.message else ""
    return f"{fault.op} of tensors on {devices}: {'; '.join(tensors)}.{error}"
