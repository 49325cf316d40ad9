"""The form of a SARIF 2.1.0 log, in our own words.

For the objects that duoka writes, what the specification's sections demand: which properties there
are, which must be there, and of what type they are.
"""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
TEXT = {"type": "string", "minLength": 1}


def form(required: tuple[str, ...] = (), **properties: Any) -> Json:
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def several(items: Json, least: int = 0) -> Json:
    return {"type": "array", "items": items, "minItems": least}


def positive(name: str) -> Json:
    return {"description": name, "type": "integer", "minimum": 1}


def definition(name: str) -> Json:
    return {"$ref": f"#/$defs/{name}"}


LEVEL = {"enum": ["none", "note", "warning", "error"]}  # §3.27.10, §3.58.6
SCHEMA: Json = {
    # §3.13 sarifLog
    **form(
        ("version", "runs"),
        **{"$schema": TEXT},
        version={"const": "2.1.0"},
        runs=several(definition("run")),
    ),
    "$defs": {
        # §3.14
        "run": form(
            ("tool",),
            tool=form(("driver",), driver=definition("component")),  # §3.18
            invocations=several(definition("invocation")),
            originalUriBaseIds={
                "type": "object",
                "additionalProperties": form(uri=TEXT, description=definition("message")),
            },
            columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
            results=several(definition("result")),
        ),
        # §3.19 toolComponent
        "component": form(
            ("name",),
            name=TEXT,
            version=TEXT,
            semanticVersion={"type": "string", "pattern": r"^\d+\.\d+\.\d+"},
            rules={**several(definition("rule")), "uniqueItems": True},
        ),
        # §3.49 reportingDescriptor, §3.12 multiformatMessageString
        "rule": form(
            ("id",),
            id=TEXT,
            name=TEXT,
            **{
                name: form(("text",), text=TEXT)
                for name in ("shortDescription", "fullDescription", "help")
            },
        ),
        # §3.11
        "message": form(("text",), text=TEXT),
        # §3.20
        "invocation": form(
            ("executionSuccessful",),
            executionSuccessful={"type": "boolean"},
            toolConfigurationNotifications=several(definition("notification")),
            toolExecutionNotifications=several(definition("notification")),
        ),
        # §3.58
        "notification": form(
            ("message",),
            level=LEVEL,
            message=definition("message"),
            locations=several(definition("location")),
        ),
        # §3.27
        "result": form(
            ("message",),
            ruleId=TEXT,
            ruleIndex={"type": "integer", "minimum": 0},
            level=LEVEL,
            message=definition("message"),
            locations=several(definition("location")),
            relatedLocations={**several(definition("location")), "uniqueItems": True},
            codeFlows=several(
                # §3.36 codeFlow, §3.37 threadFlow, §3.38 threadFlowLocation
                form(
                    ("threadFlows",),
                    threadFlows=several(
                        form(
                            ("locations",),
                            locations=several(form(location=definition("location")), 1),
                        ),
                        1,
                    ),
                )
            ),
            partialFingerprints={"type": "object", "additionalProperties": TEXT},
            occurrenceCount=positive("§3.27.8"),
        ),
        # §3.28
        "location": form(
            id={"type": "integer", "minimum": 0},
            physicalLocation=definition("physical"),
            message=definition("message"),
        ),
        # §3.29 physicalLocation, §3.4 artifactLocation, §3.30 region
        "physical": form(
            ("artifactLocation",),
            artifactLocation=form(("uri",), uri=TEXT, uriBaseId=TEXT),
            region=form(
                ("startLine",),
                **{
                    name: positive(name)
                    for name in ("startLine", "startColumn", "endLine", "endColumn")
                },
            ),
        ),
    },
}
