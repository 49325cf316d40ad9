"""Latency: seconds of the stages of a placement for a request, and their sum.

A roofline: each block takes the longer of its arithmetic and its memory traffic, and every kernel
that it starts costs the host a launch. On CUDA that goes on beside the rest, and the longest counts
where a launch was measured, with Python's time in it; the 5 µs that stand for it elsewhere come on
top. A processor, and a virtual GPU, which is one, does one after the other. Tensors that go from
one stage to the next take the link's latency each, and its bandwidth. It knows nothing of how well
kernels use a GPU: rates that were measured (`calibration`) already have that in them, published
ones don't.

A step of training in a pipeline takes what one micro-batch needs for all its passes and transfers,
and once more the slowest of them for every further micro-batch. That is what GPipe (Huang et al.,
2019) and one forward, one backward (Narayanan et al., PipeDream 2019, Megatron-LM 2021) both come
to where stages are equally fast: with K of them and m micro-batches m + K - 1 times one. Where they
aren't, it knows nothing of what stages wait because of their order of passes, and takes forward and
backward passes to be slowest at the same stage. A stage's share of the optimizer's update counts
with its passes.
"""

from __future__ import annotations

from collections.abc import Sequence
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

LAUNCH_SECONDS = 5e-6
"""What starting a kernel costs where it wasn't measured: about what an operator of PyTorch takes on
the way to the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of a stage for a request, in execution order.

    `prefill_seconds` is the whole prompt, `decode_seconds` all steps after it; with `transfer_` it
    is the way of what comes in from the stage before. In training `prefill_seconds` is forward and
    backward passes of all micro-batches and the optimizer's update, with the gradients' way back in
    the transfers.
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
    """How long a placement takes, its stages in execution order.

    `total_seconds` is from the request to the last token of the answer, nothing else running: what
    the objective "latency" makes small. `slowest_seconds` is what the stage or transfer that takes
    longest needs for one request: what "throughput" makes small, since with all stages busy a
    request comes out each time it is through. `token_seconds` is from one token to the next, on
    average. `tokens_per_second` counts the generated tokens of all sequences, with all stages busy.

    In training the total is one step of the optimizer, and the slowest is for all micro-batches.
    Tokens are those learnt from.
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
    """Raise FormatError for an impossible time or rate, as in a damaged plan file."""
    for field in fields(speeds):
        value = getattr(speeds, field.name)
        if isinstance(value, float) and not 0 <= value < inf:
            raise FormatError(f"{field.name} is {value}, which is not a valid duration")


def rate(device: Device, dtype: str) -> float | None:
    """Return operations per second in a type; None when unknown.

    A GPU without bfloat16 computes it in 32 bit, as far as that rate is known.
    """
    in_float32 = dtype == "float32" or (dtype == "bfloat16" and device.has_bfloat16 is False)
    float32_rate = device.float32_flops_per_second if in_float32 else None
    return device.flops_per_second if float32_rate is None else float32_rate


def transfer(link: Link, num_bytes: Floats, num_transfers: Floats) -> Floats:
    """Return the seconds of so many tensors of so many bytes together over a link."""
    return np.asarray(num_transfers * link.latency_seconds + num_bytes / link.bytes_per_second)


def crossing(
    fleet: Fleet, source: str, target: str, num_bytes: Floats, num_transfers: Floats
) -> Floats:
    """Return the seconds of a transfer between two devices of a fleet.

    A pair without a link is taken to be as slow as the slowest link of the fleet; without any link,
    nothing is known, and transfers take no time.
    """
    link = fleet.link(source, target)
    links = fleet.links if link is None else (link,)
    seconds = [transfer(link, num_bytes, num_transfers) for link in links]
    return max(seconds, key=np.sum, default=np.zeros_like(num_bytes, np.float64))


def _overlap(device: Device, arithmetic: Floats, traffic: Floats, launches: Floats) -> Floats:
    """Return the seconds of arithmetic, memory traffic and launches together on a device."""
    if not device.name.startswith("cuda"):
        return np.asarray(arithmetic + traffic + launches)
    kernels = np.maximum(arithmetic, traffic)
    if "launch_seconds" in device.measured:
        return np.maximum(kernels, launches)
    return np.asarray(kernels + launches)


