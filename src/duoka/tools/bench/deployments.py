"""Deployments: on one GPU, split over several, as copies, in other weights; what each would do.

Every one is planned for the same requests, with pages for just these; for throughput, or where
nobody knows how fast the GPUs are, so that the most stays free. Of fewer GPUs than there are the
fastest are taken, or else the largest; of copies, as many as there can be. Which one is
best is told by what was measured, or, where nothing was, by the forecast. It knows nothing of what
quantization does to answers.
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

# A speed of so much of the best one is as good, where it takes fewer GPUs.
_ALIKE = 0.95
_MOST_SIGNS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast a deployment is; None where that isn't known.

    Prompts are read, `prefill_tokens_per_second`, and answers written, `many_tokens_per_second`, of
    all requests at once; `one_tokens_per_second` and `first_token_seconds` are of one alone, whose
    prompt is as long as can be. `idle_share` is the bubble: the share of the time of all requests
    in which a GPU computes nothing, on average. By the forecast it is what unequal stages leave.
    """

    prefill_tokens_per_second: float | None = None
    first_token_seconds: float | None = None
    one_tokens_per_second: float | None = None
    many_tokens_per_second: float | None = None
    idle_share: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """A way to run a model: a plan for each copy, or the trouble with it; and what was measured."""

    name: str
    weights: str
    plans: tuple[Plan, ...] = ()
    forecast: Rates = Rates()
    measured: Rates | None = None
    peaks: tuple[PeakBytes, ...] = ()
    trouble: str = ""

    @property
    def rates(self) -> Rates:
        """What was measured, or else the forecast."""
        return self.measured or self.forecast

    @property
    def num_devices(self) -> int:
        """The GPUs that it takes."""
        return sum(len(plan.devices) for plan in self.plans)

    def memory(self) -> Iterator[dict[str, Any]]:
        """What each GPU's allocator reserves, by the forecast and as measured."""
        measured = {peak.device: peak.reserved_bytes for peak in self.peaks}
        for stage in chain(*(plan.forecast.devices for plan in self.plans)):
            yield {
                "device": stage.device,
                "forecast_bytes": stage.reserved_bytes,
                "measured_bytes": measured.get(stage.device),
                "budget_bytes": stage.budget_bytes,
            }

    def to_dict(self) -> dict[str, Any]:
        """The form that `json.dumps` takes."""
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
    """Deployments of a model beside one another, for the requests of a workload."""

    model: str
    workload: Workload
    deployments: tuple[Deployment, ...]

    def to_dict(self) -> dict[str, Any]:
        """The form that `json.dumps` takes."""
        best, why = recommend(self)
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
            "why": list(why),
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
    knows = all(gpu.memory_bytes_per_second and gpu.flops_per_second for gpu in fleet.devices)
    request = replace(request, objective="throughput" if knows else "headroom")
    cases: list[Deployment] = []
    for form in forms:
        try:
            work = workload_for(checkpoint, replace(request.workload, quantize=form))
            find_or_trace(checkpoint, work)
        except DuokaError as error:
            cases.append(Deployment(name="any", weights=form, trouble=one_line(error)))
            continue
        cases += _deployments(checkpoint, replace(request, workload=work), fleet, with_cpu=with_cpu)
    return Bench(model=checkpoint.name, workload=request.workload, deployments=tuple(cases))


def _deployments(
    checkpoint: Checkpoint, request: PlanRequest, fleet: Fleet, *, with_cpu: bool
) -> Iterator[Deployment]:
    """One GPU, each number of them, copies, and the processor."""
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


def one_line(error: Exception) -> str:
    """Why a deployment can't be had, in a cell of a table."""
    return str(error).partition("\n")[0][:_MOST_SIGNS]


