"""What the driver knows of the GPUs: which there are, who uses them, how they are and joined."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from duoka.base.units import GIB, format_bytes, format_count
from duoka.hardware import cuda_driver, nvml
from duoka.hardware.detect import PresentGpu
from duoka.hardware.gpu_health import POWER_LIMIT

from .facts import Facts, named, numbered
from .findings import Finding, Severity

_NVIDIA, _DISPLAYS = "0x10de", "0x03"
_MUCH_MEMORY = 0.1
_KNOWN_STATES = ("hidden", "in MIG mode", "memory unknown")
# More than any driver keeps for itself.
_UNSEEN_BYTES = 3 * GIB // 2
_MOST_OFF = 0.9
_FELL_OFF = (
    "`dmesg | grep -i xid` tells why it may have fallen off the bus; look at its power cables and "
    "its seat, and restart the machine"
)
_NO_NVLINK = "`nvidia-smi nvlink --status` tells more; look at the bridge"


def check_driver(facts: Facts) -> Iterator[Finding]:
    """Whether there is a driver that answers, and every card does."""
    try:
        facts.machine = machine = nvml.read()
    except nvml.NoDriverError as missing:
        number = _on_bus(facts.root)
        if number:
            text = f"there is {format_count(number, 'GPU')} of NVIDIA's, and no driver for it"
            yield Finding("error", text, str(missing), missing.hint or "")
            return
        yield Finding(
            "note",
            "no NVIDIA GPU is here",
            "duoka plans for GPUs elsewhere, and runs on virtual ones and on the processor",
            '--gpus "virtual:2x8GiB" tries the tests that need GPUs',
        )
        return
    cuda = facts.health.cuda_version
    known = f", CUDA {cuda[0]}.{cuda[1]}" if cuda else ""
    products: dict[str, int] = defaultdict(int)
    for gpu in machine.gpus:
        products[gpu.name] += 1
    texts = [f"{count} × {name}" for name, count in products.items()]
    yield Finding("ok", f"driver {machine.driver_version}{known}: {', '.join(texts) or 'no GPU'}")
    for lost in machine.lost:
        text = f"GPU {lost.index} doesn't answer: {lost.reason}"
        yield Finding("error", text, "it can't be used", _FELL_OFF)


def _on_bus(root: Path) -> int:
    """How many GPUs of NVIDIA's the PCI bus has, with a driver or without."""
    count = 0
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        with suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            count += vendor == _NVIDIA and kind.startswith(_DISPLAYS)
    return count


