"""A run as a picture."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from trainers import make_layout, make_report

from duoka import TuneSettings
from duoka.errors import UsageError
from duoka.tuner.plot import plot_run
from duoka.tuner.run import RunDirectory

SETTINGS = TuneSettings(seq_length=32)
Write = Callable[..., RunDirectory]


@pytest.fixture
def write(tmp_path: Path, llama: Path) -> Write:
    """Runs of so many steps; those of the last layout are on the GPUs that the run is on now."""

    def write(*numbers: int, every: int = 0, **options: int) -> RunDirectory:
        directory, steps = RunDirectory(tmp_path / "run"), itertools.count(1)
        directory.path.mkdir()
        for stages, number in zip((options.pop("before", 2), 2), numbers, strict=False):
            layout = make_layout(llama, SETTINGS, **{"stages": stages, **options})
            for step in itertools.islice(steps, number):
                directory.note(asdict(make_report(layout, step)))
                if every and step % every == 0:
                    directory.note({"step": step, "eval_loss": 1 / step})
        directory.write(SETTINGS, layout.plans, trust_remote_code=False)
        return directory

    return write


def curves(axes: Axes) -> dict[str, tuple[list[float], list[float]]]:
    """Steps and values, by what the legend calls them."""
    return {
        str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
    }


def legend(axes: Axes) -> list[str]:
    box = axes.get_legend()
    return [] if box is None else [text.get_text() for text in box.get_texts()]


def ticks(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def test_loss_and_speed(write: Write, figures: list[Figure]) -> None:
    directory = write(12, every=4)
    file = plot_run(directory)
    assert file == directory.path / "plot.png"
    with Image.open(file) as image:
        assert image.format == "PNG"
        assert image.width == 1200
        assert len(image.convert("RGB").getcolors(2**16) or ()) > 3
    loss, speed = figures[0].axes
    steps = list(range(1, 13))
    assert curves(loss) == {
        "training": (steps, [4 / step for step in steps]),
        "evaluation": ([4, 8, 12], [1 / 4, 1 / 8, 1 / 12]),
    }
    assert legend(loss) == ["training", "evaluation"]
    assert list(curves(speed).values()) == [(steps, [50.0] * 12)]
    assert legend(speed) == []
    assert speed.get_ylim()[0] == 0


def test_long_runs_are_smoothed(write: Write, figures: list[Figure]) -> None:
    plot_run(write(200))
    loss, speed = figures[0].axes
    assert legend(loss) == ["training, mean of 4 steps"]
    assert legend(speed) == ["mean of 4 steps"]
    steps, means = curves(loss)["training, mean of 4 steps"]
    assert steps == list(range(1, 201))
    assert means[0] == 4
    assert means[1] == (4 + 2) / 2
    assert means[199] == pytest.approx(sum(4 / step for step in (197, 198, 199, 200)) / 4)


def test_a_single_step(write: Write, figures: list[Figure]) -> None:
    plot_run(write(1))
    for axes in figures[0].axes:
        assert ticks(axes.xaxis) == ["0", "1", "2"]


@pytest.mark.parametrize("numbers", [(5, 3), (5, 0)])
def test_a_run_that_was_moved(
    write: Write, figures: list[Figure], numbers: tuple[int, int]
) -> None:
    plot_run(write(*numbers, before=4))
    _, speed = figures[0].axes
    assert curves(speed).popitem()[1][0] == list(range(1, sum(numbers) + 1))


def test_it_goes_where_it_is_to_go(write: Write, tmp_path: Path) -> None:
    file = tmp_path / "picture"
    assert plot_run(write(2), file) == file
    assert file.read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "run" / "plot.png").exists()


# ── what can't be drawn ──


def test_a_run_without_a_step_is_refused(write: Write) -> None:
    with pytest.raises(UsageError, match="has no step yet") as refused:
        plot_run(write(0))
    assert refused.value.hint == "try again after the first step"


def test_a_place_that_cant_be_written_is_refused(write: Write, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"plot\.png can't be written: No such file or directory"):
        plot_run(write(2), tmp_path / "absent" / "plot.png")


def test_matplotlib_may_be_absent(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duoka.base.requirements.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="plots need matplotlib") as refused:
        plot_run(write(2))
    assert refused.value.hint == 'pip install "duoka[plot]"'
