"""Calibrating: all that planning wants to know of GPUs, measured on them.

Each rate is that of the first size whose call is long enough, in rounds of many calls.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from duoka import models
from duoka.base.files import why
from duoka.base.units import MIB
from duoka.errors import FleetError, MachineError
from duoka.forecast.profile import evaluate
from duoka.forecast.replay_serving import ServingReplay
from duoka.forecast.serving import StepSize
from duoka.forecast.workload import Workload
from duoka.hardware import calibration, nvml
from duoka.hardware.calibration import Calibration, GpuFigures, LinkFigures
from duoka.hardware.device import Device
from duoka.hardware.fleet import Fleet
from duoka.planner.placement import Placement
from duoka.runtime import devices
from duoka.runtime.call.paged_model import PagedModel
from duoka.runtime.call.stepper import Stepper
from duoka.runtime.devices import can_pin
from duoka.runtime.dispatch.dispatch import without_data
from duoka.runtime.dispatch.place_tensors import place
from duoka.tracing import TraceSpec, trace_serving

Progress = Callable[[str], None]
Call = Callable[[], object]

# Generation as the runtime does it, small; with the sizes of heads that fused attention is for.
_CONFIG = {
    "model_type": "glm",
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "vocab_size": 2048,
    "attention_bias": True,
    "pad_token_id": 0,
}
_PROMPT_TOKENS = 64
_NEW_TOKENS = 4
# A step of it is as good as nothing but launches.
_SMALL_CONFIG = _CONFIG | {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128}
_SMALL_WORK = Workload(
    cache="paged",
    prompt_tokens=_PROMPT_TOKENS,
    new_tokens=2,
    dtype="float32",
    prefill_chunk_tokens=_PROMPT_TOKENS,
)
_WIDTH = 4096
_LARGEST_MATRIX = 16384
_LARGEST_BYTES = 1024 * MIB
_LARGEST_COPY_BYTES = 256 * MIB
_SMALL_BYTES = 4096
_WARM_SECONDS = 0.05
_ROUND_SECONDS = 0.02
_ROUNDS = 5
_LONG_ENOUGH_SECONDS = 3e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """What was measured, and the file that it is kept in; none for a rehearsal."""

    calibration: Calibration
    path: Path | None


def calibrate(fleet: Fleet, *, progress: Progress | None = None) -> Calibrated:
    """Measure the GPUs of a fleet, and keep it for the plans to come.

    Parameters
    ----------
    fleet : Fleet
        GPUs of this machine. Virtual ones rehearse it: nothing is kept.
    progress : callable, optional
        Called with what is measured next.

    Raises
    ------
    FleetError
        If a GPU isn't there, was declared only, is in use, or has too little free memory.
    MachineError
        If what was measured can't be kept.
    """
    _refuse_declared(fleet)
    driver = _driver(fleet)
    devices.materialise(fleet)
    say = progress or (lambda what: None)
    try:
        result = Calibration(
            driver=driver,
            torch=calibration.torch_version(),
            gpus=tuple(_measure(device, say) for device in _kinds(fleet)),
            links=tuple(_links(fleet, say)),
        )
    except torch.OutOfMemoryError as error:
        raise too_small(", ".join(fleet.names)) from error
    if not driver:
        return Calibrated(calibration=result, path=None)
    try:
        return Calibrated(calibration=result, path=calibration.keep(result))
    except OSError as error:
        raise MachineError(
            f"what was measured can't be kept in {calibration.path_for(driver)}: {why(error)}",
            hint="name another place in DUOKA_CACHE",
        ) from error


def _refuse_declared(fleet: Fleet) -> None:
    declared = [d.name for d in fleet.devices if not d.uuid and not d.name.startswith("vgpu")]
    if declared:
        raise FleetError(
            f"only GPUs that are here can be measured, and these were declared: "
            f"{', '.join(declared)}",
            hint="name GPUs of this machine as nvidia-smi numbers them: --gpus 0,1",
        )


def _driver(fleet: Fleet) -> str:
    """The driver's version, where GPUs of this machine are measured that nobody else uses."""
    uuids = {device.uuid: device.name for device in fleet.devices if device.uuid}
    if not uuids:
        return ""
    machine = nvml.read()
    for gpu in machine.gpus:
        busy = [process for process in gpu.processes if process.computes]
        if gpu.uuid in uuids and busy:
            raise FleetError(
                f"GPU {gpu.index} computes for {busy[0].name or 'another process'} "
                f"(pid {busy[0].pid}): measured beside it, it would seem slower than it is",
                hint="end what uses it, or name other GPUs",
            )
    return machine.driver_version


