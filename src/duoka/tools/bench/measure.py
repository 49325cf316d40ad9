"""Measuring a deployment: its copies each answer in a process of their own, on the engine.

Prompts are tokens drawn at random, so that none shares the pages of another. The time of answers
with a few tokens less that of answers with one is what decoding takes; each request then has half
of its context, as in the plan's forecast. All is done once before, and then told as a median. A
process that runs out of memory, or is killed, ends its deployment and nothing else.
"""

from __future__ import annotations

import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

from duoka.base.quiet import quiet_libraries

with quiet_libraries():
    from duoka.checkpoint.checkpoint import Checkpoint
    from duoka.engine import Engine, SamplingParams
    from duoka.models.from_checkpoint import tokenizer_of
from duoka.errors import DuokaError, MachineError
from duoka.planner.plan import Plan
from duoka.report.measured import PeakBytes
from duoka.workers.channel import open_result, send_result
from duoka.workers.group import WorkerGroup
from duoka.workers.worker import run_with_channel

from .deployments import Deployment, Rates, one_line, together

_MODULE = "duoka.tools.bench"
_DECODE_TOKENS = 32
_ROUNDS = 3
_SEED = 20
# Loading is part of it. A kernel that never ends would be waited for without a limit.
_MOST_SECONDS = 3600.0


def measure(case: Deployment, *, trust_remote_code: bool = False) -> Deployment:
    """Run a deployment, with what was measured or why it couldn't be."""
    try:
        rates, peaks = _run(case.plans, trust_remote_code)
    except (DuokaError, RuntimeError) as error:
        return replace(case, trouble=one_line(error))
    return replace(case, measured=rates, peaks=tuple(peaks))


def _run(plans: Sequence[Plan], trust_remote_code: bool) -> tuple[Rates, list[PeakBytes]]:
    threads = len(os.sched_getaffinity(0)) // sum(len(plan.devices) for plan in plans)
    with WorkerGroup(_MODULE, len(plans), threads=max(1, threads), has_channels=True) as workers:
        drivers = workers.channels
        try:
            _ask(drivers, [(plan, trust_remote_code) for plan in plans])
            work = plans[0].workload
            new = max(2, min(_DECODE_TOKENS, work.context_tokens // 2))
            half = max(1, (work.context_tokens - new) // 2)
            (first,) = _ask(drivers[:1], [(1, work.prompt_tokens, 1)])
            (one,) = _ask(drivers[:1], [(1, half, new)])
            copies = _ask(drivers, [(plan.workload.batch, half, new) for plan in plans])
            peaks = _ask(drivers, [None] * len(plans))
        except (EOFError, OSError) as error:
            _, ending = workers.find_loss(0)
            raise MachineError(f"its process has ended: {ending}") from error
    speed, seconds = one.many_tokens_per_second, first.first_token_seconds
    rates = replace(together(copies), first_token_seconds=seconds, one_tokens_per_second=speed)
    return rates, [*chain(*peaks)]


def _ask(drivers: Sequence[Connection], messages: Sequence[Any]) -> list[Any]:
    """Let all processes do something at the same time; what came of it."""
    for driver, message in zip(drivers, messages, strict=True):
        driver.send(message)
    replies = []
    for driver in drivers:
        if not driver.poll(_MOST_SECONDS):
            raise MachineError(f"no answer within {_MOST_SECONDS:g} s: it hangs")
        replies.append(driver.recv())
    try:
        return [open_result(reply) for reply in replies]
    except (DuokaError, RuntimeError):
        raise
    except Exception as error:  # of the model's code: an OSError isn't the loss of the process
        raise RuntimeError(error) from error


# ── in the process of a copy ──


class _Copy:
    """A copy of a model that answers."""

    def __init__(self, plan: Plan, trust_remote_code: bool) -> None:
        checkpoint = Checkpoint.open(plan.source, trust_remote_code=trust_remote_code)
        tokenizer = tokenizer_of(checkpoint)
        special = set(tokenizer.all_special_ids)
        self._tokens = [token for token in range(tokenizer.vocab_size) if token not in special]
        self._random = random.Random(_SEED)
        self._engine = Engine(plan, warm_up="largest", trust_remote_code=trust_remote_code)

    def rates(self, requests: int, prompt_tokens: int, new_tokens: int) -> Rates:
        """Those of answers to so many requests at once, in rounds; the first one isn't counted."""
        rounds = []
        for _ in range(_ROUNDS + 1):
            first, _ = self._seconds(requests, prompt_tokens, 1)
            seconds, idle = self._seconds(requests, prompt_tokens, new_tokens)
            rounds.append((first, max(seconds - first, 1e-9), idle))
        first, decode, idle = map(statistics.median, zip(*rounds[1:], strict=True))
        return Rates(
            prefill_tokens_per_second=requests * prompt_tokens / first,
            first_token_seconds=first,
            many_tokens_per_second=requests * (new_tokens - 1) / decode,
            idle_share=None if math.isnan(idle) else idle,
        )

    def _seconds(self, requests: int, prompt_tokens: int, new_tokens: int) -> tuple[float, float]:
        """What answers take, and for which share of that GPUs are idle; NaN where nobody knows."""
        params = SamplingParams(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
        prompts = [self._random.choices(self._tokens, k=prompt_tokens) for _ in range(requests)]
        before, begin = self._engine.busy_seconds(), time.perf_counter()
        self._engine.generate(prompts, params)
        seconds, after = time.perf_counter() - begin, self._engine.busy_seconds()
        busy = [after[device] - before[device] for device in after]
        return seconds, max(0.0, 1 - sum(busy) / len(busy) / seconds) if busy else math.nan

    def close(self) -> list[PeakBytes]:
        """End, and tell the peaks of memory."""
        self._engine.close()
        return self._engine.peaks()


def main() -> None:
    """Run the worker process."""
    run_with_channel(_serve)


def _serve(driver: Connection) -> None:
    copies: list[_Copy] = []

    def reply() -> object:
        if not copies:
            copies.append(_Copy(*message))
            return None
        return copies[0].close() if message is None else copies[0].rates(*message)

    while True:
        message = driver.recv()
        send_result(driver, reply)
