"""The plots of the benchmark page, made of kept results, as SVG files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from page_kept import host_rows, rig_rows, rig_training_rows
from page_tables import GIB, Row, joined, with_errors

# Okabe and Ito's colours, which people with any colour vision tell apart.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#7F7F7F"
STYLE = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "white",
    "font.size": 10,
    "grid.color": "#DDDDDD",
    "savefig.facecolor": "white",
    "svg.fonttype": "path",
    "svg.hashsalt": "duoka",  # the same file for the same numbers
}


def load(results: Path, name: str) -> list[Any] | None:
    """Return the data of a section; None if it hasn't been measured."""
    path = results / f"{name}.json"
    if not path.exists():
        return None
    data: list[Any] = json.loads(path.read_text(encoding="utf-8"))["data"]
    return data


def draw_forecast(results: Path, figure: Figure) -> None:
    """Draw forecast against measured reserved memory, and the errors."""
    groups: list[tuple[str, str, str, list[Row]]] = []
    for name, section in (
        ("virtual GPUs", "forecast"),
        ("virtual GPUs, fine-tuning", "training-memory"),
    ):
        if data := load(results, section):
            rows = with_errors(row for part in data for row in part)
            groups.append((name, BLUE, "o" if section == "forecast" else "^", rows))
    groups.append(("PyTorch's CUDA allocator", ORANGE, "o", with_errors(rig_rows())))
    training = with_errors(rig_training_rows())
    groups.append(("PyTorch's CUDA allocator, fine-tuning", ORANGE, "^", training))
    sizes, errors = figure.subplots(1, 2, width_ratios=(1, 1.15))
    sizes.plot([1 / 32, 128], [1 / 32, 128], color=GREY, linewidth=1, zorder=1)
    for name, colour, marker, rows in groups:
        look: Any = {
            "label": f"{name} ({len(rows)})", "marker": marker, "s": 60 if colour == BLUE else 20,
            "facecolors": "none", "edgecolors": colour, "zorder": 2,
        }  # fmt: skip
        measured = [row["measured_reserved_bytes"] / GIB for row in rows]
        sizes.scatter(measured, [row["forecast_reserved_bytes"] / GIB for row in rows], **look)
        errors.scatter(measured, [100 * row["reserved"] for row in rows], **look)
    for axes in (sizes, errors):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("measured reserved memory per GPU, GiB")
    sizes.set_yscale("log", base=2)
    sizes.yaxis.set_major_formatter("{x:g}")
    sizes.set_ylabel("forecast, GiB")
    errors.set_yscale("symlog", linthresh=0.1)
    ticks = {-5: "−5", -1: "−1", -0.1: "−0.1", 0: "0", 0.1: "+0.1", 1: "+1", 5: "+5"}
    errors.set_yticks([*ticks], [*ticks.values()])
    errors.set_ylim(-6, 6)
    errors.set_ylabel("forecast too high, %  (below 0: too low)")
    sizes.legend(fontsize=7, loc="upper left")
    figure.suptitle("Reserved memory: forecast against measurement, no real GPU")


def draw_host(results: Path, figure: Figure) -> None:
    """Draw the CPU time and the copies of a decode step on the CUDA rig."""
    steps = ("decode, 1 x 512", "decode, 16 x 512", "decode, 16 x 8192")
    rows = {(row["step"], row["way"]): row for row in host_rows()}
    ways = [way for step, way in rows if step == steps[0]][::-1]
    times, copies = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    for number, (step, colour) in enumerate(zip(steps, (BLUE, GREEN, ORANGE), strict=True)):
        places = [at + 0.27 * (1 - number) for at in range(len(ways))]
        ratios = [rows[step, way]["ratio"] for way in ways]
        times.barh(places, ratios, height=0.25, color=colour, label=step.replace(" x ", " × "))
        for place, ratio in zip(places, ratios, strict=True):
            times.text(ratio + 0.03, place, f"{ratio:.2f}", va="center", fontsize=7)
        copies.barh(places, [rows[step, way]["copies"] for way in ways], height=0.25, color=colour)
    times.set_yticks(range(len(ways)), ways)
    times.axvline(1, color=GREY, linewidth=1)
    times.set_xlabel("host CPU time of a step / plain forward pass of transformers")
    copies.set_xscale("log")
    copies.set_xticks([1, 10, 100], ["1", "10", "100"])
    copies.set_xlabel("copies per step")
    times.legend(fontsize=8, loc="lower right")
    figure.suptitle("Host work per decode step, requests × context (CUDA build without a GPU)")


