"""Latency: seconds of the stages of a placement for a request, and their sum.

A roofline model. On CUDA, a block takes the longer of its arithmetic and its memory traffic, and
every kernel costs the host a launch. A measured launch time includes Python's time and overlaps
with the kernels, so the longer of both counts; the default of 5 µs is added to the kernels' time.
On a CPU, and on a virtual GPU, which runs on the CPU, arithmetic, traffic and launches are added.
A tensor sent from one stage to the next takes the link's latency, and its bytes over the link's
bandwidth. The efficiency of kernels isn't modelled: measured rates (`calibration`) include it,
published rates don't.

A training step in a pipeline takes the time of one micro-batch through all stages and transfers,
and the time of the slowest stage for every further micro-batch. If all K stages are equally fast,
GPipe (Huang et al., 2019) and 1F1B (Narayanan et al., PipeDream 2019, Megatron-LM 2021) both take
m + K - 1 times one stage for m micro-batches. If not, waiting caused by the order of passes isn't
modelled, and forward and backward passes are assumed to be slowest at the same stage. A stage's
share of the optimizer's update counts with its passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from duoka.errors import FormatError
from duoka.hardware.device import Device, Link
from duoka.hardware.fleet import Fleet

from .alloc_events import ForecastStep
from .optimizer_memory import state_bytes
from .profile import TRAINING_PHASES, Profile, Rule
from .replay import Replay, sample

Floats: TypeAlias = NDArray[np.float64]

GRAPH_LAUNCH_SECONDS = 1e-6
"""Seconds between two kernels of a CUDA graph. Declared: by published figures, an 8B model's step
of some 1,100 kernels takes 0.3 ms longer on an H100 than its memory traffic alone."""
HOST_BYTES_PER_SECOND = 40e9
"""Bandwidth of a host's memory if unknown: two channels of DDR4."""
HOST_FLOPS_PER_SECOND = 500e9
"""Rate of a host's matrix products if unknown: a desktop CPU with AVX2."""
HOST_WAIT_SECONDS = 50e-6
"""Seconds of a layer whose experts are on the host, for its copies and for waking threads."""
_NEARLY_ALL = 0.99
"""Share of a layer's bytes from which on a step streams all its experts: the bytes have biases."""
LAUNCH_SECONDS = 5e-6
"""Seconds to launch a kernel if not measured: about the host's time for one PyTorch operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of a stage for a request.

    `prefill_seconds` is the time for the whole prompt, `decode_seconds` for all decode steps; the
    two `transfer_seconds` are the time to copy inputs from the stage before. In training,
    `prefill_seconds` covers the forward and backward passes of all micro-batches and the
    optimizer's update, and the transfers include the gradients sent back.
    """

    device: str
    prefill_seconds: float
    decode_seconds: float
    prefill_transfer_seconds: float
    decode_transfer_seconds: float

    def __post_init__(self) -> None:
        refuse_impossible(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Seconds of a placement for a request, with its stages in execution order.

    `total_seconds` is the time from the request to its last token, with no other request running;
    the objective "latency" minimises it. `slowest_seconds` is the time of the slowest stage or
    transfer for one request; the objective "throughput" minimises it, since with all stages busy
    one request completes per `slowest_seconds`. `token_seconds` is the average time between two
    tokens; None without decode steps. `tokens_per_second` counts the generated tokens of all
    sequences, with all stages busy.

    In training, `total_seconds` is the time of one optimizer step, `slowest_seconds` covers all
    micro-batches, `tokens_per_second` counts trained tokens, and the times per token are None.
    """

    stages: tuple[StageSeconds, ...]
    total_seconds: float
    slowest_seconds: float
    first_token_seconds: float | None
    token_seconds: float | None
    tokens_per_second: float

    def __post_init__(self) -> None:
        refuse_impossible(self)


def refuse_impossible(speeds: Any) -> None:
    """Raise FormatError if a float field is negative, infinite or NaN, as in a damaged plan."""
    for field in fields(speeds):
        value = getattr(speeds, field.name)
        if isinstance(value, float) and not 0 <= value < inf:
            raise FormatError(f"{field.name} is {value}, which is not a valid duration")


def rate(device: Device, dtype: str) -> float | None:
    """Return a device's floating-point operations per second in a dtype; None if unknown.

    A GPU without bfloat16 support computes bfloat16 at its float32 rate. If that rate is unknown,
    the device's general rate is used.
    """
    in_float32 = dtype == "float32" or (dtype == "bfloat16" and device.has_bfloat16 is False)
    float32_rate = device.float32_flops_per_second if in_float32 else None
    return device.flops_per_second if float32_rate is None else float32_rate


def transfer(link: Link, num_bytes: Floats, num_transfers: Floats) -> Floats:
    """Return the seconds to send tensors over a link: their number, and their bytes in total."""
    return np.asarray(num_transfers * link.latency_seconds + num_bytes / link.bytes_per_second)


def crossing(
    fleet: Fleet, source: str, target: str, num_bytes: Floats, num_transfers: Floats
) -> Floats:
    """Return the seconds of a transfer between two devices of a fleet.

    A pair without a link of its own is assumed to be as slow as the slowest link of the fleet. If
    the fleet has no links, transfers take no time.
    """
    link = fleet.link(source, target)
    links = fleet.links if link is None else (link,)
    seconds = [transfer(link, num_bytes, num_transfers) for link in links]
    return max(seconds, key=np.sum, default=np.zeros_like(num_bytes, np.float64))


def _overlap(device: Device, arithmetic: Floats, traffic: Floats, launches: Floats) -> Floats:
    """Return the seconds of a block from its arithmetic, memory traffic and launches (see top)."""
    if not device.name.startswith("cuda"):
        return np.asarray(arithmetic + traffic + launches)
    kernels = np.maximum(arithmetic, traffic)
    if "launch_seconds" in device.measured:
        return np.maximum(kernels, launches)
    return np.asarray(kernels + launches)


def _seconds_on_host(num_bytes: Floats, flops: Floats, host: Device | None) -> Floats:
    """Return the seconds of a block's experts on the host, while its GPU waits."""
    bandwidth = host and host.memory_bytes_per_second
    rate = host and host.flops_per_second
    reading = num_bytes / (bandwidth or HOST_BYTES_PER_SECOND)
    computing = flops / (rate or HOST_FLOPS_PER_SECOND)
    seconds = np.maximum(reading, computing) + HOST_WAIT_SECONDS
    return np.asarray(np.where(flops >= 1, seconds, 0.0))


class LatencyModel:
    """Seconds of a request at the places of a chain of blocks.

    A place is a block where a stage may begin, with its attached blocks. `boundary_bytes` and
    `boundary_transfers`, [(prefill, decode), places + 1], are the bytes and the number of tensors
    sent to a stage that begins at each place; in training, gradients sent back are included.
    """

    def __init__(
        self, replay: Replay, places: Sequence[Sequence[int]], host: Device | None = None
    ) -> None:
        self._profile: Profile = replay.profile
        self._host = host
        self._workload = replay.workload
        self._places = places
        workload = self._workload
        training = workload.training
        is_pipeline = training is not None and training.schedule != "sequential"
        self._num_passes = training.micro_batches if training is not None and is_pipeline else 1
        lengths = range(workload.prompt_tokens, workload.context_tokens - 1)
        weighted = [(step, weight, 0.0) for step, weight in replay.prompt_steps()]
        weighted += [(replay.step_over(1, past), 0.0, weight) for past, weight in sample(lengths)]
        self._num_decodes = len(lengths)
        self._steps: list[ForecastStep] = [step for step, _, _ in weighted]
        self._weights = np.array([weights for _, *weights in weighted]).T  # [2, steps]
        self._values = np.array([step.values for step in self._steps], np.float64)
        self._place_seconds: dict[tuple[object, ...], Floats] = {}
        self._work = {kind: self._work_of(kind) for kind in self._kinds()}
        self._host_seconds = {
            kind: _seconds_on_host(bytes_read, flops, host)
            for kind, (*_, bytes_read, flops) in self._work.items()
        }
        kinds = [block.kind for block in self._profile.blocks]
        # The tensors sent over a cut depend on the kinds of the two blocks at the cut: the first
        # block of a stage, and the last block of the stage before.
        cuts = [(kinds[first_block], kinds[max(first_block - 1, 0)]) for first_block, *_ in places]
        boundaries = {cut: self._boundary(*cut) for cut in set(cuts)}
        # [places + 1, (bytes, number), (prefill, decode)]
        ends = np.array([*(boundaries[cut] @ self._weights.T for cut in cuts), np.zeros((2, 2))])
        self.boundary_bytes: Floats = ends[:, 0].T
        self.boundary_transfers: Floats = ends[:, 1].T

    @property
    def host_bytes(self) -> float:
        """Bytes of experts' weights that the host reads in a decode step."""
        return self._sum_of_decode({kind: work[3] for kind, work in self._work.items()})

    @property
    def host_seconds(self) -> float:
        """Seconds of a decode step in which the host computes experts."""
        return self._sum_of_decode(self._host_seconds)

    def _sum_of_decode(self, by_kind: Mapping[int, Floats]) -> float:
        """Return the mean of a decode step over all blocks, from values by kind, [steps]."""
        blocks = [self._profile.blocks[block] for place in self._places for block in place]
        total = sum(float(self._weights[1] @ by_kind[block.kind]) for block in blocks)
        return total / self._num_decodes if self._num_decodes else 0.0

    def seconds_on(self, device: Device) -> Floats | None:
        """[(prefill, decode), places]: seconds on a device; None if a speed of it is unknown."""
        is_measured = device.name.startswith("cuda"), "launch_seconds" in device.measured
        key = (*device.speeds, device.host_bytes_per_second, is_measured)
        if key not in self._place_seconds:
            by_kind = self._kinds_on(device)
            if by_kind is None:
                return None
            kinds = {kind: self._weights @ seconds for kind, seconds in by_kind.items()}
            blocks = self._profile.blocks
            self._place_seconds[key] = np.array(
                [sum(kinds[blocks[block].kind] for block in place) for place in self._places]
            ).T
            self._place_seconds[key][0] += self._updates_on(device)
        return self._place_seconds[key]

    def _kinds_on(self, device: Device) -> dict[int, Floats] | None:
        """Return the seconds of each kind of block, [steps]; None if a speed is unknown."""
        flops = rate(device, self._workload.dtype)
        bandwidth = device.memory_bytes_per_second
        copies = self._copies(device)
        fetched = self._fetched_seconds(device)
        if flops is None or bandwidth is None or copies is None or fetched is None:
            return None
        launch: Any = LAUNCH_SECONDS if device.launch_seconds is None else device.launch_seconds
        is_graph = [step.is_graph for step in self._steps]
        launch = np.where(is_graph, min(launch, GRAPH_LAUNCH_SECONDS), launch)
        return {
            kind: self._join(
                kind,
                _overlap(device, flop / flops, size / bandwidth, count * launch),
                copies.get(kind, 0.0) + fetched[kind],
            )
            + self._host_seconds[kind]
            for kind, (flop, size, count, _, _) in self._work.items()
        }

    def _join(self, kind: int, kernels: Floats, copies: Floats) -> Floats:
        """Return the seconds of kernels and copies of a kind of block.

        Streamed weights are copied during kernels; experts for a cache after a wait for the
        routing, and before the kernels.
        """
        overlapping: Floats = np.maximum(kernels, copies)
        expert_bytes = self._profile.kinds[kind].expert_bytes
        if not self._workload.expert_cache_bytes or not expert_bytes:
            return overlapping
        is_streamed = self._work[kind][3] > _NEARLY_ALL * expert_bytes
        return np.where(is_streamed, overlapping, kernels + copies + HOST_WAIT_SECONDS)

    def _fetched_seconds(self, device: Device) -> dict[int, Floats] | None:
        """[steps]: seconds to fetch experts from the host, by kind of block.

        None if experts are fetched and the rate from the host is unknown.
        """
        sizes = {
            kind: np.where(flops < 1, num_bytes, 0.0)
            for kind, (*_, num_bytes, flops) in self._work.items()
        }
        rate = device.host_bytes_per_second
        if rate is None and any(size.any() for size in sizes.values()):
            return None
        return {kind: size / (rate or 1.0) for kind, size in sizes.items()}

    def _copies(self, device: Device) -> dict[int, float] | None:
        """Return the seconds to copy streamed weights, by kind of block.

        Empty if no weights are streamed; None if the rate from the host is unknown.
        """
        sizes = {kind: self._profile.kinds[kind].streamed_bytes for kind in self._kinds()}
        if not any(sizes.values()):
            return {}
        rate = device.host_bytes_per_second
        return None if rate is None else {kind: size / rate for kind, size in sizes.items()}

    def _updates_on(self, device: Device) -> Floats:
        """[places]: seconds of the optimizer's update, which is bound by memory bandwidth.

        The update reads weights, gradients and states, and writes weights and states.
        """
        training, bandwidth = self._workload.training, device.memory_bytes_per_second
        if training is None:
            return np.zeros(len(self._places))
        assert bandwidth is not None, "`seconds_on` knows this device"
        kinds, blocks = self._profile.kinds, self._profile.blocks
        num_bytes = [
            sum(
                3 * tensor.num_bytes + 2 * sum(state_bytes(training.optimizer, tensor))
                for tensor in kind.trained
            )
            for kind in kinds
        ]
        by_place = [sum(num_bytes[blocks[block].kind] for block in place) for place in self._places]
        return np.array(by_place) / bandwidth

    def seconds_of(self, stages: Sequence[tuple[str, int, int]], fleet: Fleet) -> Seconds | None:
        """Return the seconds of a placement, whose stages are (device name, start, stop).

        None if a speed of a device is unknown.
        """
        stage_seconds = []
        previous_device: str | None = None
        for name, start, stop in stages:
            times = self.seconds_on(fleet.device(name))
            if times is None:
                return None
            prefill, decode = times[:, start:stop].sum(axis=1)
            transfers = np.zeros(2)
            if previous_device is not None:
                sizes, numbers = self.boundary_bytes[:, start], self.boundary_transfers[:, start]
                transfers = crossing(fleet, previous_device, name, sizes, numbers)
            stage_seconds.append(
                StageSeconds(
                    device=name,
                    prefill_seconds=float(prefill),
                    decode_seconds=float(decode),
                    prefill_transfer_seconds=float(transfers[0]),
                    decode_transfer_seconds=float(transfers[1]),
                )
            )
            previous_device = name
        return self._sum_up(tuple(stage_seconds))

    def _sum_up(self, stages: tuple[StageSeconds, ...]) -> Seconds:
        """Return the seconds of a request from those of its stages."""
        prefill = sum(s.prefill_seconds + s.prefill_transfer_seconds for s in stages)
        decode = sum(s.decode_seconds + s.decode_transfer_seconds for s in stages)
        slowest = max(
            seconds
            for s in stages
            for seconds in (
                s.prefill_seconds + s.decode_seconds,
                s.prefill_transfer_seconds + s.decode_transfer_seconds,
            )
        )
        # One micro-batch through all stages takes the sums (over m micro-batches) divided by m.
        # Each of the m - 1 further micro-batches adds the slowest stage's time for one.
        training, tokens = self._workload.training, self._workload.new_tokens
        total = (prefill + decode + (self._num_passes - 1) * slowest) / self._num_passes
        busy = slowest
        if training is not None:
            tokens, busy = self._workload.prompt_tokens * training.micro_batches, total
        tokens *= self._workload.batch
        return Seconds(
            stages=stages,
            total_seconds=total,
            slowest_seconds=slowest,
            first_token_seconds=prefill if training is None else None,
            token_seconds=decode / self._num_decodes if self._num_decodes else None,
            tokens_per_second=tokens / busy if busy else 0.0,
        )

    def _kinds(self) -> set[int]:
        """Return the kinds of all blocks in places."""
        return {self._profile.blocks[block].kind for place in self._places for block in place}

    def _work_of(self, kind: int) -> Floats:
        """[5, steps]: FLOPs, bytes and launches of a kind of block; bytes and FLOPs on the host."""
        traces = self._profile.kinds[kind].traces
        work = np.zeros((5, len(self._steps)))
        for regime in {step.regime for step in self._steps}:
            trace = traces[regime]
            steps = [index for index, step in enumerate(self._steps) if step.regime == regime]
            rules = [trace.flops, trace.moved_bytes, trace.launches]
            rules += [trace.host_bytes, trace.host_flops]
            work[:, steps] = _evaluate_at(rules, self._values[steps])
        return work

    def _boundary(self, kind: int, sender: int) -> Floats:
        """[(bytes, number), steps]: tensors sent over a cut.

        `kind` is the kind of the first block after the cut, `sender` the kind of the last block
        before it, which reads gradients in backward passes.
        """
        sent = np.zeros((2, len(self._steps)))
        for regime in {step.regime for step in self._steps}:
            steps = [index for index, step in enumerate(self._steps) if step.regime == regime]
            comes_back = self._steps[steps[0]].phase in TRAINING_PHASES[1:]
            trace = self._profile.kinds[sender if comes_back else kind].traces[regime]
            reads = [read for read in trace.reads if not comes_back or read.ref.back < 0]
            sizes = _evaluate_at([read.size for read in reads], self._values[steps])
            sent[:, steps] = sizes.sum(axis=0), np.count_nonzero(sizes > 0, axis=0)
        return sent


def _evaluate_at(rules: Sequence[Rule], values: Floats) -> Floats:
    """[rules, …]: each rule evaluated at values […, monomials]."""
    table = np.zeros((len(rules), values.shape[-1]))
    for row, rule in zip(table, rules, strict=True):
        row[: len(rule)] = rule[: len(row)]
    return np.asarray(table @ values.T)