def _measure(device: Device, say: Progress) -> GpuFigures:
    name = device.name
    say(f"{name}: memory outside the allocator")
    dtype = torch.float16 if device.has_bfloat16 is False else torch.bfloat16
    overhead = _overhead(device, dtype)
    say(f"{name}: memory, matrices, launches")
    reading = read_rate(name, dtype)
    half, single = multiply_rate(name, dtype), multiply_rate(name, torch.float32)
    launch = launch_time(name)
    say(f"{name}: the host's memory")
    host = from_host(name)
    torch.get_device_module(name).empty_cache()
    return GpuFigures(
        product=device.product or name.partition(":")[0],
        memory_bytes=device.memory_bytes or device.budget_bytes,
        overhead_bytes=overhead,
        memory_bytes_per_second=_rounded(reading),
        flops_per_second=_rounded(half),
        float32_flops_per_second=_rounded(single),
        launch_seconds=_rounded(launch),
        host_bytes_per_second=None if host is None else _rounded(host),
    )


def _overhead(device: Device, dtype: torch.dtype) -> int:
    """Bytes that this process holds on a GPU outside torch's allocator, once it has generated."""
    name = device.name
    model = models.build(_CONFIG, dtype=dtype)
    _place(model, name)
    with torch.no_grad():
        for batch in (1, 2):
            stepper = Stepper(model, batch, torch.device(name))
            stepper.step(_PROMPT_TOKENS)
            for _ in range(_NEW_TOKENS):
                stepper.step(1)
        wide = torch.ones((256, 256), device=name)
        (wide @ wide).sum().item()
    devices.synchronize(name)
    total = nvml.own_bytes(device.uuid) if device.uuid else None
    backend = torch.get_device_module(name)
    if total is None:
        free_before = device.budget_bytes + device.reserve_bytes
        total = free_before - int(backend.mem_get_info(name)[0])
    return max(total - int(backend.memory_reserved(name)), 0)


