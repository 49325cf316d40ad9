"""GPU checks: driver, visibility and memory, as reported by NVML and CUDA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from duoka.base.units import GIB, format_bytes, format_count
from duoka.hardware import cuda_driver, nvml
from duoka.hardware.fleet import Fleet
from duoka.hardware.host import is_wsl

from .facts import Facts, Finding, Severity, join_names

_NVIDIA, _DISPLAYS = "0x10de", "0x03"
_LARGE_SHARE = 0.1
_HARMLESS_STATES = ("hidden", "in MIG mode", "memory unknown")
# More memory than any driver reserves: if more is used, an unlisted process uses it.
_DRIVER_BYTES = 3 * GIB // 2
_FELL_OFF = "check `dmesg | grep -i xid`, its power cables and its seat, and restart the machine"

# Text and advice. The reports: nvidia.custhelp.com/app/answers/detail/a_id/5490 (the fallback), and
# github.com/microsoft/WSL/issues/6587 (no NVLink), 11050 (the setting), 41176 (less than is free).
_WSL_LIMITS = {
    "Windows uses the same memory; NVML lists its programs without their memory, and less than the "
    "free memory may be usable": "close programs in Windows, or use less: --reserve cuda:0=2GiB",
    "if GPU memory is full, Windows may use system memory: slow instead of out of memory": "in the "
    "NVIDIA Control Panel, Manage 3D settings, set CUDA - Sysmem Fallback Policy to Prefer No "
    "Sysmem Fallback (WSL may ignore it: github.com/microsoft/WSL/issues/11050)",
    "the GPUs have no peer-to-peer access, also not by NVLink: copies go through CPU memory": "",
}


def check_driver(facts: Facts) -> Iterator[Finding]:
    """Read the driver into `facts.machine`, and check that every GPU responds."""
    try:
        facts.machine = machine = nvml.read()
    except nvml.NoDriverError as missing:
        number = _count_on_bus(facts.root)
        if number:
            text = f"{format_count(number, 'NVIDIA GPU')} found, without a driver"
            yield Finding("error", text, str(missing), missing.hint or "")
            return
        meaning = "planning for declared GPUs, virtual GPUs and the CPU work"
        advice = 'use --gpus "virtual:2x8GiB" to run the GPU tests on virtual GPUs'
        if is_wsl(facts.root):
            advice = "install NVIDIA's driver in Windows, none in WSL, and restart: wsl --shutdown"
        yield Finding("note", "no NVIDIA GPU found", meaning, advice)
        return
    cuda = machine.cuda_version
    version = f", CUDA {cuda[0]}.{cuda[1]}" if cuda else ""
    products = Counter(gpu.name for gpu in machine.gpus)
    texts = [f"{count} × {name}" for name, count in products.items()]
    yield Finding("ok", f"driver {machine.driver_version}{version}: {', '.join(texts) or 'no GPU'}")
    for lost in (gpu for gpu in machine.lost if facts.is_meant(gpu.index)):
        text = f"GPU {lost.index} doesn't answer: {lost.reason}"
        yield Finding("error", text, "it can't be used", _FELL_OFF)


def check_wsl(facts: Facts) -> Iterator[Finding]:
    """Describe the limits of GPUs in the Windows Subsystem for Linux."""
    for text, advice in _WSL_LIMITS.items():
        if advice or len(facts.cards) > 1:
            yield Finding("note", text, advice=advice)


def _count_on_bus(root: Path) -> int:
    """Count NVIDIA GPUs on the PCI bus, which are listed even without a driver."""
    count = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            count += vendor == _NVIDIA and kind.startswith(_DISPLAYS)
    return count


def check_named(facts: Facts) -> Iterator[Finding]:
    """Resolve the names given by ``--gpus``, and report the GPUs."""
    yield Finding("ok", f"{facts.gpus} is {join_names(Fleet.parse(facts.gpus or 'all').names)}")


def check_visible(facts: Facts) -> Iterator[Finding]:
    """Compare the GPUs that CUDA sees, and their numbers, with NVML's."""
    for gpu in facts.present:
        trouble = gpu.trouble
        # `check_driver` has already reported GPUs in the state "lost".
        if trouble is not None and trouble.state != "lost" and facts.is_meant(gpu.gpu.index):
            severity: Severity = "note" if trouble.state in _HARMLESS_STATES else "warning"
            text = f"{gpu.label}: {trouble.reason}"
            yield Finding(severity, text, "it isn't used", trouble.advice)
    uuids = {gpu.part.uuid.lower().partition("-")[2] for gpu in facts.present}
    unknown = [
        f"cuda:{at}" for at, uuid in enumerate(cuda_driver.visible_uuids()) if uuid not in uuids
    ]
    if unknown:
        text = f"CUDA sees {', '.join(unknown)}, unknown to NVML"
        yield Finding("warning", text, "their free memory is unknown")
    visible = [gpu for gpu in facts.present if gpu.torch_name is not None]
    renumbered = [gpu for gpu in visible if gpu.torch_name != f"cuda:{gpu.gpu.index}"]
    if renumbered:
        texts = [f"{gpu.torch_name} is nvidia-smi's GPU {gpu.gpu.index}" for gpu in renumbered]
        text = f"CUDA numbers the GPUs differently from nvidia-smi: {join_names(texts)}"
        advice = (
            "--gpus uses the numbers of nvidia-smi; set CUDA_DEVICE_ORDER=PCI_BUS_ID for "
            "other programs"
        )
        value = cuda_driver.restriction()
        meaning = "" if value is None else f"{cuda_driver.VARIABLE}={value}"
        yield Finding("note", text, meaning, advice)
    elif visible and not unknown:
        yield Finding("ok", f"CUDA sees {format_count(len(visible), 'GPU')}, in nvidia-smi's order")


def check_memory(facts: Facts) -> Iterator[Finding]:
    """Report the processes that use GPU memory, and the free memory of all GPUs."""
    for gpu in facts.cards:
        total, free = gpu.total_bytes or 0, gpu.free_bytes or 0
        texts = [
            f"{process.name or 'a process'} (pid {process.pid}) has "
            + ("memory" if process.used_bytes is None else format_bytes(process.used_bytes))
            for process in gpu.processes
        ]
        meaning = f"plans use the free memory: {format_bytes(free)} of {format_bytes(total)}"
        if texts:
            used = sum(process.used_bytes or 0 for process in gpu.processes)
            severity: Severity = "warning" if used > _LARGE_SHARE * total else "note"
            advice = "end the process, or leave the GPU out of --gpus"
            yield Finding(severity, f"GPU {gpu.index}: {join_names(texts)}", meaning, advice)
        elif total and not gpu.is_mig and total - free > _DRIVER_BYTES:
            text = f"GPU {gpu.index}: unknown processes use {format_bytes(total - free)}"
            where = "in Windows" if is_wsl(facts.root) else "outside of this container"
            advice = f"check processes {where}, and dead processes"
            yield Finding("warning", text, meaning, advice)
    if free := sum(gpu.free_bytes or 0 for gpu in facts.cards):
        yield Finding("ok", f"{format_bytes(free)} are free in total")
