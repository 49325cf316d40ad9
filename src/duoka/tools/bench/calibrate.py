"""Calibration: measure the speeds and overhead of GPUs, and the host's memory, for planning.

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
from duoka.base.units import GIB, MIB
from duoka.errors import FleetError, MachineError
from duoka.forecast.profile import evaluate
from duoka.forecast.replay_serving import ServingReplay
from duoka.forecast.serving import StepSize
from duoka.forecast.workload import Workload
from duoka.hardware import calibration, nvml
from duoka.hardware.calibration import Calibration, GpuFigures, HostFigures, LinkFigures
from duoka.hardware.device import Device
from duoka.hardware.fleet import Fleet
from duoka.hardware.host import available_bytes, total_bytes
from duoka.planner.placement import Placement
from duoka.runtime import devices
from duoka.runtime.call.paged_model import PagedModel
from duoka.runtime.call.stepper import Stepper
from duoka.runtime.devices import can_pin
from duoka.runtime.dispatch.dispatch import without_data
from duoka.runtime.dispatch.place_tensors import place
from duoka.tracing import TraceSpec, trace_serving

Call = Callable[[], object]

# A small model to generate with; its head size allows fused attention.
CONFIG = {
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
# The kernels of this model compute so little that a step takes little more than its launches.
_SMALL_CONFIG = CONFIG | {"hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 128}
_SMALL_WORK = Workload(
    cache="paged",
    prompt_tokens=_PROMPT_TOKENS,
    new_tokens=2,
    dtype="float32",
    prefill_chunk_tokens=_PROMPT_TOKENS,
)
_WIDTH = 4096
# Sizes to try: doubled until a call takes at least `_LONG_ENOUGH_SECONDS`.
_MATRIX_BYTES = [MIB << n for n in range(11)]
_COPIED_BYTES = _MATRIX_BYTES[:9]
_WIDTHS = [256, 512, 1024, 2048, 4096, 8192, 16384]
_LATENCY_BYTES = 4096
_HOST_BYTES = GIB  # more than caches hold
_WARM_SECONDS = 0.05
_ROUND_SECONDS = 0.02
_ROUNDS = 5
_LONG_ENOUGH_SECONDS = 3e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Measured figures, and the file they were saved in; None for virtual GPUs, not saved."""

    calibration: Calibration
    path: Path | None


def calibrate(fleet: Fleet | None) -> Calibrated:
    """Measure the GPUs of a fleet and the host's memory, and save the figures for later plans.

    Parameters
    ----------
    fleet : Fleet or None
        GPUs of this machine, or virtual GPUs, beside which nothing is saved. None to measure the
        host alone.

    Raises
    ------
    FleetError
        If a GPU was only declared, is used by another process, or has too little free memory.
    MachineError
        If the figures can't be saved.
    """
    driver = nvml.driver_version()
    if fleet is not None:
        _refuse_declared(fleet)
        driver = _driver_version(fleet)
        devices.materialise(fleet)
    try:
        result = Calibration(
            driver=driver,
            torch=calibration.torch_version(),
            gpus=() if fleet is None else tuple(map(_measure, kinds(fleet))),
            links=() if fleet is None else tuple(_measure_links(fleet)),
            host=_measure_host(),
        )
    except torch.OutOfMemoryError as error:
        raise make_too_small_error(", ".join(fleet.names if fleet else ())) from error
    if fleet is not None and not driver:
        return Calibrated(calibration=result, path=None)
    try:
        return Calibrated(calibration=result, path=calibration.keep_calibration(result))
    except OSError as error:
        raise MachineError(
            f"the calibration can't be saved in {calibration.path_for(driver)}: {why(error)}",
            hint="set DUOKA_CACHE to another directory",
        ) from error


def _refuse_declared(fleet: Fleet) -> None:
    """Raise FleetError if a GPU is neither in this machine nor virtual."""
    declared = [d.name for d in fleet.devices if not d.uuid and not d.name.startswith("vgpu")]
    if declared:
        raise FleetError(
            "only GPUs of this machine can be measured; these were declared: "
            f"{', '.join(declared)}",
            hint="use indices of nvidia-smi: --gpus 0,1",
        )


