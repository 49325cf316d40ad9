"""Detection: the GPUs of this machine, and those that this process can use.

NVML lists the GPUs in `nvidia-smi`'s order; CUDA lists the ones visible to this process, with its
own numbers. The two lists are joined by UUID, never by number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from duoka.base.units import format_bytes
from duoka.errors import FleetError

from . import calibration, catalogue, cuda_driver, gpu_generation, nvml
from .calibration import GpuFigures
from .device import MAX_DEVICES, RESERVE_BYTES, STEP_BYTES, Device, FleetParts
from .host import is_wsl
from .links import Way, by_nvlink, from_host, links_of, through_host, ways_between

_UUID = re.compile(r"(?:gpu|mig)-[0-9a-z/-]{1,80}", re.ASCII | re.IGNORECASE)
_INDEX = re.compile(r"\d{1,9}", re.ASCII)
_BARE_NUMBER = (
    "a number without a unit is the index that nvidia-smi shows; a budget needs a unit, as in 24GiB"
)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Reason why a GPU can't be used: a short `state`, a sentence, and advice."""

    state: str
    reason: str
    advice: str


_DIVIDED = Trouble(
    state="in MIG mode",
    reason="it is in MIG mode, and only its instances can compute",
    advice=f"use an instance by its UUID, and make it visible: {cuda_driver.VARIABLE}=MIG-…",
)
_NO_MEMORY_DATA = Trouble(
    state="memory unknown",
    reason="the driver doesn't report its memory",
    advice='give a budget instead: "24GiB"',
)
_BFLOAT16_SINCE = (8, 0)
_FELL_OFF = "it may have fallen off the bus (`dmesg | grep -i xid` shows it); restart the machine"


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentGpu:
    """A GPU of this machine, or an `instance` of a GPU in MIG mode.

    `figures` are measured ones, None if not calibrated. `torch_name` is torch's name in this
    process, None if the GPU is hidden from torch. `trouble` is None if the GPU can be used.
    """

    gpu: nvml.NvmlGpu
    instance: nvml.Instance | None = None
    figures: GpuFigures | None = None
    torch_name: str | None = None
    trouble: Trouble | None = None

    @property
    def name(self) -> str:
        """Name for ``--gpus``: the index, or an instance's UUID."""
        return str(self.gpu.index) if self.instance is None else self.instance.uuid

    @property
    def label(self) -> str:
        """Name in error messages."""
        index = self.gpu.index
        return f"GPU {index}" if self.instance is None else f"an instance of GPU {index}"

    @property
    def part(self) -> nvml.NvmlGpu | nvml.Instance:
        """The whole GPU, or the instance."""
        return self.instance or self.gpu

    @property
    def processes(self) -> tuple[nvml.Process, ...]:
        """Other processes on the GPU; unknown for an instance."""
        return self.gpu.processes if self.instance is None else ()

    @property
    def budget_bytes(self) -> int | None:
        """Free memory minus the reserve, in whole `STEP_BYTES`; negative if less is free.

        None if the driver doesn't report the free memory.
        """
        free = self.part.free_bytes
        return None if free is None else (free - self.kept_bytes) // STEP_BYTES * STEP_BYTES

    @property
    def kept_bytes(self) -> int:
        """Reserve outside torch's allocator: measured, or else `RESERVE_BYTES`."""
        return RESERVE_BYTES if self.figures is None else self.figures.reserve_bytes

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dict for `json.dumps`."""
        return {
            "name": self.name,
            "torch_name": self.torch_name,
            "product": self.part.name,
            "uuid": self.part.uuid,
            "total_bytes": self.part.total_bytes,
            "free_bytes": self.part.free_bytes,
            "budget_bytes": None if self.trouble else self.budget_bytes,
            "trouble": self.trouble.reason if self.trouble else "",
            "processes": [asdict(process) for process in self.processes],
        }


def is_detected(text: str) -> bool:
    """Return True for the index or the UUID of a GPU, or the beginning of a UUID."""
    return bool(_INDEX.fullmatch(text) or _UUID.fullmatch(text))


def detect(which: str | None = None) -> FleetParts:
    """Find all usable GPUs of this machine, or the GPUs listed in `which`, and their links."""
    view = _View()
    gpus = view.usable() if which is None else view.choose(which)
    names = [gpu.torch_name or "" for gpu in gpus]
    uuids = {name: gpu.part.uuid for name, gpu in zip(names, gpus, strict=True)}
    direct_links = links_of(ways_between(zip(names, gpus, strict=True), _way))
    links = calibration.with_links(direct_links, uuids, view.calibration)
    return tuple(map(_device, gpus)), links


def survey() -> tuple[list[PresentGpu], list[tuple[str, str, Way]]]:
    """List all GPUs of this machine, usable or not, and the ways between them."""
    gpus = _View().gpus
    return gpus, [*ways_between(((gpu.name, gpu) for gpu in gpus), _way)]


def reports_memory() -> bool:
    """Return True if a driver reports the free memory of any GPU.

    It doesn't for GPUs that share the CPU's memory.
    """
    with suppress(FleetError):
        return any(gpu.free_bytes is not None for gpu in nvml.read().gpus)
    return False


def describe_numbers(devices: Sequence[Device]) -> str:
    """Describe `nvidia-smi`'s numbers of devices, if CUDA_VISIBLE_DEVICES renumbers them."""
    if cuda_driver.restriction() is not None and any(device.uuid for device in devices):
        with suppress(FleetError):  # a plan of another machine's
            numbers = {gpu.uuid: gpu.index for gpu in nvml.read().gpus}
            pairs = [(d.name, numbers[d.uuid]) for d in devices if d.uuid in numbers]
            return _describe_numbers(pairs)
    return ""


