"""GPU checks: driver, visibility, memory, health and PCIe lanes, by the driver and CUDA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from duoka.base.units import GIB, format_bytes, format_count
from duoka.hardware import cuda_driver, nvml
from duoka.hardware.detect import PresentGpu
from duoka.hardware.fleet import Fleet

from .facts import Facts, Finding, Severity, by_gpu, join_names, or_ok

_NVIDIA, _DISPLAYS = "0x10de", "0x03"
_MUCH_MEMORY = 0.1
_KNOWN_STATES = ("hidden", "in MIG mode", "memory unknown")
# More than any driver keeps for itself.
_UNSEEN_BYTES = 3 * GIB // 2
_FELL_OFF = (
    "`dmesg | grep -i xid` tells why it may have fallen off the bus; look at its power cables and "
    "its seat, and restart the machine"
)


def check_driver(facts: Facts) -> Iterator[Finding]:
    """Check that the driver and every card answer."""
    try:
        facts.machine = machine = nvml.read()
    except nvml.NoDriverError as missing:
        number = _count_on_bus(facts.root)
        if number:
            text = f"there is {format_count(number, 'GPU')} of NVIDIA's, and no driver for it"
            yield Finding("error", text, str(missing), missing.hint or "")
            return
        meaning = "duoka plans for GPUs elsewhere, and runs on virtual ones and on the processor"
        advice = '--gpus "virtual:2x8GiB" tries the tests that need GPUs'
        yield Finding("note", "no NVIDIA GPU is here", meaning, advice)
        return
    cuda = machine.cuda_version
    version = f", CUDA {cuda[0]}.{cuda[1]}" if cuda else ""
    products = Counter(gpu.name for gpu in machine.gpus)
    texts = [f"{count} × {name}" for name, count in products.items()]
    yield Finding("ok", f"driver {machine.driver_version}{version}: {', '.join(texts) or 'no GPU'}")
    for lost in (gpu for gpu in machine.lost if facts.is_meant(gpu.index)):
        text = f"GPU {lost.index} doesn't answer: {lost.reason}"
        yield Finding("error", text, "it can't be used", _FELL_OFF)


def _count_on_bus(root: Path) -> int:
    """Count NVIDIA's GPUs on the PCI bus, with a driver or without."""
    count = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            count += vendor == _NVIDIA and kind.startswith(_DISPLAYS)
    return count


def check_named(facts: Facts) -> Iterator[Finding]:
    """Check the GPUs named by ``--gpus``."""
    yield Finding("ok", f"{facts.gpus} is {join_names(Fleet.parse(facts.gpus or 'all').names)}")


def check_visible(facts: Facts) -> Iterator[Finding]:
    """Compare CUDA's GPUs and their numbers with NVML's."""
    for gpu in facts.present:
        trouble = gpu.trouble
        # `check_driver` has reported the lost ones.
        if trouble is not None and trouble.state != "lost" and facts.is_meant(gpu.gpu.index):
            severity: Severity = "note" if trouble.state in _KNOWN_STATES else "warning"
            text = f"{gpu.label}: {trouble.reason}"
            yield Finding(severity, text, "it isn't used", trouble.advice)
    uuids = {gpu.part.uuid.lower().partition("-")[2] for gpu in facts.present}
    unknown = [
        f"cuda:{at}" for at, uuid in enumerate(cuda_driver.visible_uuids()) if uuid not in uuids
    ]
    if unknown:
        text = f"CUDA sees {', '.join(unknown)}, which NVML doesn't know"
        yield Finding("warning", text, "nobody can tell how much memory is free there")
    visible = [gpu for gpu in facts.present if gpu.torch_name is not None]
    renumbered = [gpu for gpu in visible if gpu.torch_name != f"cuda:{gpu.gpu.index}"]
    if renumbered:
        texts = [f"{gpu.torch_name} is nvidia-smi's GPU {gpu.gpu.index}" for gpu in renumbered]
        text = f"CUDA's numbers aren't nvidia-smi's: {join_names(texts)}"
        advice = "--gpus means nvidia-smi's; for other programs set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        yield Finding("note", text, _explain_numbers(renumbered), advice)
    elif visible and not unknown:
        yield Finding("ok", f"CUDA sees {format_count(len(visible), 'GPU')}, in nvidia-smi's order")