def _place(model: nn.Module, name: str) -> None:
    """Put a model on a device, with weights that are numbers."""
    place(model, Placement(entries=(("", name),)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)


def _kinds(fleet: Fleet) -> Iterator[Device]:
    """A GPU of each kind."""
    kinds = {(device.product, device.memory_bytes): device for device in reversed(fleet.devices)}
    return (device for device in fleet.devices if device in kinds.values())


def _links(fleet: Fleet, say: Progress) -> Iterator[LinkFigures]:
    for source, target in itertools.permutations(fleet.devices, 2):
        say(f"{source.name} → {target.name}")
        rate, latency = crossing_rate(source.name, target.name)
        yield LinkFigures(
            source=source.uuid or source.name,
            target=target.uuid or target.name,
            bytes_per_second=_rounded(rate),
            latency_seconds=_rounded(latency),
        )


def _rounded(number: float) -> float:
    """With two digits that count: twins that differ by less are equal when a plan is sought."""
    return float(f"{number:.1e}")


def read_rate(name: str, dtype: torch.dtype) -> float:
    """Bytes of a matrix that go through its product with a single row, per second."""
    row = torch.ones((1, _WIDTH), dtype=dtype, device=name)

    def make(size: int) -> tuple[Call, float]:
        matrix = torch.ones((size // _WIDTH // dtype.itemsize, _WIDTH), dtype=dtype, device=name)
        return (lambda: linear(row, matrix)), matrix.nbytes

    return best_rate(make, _doubled(MIB, _LARGEST_BYTES), name)


def multiply_rate(name: str, dtype: torch.dtype) -> float:
    """Operations of a product of square matrices, per second."""

    def make(size: int) -> tuple[Call, float]:
        one, other = (torch.ones((size, size), dtype=dtype, device=name) for _ in range(2))
        return (lambda: one @ other), 2.0 * size**3

    return best_rate(make, _doubled(256, _LARGEST_MATRIX), name)


def launch_time(name: str) -> float:
    """Seconds of a small model's decode step for each launch that its profile counts.

    So it has in it what goes with launches: modules and arguments in Python, and views. Where the
    device computes by itself it is what the host takes until it can go on.
    """
    model = models.build(_SMALL_CONFIG, dtype=torch.float32)
    profile = trace_serving(
        without_data(model), TraceSpec(fingerprint="", conditions=_SMALL_WORK.conditions)
    )
    replay = ServingReplay(profile, _SMALL_WORK, brief=True)
    step = replay.step_over(1, _PROMPT_TOKENS)
    rules = (profile.kinds[block.kind].tapes[step.regime].launches for block in profile.blocks)
    launches = sum(evaluate(rule, step.values) for rule in rules)
    _place(model, name)
    stepper = PagedModel(model, replay.capacity, torch.device(name))
    size = StepSize(tokens=1, rows=1, logits=2)
    seconds = median_seconds(lambda: stepper.run(size=size), name)
    return seconds / launches


def from_host(name: str) -> float | None:
    """Bytes per second out of the host's pinned memory; None where there can't be such."""
    if not can_pin(name):
        return None

    def make(size: int) -> tuple[Call, float]:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        device = _bytes(size, name)
        return (lambda: device.copy_(host, non_blocking=True)), size

    return best_rate(make, _doubled(MIB, _LARGEST_COPY_BYTES), name)


def crossing_rate(source: str, target: str) -> tuple[float, float]:
    """Bytes per second from one device to another, and what each tensor takes besides."""
    small = [_bytes(_SMALL_BYTES, name) for name in (source, target)]
    latency = median_seconds(lambda: small[1].copy_(small[0], non_blocking=True), source, target)

    def make(size: int) -> tuple[Call, float]:
        sender, receiver = _bytes(size, source), _bytes(size, target)
        return (lambda: receiver.copy_(sender, non_blocking=True)), size

    rate = best_rate(make, _doubled(MIB, _LARGEST_COPY_BYTES), source, target)
    return rate, latency


def _bytes(size: int, name: str) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=name)


def _doubled(first: int, last: int) -> Iterator[int]:
    while first <= last:
        yield first
        first *= 2


def median_seconds(call: Call, *names: str) -> float:
    """Seconds of one call among many of its kind, the median of a few rounds."""
    started, calls = time.perf_counter(), 0
    while calls < 2 or time.perf_counter() - started < _WARM_SECONDS:
        call()
        _finish(names)
        calls += 1
    once = _round(call, 1, names)
    repeats = max(1, min(1000, round(_ROUND_SECONDS / max(once, 1e-6))))
    return statistics.median(_round(call, repeats, names) / repeats for _ in range(_ROUNDS))


def best_rate(
    make: Callable[[int], tuple[Call, float]], sizes: Iterable[int], *names: str
) -> float:
    """Work per second at the first size whose call is long enough, or the largest that fits."""
    best: tuple[Call, float] | None = None
    for size in sizes:
        try:
            call, work = make(size)
            _round(call, 1, names)
            seconds = _round(call, 1, names)
        except torch.OutOfMemoryError:
            break
        best = call, work
        if seconds >= _LONG_ENOUGH_SECONDS:
            break
    if best is None:
        raise too_small(names[0])
    call, work = best
    return work / median_seconds(call, *names)


def too_small(name: str) -> FleetError:
    """What is raised where a GPU hasn't memory enough to measure anything."""
    return FleetError(
        f"{name} has too little free memory to measure anything",
        hint="end what uses it, or name other GPUs",
    )


def _round(call: Call, repeats: int, names: Iterable[str]) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    _finish(names)
    return time.perf_counter() - start


def _finish(names: Iterable[str]) -> None:
    for name in names:
        devices.synchronize(name)
