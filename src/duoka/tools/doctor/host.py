"""The host: its memory, what a container and a shell allow, and the libraries."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from duoka.base.requirements import unmet_extras, unmet_requirements
from duoka.base.units import GIB, MIB, format_bytes
from duoka.hardware.host import available_bytes, container_memory

from .facts import Facts
from .findings import Finding

_LITTLE_BYTES = 4 * GIB
_LITTLE_SHARED_BYTES = 256 * MIB
_FEW_FILES = 1024
_PERIODS = (("cpu.max", None), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"))


def check_host_memory(facts: Facts) -> Iterator[Finding]:
    """Whether there is memory for what is read, converted and offloaded."""
    available = available_bytes(facts.root)
    if available is None:
        yield Finding("note", "how much memory the host has free isn't known here")
    elif available < _LITTLE_BYTES:
        yield Finding(
            "warning",
            f"{format_bytes(available)} of the host's memory are free",
            "loading holds some hundred MiB, torch and transformers as much, offloading the rest",
            "end other programs, or let the container have more",
        )
    else:
        yield Finding("ok", f"{format_bytes(available)} of the host's memory are free")
    total, free = _swap(facts.root)
    if available is not None and total - free > available:
        text = f"{format_bytes(total - free)} of swap are in use"
        yield Finding("warning", text, "the machine is short of memory; what is swapped is slow")


def _swap(root: Path) -> tuple[int, int]:
    sizes = {}
    with suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines():
            name, _, rest = line.partition(":")
            if name.startswith("Swap"):
                sizes[name] = int(rest.split()[0]) * 1024
    return sizes.get("SwapTotal", 0), sizes.get("SwapFree", 0)


def check_shared_memory(facts: Facts) -> Iterator[Finding]:
    """Whether /dev/shm is large enough for processes that exchange tensors."""
    try:
        free = shutil.disk_usage(facts.root / "dev/shm").free
    except OSError:
        yield Finding(
            "note", "there is no /dev/shm", "NCCL and data loaders of other programs want it"
        )
        return
    if free < _LITTLE_SHARED_BYTES:
        yield Finding(
            "warning",
            f"/dev/shm has {format_bytes(free)} free",
            "NCCL and data loaders fail with a bus error where it runs out",
            "docker run --shm-size=2g (or --ipc=host)",
        )
    else:
        yield Finding("ok", f"/dev/shm has {format_bytes(free)} free")


def check_limits(facts: Facts) -> Iterator[Finding]:
    """What ulimits and a container's limits leave."""
    problems = [*_ulimits(), *_container(facts.root)]
    yield from problems
    if not problems:
        yield Finding("ok", "no limit of the shell's or a container's is in the way")


def _ulimits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < _FEW_FILES:
        text = f"{files} files may be open at once (ulimit -n)"
        yield Finding(
            "warning", text, "a checkpoint of many files may not load", f"ulimit -n {_FEW_FILES}"
        )
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY:
        text = f"{format_bytes(space)} of addresses may be used (ulimit -v)"
        meaning = "CUDA reserves far more addresses than it uses, and doesn't start"
        yield Finding("error", text, meaning, "ulimit -v unlimited")
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if size != resource.RLIM_INFINITY:
        text = f"files may have {format_bytes(size)} at most (ulimit -f)"
        yield Finding(
            "warning", text, "models and checkpoints can't be saved", "ulimit -f unlimited"
        )


def _container(root: Path) -> Iterator[Finding]:
    memory = container_memory(root)
    if memory is not None:
        limit, used = memory
        texts = f"a limit of {format_bytes(limit)} for this container, {format_bytes(used)} used"
        meaning = "who takes more is killed without a word; files that were read count until needed"
        yield Finding("note", f"memory: {texts}", meaning)
    processors = _quota(root)
    if processors is not None:
        text = f"processors: the container may use {processors:.1f} at a time"
        yield Finding(
            "note", text, "steps of small models wait for them; a GPU wants one for itself"
        )


def _quota(root: Path) -> float | None:
    """Processors that a container's quota comes to, in either version of control groups."""
    group = root / "sys/fs/cgroup"
    for name, period in _PERIODS:
        with suppress(OSError, ValueError):
            texts = (group / name).read_text().split()
            if period is not None:
                texts += (group / period).read_text().split()
            quota = int(texts[0])  # "max" is none
            return quota / int(texts[1]) if quota > 0 else None
    return None


def check_versions(facts: Facts) -> Iterator[Finding]:
    """Whether the libraries are those that duoka is tested with."""
    wrong, optional = unmet_requirements(), unmet_extras()
    for text in wrong:
        yield Finding("error", text, "duoka may fail anywhere", "pip install --upgrade duoka")
    for text in optional:
        yield Finding(
            "warning", text, "what needs it may fail", 'pip install --upgrade "duoka[all]"'
        )
    if not wrong and not optional:
        yield Finding("ok", "all libraries are in the ranges that duoka is tested with")
