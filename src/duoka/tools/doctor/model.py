"""Model checks: completeness of the checkpoint, and a plan."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator

from duoka.base.units import format_bytes, format_count
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import InfeasibleError
from duoka.planner.plan import Plan

from .facts import Facts, Finding


class ModelFacts:
    """A model, and a function to plan it as `duoka plan` does.

    `checkpoint` is None until `check_whole` has opened it.
    """

    def __init__(self, model: str, make_plan: Callable[[], Plan]) -> None:
        self.model = model
        self.make_plan = make_plan
        self.checkpoint: Checkpoint | None = None


def check_whole(facts: ModelFacts) -> Iterator[Finding]:
    """Open the checkpoint; check that its files are complete and match headers and index."""
    facts.checkpoint = checkpoint = Checkpoint.open(facts.model)
    if not checkpoint.has_weights:
        meaning = "it can be planned, but not loaded"
        yield Finding("note", f"{checkpoint.source} has no weights", meaning)
        return
    size, missing = checkpoint.weight_bytes, len(checkpoint.missing)
    text = f"{format_count(len(checkpoint.files), 'file')} of {checkpoint.format}"
    text += "" if size is None else f", {format_bytes(size)} of weights"
    if missing:
        text += f"; {format_count(missing, 'file')} not downloaded yet"
        yield Finding("note", text, "duoka downloads them during loading")
    else:
        yield Finding("ok", f"{text}: sizes, headers and index are consistent")


def check_fit(facts: ModelFacts, machine: Facts) -> Iterator[Finding]:
    """Check that the model fits on the GPUs; if not, list the alternatives as commands."""
    if facts.checkpoint is None:
        return  # `check_whole` has reported why
    if machine.fleet is None:
        advice = "declare some: --gpus 24GiB,12GiB"
        yield Finding("skipped", "no GPU to plan for", advice=advice)
        return
    command = ["duoka", "plan", facts.model]
    command += [] if machine.gpus is None else ["--gpus", machine.gpus]
    try:
        plan = facts.make_plan()
    except InfeasibleError as problem:
        ways = [f"{way.text}: {shlex.join([*command, *way.options])}" for way in problem.ways_out]
        advice = "\n".join(ways) or problem.hint or ""
        yield Finding("error", str(problem), "it can't be loaded", advice)
        return
    free_bytes = min(stage.free_bytes for stage in plan.forecast.devices)
    text = (
        f"it fits on {', '.join(plan.devices)} with {plan.workload.context_tokens} tokens, in "
        f"{plan.workload.dtype}; {format_bytes(free_bytes)} free on the fullest GPU "
        f"({shlex.join(command)} shows it)"
    )
    yield Finding("ok", text)
