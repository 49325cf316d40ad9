"""The model that a tool shall take: its name there, its revision, and what its weights become."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePath

from duoka.planner.plan import Plan

_PLACEHOLDER = "MODEL"
# Plans keep a model of the Hub with its commit; a path looks otherwise.
_OF_THE_HUB = re.compile(r"([^/@\s]+/[^/@\s]+)@([0-9a-f]{40})", re.ASCII)


def name_of(plan: Plan) -> str:
    """The directory or the repository; a placeholder where the plan knows no weights."""
    if not plan.source or _is_config(plan):
        return _PLACEHOLDER
    found = _OF_THE_HUB.fullmatch(plan.source)
    return found[1] if found else plan.source


def revision_of(plan: Plan) -> str | None:
    """The commit on the Hub that was planned; None for what lies on a disk."""
    found = _OF_THE_HUB.fullmatch(plan.source)
    return found[2] if found else None


def source_note(plan: Plan) -> Iterator[str]:
    """That a placeholder is one."""
    if name_of(plan) == _PLACEHOLDER:
        what = f"{PurePath(plan.source).name}, a config" if plan.source else "a model in memory"
        yield (
            f"NOTE: the plan was made from {what}; {_PLACEHOLDER} stands for the directory or the "
            "repository with the weights."
        )


def bits_notes(plan: Plan, tool: str) -> Iterator[str]:
    """What an engine has instead of the cache and the weights of fewer bits that were planned."""
    if plan.workload.cache == "int8":
        yield f"NOTE: the plan's cache has 8-bit integers; {tool}'s has 8-bit floats."
    if plan.workload.quantize != "none":
        yield (
            f"NOTE: the plan's weights are in {plan.workload.quantize}, made while loading; {tool} "
            "needs a checkpoint that is quantized already, or its own --quantization."
        )


def step_tokens(plan: Plan) -> int | None:
    """Prompt tokens that run in one step, those of all sequences together; None for all of them."""
    chunk = plan.workload.prefill_chunk_tokens
    return chunk * plan.workload.batch if isinstance(chunk, int) else None


def _is_config(plan: Plan) -> bool:
    return plan.source.endswith(".json")