def _describe_numbers(pairs: Sequence[tuple[str, int]]) -> str:
    """Describe pairs of torch's name and `nvidia-smi`'s number; "" if all numbers are equal."""
    if all(name == f"cuda:{number}" for name, number in pairs):
        return ""
    texts = [f"{name} is nvidia-smi's GPU {number}" for name, number in pairs]
    return f"{cuda_driver.VARIABLE}={cuda_driver.restriction()}: {', '.join(texts)}"


def _visible(machine: nvml.Machine) -> tuple[str, ...]:
    """Return the UUIDs visible to this process; an error names the lost GPUs, a possible cause."""
    try:
        return cuda_driver.visible_uuids()
    except FleetError as error:
        if not machine.lost:
            raise
        lost = ", ".join(f"GPU {gpu.index} ({gpu.reason})" for gpu in machine.lost)
        raise FleetError(
            f"{error}; no response from {lost}",
            hint="one lost GPU can block CUDA on all: list the others by UUID in "
            f"{cuda_driver.VARIABLE}; {_FELL_OFF}",
        ) from None


# The same GPUs have three numbers, for example with CUDA_VISIBLE_DEVICES=3,1 on a machine of four:
#
#   nvidia-smi (NVML)   0        1        2        3          → --gpus
#   UUID                GPU-a    GPU-b    GPU-c    GPU-d      ← the common key
#   CUDA, torch         hidden   cuda:1   hidden   cuda:0     → Device.name
#
# NVML reports memory, processes and links; CUDA reports which GPUs are visible, and their order. A
# GPU in MIG mode is followed by its instances, each with a UUID of its own.
class _View:
    """The machine's GPUs, as visible to this process."""

    def __init__(self) -> None:
        machine = nvml.read()
        self.calibration = calibration.read_calibration(machine.driver_version)
        names = {uuid: f"cuda:{number}" for number, uuid in enumerate(_visible(machine))}
        gpus = [
            PresentGpu(
                gpu=gpu,
                instance=instance,
                figures=self.calibration.of_product(part.name, part.total_bytes),
                # CUDA's UUIDs lack the prefix of NVML's, "GPU-" or "MIG-".
                torch_name=names.get(part.uuid.lower().partition("-")[2]),
            )
            for gpu in machine.gpus
            for instance in (None, *gpu.instances)
            for part in (instance or gpu,)
        ]
        visible = [(gpu.torch_name, gpu.gpu.index) for gpu in gpus if gpu.torch_name is not None]
        numbers = "" if cuda_driver.restriction() is None else _describe_numbers(visible)
        if numbers:
            numbers += f"; those are --gpus {','.join(str(index) for _, index in visible)}"
        lost = [
            PresentGpu(
                gpu=nvml.NvmlGpu(index=gpu.index, name="", uuid=""),
                trouble=Trouble("lost", f"it doesn't respond: {gpu.reason}", _FELL_OFF),
            )
            for gpu in machine.lost
        ]
        answering = [replace(gpu, trouble=_find_trouble(gpu, numbers)) for gpu in gpus]
        self.gpus = sorted([*answering, *lost], key=lambda gpu: gpu.gpu.index)

    def usable(self) -> list[PresentGpu]:
        """Return all usable GPUs, in `nvidia-smi`'s order."""
        usable = [gpu for gpu in self.gpus if gpu.trouble is None]
        if not usable:
            raise self._error("no GPU can be used")
        return usable[:MAX_DEVICES]

    def choose(self, which: str) -> list[PresentGpu]:
        """Return the GPUs of a comma-separated list, in its order."""
        gpus: list[PresentGpu] = []
        for text in which.split(",", MAX_DEVICES + 1):
            gpu = self._find_gpu(text.strip())
            if gpu in gpus:
                raise self._error(f"{gpu.label} is listed twice")
            if gpu.trouble is not None:
                message = f"{gpu.label} can't be used: {gpu.trouble.reason}"
                raise self._error(message, gpu.trouble.advice)
            gpus.append(gpu)
        return gpus

    def _find_gpu(self, text: str) -> PresentGpu:
        """Find a GPU by `nvidia-smi`'s index, its UUID, or an unambiguous beginning of its UUID."""
        if _INDEX.fullmatch(text):
            for gpu in self.gpus:
                if gpu.name == str(int(text)):
                    return gpu
            raise self._error(f"there is no GPU {int(text)}", _BARE_NUMBER)
        if not _UUID.fullmatch(text):
            raise self._error(f"{text[:60]!r} is neither the index nor the UUID of a GPU")
        prefix = text.lower()
        matches = [gpu for gpu in self.gpus if gpu.part.uuid.lower().startswith(prefix)]
        # A complete UUID that is also the beginning of another one means its own GPU.
        matches = [gpu for gpu in matches if gpu.part.uuid.lower() == prefix] or matches
        if len(matches) != 1:
            count = f"{len(matches)} GPUs have UUIDs that begin with" if matches else ""
            raise self._error(f"{count or 'no GPU has the UUID'} {text!r}")
        return matches[0]

    def _error(self, message: str, advice: str | None = None) -> FleetError:
        lines = [advice] if advice else []
        gpu_lines = map(_describe_gpu, self.gpus) if self.gpus else ["  no GPU"]
        return FleetError(message, hint="\n".join([*lines, "this machine has", *gpu_lines]))


