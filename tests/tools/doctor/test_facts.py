"""The tests on devices, in the process that runs them; one that hangs or dies ends no other."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from duoka import Fleet
from duoka.tools.doctor import device_tests, facts

DEVICES = Fleet.parse("virtual:2x256MiB").devices
NAMES = ["vgpu:0", "vgpu:1"]
TESTS = [("matrix", "vgpu:0"), ("matrix", "vgpu:1"), ("copy", *NAMES), ("copy", *NAMES[::-1])]


@pytest.mark.process
@pytest.mark.usefixtures("quick_start")
def test_virtual_gpus() -> None:
    probed = facts.probe(DEVICES)
    assert probed.torch["version"]
    assert list(probed.outcomes) == TESTS
    assert all(outcome["fault"] == "" for outcome in probed.outcomes.values())
    copied = probed.outcomes["copy", "vgpu:0", "vgpu:1"]
    assert copied["bytes_per_second"] > 1e6
    assert 0 < copied["latency_seconds"] < 1
    assert copied["direct"] is False


def test_a_product_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert device_tests._test_matrix("cpu")["fault"] == ""
    real = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda product: real(product).mul_(1.1))
    assert device_tests._test_matrix("cpu")["fault"] == "it is off by 10%"
    monkeypatch.setattr(torch.Tensor, "cpu", lambda product: real(product).fill_(float("nan")))
    assert device_tests._test_matrix("cpu")["fault"] == "it is off by nan%"


class Process:
    """Plays what processes write, one after another, and remembers what they were to do."""

    def __init__(self, *endings: subprocess.CompletedProcess[bytes] | Exception) -> None:
        self.endings = list(endings)
        self.requests: list[str] = []

    def __call__(self, command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        self.requests.append(command[-1])
        ending = self.endings.pop(0)
        if isinstance(ending, Exception):
            raise ending
        return ending


def written(*lines: str, code: int = 0, said: str = "") -> subprocess.CompletedProcess[bytes]:
    output = "".join(f"{line}\n" for line in lines).encode()
    return subprocess.CompletedProcess([], code, output, said.encode())


def test_what_hangs_or_dies_is_named_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    about, well = '{"version": "2"}', '{"fault": ""}'
    hanging = subprocess.TimeoutExpired("x", 1, output=f"{about}\n{well}\n".encode() + b'{"fau')
    process = Process(
        hanging,
        written(about, code=-11, said="x\nillegal address"),
        written(about, '{"fault": "GPU is lost"}'),
    )
    monkeypatch.setattr(facts.subprocess, "run", process)
    probed = facts.probe(DEVICES)
    faults = [probed.outcomes[test]["fault"] for test in TESTS]
    assert faults[0] == ""
    assert faults[1].startswith("no result within")
    assert faults[2] == "its process ended with -11 illegal address"
    assert faults[3] == "GPU is lost"
    assert [request.count("vgpu") for request in process.requests] == [6, 4, 2]


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts.subprocess, "run", Process(written(code=1, said="No module torch")))
    probed = facts.probe(DEVICES)
    assert probed.torch == {"error": "its process ended with 1 No module torch"}
    assert probed.outcomes == {}