def check_visible(facts: Facts) -> Iterator[Finding]:
    """Whether CUDA sees what NVML sees, under which numbers, and it can be used."""
    seen = [gpu for gpu in facts.present if gpu.torch_name is not None]
    troubled = [gpu for gpu in facts.present if gpu.trouble is not None]
    for gpu in troubled:
        assert gpu.trouble is not None
        if gpu.trouble.state == "lost":
            continue  # `check_driver` has told it
        severity: Severity = "note" if gpu.trouble.state in _KNOWN_STATES else "warning"
        text = f"{gpu.label}: {gpu.trouble.reason}"
        yield Finding(severity, text, "it isn't used", gpu.trouble.advice)
    known = {gpu.part.uuid.lower().partition("-")[2] for gpu in facts.present}
    unknown = [f"cuda:{at}" for at, uuid in enumerate(facts.visible_uuids) if uuid not in known]
    if unknown:
        text = f"CUDA sees {', '.join(unknown)}, which NVML doesn't know"
        yield Finding("warning", text, "nobody can tell how much memory is free there")
    moved = [gpu for gpu in seen if gpu.torch_name != f"cuda:{gpu.gpu.index}"]
    if moved:
        texts = [f"{gpu.torch_name} is nvidia-smi's GPU {gpu.gpu.index}" for gpu in moved]
        yield Finding(
            "note",
            f"CUDA's numbers aren't nvidia-smi's: {named(texts)}",
            _renumbering(moved),
            "--gpus means nvidia-smi's; for other programs set CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )
    if seen and not moved and not unknown:
        yield Finding("ok", f"CUDA sees {format_count(len(seen), 'GPU')}, in nvidia-smi's order")


def _renumbering(moved: Sequence[PresentGpu]) -> str:
    """Why CUDA has other numbers."""
    value = cuda_driver.restriction()
    if value is not None:
        return f"{cuda_driver.VARIABLE}={value}"
    numbers = [int((gpu.torch_name or ":0").partition(":")[2]) for gpu in moved]
    is_shifted = numbers == sorted(numbers)
    return "it doesn't count what it doesn't see" if is_shifted else "it counts the fastest first"


def check_named(facts: Facts) -> Iterator[Finding]:
    """Whether the GPUs that were named can be had."""
    yield Finding("ok", f"{facts.gpus} is {named(facts.parsed().names)}")


def check_memory(facts: Facts) -> Iterator[Finding]:
    """Who else has memory of a GPU."""
    machine = facts.machine
    free = 0
    for gpu in () if machine is None else machine.gpus:
        total, available = gpu.total_bytes or 0, gpu.free_bytes or 0
        free += available
        sizes = [process.used_bytes or 0 for process in gpu.processes]
        texts = [
            f"{process.name or 'a process'} (pid {process.pid}) has "
            + ("memory" if process.used_bytes is None else format_bytes(process.used_bytes))
            for process in gpu.processes
        ]
        meaning = f"plans count what is free: {format_bytes(available)} of {format_bytes(total)}"
        if texts:
            severity: Severity = "warning" if sum(sizes) > _MUCH_MEMORY * total else "note"
            advice = "end it, or leave the GPU out"
            yield Finding(severity, f"GPU {gpu.index}: {named(texts)}", meaning, advice)
        elif total and not gpu.is_mig and total - available > _UNSEEN_BYTES:
            text = f"GPU {gpu.index}: nobody seen here has {format_bytes(total - available)}"
            advice = "look outside of this container, or for a dead process"
            yield Finding("warning", text, meaning, advice)
    if free:
        yield Finding("ok", f"{format_bytes(free)} are free on all together")


def check_state(facts: Facts) -> Iterator[Finding]:
    """Whether the cards are well: memory errors, clocks, power, persistence."""
    transient: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for gpu, health in facts.healths():
        yield from _memory_errors(gpu.index, health.uncorrected_errors, health.is_worn)
        if health.awaits_reset:
            yield Finding(
                "warning",
                f"GPU {gpu.index}: parts of its memory are to be replaced by spare ones",
                "that happens at its next reset; until then it may fail again",
                f"with nothing running on it: nvidia-smi --gpu-reset -i {gpu.index}, or restart",
            )
        hindrances = [text for text in health.slowdowns if text != POWER_LIMIT]
        if hindrances:
            yield Finding(
                "warning",
                f"GPU {gpu.index} is slowed down by {' and '.join(hindrances)}",
                "it computes slower than planned for, and a pipeline waits for its slowest stage",
                "look at its fans, the airflow, its power supply and cables",
            )
        if POWER_LIMIT in health.slowdowns:
            transient["at their power limit", "that is as it should be under load", ""].append(
                gpu.index
            )
        limit, usual = health.power_limit_watts, health.default_power_limit_watts
        if limit is not None and usual is not None and limit < _MOST_OFF * usual:
            text = f"a power limit of {limit:.0f} W instead of {usual:.0f} W"
            transient[text, "long prompts take longer", "nvidia-smi -pl sets it"].append(gpu.index)
        if health.is_persistent is False:
            advice = "sudo nvidia-smi -pm 1, or the service nvidia-persistenced"
            text = "the driver lets go of it when idle, and the next start waits for seconds"
            transient["not in persistence mode", text, advice].append(gpu.index)
    for (text, meaning, advice), indices in transient.items():
        yield Finding("note", f"{numbered(indices)}: {text}", meaning, advice)
    if not any(
        health.slowdowns or health.uncorrected_errors or health.is_worn or health.awaits_reset
        for _, health in facts.healths()
    ):
        yield Finding("ok", "no GPU tells of memory errors, or is slowed down")


def _memory_errors(index: int, uncorrected: int | None, is_worn: bool) -> Iterator[Finding]:
    if uncorrected:
        yield Finding(
            "error",
            f"GPU {index}: {format_count(uncorrected, 'memory error')} that couldn't be corrected",
            "since the driver was loaded; what computed on it then was ended or is wrong",
            "restart; if they come again, the card is defective",
        )
    if is_worn:
        yield Finding(
            "error",
            f"GPU {index} has no spare memory left for parts that failed",
            "the next failure stays",
            "have the card replaced",
        )


def check_pcie(facts: Facts) -> Iterator[Finding]:
    """Whether each card is connected as well as it could be."""
    gpus = () if facts.machine is None else facts.machine.gpus
    idle: dict[tuple[int, int], list[int]] = defaultdict(list)
    narrow = 0
    for gpu in gpus:
        if gpu.pcie_lanes and gpu.max_pcie_lanes and gpu.pcie_lanes < gpu.max_pcie_lanes:
            narrow += 1
            yield Finding(
                "warning",
                f"GPU {gpu.index} has {gpu.pcie_lanes} of {gpu.max_pcie_lanes} lanes of PCIe",
                "what is copied to and from it, weights and hidden states, takes "
                f"{gpu.max_pcie_lanes / gpu.pcie_lanes:.0f} times as long",
                "put it into a full slot; look at risers, and at the BIOS's bifurcation",
            )
        now, most = gpu.pcie_generation or 0, gpu.max_pcie_generation or 0
        if 0 < now < most:
            idle[now, most].append(gpu.index)
    for (now, most), indices in idle.items():
        yield Finding(
            "note",
            f"{numbered(indices)}: PCIe {now}.0 now, {most}.0 at most",
            "an idle card lowers it; if it stays so under load, the slot or a riser is older",
        )
    connected = [gpu for gpu in gpus if gpu.pcie_lanes]
    if connected and not narrow:
        yield Finding("ok", f"all lanes of PCIe on {format_count(len(connected), 'GPU')}")


def check_nvlink(facts: Facts) -> Iterator[Finding]:
    """Whether all NVLinks are up that there are."""
    best: dict[str, int] = defaultdict(int)
    for gpu, health in facts.healths():
        best[gpu.name] = max(best[gpu.name], health.links_up)
    up: dict[int, list[int]] = defaultdict(list)
    for gpu, health in facts.healths():
        number = health.links_up
        if 0 < number < best[gpu.name] or (number and health.links_down):
            text = f"GPU {gpu.index}: {number} NVLinks are up, {health.links_down} down"
            yield Finding("warning", text, f"its like has {best[gpu.name]} up", _NO_NVLINK)
        elif number:
            up[number].append(gpu.index)
        elif health.links_down:
            text = f"GPU {gpu.index}: none of its {health.links_down} NVLinks is up"
            yield Finding("note", text, "no bridge, or not a card at its other end", _NO_NVLINK)
    for number, indices in up.items():
        yield Finding("ok", f"{numbered(indices)}: {number} NVLinks up")


def check_reach(facts: Facts) -> Iterator[Finding]:
    """Whether GPUs reach one another's memory, as the driver says."""
    pairs: dict[str, list[str]] = defaultdict(list)
    for gpu, health in facts.healths():
        for index, reason in health.peers.items():
            pairs[reason].append(f"{gpu.index}→{index}")
    reached = pairs.pop("", [])
    for reason, texts in pairs.items():
        yield Finding(
            "note",
            f"{named(texts)}: no direct way to the other's memory: {reason}",
            "copies go through the host's memory, which the driver does by itself",
            "where a program that uses NCCL hangs over it: NCCL_P2P_DISABLE=1",
        )
    if reached and not pairs:
        yield Finding("ok", "all reach one another's memory directly, as the driver says")


def check_numa(facts: Facts) -> Iterator[Finding]:
    """Whether the GPUs are near the processors that this process may use."""
    nodes: dict[int, list[int]] = defaultdict(list)
    for gpu in () if facts.machine is None else facts.machine.gpus:
        address = gpu.pci_address.lower()[-12:]
        with suppress(OSError, ValueError):
            text = (facts.root / "sys/bus/pci/devices" / address / "numa_node").read_text()
            nodes[int(text)].append(gpu.index)
    nodes.pop(-1, None)
    mine = os.sched_getaffinity(0)
    for node, indices in sorted(nodes.items()):
        with suppress(OSError, ValueError):
            listed = (facts.root / f"sys/devices/system/node/node{node}/cpulist").read_text()
            if not mine & _processors(listed):
                yield Finding(
                    "warning",
                    f"{numbered(indices)}: on NUMA node {node}, whose processors aren't ours",
                    "each copy from the host crosses the machine",
                    f"start with numactl --cpunodebind={node} --membind={node}",
                )
    if len(nodes) > 1:
        texts = [f"{numbered(indices)} on node {node}" for node, indices in sorted(nodes.items())]
        yield Finding(
            "note",
            f"two NUMA nodes or more: {'; '.join(texts)}",
            "copies between nodes are slower; stages that follow one another fare best on one",
        )
    elif nodes:
        yield Finding("ok", "all GPUs are on one NUMA node")


def _processors(text: str) -> set[int]:
    """Numbers of a list like 0-15,32-47."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers |= {*range(int(first), int(last or first) + 1)}
    return numbers
