"""Deployments of a model: one GPU, splits over several GPUs, replicas, quantized weights.

Every deployment is planned for the same requests, with KV cache pages for exactly these requests.
The objective is throughput, or headroom if the speed of any GPU is unknown. A split over some of
the GPUs uses the fastest GPUs, or the largest ones if the model does not fit on the fastest. The
deployment with replicas has as many replicas as fit. The recommendation is based on measurements if
any deployment was measured, otherwise on forecasts. `quality` measures how quantization changes the
answers.
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
from duoka.hardware.fleet import Fleet
from duoka.hardware.parse import devices_in
from duoka.planner.command_line import options
from duoka.planner.plan import Plan
from duoka.planner.replicas import format_copies
from duoka.planner.request import PlanRequest
from duoka.planner.resolve import workload_for
from duoka.report.measured import PeakBytes

# A deployment with fewer GPUs is preferred if it reaches this share of the best value.
_NEARLY_BEST = 0.95
_MAX_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Speeds of a deployment; None if unknown.

    `prefill_tokens_per_second` and `many_tokens_per_second` (decoding) are the totals of all
    concurrent requests. `one_tokens_per_second` (decoding) and `first_token_seconds` are for a
    single request; `first_token_seconds` is for the longest prompt. `idle_share` is the pipeline
    bubble: the average share of idle GPU time. Its forecast only counts idle time that is caused by
    stages of unequal duration.
    """

    prefill_tokens_per_second: float | None = None
    first_token_seconds: float | None = None
    one_tokens_per_second: float | None = None
    many_tokens_per_second: float | None = None
    idle_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A way to run a model: one plan per replica, with forecast and measurements.

    `trouble` is the error that prevented planning or measuring, or "". `plans` is empty if planning
    failed, and `measured` None if the deployment was not run to its end.
    """

    name: str
    weights: str
    plans: tuple[Plan, ...] = ()
    forecast: Rates = Rates()
    measured: Rates | None = None
    peaks: tuple[PeakBytes, ...] = ()
    trouble: str = ""

    @property
    def rates(self) -> Rates:
        """Measured rates if there are any, otherwise the forecast."""
        return self.measured or self.forecast

    @property
    def num_devices(self) -> int:
        """Number of devices over all replicas."""
        return sum(len(plan.devices) for plan in self.plans)

    def memory(self) -> Iterator[dict[str, Any]]:
        """Yield the reserved bytes of each device, forecast and measured, and its budget."""
        measured = {peak.device: peak.reserved_bytes for peak in self.peaks}
        for stage in chain(*(plan.forecast.devices for plan in self.plans)):
            yield {
                "device": stage.device,
                "forecast_bytes": stage.reserved_bytes,
                "measured_bytes": measured.get(stage.device),
                "budget_bytes": stage.budget_bytes,
            }

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON-compatible dict."""
        return {
            "name": self.name,
            "weights": self.weights,
            "copies": [list(plan.devices) for plan in self.plans],
            "forecast": asdict(self.forecast),
            "measured": None if self.measured is None else asdict(self.measured),
            "memory": list(self.memory()),
            "trouble": self.trouble or None,
            "command": serve_command(self),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """All deployments of a model for the same concurrent requests."""

    model: str
    workload: Workload
    deployments: tuple[Deployment, ...]

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON-compatible dict, with the recommendation."""
        best, reasons = recommend(self)
        work = self.workload
        return {
            "format": "duoka.bench",
            "version": 1,
            "model": self.model,
            "requests": work.batch,
            "prompt_tokens": work.prompt_tokens,
            "new_tokens": work.new_tokens,
            "deployments": [item.to_dict() for item in self.deployments],
            "recommended": None if best is None else self.deployments.index(best),
            "why": list(reasons),
        }


def plan_deployments(
    checkpoint: Checkpoint, request: PlanRequest, fleet: Fleet, forms: Sequence[Quantization]
) -> Bench:
    """Plan every deployment of a checkpoint for the requests of a paged workload.

    `forms` are the weight formats to plan: "none" for unquantized weights, or a quantization.
    """
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
        cases += _plan_each(checkpoint, replace(request, workload=work), fleet)
    return Bench(model=checkpoint.name, workload=request.workload, deployments=tuple(cases))


def _plan_each(checkpoint: Checkpoint, request: PlanRequest, fleet: Fleet) -> Iterator[Deployment]:
    """Yield a split over each number of GPUs, and the most replicas."""
    for count in range(1, len(fleet.devices) + 1):
        candidates = []
        for group in _candidate_subsets(fleet, count):
            on_group = replace(request, use_all=True, gpus=_format_gpus(request.gpus, fleet, group))
            candidates.append(_split(checkpoint, on_group, group, format_count(count, "GPU")))
        yield next((split for split in candidates if split.plans), candidates[0])
    yield from _replicas(checkpoint, request, fleet)


def describe_error(error: Exception) -> str:
    """Return the first line of an error, shortened to fit a table cell."""
    return str(error).partition("\n")[0][:_MAX_CHARACTERS]


def _replica_workload(
    checkpoint: Checkpoint, work: Workload, fleet: Fleet, copies: int = 1
) -> Workload:
    """Return the workload of one replica: its share of the requests, and pages for them."""
    part = replace(work, batch=-(-work.batch // copies), gpu_generation=fleet.gpu_generation)
    part = workload_for(checkpoint, part)  # the size of pages depends on the GPUs
    return replace(part, pages=part.batch * least_pages(part))


def _candidate_subsets(fleet: Fleet, count: int) -> Iterator[Fleet]:
    """Yield the `count` fastest GPUs, then the `count` largest GPUs if they differ."""
    fastest = sorted(fleet.devices, key=lambda gpu: -(gpu.memory_bytes_per_second or 0.0))[:count]
    largest = sorted(fleet.devices, key=lambda gpu: -gpu.budget_bytes)[:count]
    yield fleet.only([gpu.name for gpu in fastest])
    if {*fastest} != {*largest}:
        yield fleet.only([gpu.name for gpu in largest])


def _format_gpus(text: str, fleet: Fleet, group: Fleet) -> str:
    """Write a subset of a fleet as a value of `--gpus`; `text` is the value for the fleet."""
    if len(group.devices) == len(fleet.devices):
        return text
    declared = devices_in(text)
    if declared is None:
        return ",".join(device.uuid for device in group.devices)
    prefix, names = declared
    return prefix + "+".join(names[fleet.names.index(name)] for name in group.names)


def _weight_format(work: Workload) -> str:
    """Return the quantization of the weights, or their dtype if they are not quantized."""
    return work.dtype if work.quantize == "none" else work.quantize


def _split(checkpoint: Checkpoint, request: PlanRequest, fleet: Fleet, name: str) -> Deployment:
    """Plan one replica on all devices of a fleet; an error becomes the deployment's `trouble`."""
    deployment = Deployment(name=name, weights=_weight_format(request.workload))
    try:
        whole = replace(request, workload=_replica_workload(checkpoint, request.workload, fleet))
        plan = plan_request(checkpoint, whole, fleet, suggest=False)
    except DuokaError as error:
        return replace(deployment, trouble=describe_error(error))
    return replace(deployment, plans=(plan,), forecast=_forecast_rates(plan))


def _replicas(checkpoint: Checkpoint, request: PlanRequest, fleet: Fleet) -> Iterator[Deployment]:
    """Yield the deployment with the most replicas, if at least two fit."""
    num_copies = min(len(fleet.devices), request.workload.batch)
    for number in range(num_copies, 1, -1):
        workload = _replica_workload(checkpoint, request.workload, fleet, number)
        part = replace(request, workload=workload)
        try:
            plans = plan_copies(checkpoint, part, fleet, number, suggest=False).plans
        except DuokaError:  # too little memory, or too many ways to assign GPUs
            continue
        sizes = "/".join(map(str, sorted({len(plan.devices) for plan in plans})))
        yield Deployment(
            name=f"{format_copies(number)}, {sizes} GPU{'' if sizes == '1' else 's'} each",
            weights=_weight_format(request.workload),
            # `plan_copies` restricts each request to the replica's GPUs; here it names all GPUs.
            plans=tuple(
                replace(plan, request=replace(part, workload=plan.request.workload))
                for plan in plans
            ),
            forecast=combine_rates([_forecast_rates(plan) for plan in plans]),
        )
        return


_COMBINE_RATES: dict[str, Callable[[list[float]], float]] = {
    "prefill_tokens_per_second": sum,
    "first_token_seconds": min,
    "one_tokens_per_second": max,
    "many_tokens_per_second": sum,
    "idle_share": mean,
}


def combine_rates(copies: Sequence[Rates]) -> Rates:
    """Combine the rates of parallel replicas; a single request runs on the fastest replica."""
    rates: dict[str, float | None] = {}
    for name, combine in _COMBINE_RATES.items():
        values = [getattr(copy, name) for copy in copies]
        rates[name] = None if None in values else combine(values)
    return Rates(**rates)


def _forecast_rates(plan: Plan) -> Rates:
    """Return the forecast rates of a plan; all None if the GPUs' speeds are unknown."""
    seconds, work = plan.forecast.seconds, plan.workload
    if seconds is None or not seconds.first_token_seconds:
        return Rates()
    # Seconds of the forecast are for the whole batch. The prompts follow one another through the
    # stages: the slowest stage processes all prompts, each other stage adds the time of one prompt.
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


# A deployment should be fast both for a single user and for all requests together. The product of
# the two speeds gives both the same weight, independent of their units. Small differences are
# noise, so the deployment with the fewest GPUs within 5 % of the best product is recommended.
def recommend(bench: Bench) -> tuple[Deployment | None, tuple[str, ...]]:
    """Return the recommended deployment, and the reasons as sentences.

    Only measured deployments are compared if there are any, otherwise the forecasts of all. The
    deployment is None if planning or measuring failed for every one of them.
    """
    usable = [item for item in bench.deployments if item.plans and not item.trouble]
    usable = [item for item in usable if item.measured is not None] or usable
    if not usable:
        return None, ()

    def single_speed(deployment: Deployment) -> float:
        return deployment.rates.one_tokens_per_second or 0.0

    def total_speed(deployment: Deployment) -> float:
        return deployment.rates.many_tokens_per_second or 0.0

    def describe(speed: Callable[[Deployment], float]) -> str:
        fastest = _nearly_best(usable, speed)
        return f"{title(fastest)}, {format_speed(speed(fastest))} tokens/s"

    most_single, most_total = (max(map(speed, usable)) for speed in (single_speed, total_speed))
    if not most_total:
        reason = "the speeds are unknown (measure them with --calibrate): it uses the fewest"
        return min(usable, key=lambda deployment: deployment.num_devices), (reason,)
    best = _nearly_best(usable, lambda item: single_speed(item) * total_speed(item))
    requests = bench.workload.batch
    return best, (
        f"one user: {describe(single_speed)}",
        f"{requests} at once: {describe(total_speed)}",
        f"both: {title(best)} gives one user {single_speed(best) / most_single:.0%} and "
        f"{requests} at once {total_speed(best) / most_total:.0%} of the maximum",
    )


def title(deployment: Deployment) -> str:
    """Return the name of a deployment with its weight format."""
    return f"{deployment.name} ({deployment.weights})"


def format_speed(speed: float) -> str:
    """Format a speed with three significant digits."""
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _nearly_best(cases: Sequence[Deployment], value: Callable[[Deployment], float]) -> Deployment:
    """Return the deployment with the fewest GPUs among those within 5 % of the best value."""
    minimum = _NEARLY_BEST * max(map(value, cases))
    candidates = [deployment for deployment in cases if value(deployment) >= minimum]
    return min(candidates, key=lambda deployment: (deployment.num_devices, -value(deployment)))


def serve_command(deployment: Deployment) -> str | None:
    """Return the command to serve a deployment, or None if it has no plan or names no GPUs."""
    if not deployment.plans or not deployment.plans[0].request.gpus:
        return None
    plan = deployment.plans[0]
    serve_options = options(plan.request)
    serve_options.pop("--serve", None)
    if any(gpu.measured and gpu.name.startswith("vgpu") for gpu in plan.fleet.devices):
        serve_options.pop("--objective", None)  # calibrations of virtual GPUs aren't saved
    if len(deployment.plans) > 1:
        serve_options["--replicas"] = ("--replicas", str(len(deployment.plans)))
    return shlex.join(["duoka", "serve", plan.source, *chain(*serve_options.values())])
