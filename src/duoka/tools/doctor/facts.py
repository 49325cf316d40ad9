"""Facts: what several checks look at, asked of the machine once."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from duoka.errors import FleetError
from duoka.hardware import cuda_driver, detect, gpu_health, nvml
from duoka.hardware.detect import PresentGpu
from duoka.hardware.fleet import Fleet
from duoka.hardware.gpu_health import GpuHealth, MachineHealth

from . import probe
from .probe import Probed

_ALL = "all"


class Facts:
    """The machine: `machine` is None until NVML has answered, and where it never does."""

    def __init__(self, gpus: str | None, root: Path) -> None:
        self.gpus = gpus
        self.root = root
        self.machine: nvml.Machine | None = None

    @cached_property
    def health(self) -> MachineHealth:
        """What NVML tells beyond what planning needs."""
        return gpu_health.read_health()

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
        return Fleet.parse(self.gpus or _ALL)

    @property
    def testable(self) -> bool:
        """Whether there are devices, real or virtual, that something can be tried on."""
        return self.fleet is not None and all(
            device.uuid or device.name.startswith("vgpu") for device in self.fleet.devices
        )

    @cached_property
    def probed(self) -> Probed:
        """What torch and the devices did when they were tested."""
        devices = self.fleet.devices if self.fleet is not None and self.testable else ()
        return probe.probe(devices)

    def healths(self) -> list[tuple[nvml.Gpu, GpuHealth]]:
        """Each GPU that answers, with its health."""
        gpus = () if self.machine is None else self.machine.gpus
        return [(gpu, self.health.gpus[gpu.index]) for gpu in gpus if gpu.index in self.health.gpus]


def named(names: Iterable[object]) -> str:
    """Names in a list that stays short."""
    texts = [*map(str, names)]
    more = f" and {len(texts) - 6} more" if len(texts) > 6 else ""
    return ", ".join(texts[:6]) + more


def numbered(indices: Iterable[int]) -> str:
    """GPUs by their numbers."""
    numbers = [*map(str, indices)]
    return f"GPU{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
