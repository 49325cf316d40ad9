"""Measurement of a deployment: each replica runs on the engine in a process of its own.

Prompts are random tokens, so that no two prompts share KV cache pages. Decode time is the time to
generate several tokens minus the time to generate one token; each request is then at about half of
its planned context, as in the plan's forecast. Results are medians after a warm-up. If a process
runs out of memory or is killed, only its deployment fails.
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

from .deployments import Deployment, Rates, combine_rates, describe_error

_MODULE = "duoka.tools.bench"
_DECODE_TOKENS = 32
_ROUNDS = 3
_SEED = 20
# Timeout of one message, which may include loading: a kernel can hang forever.
_MOST_SECONDS = 3600.0


def measure(case: Deployment, *, trust_remote_code: bool = False) -> Deployment:
    """Run a deployment; return it with rates and memory peaks, or with the error as `trouble`."""
    try:
        rates, peaks = _run_replicas(case.plans, trust_remote_code)
    except (DuokaError, RuntimeError) as error:
        return replace(case, trouble=describe_error(error))
    return replace(case, measured=rates, peaks=tuple(peaks))


def _run_replicas(plans: Sequence[Plan], trust_remote_code: bool) -> tuple[Rates, list[PeakBytes]]:
    """Load and measure all replicas at the same time; a single request only on the first."""
    threads = len(os.sched_getaffinity(0)) // sum(len(plan.devices) for plan in plans)
    with WorkerGroup(_MODULE, len(plans), threads=max(1, threads), has_channels=True) as workers:
        drivers = workers.channels
        try:
            _exchange(drivers, [(plan, trust_remote_code) for plan in plans])
            work = plans[0].workload
            new = max(2, min(_DECODE_TOKENS, work.context_tokens // 2))
            half = max(1, (work.context_tokens - new) // 2)
            (prefill,) = _exchange(drivers[:1], [(1, work.prompt_tokens, 1)])
            (single,) = _exchange(drivers[:1], [(1, half, new)])
            copies = _exchange(drivers, [(plan.workload.batch, half, new) for plan in plans])
            peaks = _exchange(drivers, [None] * len(plans))
        except (EOFError, OSError) as error:
            _, ending = workers.find_loss(0)
            raise MachineError(f"its process has ended: {ending}") from error
    speed, seconds = single.many_tokens_per_second, prefill.first_token_seconds
    rates = replace(combine_rates(copies), first_token_seconds=seconds, one_tokens_per_second=speed)
    return rates, [*chain(*peaks)]


def _exchange(drivers: Sequence[Connection], messages: Sequence[Any]) -> list[Any]:
    """Send one message to each process, then wait for all; return their results in order."""
    for driver, message in zip(drivers, messages, strict=True):
        driver.send(message)
    replies = []
    for driver in drivers:
        if not driver.poll(_MOST_SECONDS):
            raise MachineError(f"no response within {_MOST_SECONDS:g} s")
        replies.append(driver.recv())
    try:
        return [open_result(reply) for reply in replies]
    except (DuokaError, RuntimeError):
        raise
    except Exception as error:  # of the model's code; its OSError doesn't mean a lost process
        raise RuntimeError(error) from error


# ── in the process of a replica ──


class ReplicaEngine:
    """A replica of a model, run by an engine in this process; `options` are the engine's."""

    def __init__(self, plan: Plan, trust_remote_code: bool = False, **options: Any) -> None:
        checkpoint = Checkpoint.open(plan.source, trust_remote_code=trust_remote_code)
        tokenizer = tokenizer_of(checkpoint)
        special = set(tokenizer.all_special_ids)
        self._tokens = [token for token in range(tokenizer.vocab_size) if token not in special]
        self._random = random.Random(_SEED)
        options.setdefault("warm_up", "largest")
        self._engine = Engine(plan, trust_remote_code=trust_remote_code, **options)

    def rates(self, requests: int, prompt_tokens: int, new_tokens: int) -> Rates:
        """Measure the rates of concurrent requests: medians of several rounds after a warm-up."""
        rounds = []
        for _ in range(_ROUNDS + 1):
            prefill, _ = self._seconds(requests, prompt_tokens, 1)
            seconds, idle = self._seconds(requests, prompt_tokens, new_tokens)
            rounds.append((prefill, max(seconds - prefill, 1e-9), idle))
        prefill, decode, idle = map(statistics.median, zip(*rounds[1:], strict=True))
        return Rates(
            prefill_tokens_per_second=requests * prompt_tokens / prefill,
            first_token_seconds=prefill,
            many_tokens_per_second=requests * (new_tokens - 1) / decode,
            idle_share=None if math.isnan(idle) else idle,
        )

    def _seconds(self, requests: int, prompt_tokens: int, new_tokens: int) -> tuple[float, float]:
        """Return the seconds to generate, and the GPUs' idle share (NaN if unknown)."""
        params = SamplingParams(max_new_tokens=new_tokens, min_new_tokens=new_tokens)
        prompts = [self._random.choices(self._tokens, k=prompt_tokens) for _ in range(requests)]
        busy_at_start, start = self._engine.busy_seconds(), time.perf_counter()
        self._engine.generate(prompts, params)
        seconds, busy_at_end = time.perf_counter() - start, self._engine.busy_seconds()
        busy = [busy_at_end[device] - busy_at_start[device] for device in busy_at_end]
        return seconds, max(0.0, 1 - sum(busy) / len(busy) / seconds) if busy else math.nan

    def close(self) -> list[PeakBytes]:
        """Close the engine, and return the memory peaks of its devices."""
        self._engine.close()
        return self._engine.peaks()


def main() -> None:
    """Run the worker process of one replica."""
    run_with_channel(_serve_requests)


def _serve_requests(driver: Connection) -> None:
    """Answer messages: the plan to load, then (requests, prompt, new tokens), then None to end."""
    replicas: list[ReplicaEngine] = []

    def reply() -> object:
        if not replicas:
            replicas.append(ReplicaEngine(*message))
            return None
        return replicas[0].close() if message is None else replicas[0].rates(*message)

    while True:
        message = driver.recv()
        send_result(driver, reply)
