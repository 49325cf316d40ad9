"""The host's memory and limits, from files as Linux has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from duoka.base import requirements
from duoka.tools.doctor import host
from duoka.tools.doctor.facts import Facts, Finding

GIB = 2**30
MEMORY = "MemTotal: 67108864 kB\nMemAvailable: {} kB\n"


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def pairs(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.severity, finding.text) for finding in findings]


def test_memory(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", MEMORY.format(2 * 2**20))
    assert pairs([*host.check_host_memory(Facts(None, tmp_path))]) == [
        ("warning", "2.00 GiB of CPU memory are free, 64.00 GiB in total"),
    ]
    write(tmp_path, "proc/meminfo", MEMORY.format(32 * 2**20))
    assert pairs([*host.check_host_memory(Facts(None, tmp_path))]) == [
        ("ok", "32.00 GiB of CPU memory are free, 64.00 GiB in total")
    ]


@pytest.mark.parametrize(
    ("limit", "used", "unlimited"),
    [
        ("memory.max", "memory.current", "max\n"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", f"{2**63 - 4096}\n"),
    ],
)
def test_containers_of_both_versions(limit: str, used: str, unlimited: str, tmp_path: Path) -> None:
    group = "sys/fs/cgroup/"
    write(tmp_path, group + limit, f"{8 * GIB}\n")
    write(tmp_path, group + used, f"{3 * GIB}\n")
    free, container = pairs([*host.check_host_memory(Facts(None, tmp_path))])
    assert free == ("ok", "5.00 GiB of CPU memory are free, 8.00 GiB in total")
    assert container[1] == "memory: a limit of 8.00 GiB for this container, 3.00 GiB used"
    write(tmp_path, group + limit, unlimited)
    (unknown,) = host.check_host_memory(Facts(None, tmp_path))
    assert unknown.severity == "note"


def test_extras(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = {"bitsandbytes", "ray"}
    monkeypatch.setattr(requirements, "find_spec", lambda name: None if name in gone else name)
    monkeypatch.setattr(host, "CompiledMemory", None)
    slow, missing = host.check_extras(Facts(None, tmp_path))
    assert slow.severity == missing.severity == "note"
    assert "compiled module is missing" in slow.text
    assert missing.text == "not installed: bnb, ray"
    assert missing.advice.splitlines() == [
        'pip install "duoka[bnb]": --quantize nf4, --train qlora, --optimizer adamw8bit',
        'pip install "duoka[ray]": replicas on a Ray cluster: duoka serve --on ray',
    ]
    monkeypatch.setattr(requirements, "find_spec", lambda name: name)
    monkeypatch.setattr(host, "CompiledMemory", object)
    assert [*host.check_extras(Facts(None, tmp_path))] == []


def test_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = requirements.version
    other = {"transformers": "4.30.2", "gguf": "0.1"}
    monkeypatch.setattr(requirements, "version", lambda name: other.get(name) or real(name))
    wrong, optional = host.check_versions(Facts(None, tmp_path))
    assert (wrong.severity, wrong.text.partition(" is")[0]) == ("error", "transformers 4.30.2")
    assert (optional.severity, optional.text.partition(" is")[0]) == ("warning", "gguf 0.1")
