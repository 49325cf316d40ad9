"""Calibration: measure the GPUs' speeds and overhead, for planning.

Each rate is measured at the first size with a long enough call, as the median of rounds of calls.
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
from duoka.base.progress import say
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

Call = Callable[[], object]

# A small model for generation, with the head sizes of fused attention.
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
# A step of this model consists of launches almost alone.
_SMALL_CONFIG = _CONFIG | {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128}
_SMALL_WORK = Workload(
    cache="paged",
    prompt_tokens=_PROMPT_TOKENS,
    new_tokens=2,
    dtype="float32",
    prefill_chunk_tokens=_PROMPT_TOKENS,
)
_WIDTH = 4096
# Doubled, until a call takes long enough.
_MATRIX_BYTES = [MIB << n for n in range(11)]
_COPIED_BYTES = _MATRIX_BYTES[:9]
_WIDTHS = [256, 512, 1024, 2048, 4096, 8192, 16384]
_SMALL_BYTES = 4096
_WARM_SECONDS = 0.05
_ROUND_SECONDS = 0.02
_ROUNDS = 5
_LONG_ENOUGH_SECONDS = 3e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Measured figures, and their file; None for virtual GPUs."""

    calibration: Calibration
    path: Path | None


def calibrate(fleet: Fleet) -> Calibrated:
    """Measure the GPUs of a fleet, and keep the figures for later plans.

    Parameters
    ----------
    fleet : Fleet
        GPUs of this machine. Of virtual ones nothing is kept.

    Raises
    ------
    FleetError
        If a GPU isn't there, was only declared, is in use, or has too little free memory.
    MachineError
        If the figures can't be kept.
    """
    _refuse_declared(fleet)
    driver = _driver(fleet)
    devices.materialise(fleet)
    try:
        result = Calibration(
            driver=driver,
            torch=calibration.torch_version(),
            gpus=tuple(map(_measure, _kinds(fleet))),
            links=tuple(_links(fleet)),
        )
    except torch.OutOfMemoryError as error:
        raise make_too_small_error(", ".join(fleet.names)) from error
    if not driver:
        return Calibrated(calibration=result, path=None)
    try:
        return Calibrated(calibration=result, path=calibration.keep_calibration(result))
    except OSError as error:
        raise MachineError(
            f"the calibration can't be saved in {calibration.path_for(driver)}: {why(error)}",
            hint="set DUOKA_CACHE to another directory",
        ) from error


def _refuse_declared(fleet: Fleet) -> None:
    declared = [d.name for d in fleet.devices if not d.uuid and not d.name.startswith("vgpu")]
    if declared:
        raise FleetError(
            "only GPUs of this machine can be measured; these were declared: "
            f"{', '.join(declared)}",
            hint="use indices of nvidia-smi: --gpus 0,1",
        )


def _driver(fleet: Fleet) -> str:
    """Return the driver's version; refuse GPUs in use. Empty for virtual GPUs."""
    uuids = {device.uuid: device.name for device in fleet.devices if device.uuid}
    if not uuids:
        return ""
    machine = nvml.read()
    for gpu in machine.gpus:
        busy = [process for process in gpu.processes if process.computes]
        if gpu.uuid in uuids and busy:
            raise FleetError(
                f"GPU {gpu.index} is busy with {busy[0].name or 'another process'} (pid "
                f"{busy[0].pid}), which would distort the measurement",
                hint="end the process, or use other GPUs",
            )
    return machine.driver_version


