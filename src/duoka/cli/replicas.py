"""``duoka plan --replicas``: print and save a plan for each replica."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import duoka
from duoka.base.units import format_bytes
from duoka.errors import UsageError
from duoka.planner.replicas import Replicas, format_copies

from .terminal import stdout


def read_number(text: str) -> int | Literal["auto"]:
    """Parse the number of replicas, or "auto"."""
    if text == "auto":
        return "auto"
    if not (text.isascii() and text.isdecimal() and len(text) < 5 and int(text)):
        hint = 'write a number, or "auto" for as many as fit'
        raise UsageError(f"{text[:40]!r} is not a number of replicas", hint=hint)
    return int(text)


def files(save: Path, number: int) -> list[Path]:
    """Return a file for each replica's plan: chatglm3-1.plan, chatglm3-2.plan, and so on."""
    width = len(str(number))
    return [
        save.with_name(f"{save.stem}-{index + 1:0{width}d}{save.suffix}") for index in range(number)
    ]


def show_copies(copies: Replicas) -> None:
    """Print a summary, then each plan; identical plans are printed once."""
    from duoka.report.terminal import render_plan

    stdout().print("\n".join(_summary(copies)), markup=False)
    equal_copies: dict[object, list[int]] = {}
    for index, plan in enumerate(copies.plans):
        equal_copies.setdefault(_without_gpu_names(plan), []).append(index)
    for first, *like_it in equal_copies.values():
        plan = copies.plans[first]
        title = f"replica {first + 1} of {len(copies.plans)}"
        if like_it:
            title += ", identical ones: " + "; ".join(
                f"replica {index + 1} on {', '.join(copies.plans[index].fleet.names)}"
                for index in like_it
            )
        stdout().print("", title, markup=False, sep="\n")
        stdout().print(render_plan(plan))


def _without_gpu_names(plan: duoka.Plan) -> object:
    """Return the content of a plan without GPU names, to find identical plans."""
    place = {name: index for index, name in enumerate(plan.devices)}
    return (
        tuple((module, place[at]) for module, at in plan.placement.entries),
        tuple(replace(stage, device="") for stage in plan.forecast.devices),
        tuple(
            replace(plan.fleet.device(name), name="cuda:0", uuid="", pci_address="")
            for name in plan.devices
        ),
        plan.workload,
        plan.forecast.seconds and plan.forecast.seconds.total_seconds,
    )


def _summary(copies: Replicas) -> Iterator[str]:
    """Describe the value of the objective over all replicas, and the unused GPUs."""
    number = len(copies.plans)
    what = {
        "headroom": f"at least {format_bytes(round(copies.value))} of headroom on each GPU",
        "latency": f"a request takes {copies.value:.3g} s on the slowest",
        "throughput": f"{copies.value:.3g} requests per second in total",
        "pages": f"{round(copies.value):,} pages of KV cache in total",
    }[copies.objective]
    yield f"{format_copies(number)}: {what}"
    if copies.idle:
        yield f"unused: {', '.join(copies.idle)}"