class LatencyModel:
    """Seconds of a request at the places of a chain of blocks.

    A place is a block where a stage may begin, with the blocks attached to it. `boundary_bytes` and
    `boundary_transfers`, [2, places + 1], are sent to a stage that begins at each place, in prefill
    and in decoding; in training with the gradients that come back from it.
    """

    def __init__(self, replay: Replay, places: Sequence[Sequence[int]]) -> None:
        self._profile: Profile = replay.profile
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
        self._known: dict[tuple[object, ...], Floats] = {}
        self._work = {kind: self._work_of(kind) for kind in self._kinds()}
        kinds = [block.kind for block in self._profile.blocks]
        # What is sent over a cut follows from the kinds of the two blocks at it: the first one of a
        # stage, and the last one of the stage before.
        cuts = [(kinds[first_block], kinds[max(first_block - 1, 0)]) for first_block, *_ in places]
        boundaries = {cut: self._boundary(*cut) for cut in set(cuts)}
        # [places + 1, (bytes, number), (prefill, decode)]
        ends = np.array([*(boundaries[cut] @ self._weights.T for cut in cuts), np.zeros((2, 2))])
        self.boundary_bytes: Floats = ends[:, 0].T
        self.boundary_transfers: Floats = ends[:, 1].T

    def seconds_on(self, device: Device) -> Floats | None:
        """[2, places]: seconds of each place, in prefill and in decoding; None when unknown."""
        is_measured = device.name.startswith("cuda"), "launch_seconds" in device.measured
        key = (*device.speeds, device.host_bytes_per_second, is_measured)
        if key not in self._known:
            by_kind = self._kinds_on(device)
            if by_kind is None:
                return None
            kinds = {kind: self._weights @ seconds for kind, seconds in by_kind.items()}
            blocks = self._profile.blocks
            self._known[key] = np.array(
                [sum(kinds[blocks[block].kind] for block in place) for place in self._places]
            ).T
            self._known[key][0] += self._updates_on(device)
        return self._known[key]

    def _kinds_on(self, device: Device) -> dict[int, Floats] | None:
        """[steps]: seconds of a block of each kind in each step; None when unknown."""
        flops = rate(device, self._workload.dtype)
        bandwidth = device.memory_bytes_per_second
        copies = self._copies(device)
        if flops is None or bandwidth is None or copies is None:
            return None
        launch = LAUNCH_SECONDS if device.launch_seconds is None else device.launch_seconds
        return {
            kind: np.maximum(
                _overlap(device, flop / flops, size / bandwidth, count * launch),
                copies.get(kind, 0.0),
            )
            for kind, (flop, size, count) in self._work.items()
        }

    def _copies(self, device: Device) -> dict[int, float] | None:
        """Return the seconds to copy streamed weights, by kind; None when unknown."""
        sizes = {kind: self._profile.kinds[kind].streamed_bytes for kind in self._kinds()}
        if not any(sizes.values()):
            return {}
        rate = device.host_bytes_per_second
        return None if rate is None else {kind: size / rate for kind, size in sizes.items()}

    def _updates_on(self, device: Device) -> Floats:
        """[places]: seconds of the optimizer's update, bound by memory.

        It reads weights, gradients and states, and writes all but the gradients.
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
        """Return the seconds of a placement; None where a device's speeds are unknown."""
        stage_seconds = []
        previous_device: str | None = None
        for name, start, stop in stages:
            times = self.seconds_on(fleet.device(name))
            if times is None:
                return None
            prefill, decode = times[:, start:stop].sum(axis=1)
            ways = np.zeros(2)
            if previous_device is not None:
                sizes, numbers = self.boundary_bytes[:, start], self.boundary_transfers[:, start]
                ways = crossing(fleet, previous_device, name, sizes, numbers)
            stage_seconds.append(
                StageSeconds(
                    device=name,
                    prefill_seconds=float(prefill),
                    decode_seconds=float(decode),
                    prefill_transfer_seconds=float(ways[0]),
                    decode_transfer_seconds=float(ways[1]),
                )
            )
            previous_device = name
        return self._sum_up(tuple(stage_seconds))

    def _sum_up(self, stages: tuple[StageSeconds, ...]) -> Seconds:
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
        # In a pipeline of K stages, m micro-batches take m + K - 1 times one stage, if all are
        # equal: once through all stages (the sums over m), and m - 1 times the slowest more.
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
        return {self._profile.blocks[block].kind for place in self._places for block in place}

    def _work_of(self, kind: int) -> Floats:
        """[3, steps]: arithmetic, bytes moved, and launches."""
        traces = self._profile.kinds[kind].traces
        work = np.zeros((3, len(self._steps)))
        for regime in {step.regime for step in self._steps}:
            trace = traces[regime]
            steps = [index for index, step in enumerate(self._steps) if step.regime == regime]
            rules = [trace.flops, trace.moved_bytes, trace.launches]
            work[:, steps] = _evaluate_at(rules, self._values[steps])
        return work

    def _boundary(self, kind: int, sender: int) -> Floats:
        """[(bytes, number), steps]: tensors sent over a cut.

        `kind` is that of the first block behind the cut, `sender` that of the last block before it,
        to which gradients come back.
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
    """[rules, …]: each rule at values […, monomials]."""
    table = np.zeros((len(rules), values.shape[-1]))
    for row, rule in zip(table, rules, strict=True):
        row[: len(rule)] = rule[: len(row)]
    return np.asarray(table @ values.T)