def _describe_gpu(gpu: PresentGpu) -> str:
    """Describe a GPU in a line of a list."""
    part, about = gpu.part, [f"  {gpu.gpu.index}", *filter(None, (gpu.part.name, gpu.part.uuid))]
    if part.free_bytes is not None and part.total_bytes is not None:
        about.append(f"{format_bytes(part.free_bytes)} free of {format_bytes(part.total_bytes)}")
    about += [gpu.trouble.state] if gpu.trouble else []
    for process in gpu.processes[:4]:
        size = "" if process.used_bytes is None else f", {format_bytes(process.used_bytes)}"
        about.append(f"used by {process.name or 'a process'} (pid {process.pid}{size})")
    return "  ".join(about)


def _find_trouble(gpu: PresentGpu, numbers: str) -> Trouble | None:
    """Return the reason why a GPU can't be used; None if usable.

    `numbers` describes CUDA's numbers of the visible GPUs, for the advice.
    """
    if gpu.instance is None and gpu.gpu.is_mig:
        return _DIVIDED
    if gpu.torch_name is None:
        return _describe_hidden(gpu, numbers)
    if gpu.part.free_bytes is None:
        return _NO_MEMORY_DATA
    if gpu.budget_bytes is not None and gpu.budget_bytes <= 0:
        return Trouble(
            state="full",
            reason=f"{format_bytes(gpu.part.free_bytes)} are free, and CUDA reserves "
            f"{format_bytes(gpu.kept_bytes)}",
            advice="use another GPU, or end the programs that use it",
        )
    if gpu.gpu.is_prohibited:
        return Trouble(
            state="closed",
            reason="its compute mode is Prohibited",
            advice=f"an administrator can change that: nvidia-smi -i {gpu.gpu.index} -c DEFAULT",
        )
    return None


