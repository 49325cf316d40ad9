"""Facts: what several checks look at, asked of the machine once; and what a check says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from duoka.errors import FleetError
from duoka.hardware import cuda_driver, detect, nvml
from duoka.hardware.detect import PresentGpu
from duoka.hardware.fleet import Fleet

from . import probe
from .probe import Probed

Severity: TypeAlias = Literal["ok", "note", "skipped", "warning", "error"]
BAD: tuple[Severity, ...] = ("error", "warning")
_MOST_NAMES = 6


@dataclass(frozen=True, slots=True)
class Finding:
    """What a check found.

    `text` says what there is, `meaning` what follows from it, `advice` what to do; `figures` are
    what was measured, for programs.
    """

    severity: Severity
    text: str
    meaning: str = ""
    advice: str = ""
    figures: Mapping[str, Any] = field(default_factory=dict, compare=False)


class Facts:
    """The machine: `machine` is None until NVML has answered, and where it never does."""

    def __init__(self, gpus: str | None, root: Path) -> None:
        self.gpus = gpus
        self.root = root
        self.machine: nvml.Machine | None = None

    @property
    def cards(self) -> Sequence[nvml.Gpu]:
        """The GPUs that answer."""
        return () if self.machine is None else self.machine.gpus

    @cached_property
    def present(self) -> list[PresentGpu]:
        """All GPUs, with why one can't be used."""
        return detect.survey()[0]

    @cached_property
    def visible_uuids(self) -> tuple[str, ...]:
        """The GPUs that CUDA shows this process, in its order."""
        return cuda_driver.visible_uuids()

    @cached_property
    def fleet(self) -> Fleet | None:
        """The devices that are meant; None where there is none to be had."""
        try:
            return None if self.gpus is None and self.machine is None else self.parsed()
        except FleetError:
            return None

    def parsed(self) -> Fleet:
        """The same, where there is one; FleetError says what is in the way."""
        return Fleet.parse(self.gpus or "all")

    @property
    def testable(self) -> bool:
        """Whether there are devices, real or virtual, that something can be tried on."""
        return self.fleet is not None and all(
            device.uuid or device.name.startswith("vgpu") for device in self.fleet.devices
        )

    @cached_property
    def probed(self) -> Probed:
        """What torch and the devices did when they were tested."""
        return probe.probe(self.fleet.devices if self.fleet is not None and self.testable else ())


def by_gpu(
    gpus: Iterable[nvml.Gpu], check: Callable[[nvml.Gpu], Iterable[Finding]]
) -> Iterator[Finding]:
    """What a check says of each GPU; of several that are alike once."""
    indices: dict[Finding, list[int]] = {}
    for gpu in gpus:
        for finding in check(gpu):
            indices.setdefault(finding, []).append(gpu.index)
    for finding, numbers in indices.items():
        yield replace(finding, text=f"{numbered(numbers)}: {finding.text}")


def or_ok(findings: Iterable[Finding], text: str) -> Iterator[Finding]:
    """What was found, and where nothing of it is bad, what is all right."""
    is_bad = False
    for finding in findings:
        is_bad |= finding.severity in BAD
        yield finding
    if not is_bad:
        yield Finding("ok", text)


def named(names: Iterable[object]) -> str:
    """Names in a list that stays short."""
    texts = [*map(str, names)]
    more = f" and {len(texts) - _MOST_NAMES} more" if len(texts) > _MOST_NAMES else ""
    return ", ".join(texts[:_MOST_NAMES]) + more


def numbered(indices: Iterable[int]) -> str:
    """GPUs by their numbers."""
    numbers = [*map(str, indices)]
    return f"GPU{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