def _measure(device: Device) -> GpuFigures:
    name = device.name
    say(f"{name}: memory outside the allocator")
    dtype = torch.float16 if device.has_bfloat16 is False else torch.bfloat16
    overhead = _overhead(device, dtype)
    say(f"{name}: memory, matrices, launches")
    reading = read_rate(name, dtype)
    half, single = multiply_rate(name, dtype), multiply_rate(name, torch.float32)
    launch = launch_time(name)
    say(f"{name}: CPU memory")
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
    """Return this process' bytes on a GPU outside torch's allocator, after generation."""
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
    """Put a model on a device, with random weights."""
    place(model, Placement(entries=(("", name),)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)


def _kinds(fleet: Fleet) -> Iterable[Device]:
    """Return a GPU of each product."""
    kinds: dict[tuple[str, int | None], Device] = {}
    for device in fleet.devices:
        kinds.setdefault((device.product, device.memory_bytes), device)
    return kinds.values()


def _links(fleet: Fleet) -> Iterator[LinkFigures]:
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
    """Round to two significant digits: the search can exchange twins of equal speed."""
    return float(f"{number:.1e}")


def read_rate(name: str, dtype: torch.dtype) -> float:
    """Measure bytes per second of a matrix in products with a single row."""
    row = torch.ones((1, _WIDTH), dtype=dtype, device=name)

    def make_call(size: int) -> tuple[Call, float]:
        matrix = torch.ones((size // _WIDTH // dtype.itemsize, _WIDTH), dtype=dtype, device=name)
        return (lambda: linear(row, matrix)), matrix.nbytes

    return best_rate(make_call, _MATRIX_BYTES, name)


def multiply_rate(name: str, dtype: torch.dtype) -> float:
    """Measure operations per second of products of square matrices."""

    def make_call(size: int) -> tuple[Call, float]:
        left, right = (torch.ones((size, size), dtype=dtype, device=name) for _ in range(2))
        return (lambda: left @ right), 2.0 * size**3

    return best_rate(make_call, _WIDTHS, name)


def launch_time(name: str) -> float:
    """Measure seconds of a small model's decode step per kernel launch of the profile.

    The time includes Python's modules and arguments, and views. On a device with asynchronous
    launches it is the host's time.
    """
    model = models.build(_SMALL_CONFIG, dtype=torch.float32)
    profile = trace_serving(
        without_data(model), TraceSpec(fingerprint="", conditions=_SMALL_WORK.conditions)
    )
    replay = ServingReplay(profile, _SMALL_WORK, brief=True)
    step = replay.step_over(1, _PROMPT_TOKENS)
    rules = (profile.kinds[block.kind].traces[step.regime].launches for block in profile.blocks)
    launches = sum(evaluate(rule, step.values) for rule in rules)
    _place(model, name)
    stepper = PagedModel(model, replay.capacity, torch.device(name))
    size = StepSize(tokens=1, rows=1, logits=2)
    seconds = median_seconds(lambda: stepper.run(size=size), name)
    return seconds / launches


def from_host(name: str) -> float | None:
    """Measure bytes per second from pinned host memory; None without pinned memory."""
    if not can_pin(name):
        return None

    def make_call(size: int) -> tuple[Call, float]:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        device = _bytes(size, name)
        return (lambda: device.copy_(host, non_blocking=True)), size

    return best_rate(make_call, _COPIED_BYTES, name)


def crossing_rate(source: str, target: str) -> tuple[float, float]:
    """Measure bytes per second from a device to another, and the latency of a tensor."""
    small = [_bytes(_SMALL_BYTES, name) for name in (source, target)]
    latency = median_seconds(lambda: small[1].copy_(small[0], non_blocking=True), source, target)

    def make_call(size: int) -> tuple[Call, float]:
        sender, receiver = _bytes(size, source), _bytes(size, target)
        return (lambda: receiver.copy_(sender, non_blocking=True)), size

    rate = best_rate(make_call, _COPIED_BYTES, source, target)
    return rate, latency


def _bytes(size: int, name: str) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=name)


# Calls are asynchronous on a GPU, so a round is timed from its first call to the synchronisation
# after its last. One call alone would measure the launch and the synchronisation: a round has so
# many calls that it lasts about 20 ms, after 50 ms of warm-up, and the median of five rounds is
# taken. Rates are measured at sizes that double until a call takes 3 ms, so that launches don't
# count:
#
#   1 MiB  0.02 ms   2 MiB  0.03 ms   …   512 MiB  2.4 ms   1 GiB  4.7 ms → this one
def median_seconds(call: Call, *names: str) -> float:
    """Measure the seconds of a call, as the median of rounds of many calls."""
    started, calls = time.perf_counter(), 0
    while calls < 2 or time.perf_counter() - started < _WARM_SECONDS:
        seconds = _round(call, 1, names)
        calls += 1
    repeats = max(1, min(1000, round(_ROUND_SECONDS / max(seconds, 1e-6))))
    return statistics.median(_round(call, repeats, names) / repeats for _ in range(_ROUNDS))


def best_rate(
    make_call: Callable[[int], tuple[Call, float]], sizes: Iterable[int], *names: str
) -> float:
    """Measure work per second at the first size with a long enough call, or the largest fitting."""
    best: tuple[Call, float] | None = None
    for size in sizes:
        try:
            call, work = make_call(size)
            _round(call, 1, names)
            seconds = _round(call, 1, names)
        except torch.OutOfMemoryError:
            break
        best = call, work
        if seconds >= _LONG_ENOUGH_SECONDS:
            break
    if best is None:
        raise make_too_small_error(names[0])
    call, work = best
    return work / median_seconds(call, *names)


def make_too_small_error(name: str) -> FleetError:
    """Make the error for a GPU without enough memory for any measurement."""
    return FleetError(
        f"{name} has too little free memory to measure anything",
        hint="end the process, or use other GPUs",
    )


def _round(call: Call, repeats: int, names: Iterable[str]) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    for name in names:
        devices.synchronize(name)
    return time.perf_counter() - start
