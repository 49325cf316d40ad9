"""Nothing in a report that is attached somewhere says whose machine it is."""

from __future__ import annotations

import json
import platform
import socket

import pytest

from duoka.cli.errors import redact
from duoka.tools.doctor.bundle import bundle
from duoka.tools.doctor.diagnose import Diagnosis, Examined
from duoka.tools.doctor.facts import Finding

UUID = "8932f937-d72c-4106-c12f-20bd9faed9f6"
TOKEN = "hf_" + "a1B2" * 8


@pytest.fixture(autouse=True)
def person(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "gpubox.corp.example")
    monkeypatch.setattr(platform, "node", lambda: "gpubox.corp.example")
    for name, value in {
        "USER": "li",
        "HOME": "/data/people/meifang",
        "HF_TOKEN": "plain-words-of-a-token",
        "CUDA_VISIBLE_DEVICES": f"GPU-{UUID},MIG-{UUID}",
        "HF_HOME": "/data/people/meifang/hub",
        "LD_LIBRARY_PATH": "/home/zhang/cuda:/opt/lib",
        "NCCL_DEBUG_FILE": "/logs/gpubox/li.log",
        "SECRET_OF_MINE": "nothing of theirs",
        "DUOKA_API_KEY": "open-sesame",
    }.items():
        monkeypatch.setenv(name, value)


def texts() -> list[str]:
    return [
        f"{UUID} and GPU-{UUID.upper()} at gpubox",
        f"started by li on gpubox.corp.example with {TOKEN}",
        "token='plain-words-of-a-token' in /data/people/meifang/models/glm",
        "https://li:geheim@hub.example/x?token=abcdef",
        'password: "quoted-secret"',
        "/home/zhang/models and /Users/wang/models",
        "a list of limits, like this one",
    ]


def test_names_and_secrets_are_masked() -> None:
    findings = tuple(
        Finding(severity="note", text=text, figures={"inner": [text]}) for text in texts()
    )
    diagnosis = Diagnosis(checks=(Examined(group="GPUs", name="x", findings=findings),))
    written = bundle(diagnosis, redact)
    private = (UUID, UUID.upper(), "gpubox", "corp.example", TOKEN, "meifang", "zhang", "wang")
    for name in (
        *private,
        "plain-words-of-a-token",
        "geheim",
        "abcdef",
        "open-sesame",
        "quoted-secret",
        "nothing of theirs",
    ):
        assert name not in written, name
    report = json.loads(written)
    assert " li " not in written
    assert "/li.log" not in written
    assert report["environment"]["HF_HOME"] == "~/hub"
    assert report["environment"]["CUDA_VISIBLE_DEVICES"] == "***,***"
    assert report["environment"]["LD_LIBRARY_PATH"] == "/home/***/cuda:/opt/lib"
    assert "SECRET_OF_MINE" not in report["environment"]
    found = [finding["text"] for finding in report["checks"][0]["findings"]]
    assert found[2].endswith("in ~/models/glm")
    assert found[-1] == "a list of limits, like this one"
    assert report["libraries"]["torch"]
    assert report["severity"] == "ok"
