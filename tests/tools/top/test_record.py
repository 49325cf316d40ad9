"""Snapshots as rows of a file, and as Prometheus reads them."""

from __future__ import annotations

import csv
import socket
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from recordings import replay
from watching import GIB, MIB, live_device

from duoka.errors import UsageError
from duoka.report import live
from duoka.tools.top import record
from duoka.tools.top.record import COLUMNS, Exporter, csv_file
from duoka.tools.top.snapshot import GpuSnapshot, Monitor


@pytest.fixture
def moment(monkeypatch: pytest.MonkeyPatch) -> GpuSnapshot:
    """Two processes on the fourth of eight cards, and one on a virtual GPU."""
    recording = replay(monkeypatch, "eight-3090")
    devices = [
        live_device("cuda:0", uuid=recording.uuids[3]),
        live_device("cuda:1", uuid=recording.uuids[3], pid=7, busy_share=0.25),
        live_device("vgpu:0"),
    ]
    monkeypatch.setattr(live, "read_memory", lambda: devices)
    return Monitor().look()


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def record_to(path: Path, *moments: GpuSnapshot) -> None:
    with csv_file(path) as take:
        for moment in moments:
            take(moment)


def test_a_row_for_each_gpu(moment: GpuSnapshot, tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    record_to(path, moment)
    content = rows(path)
    names = [row["gpu"] for row in content]
    assert names == [*map(str, range(8)), "vgpu:0 (pid 4242)"]
    third = content[3]
    assert tuple(third) == COLUMNS
    assert third["time"] == moment.time
    assert third["weight_bytes"] == str(2 * GIB // 4)
    assert third["kv_cache_bytes"] == str(2 * 128 * MIB)
    assert third["reserved_bytes"] == str(2 * GIB)
    assert third["forecast_bytes"] == str(4 * GIB)
    assert (third["busy_share"], third["utilization"], third["power_watts"]) == (
        "0.25",
        "0.83",
        "312.4",
    )
    assert (content[0]["weight_bytes"], content[0]["busy_share"]) == ("0", "")
    assert content[8]["total_bytes"] == str(4 * GIB)


def test_rows_are_appended_and_there_at_once(moment: GpuSnapshot, tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    record_to(path, moment)
    with csv_file(path) as take:
        take(moment)
        assert len(rows(path)) == 18
    assert path.read_text().count("time,gpu") == 1


@pytest.mark.parametrize("content", ["a,b\n1,2\n", "x" * 10_000, f"{','.join(COLUMNS)},more\n"])
def test_another_file_stays_as_it_is(content: str, tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text(content)
    with pytest.raises(UsageError, match="is no recording of this duoka's"), csv_file(path):
        pass
    assert path.read_text() == content


# ── Prometheus ──


@pytest.fixture
def port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        number: int = taken.getsockname()[1]
    return number


@pytest.fixture
def exporter(port: int) -> Iterator[Exporter]:
    exporter = Exporter(f":{port}")
    yield exporter
    exporter.close()


def metrics(port: int) -> dict[str, dict[tuple[str, ...], float]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            family.name: {tuple(s.labels.values()): s.value for s in family.samples}
            for family in families
        }


def test_the_last_moment_is_exported(exporter: Exporter, port: int, moment: GpuSnapshot) -> None:
    assert metrics(port)["duoka:gpu_total_bytes"] == {}
    exporter.take(replace(moment, gpus=()))
    exporter.take(moment)
    found = metrics(port)
    memory = found["duoka:gpu_memory_bytes"]
    assert len(memory) == 3 * 6
    model = "LlamaForCausalLM"
    assert memory["3", "weights", model, "7"] == GIB // 4
    assert memory["vgpu:0 (pid 4242)", "overhead", model, "4242"] == 576 * MIB
    assert found["duoka:gpu_memory_forecast_bytes"]["3", "overhead", model, "7"] == 1600 * MIB
    assert found["duoka:gpu_busy_share"] == {("3", model, "7"): 0.25}
    assert found["duoka:gpu_utilization"] == {("0",): 0, ("3",): 0.83}
    assert len(found["duoka:gpu_total_bytes"]) == 9


def test_this_machine_alone_reaches_it(exporter: Exporter) -> None:
    assert exporter._server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("address", ["", ":", "9400x", ":70000", ":-1", "256.1.1.1:9400"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match="can't be had") as refused:
        Exporter(address)
    assert "HOST:PORT" in str(refused.value.hint)


def test_a_port_that_is_taken_is_refused(exporter: Exporter, port: int) -> None:
    with pytest.raises(UsageError, match="can't be had: Address already in use"):
        Exporter(f"127.0.0.1:{port}")


def test_prometheus_client_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs prometheus-client") as refused:
        Exporter(":9400")
    assert refused.value.hint == 'pip install "duoka[serve]"'
