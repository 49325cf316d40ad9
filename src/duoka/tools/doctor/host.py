"""The host: its memory, what a container and a shell allow, and the libraries."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from duoka.base.requirements import unmet_extras, unmet_requirements
from duoka.base.units import GIB, MIB, format_bytes
from duoka.hardware.host import available_bytes, container_memory

from .facts import Facts, Finding, or_ok

_LITTLE_BYTES = 4 * GIB
_LITTLE_SHARED_BYTES = 256 * MIB
_FEW_FILES = 1024


def check_host_memory(facts: Facts) -> Iterator[Finding]:
    """Whether there is memory for what is read, converted and offloaded."""
    available = available_bytes(facts.root)
    if available is None:
        yield Finding("note", "how much memory the host has free isn't known here")
        return
    text = f"{format_bytes(available)} of the host's memory are free"
    if available < _LITTLE_BYTES:
        meaning = "loading holds some hundred MiB, torch and transformers as much, offloading more"
        advice = "end other programs, or let the container have more"
        yield Finding("warning", text, meaning, advice)
    else:
        yield Finding("ok", text)


def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    """Whether /dev/shm is large enough for processes that exchange tensors."""
    try:
        free = shutil.disk_usage(facts.root / "dev/shm").free
    except OSError:
        meaning = "NCCL and data loaders of other programs want it"
        yield Finding("note", "there is no /dev/shm", meaning)
        return
    text = f"/dev/shm has {format_bytes(free)} free"
    if free < _LITTLE_SHARED_BYTES:
        meaning = "NCCL and data loaders fail with a bus error where it runs out"
        yield Finding("warning", text, meaning, "docker run --shm-size=2g (or --ipc=host)")
    else:
        yield Finding("ok", text)


def check_limits(facts: Facts) -> Iterator[Finding]:
    """What ulimits and a container's limits leave."""
    problems = [*_ulimits(), *_container(facts.root)]
    return iter(problems or [Finding("ok", "no limit of a shell's or a container's is in the way")])


def _ulimits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < _FEW_FILES:
        text = f"{files} files may be open at once (ulimit -n)"
        meaning = "a checkpoint of many files may not load"
        yield Finding("warning", text, meaning, f"ulimit -n {_FEW_FILES}")


def _container(root: Path) -> Iterator[Finding]:
    memory = container_memory(root)
    if memory is not None:
        limit, used = map(format_bytes, memory)
        text = f"memory: a limit of {limit} for this container, {used} used"
        meaning = "who takes more is killed without a word; files that were read count until needed"
        yield Finding("note", text, meaning)


def check_versions(facts: Facts) -> Iterator[Finding]:
    """Whether the libraries are those that duoka is tested with."""
    problems = [
        Finding("error", text, "duoka may fail anywhere", "pip install --upgrade duoka")
        for text in unmet_requirements()
    ]
    problems += [
        Finding("warning", text, "what needs it may fail", 'pip install --upgrade "duoka[all]"')
        for text in unmet_extras()
    ]
    return or_ok(problems, "all libraries are in the ranges that duoka is tested with")
