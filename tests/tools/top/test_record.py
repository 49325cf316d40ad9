"""Snapshots as rows of a file."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from recordings import replay
from watching import GIB, MIB, live_device

from duoka.errors import UsageError
from duoka.report import live
from duoka.tools.top.record import COLUMNS, csv_file
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
    with (
        pytest.raises(UsageError, match="is not a recording of this version of duoka"),
        csv_file(path),
    ):
        pass
    assert path.read_text() == content