def draw_scaling(results: Path, figure: Figure) -> None:
    """Draw the speed-up of a training step over the number of stages."""
    data = load(results, "scaling")
    if not data:
        return
    axes: Axes = figure.subplots()
    rows = sorted(data[0], key=itemgetter("micro_batches", "stages"))
    for (number, group), colour in zip(
        groupby(rows, itemgetter("micro_batches")), (BLUE, ORANGE, GREEN), strict=False
    ):
        own = list(group)
        stages = [row["stages"] for row in own]
        speeds = [[row["computed_seconds"] / each for each in row["seconds"]] for row in own]
        ideal = [row["ideal_speedup"] for row in own]
        axes.plot(
            stages, ideal, color=colour, linestyle="--", label=f"{number} micro-batches, ideal"
        )
        best = [max(each) for each in speeds]
        down = [top - min(each) for top, each in zip(best, speeds, strict=True)]
        axes.errorbar(
            stages, best, yerr=[down, [0] * len(best)], color=colour, marker="o", capsize=3,
            label=f"{number} micro-batches, measured",
        )  # fmt: skip
    axes.plot([1, 8], [1, 8], color=GREY, linewidth=1, label="linear")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.set_xticks([1, 2, 4, 8])
    axes.set_xlabel("pipeline stages (processes)")
    axes.set_ylabel("speed-up over one stage without overhead")
    axes.legend(fontsize=8)
    axes.set_title("A training step over pipeline stages, layers of constant time")


def draw_planner(results: Path, figure: Figure) -> None:
    """Draw what fits, and how much is free on the fullest GPU, beside "auto"."""
    data = load(results, "planner")
    if not data:
        return
    found = {key: joined(data, key) for key in ("cells", "balance")}
    cells, balance = figure.subplots(1, 2, width_ratios=(1.2, 1))
    _draw_cells(cells, [row for row in found["cells"] if row["fewest"] is not None])
    both = [row for row in found["balance"] if row["auto"] is not None]
    largest = max(row["duoka"] for row in found["balance"]) / GIB
    balance.plot([0, largest], [0, largest], color=GREY, linewidth=1, zorder=1)
    look: Any = {"s": 24, "facecolors": "none", "zorder": 2}
    points = [[row[name] / GIB for row in both] for name in ("auto", "duoka")]
    balance.scatter(*points, edgecolors=BLUE, label=f"both hold it ({len(both)})", **look)
    failed = [row["duoka"] / GIB for row in found["balance"] if row["auto"] is None]
    balance.scatter(
        [-1] * len(failed), failed, marker="x", s=24, color=ORANGE,
        label=f'"auto" overflows or offloads ({len(failed)})',
    )  # fmt: skip
    balance.set_xlabel('free on the fullest GPU by "auto", GiB')
    balance.set_ylabel("free on the fullest GPU by duoka, GiB")
    balance.legend(fontsize=8, loc="lower right")
    figure.suptitle('duoka beside device_map="auto", as replayed through the allocator\'s model')


def _draw_cells(axes: Axes, fit: Sequence[Row]) -> None:
    """Draw how many of the cells that fit each planner solves, by machine."""
    machines = sorted({row["machine"] for row in fit}, reverse=True)
    for number, (name, label, colour) in enumerate(
        (
            ("fewest", "exhaustive search", GREY),
            ("duoka", "duoka", BLUE),
            ("auto", '"auto"', ORANGE),
        )
    ):
        counts = [
            sum(row["machine"] == machine and row[name] is not None for row in fit)
            for machine in machines
        ]
        places = [at + 0.27 * (1 - number) for at in range(len(machines))]
        axes.barh(places, counts, height=0.25, color=colour, label=f"{label} ({sum(counts)})")
    axes.set_yticks(range(len(machines)), machines, fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("cells (model, context, batch) that fit")
    axes.set_ylabel("machine, GPUs in GiB")
    axes.legend(fontsize=8, loc="lower right")


PLOTS: dict[str, tuple[Callable[[Path, Figure], None], tuple[float, float]]] = {
    "forecast": (draw_forecast, (9.5, 4.4)),
    "host": (draw_host, (9.5, 5.2)),
    "planner": (draw_planner, (9.5, 6.2)),
    "scaling": (draw_scaling, (6.0, 4.4)),
}


def draw_all(results: Path, directory: Path) -> None:
    """Write all plots whose numbers are there."""
    with mpl.rc_context(STYLE):
        for name, (draw, size) in PLOTS.items():
            figure = Figure(figsize=size, layout="constrained")
            draw(results, figure)
            if figure.axes:
                figure.savefig(directory / f"{name}.svg", metadata={"Date": None})