def _describe_hidden(gpu: PresentGpu, numbers: str) -> Trouble:
    """Return the trouble of a GPU that torch doesn't see, with advice how to make it visible."""
    value = cuda_driver.restriction()
    by = "CUDA" if value is None else f"{cuda_driver.VARIABLE}={value!r}"
    if gpu.instance is not None:
        advice = f"make the instance visible: {cuda_driver.VARIABLE}={gpu.name}"
    elif value is None:
        advice = "see `nvidia-smi -q`: compute mode, state, MIG"
    else:
        advice = f"unset {cuda_driver.VARIABLE}, or add the GPU to it: {gpu.part.uuid}"
        advice += f"; --gpus takes nvidia-smi's numbers. {numbers}" if numbers else ""
    return Trouble(state="hidden", reason=f"it is hidden from this process by {by}", advice=advice)


def _device(gpu: PresentGpu) -> Device:
    """Make the device of a usable GPU: catalogue speeds, overridden by measured ones."""
    part, budget = gpu.part, gpu.budget_bytes
    assert budget is not None, "usable GPUs have a budget"
    assert gpu.torch_name is not None, "torch sees usable GPUs"
    card = catalogue.of_product(part.name, part.total_bytes)
    speeds, capability = card.speeds if card else {}, gpu.gpu.compute_capability
    if capability is not None:
        speeds["has_bfloat16"] = capability >= _BFLOAT16_SINCE
    elif card is not None:
        capability = card.compute_capability
    device = Device(
        name=gpu.torch_name,
        budget_bytes=budget,
        product=part.name,
        uuid=part.uuid,
        pci_address=gpu.gpu.pci_address,
        memory_bytes=part.total_bytes,
        reserve_bytes=(part.free_bytes or 0) - budget,
        workspace_bytes=gpu_generation.workspace_bytes(capability),
        host_bytes_per_second=from_host(*_connector(gpu.gpu)),
        **speeds,
    )
    return calibration.with_figures(device, gpu.figures)


def _way(source: PresentGpu, target: PresentGpu) -> Way | None:
    if source.instance or target.instance:
        return None  # instances have no direct connection, and no published speed
    # WSL has no NVLink and no other peer access (github.com/microsoft/WSL/issues/6587).
    speed = None if is_wsl() else _nvlink_speed(source.gpu, target.gpu)
    if speed is not None:
        return by_nvlink(speed)
    return through_host(_connector(source.gpu), _connector(target.gpu))


# NVML lists the other ends of a GPU's NVLinks. Two GPUs are joined directly if an end of one has
# the PCI address of the other; then only that end's links count. Otherwise both must have links to
# switches (NVSwitch), and the slower sum of the two limits a copy.
def _nvlink_speed(*pair: nvml.NvmlGpu) -> float | None:
    """Return NVLink bytes per second in one direction, direct or by switches; None if unknown."""
    for source, target in (pair, reversed(pair)):
        for peer in source.peers:
            if peer.kind == "gpu" and peer.pci_address and peer.pci_address == target.pci_address:
                return peer.bytes_per_second
    ends = [[peer.bytes_per_second or 0 for peer in g.peers if peer.kind == "switch"] for g in pair]
    return min(map(sum, ends)) or None


def _connector(gpu: nvml.NvmlGpu) -> tuple[int | None, int | None]:
    """Return the PCIe generation and lanes; None for unknown ones.

    The maximal generation, because an idle card lowers the current one; the current lanes.
    """
    generation = gpu.max_pcie_generation or gpu.pcie_generation
    return generation, gpu.pcie_lanes or gpu.max_pcie_lanes
