"""A recording as a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image
from recordings import replay
from watching import GIB, live_device

from duoka.errors import UsageError
from duoka.report import live
from duoka.tools.top.plot import plot_recording
from duoka.tools.top.record import COLUMNS, csv_file
from duoka.tools.top.snapshot import Monitor

Record = Callable[..., Path]


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """So many moments, half a minute apart, of a machine with a virtual GPU."""

    def record(number: int, machine: str = "no-driver") -> Path:
        recording = replay(monkeypatch, machine)
        path = tmp_path / "run.csv"
        monitor = Monitor()
        with csv_file(path) as take:
            for at in range(number):
                uuid = recording.uuids[1] if machine != "no-driver" else ""
                device = live_device(uuid=uuid, now_bytes=GIB + at * GIB // 8)
                monkeypatch.setattr(live, "read_memory", lambda device=device: [device])
                time = f"2026-11-25T10:{at // 2:02}:{30 * (at % 2):02}.000+00:00"
                take(replace(monitor.look(), time=time))
        return path

    return record


def test_kinds_over_time(record: Record, figures: list[Figure]) -> None:
    file = plot_recording(record(5))
    assert file.name == "run.png"
    with Image.open(file) as image:
        assert (image.format, image.width) == ("PNG", 1200)
    (axes,) = figures[0].axes
    assert axes.get_title(loc="left") == "vgpu:0 (pid 4242)"
    legend = axes.get_legend()
    assert legend is not None
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["weights", "KV cache", "activations", "overhead", "plan's peak", "capacity"]
    peak, capacity = axes.get_lines()
    assert list(peak.get_xdata()) == [0, 0.5, 1, 1.5, 2]
    assert list(peak.get_ydata()) == [2.0] * 5
    assert list(capacity.get_ydata()) == [4.0] * 5
    # The layers end where what is reserved does.
    top = axes.collections[3].get_paths()[0].vertices
    assert max(y for x, y in top if x == 2) == pytest.approx(1.5)


def test_every_gpu_of_a_machine(record: Record, figures: list[Figure]) -> None:
    plot_recording(record(2, "busy"))
    assert [axes.get_title(loc="left") for axes in figures[0].axes] == ["GPU 0", "GPU 1", "GPU 2"]
    legend = figures[0].axes[0].get_legend()
    assert legend is not None
    assert "others" in [text.get_text() for text in legend.get_texts()]


def test_a_single_moment(record: Record, tmp_path: Path) -> None:
    target = tmp_path / "picture"
    assert plot_recording(record(1), target) == target
    assert target.read_bytes().startswith(b"\x89PNG")


HEAD = ",".join(COLUMNS)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "its first line isn't that of a recording"),
        (b"a,b\n1,2\n", "its first line isn't that of a recording"),
        (b"\xff\n", "no text in UTF-8"),
        (f"{HEAD}\n".encode(), "has 0 GPUs"),
        (f"{HEAD}\nnow{',1' * (len(COLUMNS) - 1)}\n".encode(), "Invalid isoformat string"),
        (f"{HEAD}\n2026-11-25T10:00:00,0{',x' * (len(COLUMNS) - 2)}\n".encode(), "invalid literal"),
        (f"{HEAD}\n2026-11-25T10:00:00,0\n".encode(), "has 0 GPUs"),
    ],
)
def test_what_is_no_recording_is_refused(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=problem):
        plot_recording(path)
    assert not path.with_suffix(".png").exists()


def test_no_more_gpus_than_can_be_seen(tmp_path: Path) -> None:
    rest = ",1" * (len(COLUMNS) - 2)
    lines = [f"2026-11-25T10:00:00+00:00,{gpu}{rest}" for gpu in range(33)]
    path = tmp_path / "run.csv"
    path.write_text("\n".join([HEAD, *lines]))
    with pytest.raises(UsageError, match="has 33 GPUs, and 1 to 32 can be drawn"):
        plot_recording(path)