def _explain_numbers(renumbered: Sequence[PresentGpu]) -> str:
    """Explain why CUDA's numbers differ from nvidia-smi's."""
    value = cuda_driver.restriction()
    if value is not None:
        return f"{cuda_driver.VARIABLE}={value}"
    numbers = [int((gpu.torch_name or ":0").partition(":")[2]) for gpu in renumbered]
    is_shifted = numbers == sorted(numbers)
    return "it doesn't count what it doesn't see" if is_shifted else "it counts the fastest first"


def check_memory(facts: Facts) -> Iterator[Finding]:
    """List other processes with memory of a GPU."""
    for gpu in facts.cards:
        total, free = gpu.total_bytes or 0, gpu.free_bytes or 0
        texts = [
            f"{process.name or 'a process'} (pid {process.pid}) has "
            + ("memory" if process.used_bytes is None else format_bytes(process.used_bytes))
            for process in gpu.processes
        ]
        meaning = f"plans count what is free: {format_bytes(free)} of {format_bytes(total)}"
        if texts:
            used = sum(process.used_bytes or 0 for process in gpu.processes)
            severity: Severity = "warning" if used > _MUCH_MEMORY * total else "note"
            advice = "end it, or leave the GPU out"
            yield Finding(severity, f"GPU {gpu.index}: {join_names(texts)}", meaning, advice)
        elif total and not gpu.is_mig and total - free > _UNSEEN_BYTES:
            text = f"GPU {gpu.index}: nobody seen here has {format_bytes(total - free)}"
            advice = "look outside of this container, or for a dead process"
            yield Finding("warning", text, meaning, advice)
    if free := sum(gpu.free_bytes or 0 for gpu in facts.cards):
        yield Finding("ok", f"{format_bytes(free)} are free on all together")


def check_state(facts: Facts) -> Iterator[Finding]:
    """Check the cards' health: memory errors, and throttled clocks."""
    return or_ok(by_gpu(facts.cards, _state), "no GPU tells of memory errors, or is slowed down")


def _state(gpu: nvml.NvmlGpu) -> Iterator[Finding]:
    if gpu.uncorrected_errors:
        text = f"{format_count(gpu.uncorrected_errors, 'memory error')} that couldn't be corrected"
        meaning = "since the driver was loaded; what computed on it then was ended or is wrong"
        yield Finding("error", text, meaning, "restart; if they come again, the card is defective")
    if gpu.is_worn:
        text = "no spare memory is left for parts that failed"
        yield Finding("error", text, "the next failure stays", "have the card replaced")
    if gpu.awaits_reset:
        text = "parts of the memory are to be replaced by spare ones"
        meaning = "that happens at the next reset; until then it may fail again"
        advice = "with nothing running on it: nvidia-smi --gpu-reset -i and its number, or restart"
        yield Finding("warning", text, meaning, advice)
    if gpu.slowdowns:
        text = f"slowed down by {' and '.join(gpu.slowdowns)}"
        meaning = "it computes slower than planned for, and a pipeline waits for its slowest stage"
        advice = "look at its fans, the airflow, its power supply and cables"
        yield Finding("warning", text, meaning, advice)


def check_pcie(facts: Facts) -> Iterator[Finding]:
    """Check that every card uses all its PCIe lanes."""
    connected = [gpu for gpu in facts.cards if gpu.pcie_lanes]
    text = f"all lanes of PCIe on {format_count(len(connected), 'GPU')}"
    return or_ok(by_gpu(connected, _pcie), text) if connected else iter(())


def _pcie(gpu: nvml.NvmlGpu) -> Iterator[Finding]:
    lanes, all_lanes = gpu.pcie_lanes or 0, gpu.max_pcie_lanes or 0
    if lanes < all_lanes:
        meaning = (
            "what is copied to and from it, weights and hidden states, takes "
            f"{all_lanes / lanes:.0f} times as long"
        )
        advice = "put it into a full slot; look at risers, and at the BIOS's bifurcation"
        yield Finding("warning", f"{lanes} of {all_lanes} lanes of PCIe", meaning, advice)
