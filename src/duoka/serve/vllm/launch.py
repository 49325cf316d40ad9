"""Launch: vLLM from a plan to an exit code."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from duoka.base.units import format_count
from duoka.errors import MachineError
from duoka.planner.plan import Plan
from duoka.planner.plan_profile import cached_profile
from duoka.report.export.vllm import BLOCK_TOKENS, export, planned_blocks
from duoka.serve.address import Address

from .commands import DRAIN_SECONDS, MODULE, NodeCommand, commands, served_name
from .interpreter import clean_environment, find_vllm
from .options import VllmOptions
from .process import ProgramGroup
from .ready import is_healthy, read_cache, url_of

Tell = Callable[[str], None]
_POLL_SECONDS = 0.2
# Until it answers: models are large, and may have to be downloaded.
_START_SECONDS = 1800.0
# Beyond the time to drain: engines let go of their GPUs.
_GRACE_SECONDS = 15.0
_KEY = "VLLM_API_KEY"


def serve_with_vllm(plan: Plan, options: VllmOptions, tell: Tell) -> int:
    """Serve a model with vLLM as it was planned, until it ends or is stopped.

    What is to be run on further machines is told first. SIGINT, SIGTERM and SIGHUP are handed on to
    vLLM, which then answers what it has begun and takes nothing new. To be called in the main
    thread, where signals are; when it returns no process is left.

    Parameters
    ----------
    plan : Plan
        For generating; of GPUs that are here, or on the machines of `options`.
    options : VllmOptions
    tell : callable
        Shows a line to a person.

    Returns
    -------
    int
        vLLM's exit code; 128 and a signal's number where that ended it.

    Raises
    ------
    UsageError
        If vLLM can't be told this plan, an option is wrong, or the address is taken.
    MachineError
        If the Python has no vLLM, or vLLM ends before it answers, doesn't answer in time, or has
        fewer cache blocks than planned.
    """
    profile = cached_profile(plan)
    commands(plan, options, profile)  # what can't be said is told before vLLM is looked for
    # Another server's answers would be taken for vLLM's.
    with Address(host=options.host, port=options.port).bind() as bound:
        options = replace(options, port=bound.getsockname()[1])
    python, version = find_vllm(options.python)
    head, *further = commands(plan, options, profile)
    for note in export(plan, profile).notes:
        tell(note)
    _tell_start(python, version, further, tell)
    environment = clean_environment() | dict(head.environment)
    if options.api_key is not None:
        environment[_KEY] = options.api_key
    with ProgramGroup(
        [os.fspath(python), "-P"],
        MODULE,
        head.arguments,
        environment=environment,
        grace_seconds=DRAIN_SECONDS + _GRACE_SECONDS,
    ) as program:
        if _wait_until_healthy(program, options):
            tell(_hold_against(plan, read_cache(options.host, options.port)))
            for line in _welcome(plan, options, has_key=_KEY in environment):
                tell(line)
        return program.wait()


def _tell_start(python: Path, version: str, further: list[NodeCommand], tell: Tell) -> None:
    for command in further:
        tell(f"run this on {command.address}, where the model is at the same place:")
        tell(command.shell_text(python))
    tell(f"vLLM {version} starts; duoka was tried with 0.33")


def _wait_until_healthy(program: ProgramGroup, options: VllmOptions) -> bool:
    """Wait until vLLM answers; False where it was asked to end before that."""
    deadline = time.monotonic() + _START_SECONDS
    while not program.is_stopping:
        code = program.exit_code
        if code is not None and not program.is_stopping:
            raise MachineError(
                f"vLLM ended with exit code {code} before it answered",
                hint="the cause is in its output above; the first error in it is often the one",
            )
        if is_healthy(options.host, options.port):
            return True
        if time.monotonic() > deadline:
            raise MachineError(
                f"vLLM doesn't answer at {url_of(options.host, options.port)}/health after "
                f"{_START_SECONDS:.0f} s, and was ended",
                hint="are the other machines' commands running, and is the model downloaded?",
            )
        time.sleep(_POLL_SECONDS)
    return False


def _hold_against(plan: Plan, cache: dict[str, float]) -> str:
    """Refuse a cache that holds less than planned; what it holds, for people."""
    workload = plan.workload
    block_tokens = int(cache.get("block_size", BLOCK_TOKENS))
    request_blocks = -(-workload.context_tokens // block_tokens)
    # One block is never given out.
    planned = (planned_blocks(workload, block_tokens) - 1) / request_blocks
    number = cache.get("num_gpu_blocks")
    if number is None:
        return (
            f"NOTE: vLLM doesn't say how many cache blocks it has; the plan needs room for "
            f"{planned:.2f} requests, and whether it is there isn't known"
        )
    # Layers that look back differently far have blocks of their own for each request.
    num_requests = min((number - 1) / request_blocks, cache.get("kv_cache_max_concurrency", number))
    if num_requests < planned:
        raise MachineError(
            f"vLLM's cache holds {num_requests:.2f} requests of {workload.context_tokens:,} tokens "
            f"at once ({number:.0f} blocks of {block_tokens} tokens), and the plan's "
            f"{planned:.2f}: it was ended",
            hint="vLLM's cache takes more for a token than the plan's, or its GPUs have less free: "
            "plan for less (--context, --sequences), or with smaller budgets (--gpus)",
        )
    return (
        f"{number:.0f} cache blocks of {block_tokens} tokens: at once "
        f"{format_count(min(int(num_requests), workload.batch), 'request')} of "
        f"{workload.context_tokens:,} tokens, {workload.batch} in all"
    )


def _welcome(plan: Plan, options: VllmOptions, *, has_key: bool) -> list[str]:
    """What a person needs to know of a server that answers."""
    url = url_of(options.host, options.port)
    body = {
        "model": served_name(plan.lasting(), options),
        "messages": [{"role": "user", "content": "Hello"}],
    }
    words = ["curl", f"{url}/v1/chat/completions"]
    words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    # The key is not shown; a shell puts it in.
    key = ' -H "Authorization: Bearer $KEY"' if has_key else ""
    return [f"vLLM answers at {url}/v1", shlex.join(words) + key]