def _driver_version(fleet: Fleet) -> str:
    """Return the driver's version, "" for virtual GPUs; FleetError if a GPU is in use."""
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
    """Measure a GPU: memory outside the allocator, bandwidth, compute, launches, host copies."""
    name = device.name
    say(f"{name}: memory outside the allocator")
    dtype = torch.float16 if device.has_bfloat16 is False else torch.bfloat16
    overhead = _overhead_bytes(device, dtype)
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
        memory_bytes_per_second=_to_two_digits(reading),
        flops_per_second=_to_two_digits(half),
        float32_flops_per_second=_to_two_digits(single),
        launch_seconds=_to_two_digits(launch),
        host_bytes_per_second=None if host is None else _to_two_digits(host),
    )


def _measure_host() -> HostFigures:
    """Measure the rate of a product with one row, in at most a quarter of the host's memory."""
    say("host memory")
    size = min(_HOST_BYTES, (available_bytes() or _HOST_BYTES) // 4)
    # As in decoding. Few cores read less than the memory could give: their arithmetic is the limit,
    # for quantized weights about as much.
    row, matrix = (
        torch.ones((rows, _WIDTH), dtype=torch.bfloat16) for rows in (1, size // _WIDTH // 2)
    )
    seconds = min(_time_round(lambda: linear(row, matrix), 1, ()) for _ in range(2 * _ROUNDS))
    return HostFigures(
        memory_bytes=total_bytes() or size,
        memory_bytes_per_second=_to_two_digits(matrix.nbytes / seconds),
        threads=torch.get_num_threads(),
    )


def _overhead_bytes(device: Device, dtype: torch.dtype) -> int:
    """Generate, and return the bytes that this process has on a GPU outside torch's allocator."""
    name = device.name
    model = models.build(CONFIG, dtype=dtype)
    load_random_weights(model, name)
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


def load_random_weights(model: nn.Module, name: str) -> None:
    """Place a model on a device; fill its matrices with random values, all else with ones."""
    place(model, Placement(entries=(("", name),)))
    with torch.no_grad():
        for parameter in model.parameters():
            is_matrix = parameter.dim() > 1
            parameter.copy_(0.02 * torch.randn(parameter.shape) if is_matrix else torch.ones(()))


def kinds(fleet: Fleet) -> Iterable[Device]:
    """Return one GPU of each product and memory size."""
    return {(device.product, device.memory_bytes): device for device in fleet.devices}.values()


def _measure_links(fleet: Fleet) -> Iterator[LinkFigures]:
    """Measure the copy speed and latency between each ordered pair of GPUs."""
    for source, target in itertools.permutations(fleet.devices, 2):
        say(f"{source.name} → {target.name}")
        rate, latency = crossing_rate(source.name, target.name)
        yield LinkFigures(
            source=source.uuid or source.name,
            target=target.uuid or target.name,
            bytes_per_second=_to_two_digits(rate),
            latency_seconds=_to_two_digits(latency),
        )


def _to_two_digits(number: float) -> float:
    """Round to two digits: GPUs with equal figures are interchangeable for the planner."""
    return float(f"{number:.1e}")


def read_rate(name: str, dtype: torch.dtype) -> float:
    """Measure the memory bandwidth: bytes per second of a matrix multiplied by one row."""
    row = torch.ones((1, _WIDTH), dtype=dtype, device=name)

    def make_call(size: int) -> tuple[Call, float]:
        matrix = torch.ones((size // _WIDTH // dtype.itemsize, _WIDTH), dtype=dtype, device=name)
        return (lambda: linear(row, matrix)), matrix.nbytes

    return best_rate(make_call, _MATRIX_BYTES, name)


def multiply_rate(name: str, dtype: torch.dtype) -> float:
    """Measure the floating-point operations per second of products of square matrices."""

    def make_call(size: int) -> tuple[Call, float]:
        left, right = (torch.ones((size, size), dtype=dtype, device=name) for _ in range(2))
        return (lambda: left @ right), 2.0 * size**3

    return best_rate(make_call, _WIDTHS, name)


def launch_time(name: str) -> float:
    """Measure the seconds per kernel launch: a small model's decode step over its launches.

    The number of launches is the profile's. The time includes the Python code of modules, argument
    parsing and views. On a device with asynchronous launches it is CPU time.
    """
    model = models.build(_SMALL_CONFIG, dtype=torch.float32)
    profile = trace_serving(
        without_data(model), TraceSpec(fingerprint="", conditions=_SMALL_WORK.conditions)
    )
    replay = ServingReplay(profile, _SMALL_WORK, brief=True)
    step = replay.step_over(1, _PROMPT_TOKENS)
    rules = (profile.kinds[block.kind].traces[step.regime].launches for block in profile.blocks)
    launches = sum(evaluate(rule, step.values) for rule in rules)
    load_random_weights(model, name)
    stepper = PagedModel(model, replay.capacity, torch.device(name))
    size = StepSize(tokens=1, rows=1, logits=2)
    seconds = median_seconds(lambda: stepper.run(size=size), name)
    return seconds / launches


def from_host(name: str) -> float | None:
    """Measure bytes per second from pinned CPU memory; None if the device can't pin memory."""
    if not can_pin(name):
        return None

    def make_call(size: int) -> tuple[Call, float]:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        device = _zero_bytes(size, name)
        return (lambda: device.copy_(host, non_blocking=True)), size

    return best_rate(make_call, _COPIED_BYTES, name)


def crossing_rate(source: str, target: str) -> tuple[float, float]:
    """Measure bytes per second from one device to another, and the seconds of a small copy."""
    small = [_zero_bytes(_LATENCY_BYTES, name) for name in (source, target)]
    latency = median_seconds(lambda: small[1].copy_(small[0], non_blocking=True), source, target)

    def make_call(size: int) -> tuple[Call, float]:
        sender, receiver = _zero_bytes(size, source), _zero_bytes(size, target)
        return (lambda: receiver.copy_(sender, non_blocking=True)), size

    rate = best_rate(make_call, _COPIED_BYTES, source, target)
    return rate, latency


def _zero_bytes(size: int, name: str) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=name)


# Calls are asynchronous on a GPU, so a round is timed from its first call to the synchronisation
# after its last call. The time of a single call would mostly be launch and synchronisation.
# Therefore a round repeats the call for about 20 ms, after 50 ms of warm-up; the result is the
# median of five rounds. Rates are measured at the first of the doubling sizes whose call takes 3 ms
# or more, so that the launch time is negligible:
#
#   1 MiB  0.02 ms   2 MiB  0.03 ms   …   512 MiB  2.4 ms   1 GiB  4.7 ms → 1 GiB is used
def median_seconds(call: Call, *names: str) -> float:
    """Measure the seconds of a call as the median of several rounds; `names` are its devices."""
    started, calls = time.perf_counter(), 0
    while calls < 2 or time.perf_counter() - started < _WARM_SECONDS:
        seconds = _time_round(call, 1, names)
        calls += 1
    repeats = max(1, min(1000, round(_ROUND_SECONDS / max(seconds, 1e-6))))
    return statistics.median(_time_round(call, repeats, names) / repeats for _ in range(_ROUNDS))


def best_rate(
    make_call: Callable[[int], tuple[Call, float]], sizes: Iterable[int], *names: str
) -> float:
    """Measure work per second at the first size with a long enough call.

    `make_call` returns a call for a size and the work it does, in bytes or operations. If no size
    is large enough, the largest size that fits into memory is used.
    """
    best: tuple[Call, float] | None = None
    for size in sizes:
        try:
            call, work = make_call(size)
            _time_round(call, 1, names)
            seconds = _time_round(call, 1, names)
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
    """Build the error for a GPU without enough memory for any measurement."""
    return FleetError(
        f"{name} has too little free memory to measure anything",
        hint="end the process, or use other GPUs",
    )


def _time_round(call: Call, repeats: int, names: Iterable[str]) -> float:
    """Return the seconds of `repeats` calls, up to the end of the work on the named devices."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    for name in names:
        devices.synchronize(name)
    return time.perf_counter() - start