def _part(work: Workload, copies: int = 1) -> Workload:
    """A copy's part of a workload, with the pages that it needs."""
    part = replace(work, batch=-(-work.batch // copies))
    return replace(part, pages=part.batch * least_pages(part))


def _groups(fleet: Fleet, count: int) -> Iterator[Fleet]:
    """The fastest GPUs, and the largest where these are others."""
    fastest = sorted(fleet.devices, key=lambda gpu: -(gpu.memory_bytes_per_second or 0.0))[:count]
    largest = sorted(fleet.devices, key=lambda gpu: -gpu.budget_bytes)[:count]
    yield fleet.only([gpu.name for gpu in fastest])
    if {*fastest} != {*largest}:
        yield fleet.only([gpu.name for gpu in largest])


def _gpus(text: str, fleet: Fleet, group: Fleet) -> str:
    """A part of a fleet as `--gpus` takes it."""
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
        return replace(case, trouble=one_line(error))
    return replace(case, plans=(plan,), forecast=_forecast(plan))


def _copies(checkpoint: Checkpoint, request: PlanRequest, fleet: Fleet) -> Iterator[Deployment]:
    """As many copies as fit, where that is more than one."""
    most = min(len(fleet.devices), request.workload.batch)
    for number in range(most, 1, -1):
        part = replace(request, workload=_part(request.workload, number))
        try:
            plans = plan_copies(checkpoint, part, fleet, number, suggest=False).plans
        except DuokaError:  # there is no room, or there are too many ways to deal GPUs
            continue
        sizes = "/".join(map(str, sorted({len(plan.devices) for plan in plans})))
        yield Deployment(
            name=f"{format_copies(number)}, {sizes} GPU{'' if sizes == '1' else 's'} each",
            weights=_weights(request.workload),
            plans=tuple(_asking(part, plan) for plan in plans),
            forecast=together([_forecast(plan) for plan in plans]),
        )
        return


def _asking(request: PlanRequest, plan: Plan) -> Plan:
    """Return the plan of a copy with the request for all copies."""
    return replace(plan, request=replace(request, workload=plan.request.workload))


_JOINS: dict[str, Callable[[list[float]], float]] = {
    "prefill_tokens_per_second": sum,
    "first_token_seconds": min,
    "one_tokens_per_second": max,
    "many_tokens_per_second": sum,
    "idle_share": mean,
}


def together(copies: Sequence[Rates]) -> Rates:
    """The rates of copies that work at the same time; of one request those of the fastest."""
    rates: dict[str, float | None] = {}
    for name, join in _JOINS.items():
        values = [getattr(copy, name) for copy in copies]
        rates[name] = None if None in values else join(values)
    return Rates(**rates)


def _forecast(plan: Plan) -> Rates:
    seconds, work = plan.forecast.seconds, plan.workload
    if seconds is None or not seconds.first_token_seconds:
        return Rates()
    # All prompts, one behind the other through the stages.
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


# ── which is best ──


def recommend(bench: Bench) -> tuple[Deployment | None, tuple[str, ...]]:
    """The best of what was measured, or else forecast, and why; none where nothing can be run.

    It is the one with the largest product of the speed for one user and that for all requests.
    """
    usable = [case for case in bench.deployments if case.plans and not case.trouble]
    usable = [case for case in usable if case.measured is not None] or usable
    if not usable:
        return None, ()

    def one(case: Deployment) -> float:
        return case.rates.one_tokens_per_second or 0.0

    def many(case: Deployment) -> float:
        return case.rates.many_tokens_per_second or 0.0

    def text(speed: Callable[[Deployment], float]) -> str:
        fastest = _best(usable, speed)
        return f"{title(fastest)}, {speed_text(speed(fastest))} tokens/s"

    most_one, most_many = (max(map(speed, usable)) for speed in (one, many))
    if not most_many:
        why = "how fast these are isn't known (--calibrate measures it): it takes the fewest"
        return min(usable, key=lambda case: case.num_devices), (why,)
    best, requests = _best(usable, lambda case: one(case) * many(case)), bench.workload.batch
    return best, (
        f"one user: {text(one)}",
        f"{requests} at once: {text(many)}",
        f"both: {title(best)} gives one user {one(best) / most_one:.0%} and {requests} at once "
        f"{many(best) / most_many:.0%} of the most there is",
    )


def title(case: Deployment) -> str:
    """What a deployment is called."""
    return f"{case.name} ({case.weights})"


def speed_text(speed: float) -> str:
    """A speed with three digits that count."""
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _best(cases: Sequence[Deployment], value: Callable[[Deployment], float]) -> Deployment:
    """Of those that are nearly as good as the best the one with the fewest GPUs."""
    enough = _ALIKE * max(map(value, cases))
    alike = [case for case in cases if value(case) >= enough]
    return min(alike, key=lambda case: (case.num_devices, -value(case)))


def command(case: Deployment) -> str | None:
    """The command that serves a model so; None where none does."""
    if not case.plans or not case.plans[0].request.gpus:
        return None
    plan = case.plans[0]
    words = options(plan.request)
    words.pop("--serve", None)
    if any(gpu.measured and gpu.name.startswith("vgpu") for gpu in plan.fleet.devices):
        words.pop("--objective", None)  # nobody keeps how fast a virtual GPU was
    if len(case.plans) > 1:
        words["--replicas"] = ("--replicas", str(len(case.plans)))
    return shlex.join(["duoka", "serve", plan.source, *chain(*words.values())])
