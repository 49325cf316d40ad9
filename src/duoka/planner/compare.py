"""Comparison: the differences between two plans, their devices and seconds, as frozen data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from duoka.base.serialization import to_dict
from duoka.errors import UsageError
from duoka.forecast.latency import Seconds
from duoka.forecast.stage_bytes import StageBytes

from .plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A property (`what`) that differs between two plans, with both values as texts."""

    what: str
    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePair:
    """The bytes of a device in both plans; None for a plan that doesn't use the device."""

    device: str
    first: StageBytes | None
    second: StageBytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Modules that are on `source` in the first plan and on `target` in the second."""

    source: str
    target: str
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two plans side by side.

    `differences` are those of model, GPUs, workload and objective. `devices` are all that either
    plan uses, in order of first use. `moves` is None if the plans are for different modules.
    `seconds` has the name of each time and its value in both plans, None where unknown.
    """

    differences: tuple[Difference, ...]
    devices: tuple[DevicePair, ...]
    moves: tuple[Move, ...] | None
    seconds: tuple[tuple[str, float | None, float | None], ...]

    @property
    def same(self) -> bool:
        """True if nothing differs, bytes, seconds and modules included."""
        same_bytes = all(device.first == device.second for device in self.devices)
        same_seconds = all(first == second for _, first, second in self.seconds)
        return same_bytes and same_seconds and not self.differences and self.moves == ()

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain dicts and lists for `json.dumps`."""
        data: dict[str, Any] = to_dict(self)
        return data


def compare(first: Plan, second: Plan) -> Comparison:
    """Compare two plans.

    Parameters
    ----------
    first, second : Plan
        Plans for the same model or for different ones, on any GPUs.

    Raises
    ------
    UsageError
        If one plan is for training and the other for generation, which can't be compared.

    Examples
    --------
    >>> compare(plan, plan).same  # doctest: +SKIP
    True
    """
    if (first.workload.training is None) != (second.workload.training is None):
        trains, generates = ("first", "second") if first.workload.training else ("second", "first")
        raise UsageError(
            f"the {trains} plan is for training and the {generates} one for generation",
            hint="compare two plans for the same kind of workload",
        )
    return Comparison(
        differences=tuple(_differences(first, second)),
        devices=tuple(_devices(first, second)),
        moves=_moves(first, second),
        seconds=tuple(_seconds(first, second)),
    )


def _differences(*plans: Plan) -> Iterator[Difference]:
    values, other_values = map(_properties, plans)
    for label, value in values.items():
        if value != other_values[label]:
            yield Difference(what=label, first=value, second=other_values[label])


def _properties(plan: Plan) -> dict[str, str]:
    """Return the properties of a plan as texts, by label."""
    devices = plan.fleet.devices
    workload = {
        part.name.replace("_", " "): "none" if value is None else str(value)
        for part in fields(plan.workload)
        for value in [getattr(plan.workload, part.name)]
    }
    return {
        "model": plan.model,
        "checkpoint": plan.source,
        "fingerprint": plan.fingerprint,
        "GPUs": plan.request.gpus or ", ".join(device.product or device.name for device in devices),
        **workload,
        "objective": plan.objective,
        "GPUs used": ", ".join(plan.devices),
        "tightest GPU": plan.binding_device,
        "offloaded modules": str(len(plan.offloaded)),
    }


def _devices(*plans: Plan) -> Iterator[DevicePair]:
    stages, other_stages = ({s.device: s for s in plan.forecast.devices} for plan in plans)
    for name in {**stages, **other_stages}:
        yield DevicePair(device=name, first=stages.get(name), second=other_stages.get(name))


def _moves(*plans: Plan) -> tuple[Move, ...] | None:
    """Return the modules on different devices; None if the plans have different modules."""
    sources, targets = (plan.device_map for plan in plans)
    if sources.keys() != targets.keys():
        return None
    modules_by_move: dict[tuple[str, str], list[str]] = {}
    for name, source in sources.items():
        if targets[name] != source:
            modules_by_move.setdefault((source, targets[name]), []).append(name)
    return tuple(
        Move(source=source, target=target, modules=tuple(names))
        for (source, target), names in modules_by_move.items()
    )


def _seconds(*plans: Plan) -> Iterator[tuple[str, float | None, float | None]]:
    seconds, other_seconds = (plan.forecast.seconds for plan in plans)
    for part in fields(Seconds):
        values = [getattr(timing, part.name, None) for timing in (seconds, other_seconds)]
        if part.name != "stages" and values != [None, None]:
            yield part.name, values[0], values[1]
