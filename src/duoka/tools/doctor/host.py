"""The host: its memory, what a container and a shell allow, and the libraries."""

from __future__ import annotations

import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from duoka.base.requirements import unmet_extras, unmet_requirements
from duoka.base.units import GIB, MIB, format_bytes
from duoka.hardware.host import available_bytes, container_memory

from .facts import Facts, Finding, Severity, or_ok

_LITTLE_BYTES = 4 * GIB
_LITTLE_SHARED_BYTES = 256 * MIB
_FEW_FILES = 1024
_SWAP = re.compile(r"^Swap(?:Total|Free): +(\d+) kB$", re.MULTILINE)
# By resource: its letter for ulimit, how bad less than no limit is, and what then fails.
_SIZES: dict[int, tuple[str, Severity, str, str]] = {
    resource.RLIMIT_AS: (
        *("v", "error", "of addresses may be used"),
        "CUDA reserves far more addresses than it uses, and doesn't start",
    ),
    resource.RLIMIT_FSIZE: (
        *("f", "warning", "is the largest that a file may be"),
        "models and checkpoints can't be saved",
    ),
}


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
    with suppress(OSError, ValueError):
        total, free = map(int, _SWAP.findall((facts.root / "proc/meminfo").read_text()))
        swapped = (total - free) * 1024
        if swapped > available:
            meaning = "the machine is short of memory; what is swapped is slow"
            yield Finding("warning", f"{format_bytes(swapped)} of swap are in use", meaning)


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
    for kind, (letter, severity, text, meaning) in _SIZES.items():
        size = resource.getrlimit(kind)[0]
        if size != resource.RLIM_INFINITY:
            text = f"{format_bytes(size)} {text} (ulimit -{letter})"
            yield Finding(severity, text, meaning, f"ulimit -{letter} unlimited")


def _container(root: Path) -> Iterator[Finding]:
    memory = container_memory(root)
    if memory is not None:
        limit, used = map(format_bytes, memory)
        text = f"memory: a limit of {limit} for this container, {used} used"
        meaning = "who takes more is killed without a word; files that were read count until needed"
        yield Finding("note", text, meaning)
    processors = _quota(root / "sys/fs/cgroup")
    if processors is not None:
        text = f"processors: the container may use {processors:.1f} at a time"
        meaning = "steps of small models wait for them; a GPU wants one for itself"
        yield Finding("note", text, meaning)


def _quota(group: Path) -> float | None:
    """Processors that a container's quota comes to, in either version of control groups."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with suppress(OSError, ValueError):
            texts = " ".join((group / name).read_text() for name in names).split()
            quota, period = map(int, texts)  # "max" is none
            return quota / period if quota > 0 else None
    return None


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
