"""Host checks: memory, shared memory, a container's limit, and the installed libraries."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

from duoka.base.requirements import unmet_requirements, versions_outside_range
from duoka.base.units import GIB, MIB, format_bytes
from duoka.hardware.host import available_bytes, container_memory, total_bytes

from .facts import Facts, Finding, or_ok

_LOW_BYTES = 4 * GIB
_LOW_SHARED_BYTES = 256 * MIB


def check_host_memory(facts: Facts) -> Iterator[Finding]:
    """Check the free CPU memory, and report the memory limit of a container."""
    available = available_bytes(facts.root)
    if available is None:
        yield Finding("note", "the free CPU memory is unknown")
    else:
        total = total_bytes(facts.root)
        size = "" if total is None else f", {format_bytes(total)} in total"
        text = f"{format_bytes(available)} of CPU memory are free{size}"
        meaning = (
            "loading needs several hundred MiB, torch and transformers as much, offloading more"
        )
        advice = "end other programs, or raise the container's limit"
        is_little = available < _LOW_BYTES
        yield Finding("warning", text, meaning, advice) if is_little else Finding("ok", text)
    container = container_memory(facts.root)
    if container is not None:
        limit, used = map(format_bytes, container)
        text = f"memory: a limit of {limit} for this container, {used} used"
        meaning = (
            "processes beyond it are killed without a message; the page cache counts until "
            "it is reclaimed"
        )
        yield Finding("note", text, meaning)


def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    """Check the free space in /dev/shm, through which processes exchange tensors."""
    try:
        free = shutil.disk_usage(facts.root / "dev/shm").free
    except OSError:
        meaning = "NCCL and data loaders need it"
        yield Finding("note", "/dev/shm is missing", meaning)
        return
    text = f"/dev/shm has {format_bytes(free)} free"
    meaning = "NCCL and data loaders fail with a bus error if it runs out"
    advice = "use docker run --shm-size=2g (or --ipc=host)"
    is_little = free < _LOW_SHARED_BYTES
    yield Finding("warning", text, meaning, advice) if is_little else Finding("ok", text)


def check_versions(facts: Facts) -> Iterator[Finding]:
    """Compare the installed libraries with the tested version ranges."""
    problems = [
        Finding("error", text, "duoka may fail", "pip install --upgrade duoka")
        for text in unmet_requirements()
    ]
    problems += [
        Finding(
            "warning", text, "features that need it may fail", 'pip install --upgrade "duoka[all]"'
        )
        for text in versions_outside_range(optional=True)
    ]
    return or_ok(problems, "all libraries are in the supported ranges")
