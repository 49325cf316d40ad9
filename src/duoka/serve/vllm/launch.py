"""Launch: vLLM from a plan to an exit code."""

from __future__ import annotations

import json
import os
import shlex
import time
from collections.abc import Callable
from dataclasses import replace

from duoka.base.units import format_count
from duoka.errors import MachineError
from duoka.planner.plan import Plan
from duoka.planner.plan_profile import cached_profile
from duoka.report.export.vllm import BLOCK_TOKENS, export, planned_blocks

from .commands import MODULE, NodeCommand, commands, served_name
from .interpreter import TRIED, Interpreter, clean_environment, find_vllm
from .options import VllmOptions
from .process import ProgramGroup
from .ready import Address, CacheBlocks, free_address, is_healthy, read_blocks

Tell = Callable[[str], None]
_POLL_SECONDS = 0.2
# Beyond the time to drain: engines let go of their GPUs.
_GRACE_SECONDS = 15.0
_SHOWN_LINES = 8
_KEY = "VLLM_API_KEY"
_PLAN_FOR_LESS = (
    "vLLM's cache takes more for a token than the plan's, or its GPUs have less free: plan for "
    "less (--context, --sequences), or with smaller budgets (--gpus)"
)


def serve_with_vllm(plan: Plan, options: VllmOptions, tell: Tell) -> int:
    """Serve a model with vLLM as it was planned, until it ends or is stopped.

    What is to be run on further machines is told first. vLLM's output goes to `tell`, line by
    line. SIGINT, SIGTERM and SIGHUP are handed on to vLLM, which then answers what it has begun
    and takes nothing new; a second signal, two seconds later, kills it. To be called in the main
    thread, where signals are; when it returns no process is left.

    Parameters
    ----------
    plan : Plan
        For generating; of GPUs that are here, or on the machines of `options`.
    options : VllmOptions
    tell : callable
        Shows a line to a person; called in other threads, too.

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
    address = free_address(options.host, options.port)
    interpreter = find_vllm(options.python)
    head, *further = commands(plan, replace(options, port=address.port), profile)
    for note in export(plan, profile).notes:
        tell(note)
    _tell_start(interpreter, further, tell)
    environment = clean_environment() | dict(head.environment)
    if options.api_key is not None:
        environment[_KEY] = options.api_key
    with ProgramGroup(
        [os.fspath(interpreter.python), "-P"],
        MODULE,
        head.arguments,
        environment=environment,
        tell=tell,
        secret=environment.get(_KEY),
        grace_seconds=options.drain_seconds + _GRACE_SECONDS,
    ) as program:
        if _wait_until_healthy(program, address, options.start_seconds):
            blocks = read_blocks(address)
            _hold_against(plan, blocks, interpreter, tell)
            for line in _welcome(plan, options, address, blocks, has_key=_KEY in environment):
                tell(line)
        return program.wait()


def _tell_start(interpreter: Interpreter, further: list[NodeCommand], tell: Tell) -> None:
    if not interpreter.is_tried:
        tell(
            f"NOTE: vLLM {interpreter.vllm_version} is installed; duoka was tried with {TRIED}. "
            "What it is told may be understood otherwise, or refused."
        )
    for command in further:
        tell(f"run this on {command.address}, where the model is at the same place:")
        tell(command.shell_text(interpreter.python))
    tell(f"vLLM {interpreter.vllm_version} starts")


def _wait_until_healthy(program: ProgramGroup, address: Address, start_seconds: float) -> bool:
    """Wait until vLLM answers; False where it was asked to end before that."""
    deadline = time.monotonic() + start_seconds
    while not program.is_stopping:
        code = program.exit_code
        if code is not None and not program.is_stopping:
            raise MachineError(
                f"vLLM ended with exit code {code} before it answered; it said last:\n"
                + "\n".join(program.last_lines()[-_SHOWN_LINES:]),
                hint="the cause is in its own words; the first error among them is often the one",
            )
        if is_healthy(address):
            return True
        if time.monotonic() > deadline:
            raise MachineError(
                f"vLLM doesn't answer at {address.url}/health after {start_seconds:.0f} s, and "
                "was ended",
                hint="are the other machines' commands running, and is the model downloaded? "
                "Allow more time where it only is slow",
            )
        time.sleep(_POLL_SECONDS)
    return False


def _hold_against(plan: Plan, blocks: CacheBlocks, interpreter: Interpreter, tell: Tell) -> None:
    """Refuse a cache that holds less than planned."""
    workload = plan.workload
    block_tokens = blocks.tokens or BLOCK_TOKENS
    planned = planned_blocks(workload, block_tokens)
    if blocks.number is None:
        tell(
            f"NOTE: vLLM {interpreter.vllm_version} doesn't say how many cache blocks it has; the "
            f"plan needs {planned} of {block_tokens} tokens, and whether they are there isn't known"
        )
        return
    if blocks.number < planned:
        raise MachineError(
            f"vLLM has {blocks.number} cache blocks of {block_tokens} tokens, and the plan needs "
            f"{planned}: it was ended",
            hint=_PLAN_FOR_LESS,
        )
    # One block is never given out.
    requests = (planned - 1) / -(-workload.context_tokens // block_tokens)
    if blocks.requests is not None and blocks.requests < requests:
        raise MachineError(
            f"vLLM's cache holds {blocks.requests:.2f} requests of {workload.context_tokens:,} "
            f"tokens at once, and the plan's {requests:.2f}: it was ended",
            hint=_PLAN_FOR_LESS,
        )


def _welcome(
    plan: Plan, options: VllmOptions, address: Address, blocks: CacheBlocks, *, has_key: bool
) -> list[str]:
    """What a person needs to know of a server that answers."""
    workload = plan.workload
    lines = [f"vLLM answers at {address.url}/v1"]
    if blocks.number is not None:
        block_tokens = blocks.tokens or BLOCK_TOKENS
        longest = (blocks.number - 1) // -(-workload.context_tokens // block_tokens)
        if blocks.requests is not None:
            longest = min(longest, int(blocks.requests))
        lines.append(
            f"{blocks.number} cache blocks of {block_tokens} tokens, "
            f"{planned_blocks(workload, block_tokens)} planned: at once "
            f"{format_count(min(longest, workload.batch), 'request')} of "
            f"{workload.context_tokens:,} tokens, {workload.batch} in all"
        )
    body = {
        "model": served_name(plan.lasting(), options),
        "messages": [{"role": "user", "content": "Hello"}],
    }
    words = ["curl", f"{address.url}/v1/chat/completions"]
    words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    # The key is not shown; a shell puts it in.
    key = ' -H "Authorization: Bearer $KEY"' if has_key else ""
    lines.append(shlex.join(words) + key)
    return lines
