"""Detection: the GPUs of this machine that this process may use.

NVML says what there is, in `nvidia-smi`'s order; CUDA says which of it this process sees, and
under which number. A GPU is the same in both by its UUID, never by its number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Literal

from duoka.base.units import format_bytes
from duoka.errors import FleetError

from . import calibration, catalogue, cuda_driver, gpu_generation, nvml
from .calibration import Calibration, GpuFigures
from .device import MAX_DEVICES, STEP_BYTES, Device, Found
from .links import Way, between, by_nvlink, from_host, through_host

_UUID = re.compile(r"(?:gpu|mig)-[0-9a-z/-]{1,80}", re.ASCII | re.IGNORECASE)
_INDEX = re.compile(r"\d{1,9}", re.ASCII)
_BARE_NUMBER = (
    "a bare number is the index that nvidia-smi shows; a budget needs its unit, as in 24GiB"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What can be used as one GPU: a whole one, or an instance of one in MIG mode."""

    gpu: nvml.Gpu
    instance: nvml.Instance | None = None
    figures: GpuFigures | None = None

    @property
    def uuid(self) -> str:
        return self.gpu.uuid if self.instance is None else self.instance.uuid

    @property
    def name(self) -> str:
        index = self.gpu.index
        return f"GPU {index}" if self.instance is None else f"an instance of GPU {index}"

    @property
    def product(self) -> str:
        return self.gpu.name if self.instance is None else self.instance.name

    @property
    def total_bytes(self) -> int | None:
        return (self.instance or self.gpu).total_bytes

    @property
    def free_bytes(self) -> int | None:
        return (self.instance or self.gpu).free_bytes

    @property
    def budget_bytes(self) -> int | None:
        """What torch's allocator may take, in whole steps; it can be negative."""
        free = self.free_bytes
        return None if free is None else (free - self.kept_bytes) // STEP_BYTES * STEP_BYTES

    @property
    def kept_bytes(self) -> int:
        """What is kept for CUDA."""
        return calibration.reserve_bytes(self.figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trouble:
    """Why something can't be used: in a word, in a sentence, and what to do."""

    state: str
    reason: str
    advice: str


_DIVIDED = _Trouble(
    state="in MIG mode",
    reason="it is in MIG mode, and only its instances compute",
    advice=f"name an instance by its UUID, and show it to CUDA: {cuda_driver.VARIABLE}=MIG-…",
)
_UNTOLD = _Trouble(
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
    """A GPU of this machine, be it usable or not.

    `name` is what ``--gpus`` takes, and `torch_name` what torch calls it in this process; None
    where torch doesn't see it. `budget_bytes` may be planned for. `trouble` says why it can't be
    used, and is empty where it can.
    """

    name: str
    torch_name: str | None
    product: str
    uuid: str
    total_bytes: int | None
    free_bytes: int | None
    budget_bytes: int | None
    trouble: str = ""
    processes: tuple[nvml.Process, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How fast bytes go between two GPUs, by their names for ``--gpus``, and by what."""

    first: str
    second: str
    kind: Literal["NVLink", "PCIe"]
    bytes_per_second: float


def is_detected(text: str) -> bool:
    """Whether a text names a GPU of this machine: by its index or its UUID."""
    return bool(_INDEX.fullmatch(text) or _UUID.fullmatch(text))


def detect(which: str | None = None) -> Found:
    """The GPUs of this machine."""
    machine = nvml.read()
    known = calibration.find(machine.driver_version)
    view = _View(machine, _visible(machine), known)
    chosen = view.usable() if which is None else view.choose(which)
    names = [view.torch_name(part) for part in chosen]
    return Found(
        devices=tuple(_device(part, name) for part, name in zip(chosen, names, strict=True)),
        links=calibration.with_links(
            between(names, lambda one, other: _way(chosen[one], chosen[other])),
            [calibration.End(name=n, uuid=p.uuid) for n, p in zip(names, chosen, strict=True)],
            known,
        ),
    )


def survey() -> tuple[tuple[PresentGpu, ...], tuple[Connection, ...]]:
    """All GPUs of this machine, those that can't be used as well, and what connects them."""
    machine = nvml.read()
    view = _View(machine, _visible(machine), calibration.find(machine.driver_version))
    return tuple(view.present()), tuple(view.connections())


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
    value = cuda_driver.restriction()
    if value is None or not any(device.uuid for device in devices):
        return ""
    numbers = {gpu.uuid: gpu.index for gpu in nvml.read().gpus}
    pairs = [(d.name, numbers[d.uuid]) for d in devices if d.uuid in numbers]
    if all(name == f"cuda:{number}" for name, number in pairs):
        return ""
    texts = [f"{name} is nvidia-smi's GPU {number}" for name, number in pairs]
    return f"{cuda_driver.VARIABLE}={value}: {', '.join(texts)}"


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
    """One machine, as one process sees it."""

    def __init__(self, machine: nvml.Machine, visible: Sequence[str], known: Calibration) -> None:
        self._machine = machine
        self._numbers = {uuid: number for number, uuid in enumerate(visible)}
        parts = (
            part
            for gpu in machine.gpus
            for part in (
                _Part(gpu=gpu),
                *(_Part(gpu=gpu, instance=instance) for instance in gpu.instances),
            )
        )
        self._parts = [
            replace(part, figures=known.of_product(part.product, part.total_bytes))
            for part in parts
        ]

    def torch_name(self, part: _Part) -> str:
        return f"cuda:{self._numbers[_bare(part.uuid)]}"

    def present(self) -> Iterator[PresentGpu]:
        """All parts as they are."""
        for part in self._parts:
            trouble = self._trouble(part)
            is_seen = _bare(part.uuid) in self._numbers
            yield PresentGpu(
                name=_short_name(part),
                torch_name=self.torch_name(part) if is_seen else None,
                product=part.product,
                uuid=part.uuid,
                total_bytes=part.total_bytes,
                free_bytes=part.free_bytes,
                budget_bytes=None if trouble else part.budget_bytes,
                trouble="" if trouble is None else trouble.reason,
                processes=part.gpu.processes if part.instance is None else (),
            )
        for lost in self._machine.lost:
            yield PresentGpu(
                name=str(lost.index),
                torch_name=None,
                product="",
                uuid="",
                total_bytes=None,
                free_bytes=None,
                budget_bytes=None,
                trouble=f"it doesn't answer: {lost.reason}",
            )

    def connections(self) -> Iterator[Connection]:
        """What is known of the ways between parts."""
        for one, other in combinations(self._parts, 2):
            way = _way(one, other)
            if way is not None:
                by_nvlink = _nvlink_speed(one.gpu, other.gpu) is not None
                yield Connection(
                    first=_short_name(one),
                    second=_short_name(other),
                    kind="NVLink" if by_nvlink else "PCIe",
                    bytes_per_second=way.bytes_per_second,
                )

    def usable(self) -> list[_Part]:
        """All that can be used, in `nvidia-smi`'s order."""
        parts = [part for part in self._parts if self._trouble(part) is None]
        if not parts:
            raise self._error("no GPU can be used")
        return parts[:MAX_DEVICES]

    def choose(self, which: str) -> list[_Part]:
        """Those that a person named, in that order."""
        chosen: dict[str, str] = {}
        parts = []
        for text in which.split(",", MAX_DEVICES + 1):
            part = self._find(text.strip())
            if part.uuid in chosen:
                raise self._error(
                    f"{part.name} is named twice: by {chosen[part.uuid]!r} and {text.strip()!r}"
                )
            chosen[part.uuid] = text.strip()
            trouble = self._trouble(part)
            if trouble is not None:
                raise self._error(f"{part.name} can't be used: {trouble.reason}", trouble.advice)
            parts.append(part)
        return parts

    def _find(self, text: str) -> _Part:
        if _INDEX.fullmatch(text):
            return self._at(int(text))
        if not _UUID.fullmatch(text):
            raise self._error(f"{text[:60]!r} is neither the index nor the UUID of a GPU")
        wanted = text.lower()
        matches = [part for part in self._parts if part.uuid.lower().startswith(wanted)]
        if len(matches) > 1:  # the whole of one may be the beginning of another
            matches = [part for part in matches if part.uuid.lower() == wanted] or matches
        if not matches:
            raise self._error(f"no GPU has the UUID {text!r}")
        if len(matches) > 1:
            raise self._error(f"{len(matches)} GPUs have UUIDs that begin with {text!r}")
        return matches[0]

    def _at(self, index: int) -> _Part:
        for part in self._parts:
            if part.gpu.index == index and part.instance is None:
                return part
        for lost in self._machine.lost:
            if lost.index == index:
                raise self._error(f"GPU {index} doesn't answer: {lost.reason}", _FELL_OFF)
        raise self._error(f"there is no GPU {index}", _BARE_NUMBER)

    def _trouble(self, part: _Part) -> _Trouble | None:
        """Why it can't be used; None when it can."""
        if part.instance is None and part.gpu.is_mig:
            return _DIVIDED
        if _bare(part.uuid) not in self._numbers:
            return _hidden(part)
        if part.free_bytes is None:
            return _UNTOLD
        if part.budget_bytes is not None and part.budget_bytes <= 0:
            return _full(part.free_bytes, part.kept_bytes)
        return _closed(part.gpu)

    def _error(self, message: str, advice: str | None = None) -> FleetError:
        lines = [advice] if advice else []
        return FleetError(message, hint="\n".join([*lines, "this machine has", *self._listing()]))

    def _listing(self) -> Iterator[str]:
        """What there is, a line for each."""
        lines = [(part.gpu.index, self._line(part)) for part in self._parts]
        for lost in self._machine.lost:
            lines.append((lost.index, f"  {lost.index}  lost: {lost.reason}"))
        if not lines:
            yield "  no GPU"
        for _, line in sorted(lines, key=lambda numbered: numbered[0]):
            yield line

    def _line(self, part: _Part) -> str:
        about = [f"  {part.gpu.index}", part.product, part.uuid]
        if part.free_bytes is not None and part.total_bytes is not None:
            free, total = format_bytes(part.free_bytes), format_bytes(part.total_bytes)
            about.append(f"{free} free of {total}")
        trouble = self._trouble(part)
        about += [trouble.state] if trouble else []
        if part.instance is None:
            about += [f"used by {_process(process)}" for process in part.gpu.processes[:4]]
        return "  ".join(about)


def _short_name(part: _Part) -> str:
    """What ``--gpus`` takes for it."""
    return str(part.gpu.index) if part.instance is None else part.uuid


def _hidden(part: _Part) -> _Trouble:
    value = cuda_driver.restriction()
    by = "CUDA" if value is None else f"{cuda_driver.VARIABLE}={value!r}"
    if part.instance is not None:
        advice = f"CUDA shows an instance where it is named: {cuda_driver.VARIABLE}={part.uuid}"
    elif value is None:
        advice = "`nvidia-smi -q` may tell why: its compute mode, its state, MIG"
    else:
        advice = f"leave {cuda_driver.VARIABLE} out, or name it there: {part.uuid}"
        listed = cuda_driver.renumbered()
        if part.gpu.index in listed.values():
            advice += (
                f"; GPUs have nvidia-smi's numbers here. {cuda_driver.tell_renumbered()}: "
                f"if that was meant, --gpus {','.join(map(str, listed))}"
            )
    return _Trouble(state="hidden", reason=f"it is hidden from this process by {by}", advice=advice)


def _full(free_bytes: int, kept_bytes: int) -> _Trouble:
    return _Trouble(
        state="full",
        reason=f"{format_bytes(free_bytes)} are free, and {format_bytes(kept_bytes)} are kept "
        "for CUDA",
        advice="name another one, or end what uses it",
    )


def _closed(gpu: nvml.Gpu) -> _Trouble | None:
    """Why its compute mode keeps this process out; None where it doesn't."""
    advice = f"an administrator can open it to all: nvidia-smi -i {gpu.index} -c DEFAULT"
    if gpu.compute_mode == "prohibited":
        reason = "its compute mode is Prohibited: no process may compute on it"
        return _Trouble(state="closed", reason=reason, advice=advice)
    computing = [process for process in gpu.processes if process.computes]
    shared = any(process.name == _MPS for process in computing)
    if gpu.compute_mode != "exclusive" or shared or not computing:
        return None
    reason = f"its compute mode is Exclusive_Process, and {_process(computing[0])} has it"
    return _Trouble(state="taken", reason=reason, advice=f"end what has it; {advice}")


def _process(process: nvml.Process) -> str:
    size = "" if process.used_bytes is None else f", {format_bytes(process.used_bytes)}"
    return f"{process.name or 'a process'} (pid {process.pid}{size})"


def _bare(uuid: str) -> str:
    """A UUID as CUDA writes it: without what NVML puts before it."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def _device(part: _Part, name: str) -> Device:
    free, budget = part.free_bytes, part.budget_bytes
    assert free is not None, "it was found to be usable"
    assert budget is not None, "what is free is known"
    card = catalogue.of_product(part.product, part.total_bytes)
    device = Device(
        name=name,
        budget_bytes=budget,
        product=part.product,
        uuid=part.uuid,
        pci_address=part.gpu.pci_address,
        memory_bytes=part.total_bytes,
        reserve_bytes=free - budget,
        memory_bytes_per_second=None if card is None else card.memory_bytes_per_second,
        flops_per_second=None if card is None else card.flops_per_second,
        has_bfloat16=_has_bfloat16(part.gpu, card),
        workspace_bytes=gpu_generation.workspace_bytes(
            part.gpu.compute_capability or (None if card is None else card.compute_capability)
        ),
        host_bytes_per_second=from_host(*_connector(part.gpu)),
        float32_flops_per_second=None if card is None else card.float32_flops_per_second,
    )
    return calibration.with_figures(device, part.figures)


def _has_bfloat16(gpu: nvml.Gpu, card: catalogue.Card | None) -> bool | None:
    if gpu.compute_capability is not None:
        return gpu.compute_capability >= _BFLOAT16_SINCE
    return None if card is None else card.has_bfloat16


def _way(one: _Part, other: _Part) -> Way | None:
    if one.instance or other.instance:
        return None  # instances can't reach each other directly; nothing is published
    speed = _nvlink_speed(one.gpu, other.gpu)
    if speed is not None:
        return by_nvlink(speed)
    return through_host(_connector(one.gpu), _connector(other.gpu))


def _nvlink_speed(one: nvml.Gpu, other: nvml.Gpu) -> float | None:
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


def _connector(gpu: nvml.Gpu) -> tuple[int | None, int | None]:
    """PCIe generation and lanes. An idle card lowers its generation, but not its lanes."""
    return (
        gpu.max_pcie_generation or gpu.pcie_generation,
        gpu.pcie_lanes or gpu.max_pcie_lanes,
    )
