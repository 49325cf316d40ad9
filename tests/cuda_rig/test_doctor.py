"""`duoka doctor` on GPUs with planted defects: real code for CUDA finds each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from duoka.cli.main import run
from duoka.tools.doctor.diagnose import diagnose

pytestmark = pytest.mark.cuda_rig(gpus="3x4GiB", peers=1)


def diagnosed() -> dict[str, list[tuple[str, str]]]:
    """What isn't as it should be, by check."""
    return {
        check.name: [
            (finding.severity, finding.text)
            for finding in check.findings
            if finding.severity in ("warning", "error")
        ]
        for check in diagnose(root=Path("/nowhere")).checks
        if check.group != "host"
    }


@pytest.mark.cuda_rig(bad_peers="0>1=zeros,2>1=garbage", neighbour="1:1GiB", capability="8.6")
def test_planted_defects() -> None:
    found = diagnosed()
    assert found["copies"] == [
        ("error", "cuda:0 → cuda:1: zeros arrive"),
        ("error", "cuda:2 → cuda:1: 65536 of 65536 numbers are corrupted"),
    ]
    # No kernel of the rig computes anything, which isn't hidden either.
    assert [text[8:] for _, text in found["matrices"]] == [
        "a bfloat16 matrix product is wrong: it is off by 100%"
    ] * 3
    assert found["memory"][0] == ("warning", "GPU 1: python (pid 4242) has 1.00 GiB")


@pytest.mark.cuda_rig(lost="1@20")
def test_a_card_that_is_lost_in_the_middle() -> None:
    copies = " ".join(text for _, text in diagnosed()["copies"])
    assert "unknown error" in copies
    assert "cuda:1" in copies
    assert "cuda:0 → cuda:2" not in copies


@pytest.mark.cuda_rig(lost="1")
def test_a_card_that_is_lost_already() -> None:
    (lost,) = diagnosed()["driver"]
    assert lost[1].startswith("GPU 1 doesn't answer")


@pytest.mark.cuda_rig(peers=0, capability="5.0", gpus="2x4GiB")
def test_a_card_that_this_torch_has_no_kernels_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--json"]) == 13
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    (finding,) = checks["torch"]["findings"]  # of both GPUs
    assert "has compute capability 5.0, and this torch has kernels for" in finding["text"]
    assert checks["copies"]["findings"][-1]["text"].startswith("copies arrive intact in 2 dir")
