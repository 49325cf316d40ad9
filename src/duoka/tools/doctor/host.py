"""Host checks: memory, a container's limit, and the installed libraries."""

from __future__ import annotations

from collections.abc import Iterator

from duoka.base.requirements import missing_extras, unmet_requirements
from duoka.base.units import GIB, format_bytes
from duoka.forecast.device_memory import CompiledMemory
from duoka.hardware.host import available_bytes, container_memory, total_bytes

from .facts import Facts, Finding, or_ok

_LOW_BYTES = 4 * GIB


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


def check_versions(_: Facts) -> Iterator[Finding]:
    """Compare the installed libraries with the tested version ranges."""
    upgrade = "pip install --upgrade"
    problems = [
        Finding("error", text, "duoka may fail", f"{upgrade} duoka")
        for text in unmet_requirements()
    ]
    problems += [
        Finding("warning", text, "features that need it may fail", f'{upgrade} "duoka[all]"')
        for text in unmet_requirements(optional=True)
    ]
    return or_ok(problems, "all libraries are in the supported ranges")


def check_extras(_: Facts) -> Iterator[Finding]:
    """List the optional parts that are missing, each with its install command and purpose."""
    if CompiledMemory is None:
        meaning = "planning takes three to twenty times as long, with the same result"
        advice = "install a C compiler and Python's headers, then install duoka again"
        yield Finding("note", "duoka's compiled module is missing", meaning, advice)
    missing = missing_extras()
    if missing:
        commands = [f'pip install "duoka[{extra}]": {purpose}' for extra, purpose in missing]
        text = f"not installed: {', '.join(extra for extra, _ in missing)}"
        yield Finding("note", text, "all else works without them", "\n".join(commands))
