"""Deployments of a model: one GPU, splits, copies, quantized weights.

Every deployment is planned for the same requests, with pages for just these; for throughput, or for
headroom if the GPUs' speeds are unknown. Of fewer GPUs than all the fastest are taken, or else the
largest; of copies as many as fit. The recommendation follows the measurements, or without any the
forecasts. Effects of quantization on answers are left to `quality`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from statistics import mean
from typing import Any

from duoka.api.plan import find_or_trace, plan_copies, plan_request
from duoka.base.units import format_count
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import DuokaError
from duoka.forecast.serving import least_pages
from duoka.forecast.workload import Quantization, Workload
from duoka.hardware.device import Device
from duoka.hardware.fleet import Fleet
from duoka.hardware.host import available_bytes
from duoka.hardware.parse import devices_in
from duoka.planner.command_line import options
from duoka.planner.plan import Plan
from duoka.planner.replicas import format_copies
from duoka.planner.request import PlanRequest
from duoka.planner.resolve import workload_for
from duoka.report.measured import PeakBytes

# A deployment with fewer GPUs is preferred at this share of the best speed.
_ALIKE = 0.95
_MOST_SIGNS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speeds of a deployment; None if unknown.

    `prefill_tokens_per_second` and `many_tokens_per_second` (decoding) are of all requests at once;
    `one_tokens_per_second` and `first_token_seconds` of a single request, the latter with the
    longest prompt. `idle_share` is the pipeline bubble: the average share of idle GPU time. Its
    forecast counts unequal stages alone.
    """

    prefill_tokens_per_second: float | None = None
    first_token_seconds: float | None = None
    one_tokens_per_second: float | None = None
    many_tokens_per_second: float | None = None
    idle_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A way to run a model: a plan for each copy, or the obstacle; and measurements."""

    name: str
    weights: str
    plans: tuple[Plan, ...] = ()
    forecast: Rates = Rates()
    measured: Rates | None = None
    peaks: tuple[PeakBytes, ...] = ()
    trouble: str = ""

    @property
    def rates(self) -> Rates:
        """Measured rates, or else the forecast."""
        return self.measured or self.forecast

    @property
    def num_devices(self) -> int:
        """Number of GPUs."""
        return sum(len(plan.devices) for plan in self.plans)

    def memory(self) -> Iterator[dict[str, Any]]:
        """Yield each GPU's reserved memory, forecast and measured."""
        measured = {peak.device: peak.reserved_bytes for peak in self.peaks}
        for stage in chain(*(plan.forecast.devices for plan in self.plans)):
            yield {
                "device": stage.device,
                "forecast_bytes": stage.reserved_bytes,
                "measured_bytes": measured.get(stage.device),
                "budget_bytes": stage.budget_bytes,
            }

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON's types."""
        return {
            "name": self.name,
            "weights": self.weights,
            "copies": [list(plan.devices) for plan in self.plans],
            "forecast": asdict(self.forecast),
            "measured": None if self.measured is None else asdict(self.measured),
            "memory": list(self.memory()),
            "trouble": self.trouble or None,
            "command": command(self),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Deployments of a model, for the requests of a workload."""

    model: str
    workload: Workload
    deployments: tuple[Deployment, ...]

    def to_dict(self) -> dict[str, Any]:
        """Convert to JSON's types."""
        best, reasons = recommend(self)
        work = self.workload
        return {
            "format": "duoka.bench",
            "version": 1,
            "model": self.model,
            "requests": work.batch,
            "prompt_tokens": work.prompt_tokens,
            "new_tokens": work.new_tokens,
            "deployments": [case.to_dict() for case in self.deployments],
            "recommended": None if best is None else self.deployments.index(best),
            "why": list(reasons),
        }


def plan_deployments(
    checkpoint: Checkpoint,
    request: PlanRequest,
    fleet: Fleet,
    forms: Sequence[Quantization],
    *,
    with_cpu: bool = False,
) -> Bench:
    """Plan each deployment of a checkpoint for the requests of a workload with pages."""
    has_speeds = all(gpu.memory_bytes_per_second and gpu.flops_per_second for gpu in fleet.devices)
    request = replace(request, objective="throughput" if has_speeds else "headroom")
    cases: list[Deployment] = []
    for form in forms:
        try:
            work = workload_for(checkpoint, replace(request.workload, quantize=form))
            find_or_trace(checkpoint, work)
        except DuokaError as error:
            cases.append(Deployment(name="any", weights=form, trouble=describe_error(error)))
            continue
        cases += _deployments(checkpoint, replace(request, workload=work), fleet, with_cpu=with_cpu)
    return Bench(model=checkpoint.name, workload=request.workload, deployments=tuple(cases))


def _deployments(
    checkpoint: Checkpoint, request: PlanRequest, fleet: Fleet, *, with_cpu: bool
) -> Iterator[Deployment]:
    """Yield splits over each number of GPUs, copies, and the processor."""
    for count in range(1, len(fleet.devices) + 1):
        cases = []
        for group in _groups(fleet, count):
            on_group = replace(request, use_all=True, gpus=_gpus(request.gpus, fleet, group))
            cases.append(_split(checkpoint, on_group, group, format_count(count, "GPU")))
        yield next((case for case in cases if case.plans), cases[0])
    yield from _copies(checkpoint, request, fleet)
    if with_cpu:
        host = Fleet(devices=(Device(name="cpu", budget_bytes=available_bytes() or 0),))
        yield _split(checkpoint, replace(request, gpus="", objective="headroom"), host, "CPU")


def describe_error(error: Exception) -> str:
    """Shorten an error to a cell of a table."""
    return str(error).partition("\n")[0][:_MOST_SIGNS]


def _part(work: Workload, copies: int = 1) -> Workload:
    """Return a copy's part of a workload, with pages for its requests."""
    part = replace(work, batch=-(-work.batch // copies))
    return replace(part, pages=part.batch * least_pages(part))


def _groups(fleet: Fleet, count: int) -> Iterator[Fleet]:
    """Yield the fastest GPUs, and the largest GPUs if different."""
    fastest = sorted(fleet.devices, key=lambda gpu: -(gpu.memory_bytes_per_second or 0.0))[:count]
    largest = sorted(fleet.devices, key=lambda gpu: -gpu.budget_bytes)[:count]
    yield fleet.only([gpu.name for gpu in fastest])
    if {*fastest} != {*largest}:
        yield fleet.only([gpu.name for gpu in largest])


def _gpus(text: str, fleet: Fleet, group: Fleet) -> str:
    """Write a part of a fleet in the form of `--gpus`."""
    if len(group.devices) == len(fleet.devices):
        return text
    declared = devices_in(text)
    if declared is None:
        return ",".join(device.uuid for device in group.devices)
    prefix, names = declared
    return prefix + "+".join(names[fleet.names.index(name)] for name in group.names)


def _weights(work: Workload) -> str:
    return work.dtype if work.quantize == "none" else work.quantize


def _split(checkpoint: Checkpoint, request: PlanRequest, fleet: Fleet, name: str) -> Deployment:
    case = Deployment(name=name, weights=_weights(request.workload))
    try:
        whole = replace(request, workload=_part(request.workload))
        plan = plan_request(checkpoint, whole, fleet, suggest=False)
    except DuokaError as error:
        return replace(case, trouble=describe_error(error))
    return replace(case, plans=(plan,), forecast=_forecast(plan))


def _copies(checkpoint: Checkpoint, request: PlanRequest, fleet: Fleet) -> Iterator[Deployment]:
    """Yield the deployment with the most copies, if two or more fit."""
    num_copies = min(len(fleet.devices), request.workload.batch)
    for number in range(num_copies, 1, -1):
        part = replace(request, workload=_part(request.workload, number))
        try:
            plans = plan_copies(checkpoint, part, fleet, number, suggest=False).plans
        except DuokaError:  # too little memory, or too many ways to assign GPUs
            continue
        sizes = "/".join(map(str, sorted({len(plan.devices) for plan in plans})))
        yield Deployment(
            name=f"{format_copies(number)}, {sizes} GPU{'' if sizes == '1' else 's'} each",
            weights=_weights(request.workload),
            # Each copy's plan has the request for all copies.
            plans=tuple(
                replace(plan, request=replace(part, workload=plan.request.workload))
                for plan in plans
            ),
            forecast=combine_rates([_forecast(plan) for plan in plans]),
        )
        return


_COMBINE: dict[str, Callable[[list[float]], float]] = {
    "prefill_tokens_per_second": sum,
    "first_token_seconds": min,
    "one_tokens_per_second": max,
    "many_tokens_per_second": sum,
    "idle_share": mean,
}


def combine_rates(copies: Sequence[Rates]) -> Rates:
    """Combine the rates of parallel copies; a single request has the fastest copy's."""
    rates: dict[str, float | None] = {}
    for name, combine in _COMBINE.items():
        values = [getattr(copy, name) for copy in copies]
        rates[name] = None if None in values else combine(values)
    return Rates(**rates)


def _forecast(plan: Plan) -> Rates:
    seconds, work = plan.forecast.seconds, plan.workload
    if seconds is None or not seconds.first_token_seconds:
        return Rates()
    # All prompts follow one another through the stages: fill the pipeline once, then one prompt per
    # turn of the slowest stage.
    slowest = max(max(s.prefill_seconds, s.prefill_transfer_seconds) for s in seconds.stages)
    prefill = slowest + (seconds.first_token_seconds - slowest) / work.batch
    speeds = {load.requests: load.tokens_per_second for load in plan.forecast.serving_speeds}
    busy: dict[str, float] = dict.fromkeys(plan.devices, 0.0)
    for stage in seconds.stages:
        busy[stage.device] += stage.prefill_seconds + stage.decode_seconds
    return Rates(
        prefill_tokens_per_second=work.batch * work.prompt_tokens / prefill,
        first_token_seconds=seconds.first_token_seconds / work.batch,
        one_tokens_per_second=speeds.get(1),
        many_tokens_per_second=speeds.get(work.batch),
        idle_share=1 - sum(busy.values()) / len(busy) / max(busy.values()),
    )


# ── recommendation ──


# Nobody wants the most tokens for all at any price for a single user, nor the other way round; the
# product of both speeds weighs them alike, whatever their units. Small differences are noise, so
# among deployments within 5 % of the best product the one with the fewest GPUs is taken.
def recommend(bench: Bench) -> tuple[Deployment | None, tuple[str, ...]]:
    """Return the best deployment by measurement, or else by forecast, with reasons.

    The best one has the largest product of the speed for one user and the speed for all requests.
    """
    usable = [case for case in bench.deployments if case.plans and not case.trouble]
    usable = [case for case in usable if case.measured is not None] or usable
    if not usable:
        return None, ()

    def single_speed(case: Deployment) -> float:
        return case.rates.one_tokens_per_second or 0.0

    def total_speed(case: Deployment) -> float:
        return case.rates.many_tokens_per_second or 0.0

    def describe(speed: Callable[[Deployment], float]) -> str:
        fastest = _best(usable, speed)
        return f"{title(fastest)}, {format_speed(speed(fastest))} tokens/s"

    most_single, most_total = (max(map(speed, usable)) for speed in (single_speed, total_speed))
    if not most_total:
        reason = "the speeds are unknown (measure them with --calibrate): it uses the fewest"
        return min(usable, key=lambda case: case.num_devices), (reason,)
    best = _best(usable, lambda case: single_speed(case) * total_speed(case))
    requests = bench.workload.batch
    return best, (
        f"one user: {describe(single_speed)}",
        f"{requests} at once: {describe(total_speed)}",
        f"both: {title(best)} gives one user {single_speed(best) / most_single:.0%} and "
        f"{requests} at once {total_speed(best) / most_total:.0%} of the maximum",
    )


def title(case: Deployment) -> str:
    """Return a deployment's name with its weights."""
    return f"{case.name} ({case.weights})"


def format_speed(speed: float) -> str:
    """Format a speed with three significant digits."""
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _best(cases: Sequence[Deployment], value: Callable[[Deployment], float]) -> Deployment:
    """Return the deployment with the fewest GPUs among the nearly best."""
    minimum = _ALIKE * max(map(value, cases))
    candidates = [case for case in cases if value(case) >= minimum]
    return min(candidates, key=lambda case: (case.num_devices, -value(case)))


def command(case: Deployment) -> str | None:
    """Return the command to serve a deployment; None without any."""
    if not case.plans or not case.plans[0].request.gpus:
        return None
    plan = case.plans[0]
    words = options(plan.request)
    words.pop("--serve", None)
    if any(gpu.measured and gpu.name.startswith("vgpu") for gpu in plan.fleet.devices):
        words.pop("--objective", None)  # speeds of virtual GPUs aren't kept
    if len(case.plans) > 1:
        words["--replicas"] = ("--replicas", str(len(case.plans)))
    return shlex.join(["duoka", "serve", plan.source, *chain(*words.values())])
