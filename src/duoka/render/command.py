"""The command that makes a plan again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ..constraints import Constraints
from ..plans import Plan
from ..workload import Workload

_DEFAULT = Workload()


def command(plan: Plan) -> str:
    """What to write in a shell to ask again what was asked for a plan.

    A device map isn't in it: it was a file, and the plan keeps only what came of it.
    """
    asked = plan.request
    words = ["duoka", "plan", plan.source or "MODEL"]
    words += ["--gpus", asked.gpus] if asked.gpus and asked.gpus != "all" else []
    words += _sizes(asked.workload)
    if asked.objective != "auto":
        words += ["--objective", asked.objective]
    words += ["--use-all"] if asked.use_all else []
    words += _demands(asked.constraints)
    words += ["--device-map", "FILE"] if plan.objective == "given" else []
    return shlex.join(words)


def _demands(constraints: Constraints) -> Iterator[str]:
    if constraints.strategy != "auto":
        yield from ("--strategy", constraints.strategy)
    for name, device in constraints.pins:
        yield from ("--pin", f"{name}={device}")
    for name in constraints.uncut:
        yield from ("--uncut", name)
    for device, size in constraints.reserve:
        yield from ("--reserve", f"{device}={size}B")


def _sizes(workload: Workload) -> Iterator[str]:
    yield from ("--context", str(workload.context_tokens))
    yield from ("--new-tokens", str(workload.new_tokens))
    if workload.batch != 1:
        yield from ("--batch", str(workload.batch))
    if workload.dtype != "auto":
        yield from ("--dtype", workload.dtype)
    chunk = workload.prefill_chunk_tokens
    if chunk != _DEFAULT.prefill_chunk_tokens:
        yield from ("--prefill-chunk", "none" if chunk is None else str(chunk))
