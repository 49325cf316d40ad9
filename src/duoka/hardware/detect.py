"""Detection: the GPUs of this machine that this process may use.

NVML says what there is, in `nvidia-smi`'s order; CUDA says which of it this process sees, and
under which number. A GPU is the same in both by its UUID, never by its number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from duoka.base.units import format_bytes
from duoka.errors import FleetError

from . import calibration, catalogue, cuda_driver, gpu_generation, nvml
from .calibration import GpuFigures
from .device import MAX_DEVICES, STEP_BYTES, Device, Found
from .links import Way, by_nvlink, from_host, links_of, through_host, ways_between

_UUID = re.compile(r"(?:gpu|mig)-[0-9a-z/-]{1,80}", re.ASCII | re.IGNORECASE)
_INDEX = re.compile(r"\d{1,9}", re.ASCII)
_BARE_NUMBER = (
    "a bare number is the index that nvidia-smi shows; a budget needs its unit, as in 24GiB"
)


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why something can't be used: in a word, in a sentence, and what to do."""

    state: str
    reason: str
    advice: str


_DIVIDED = Trouble(
    state="in MIG mode",
    reason="it is in MIG mode, and only its instances compute",
    advice=f"name an instance by its UUID, and show it to CUDA: {cuda_driver.VARIABLE}=MIG-…",
)
_UNTOLD = Trouble(
    state="memory unknown",
    reason="the driver doesn't tell its memory",
    advice='say how much of it may be used, as a budget: "24GiB"',
)
# The server of MPS holds the GPU, and lets its clients compute.
_MPS = "nvidia-cuda-mps-server"
_BFLOAT16_SINCE = (8, 0)
_FELL_OFF = (
    "it may have fallen off the bus: `dmesg | grep -i xid` tells; often only a restart helps"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PresentGpu:
    """A GPU of this machine, or an instance of one in MIG mode, be it usable or not.

    `torch_name` is what torch calls it in this process; None where torch doesn't see it. `trouble`
    says why it can't be used.
    """

    gpu: nvml.NvmlGpu
    instance: nvml.Instance | None = None
    figures: GpuFigures | None = None
    torch_name: str | None = None
    trouble: Trouble | None = None

    @property
    def name(self) -> str:
        """What ``--gpus`` takes for it."""
        return str(self.gpu.index) if self.instance is None else self.instance.uuid

    @property
    def label(self) -> str:
        """What an error calls it."""
        index = self.gpu.index
        return f"GPU {index}" if self.instance is None else f"an instance of GPU {index}"

    @property
    def part(self) -> nvml.NvmlGpu | nvml.Instance:
        """What of the GPU it is."""
        return self.instance or self.gpu

    @property
    def processes(self) -> tuple[nvml.Process, ...]:
        """Who uses it; of an instance that isn't known."""
        return self.gpu.processes if self.instance is None else ()

    @property
    def budget_bytes(self) -> int | None:
        """What torch's allocator may take, in whole steps; it can be negative."""
        free = self.part.free_bytes
        return None if free is None else (free - self.kept_bytes) // STEP_BYTES * STEP_BYTES

    @property
    def kept_bytes(self) -> int:
        """What is kept for CUDA."""
        return calibration.reserve_bytes(self.figures)

    def to_dict(self) -> dict[str, Any]:
        """The form that `json.dumps` takes."""
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
    """Whether a text names a GPU of this machine: by its index or its UUID."""
    return bool(_INDEX.fullmatch(text) or _UUID.fullmatch(text))


def detect(which: str | None = None) -> Found:
    """The GPUs of this machine."""
    view = _View()
    chosen = view.usable() if which is None else view.choose(which)
    names = [gpu.torch_name or "" for gpu in chosen]
    uuids = {name: gpu.part.uuid for name, gpu in zip(names, chosen, strict=True)}
    return Found(
        devices=tuple(map(_device, chosen)),
        links=calibration.with_links(
            links_of(ways_between(zip(names, chosen, strict=True), _way)), uuids, view.known
        ),
    )


def survey() -> tuple[list[PresentGpu], list[tuple[str, str, Way]]]:
    """All GPUs of this machine, those that can't be used as well, and the ways between them."""
    gpus = _View().gpus
    return gpus, [*ways_between(((gpu.name, gpu) for gpu in gpus), _way)]


def tells_memory() -> bool:
    """Whether there is a driver that says how much memory some GPU has free.

    None does on machines whose GPU shares the processor's memory.
    """
    try:
        gpus = nvml.read().gpus
    except FleetError:
        return False
    return any(gpu.free_bytes is not None for gpu in gpus)


def tell_numbers(devices: Sequence[Device]) -> str:
    """Which GPUs of `nvidia-smi` devices are, where CUDA_VISIBLE_DEVICES gave others' numbers."""
    if cuda_driver.restriction() is None or not any(device.uuid for device in devices):
        return ""
    try:
        numbers = {gpu.uuid: gpu.index for gpu in nvml.read().gpus}
    except FleetError:  # a plan of another machine's
        return ""
    return _tell_numbers([(d.name, numbers[d.uuid]) for d in devices if d.uuid in numbers])


def _tell_numbers(pairs: Sequence[tuple[str, int]]) -> str:
    """What torch calls the GPUs of `nvidia-smi`, where it is another number."""
    if all(name == f"cuda:{number}" for name, number in pairs):
        return ""
    texts = [f"{name} is nvidia-smi's GPU {number}" for name, number in pairs]
    return f"{cuda_driver.VARIABLE}={cuda_driver.restriction()}: {', '.join(texts)}"


def _visible(machine: nvml.Machine) -> tuple[str, ...]:
    try:
        return cuda_driver.visible_uuids()
    except FleetError as error:
        if not machine.lost:
            raise
        lost = ", ".join(f"GPU {gpu.index} ({gpu.reason})" for gpu in machine.lost)
        raise FleetError(
            f"{error}; there is no answer from {lost}",
            hint="one lost GPU can keep CUDA from all: name the others by their UUIDs in "
            f"{cuda_driver.VARIABLE}; {_FELL_OFF}",
        ) from None


class _View:
    """The machine, as one process sees it."""

    def __init__(self) -> None:
        machine = nvml.read()
        self.known = calibration.find(machine.driver_version)
        names = {uuid: f"cuda:{number}" for number, uuid in enumerate(_visible(machine))}
        gpus = [
            PresentGpu(
                gpu=gpu,
                instance=instance,
                figures=self.known.of_product(part.name, part.total_bytes),
                torch_name=names.get(_bare(part.uuid)),
            )
            for gpu in machine.gpus
            for instance in (None, *gpu.instances)
            for part in (instance or gpu,)
        ]
        seen = [(gpu.torch_name, gpu.gpu.index) for gpu in gpus if gpu.torch_name is not None]
        numbers = "" if cuda_driver.restriction() is None else _tell_numbers(seen)
        if numbers:
            numbers += f"; those are --gpus {','.join(str(index) for _, index in seen)}"
        lost = [
            PresentGpu(
                gpu=nvml.NvmlGpu(index=gpu.index, name="", uuid=""),
                trouble=Trouble("lost", f"it doesn't answer: {gpu.reason}", _FELL_OFF),
            )
            for gpu in machine.lost
        ]
        known = [replace(gpu, trouble=_trouble(gpu, numbers)) for gpu in gpus]
        self.gpus = sorted([*known, *lost], key=lambda gpu: gpu.gpu.index)

    def usable(self) -> list[PresentGpu]:
        """All that can be used, in `nvidia-smi`'s order."""
        usable = [gpu for gpu in self.gpus if gpu.trouble is None]
        if not usable:
            raise self._error("no GPU can be used")
        return usable[:MAX_DEVICES]

    def choose(self, which: str) -> list[PresentGpu]:
        """Those that a person named, in that order."""
        chosen: dict[str, str] = {}
        gpus = []
        for text in which.split(",", MAX_DEVICES + 1):
            gpu = self._find(text.strip())
            if gpu.name in chosen:
                raise self._error(
                    f"{gpu.label} is named twice: by {chosen[gpu.name]!r} and {text.strip()!r}"
                )
            chosen[gpu.name] = text.strip()
            if gpu.trouble is not None:
                raise self._error(
                    f"{gpu.label} can't be used: {gpu.trouble.reason}", gpu.trouble.advice
                )
            gpus.append(gpu)
        return gpus

    def _find(self, text: str) -> PresentGpu:
        if _INDEX.fullmatch(text):
            for gpu in self.gpus:
                if gpu.name == str(int(text)):
                    return gpu
            raise self._error(f"there is no GPU {int(text)}", _BARE_NUMBER)
        if not _UUID.fullmatch(text):
            raise self._error(f"{text[:60]!r} is neither the index nor the UUID of a GPU")
        wanted = text.lower()
        matches = [gpu for gpu in self.gpus if gpu.part.uuid.lower().startswith(wanted)]
        if len(matches) > 1:  # the whole of one may be the beginning of another
            matches = [gpu for gpu in matches if gpu.part.uuid.lower() == wanted] or matches
        if not matches:
            raise self._error(f"no GPU has the UUID {text!r}")
        if len(matches) > 1:
            raise self._error(f"{len(matches)} GPUs have UUIDs that begin with {text!r}")
        return matches[0]

    def _error(self, message: str, advice: str | None = None) -> FleetError:
        lines = [advice] if advice else []
        there = map(_line, self.gpus) if self.gpus else ["  no GPU"]
        return FleetError(message, hint="\n".join([*lines, "this machine has", *there]))


def _line(gpu: PresentGpu) -> str:
    """A GPU in a list of what there is."""
    about = [f"  {gpu.gpu.index}", *filter(None, (gpu.part.name, gpu.part.uuid))]
    if gpu.part.free_bytes is not None and gpu.part.total_bytes is not None:
        free, total = format_bytes(gpu.part.free_bytes), format_bytes(gpu.part.total_bytes)
        about.append(f"{free} free of {total}")
    about += [gpu.trouble.state] if gpu.trouble else []
    about += [f"used by {_process(process)}" for process in gpu.processes[:4]]
    return "  ".join(about)


def _trouble(gpu: PresentGpu, numbers: str) -> Trouble | None:
    """Why it can't be used; None when it can. `numbers` tells what torch calls the others."""
    if gpu.instance is None and gpu.gpu.is_mig:
        return _DIVIDED
    if gpu.torch_name is None:
        return _hidden(gpu, numbers)
    if gpu.part.free_bytes is None:
        return _UNTOLD
    if gpu.budget_bytes is not None and gpu.budget_bytes <= 0:
        return Trouble(
            state="full",
            reason=f"{format_bytes(gpu.part.free_bytes)} are free, and "
            f"{format_bytes(gpu.kept_bytes)} are kept for CUDA",
            advice="name another one, or end what uses it",
        )
    return _closed(gpu.gpu)


def _hidden(gpu: PresentGpu, numbers: str) -> Trouble:
    value = cuda_driver.restriction()
    by = "CUDA" if value is None else f"{cuda_driver.VARIABLE}={value!r}"
    if gpu.instance is not None:
        advice = f"CUDA shows an instance where it is named: {cuda_driver.VARIABLE}={gpu.name}"
    elif value is None:
        advice = "`nvidia-smi -q` may tell why: its compute mode, its state, MIG"
    else:
        advice = f"leave {cuda_driver.VARIABLE} out, or name it there: {gpu.part.uuid}"
        advice += f"; --gpus takes nvidia-smi's numbers. {numbers}" if numbers else ""
    return Trouble(state="hidden", reason=f"it is hidden from this process by {by}", advice=advice)


def _closed(gpu: nvml.NvmlGpu) -> Trouble | None:
    """Why its compute mode keeps this process out; None where it doesn't."""
    advice = f"an administrator can open it to all: nvidia-smi -i {gpu.index} -c DEFAULT"
    if gpu.compute_mode == "prohibited":
        reason = "its compute mode is Prohibited: no process may compute on it"
        return Trouble(state="closed", reason=reason, advice=advice)
    computing = [process for process in gpu.processes if process.computes]
    shared = any(process.name == _MPS for process in computing)
    if gpu.compute_mode != "exclusive" or shared or not computing:
        return None
    reason = f"its compute mode is Exclusive_Process, and {_process(computing[0])} has it"
    return Trouble(state="taken", reason=reason, advice=f"end what has it; {advice}")


def _process(process: nvml.Process) -> str:
    size = "" if process.used_bytes is None else f", {format_bytes(process.used_bytes)}"
    return f"{process.name or 'a process'} (pid {process.pid}{size})"


def _bare(uuid: str) -> str:
    """A UUID as CUDA writes it: without what NVML puts before it."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _device(gpu: PresentGpu) -> Device:
    part, budget = gpu.part, gpu.budget_bytes
    assert budget is not None, "it was found to be usable"
    assert gpu.torch_name is not None, "torch sees what can be used"
    card = catalogue.of_product(part.name, part.total_bytes)
    device = Device(
        name=gpu.torch_name,
        budget_bytes=budget,
        product=part.name,
        uuid=part.uuid,
        pci_address=gpu.gpu.pci_address,
        memory_bytes=part.total_bytes,
        reserve_bytes=(part.free_bytes or 0) - budget,
        memory_bytes_per_second=None if card is None else card.memory_bytes_per_second,
        flops_per_second=None if card is None else card.flops_per_second,
        has_bfloat16=_has_bfloat16(gpu.gpu, card),
        workspace_bytes=gpu_generation.workspace_bytes(
            gpu.gpu.compute_capability or (None if card is None else card.compute_capability)
        ),
        host_bytes_per_second=from_host(*_connector(gpu.gpu)),
        float32_flops_per_second=None if card is None else card.float32_flops_per_second,
    )
    return calibration.with_figures(device, gpu.figures)


def _has_bfloat16(gpu: nvml.NvmlGpu, card: catalogue.Card | None) -> bool | None:
    if gpu.compute_capability is not None:
        return gpu.compute_capability >= _BFLOAT16_SINCE
    return None if card is None else card.has_bfloat16


def _way(one: PresentGpu, other: PresentGpu) -> Way | None:
    if one.instance or other.instance:
        return None  # instances can't reach each other directly; nothing is published
    speed = _nvlink_speed(one.gpu, other.gpu)
    if speed is not None:
        return by_nvlink(speed)
    return through_host(_connector(one.gpu), _connector(other.gpu))


def _nvlink_speed(one: nvml.NvmlGpu, other: nvml.NvmlGpu) -> float | None:
    """Bytes per second in one direction: straight, or both over switches."""
    for source, target in ((one, other), (other, one)):
        for peer in source.peers:
            if peer.kind == "gpu" and peer.pci_address and peer.pci_address == target.pci_address:
                return peer.bytes_per_second
    ends = [
        [peer.bytes_per_second for peer in gpu.peers if peer.kind == "switch"]
        for gpu in (one, other)
    ]
    if not all(ends):
        return None
    known = [[speed for speed in end if speed is not None] for end in ends]
    return min(map(sum, known)) or None


def _connector(gpu: nvml.NvmlGpu) -> tuple[int | None, int | None]:
    """PCIe generation and lanes. An idle card lowers its generation, but not its lanes."""
    return (
        gpu.max_pcie_generation or gpu.pcie_generation,
        gpu.pcie_lanes or gpu.max_pcie_lanes,
    )
