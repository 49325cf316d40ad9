"""Comparison: two plans side by side, as frozen data; differences come first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from duoka.base.serialization import to_dict
from duoka.errors import UsageError
from duoka.forecast.stage_bytes import StageBytes

from .plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A property that differs between two plans."""

    what: str
    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePair:
    """The bytes of a device in both plans; None in a plan without the device."""

    device: str
    first: StageBytes | None
    second: StageBytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Modules on another device in the second plan, in execution order."""

    source: str
    target: str
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two plans side by side.

    `differences` are of model, GPUs, workload and objective; `devices` all that either plan uses,
    in order of first use. `moves` is None where the plans are for models of different modules.
    `seconds` are what each takes, where speeds are known in either plan.
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
    """Put two plans side by side.

    Parameters
    ----------
    first, second : Plan
        For one model or for two, on any GPUs.

    Raises
    ------
    UsageError
        If one trains and the other generates: their bytes and seconds are of different things.

    Examples
    --------
    >>> compare(plan, plan).same  # doctest: +SKIP
    True
    """
    if (first.workload.training is None) != (second.workload.training is None):
        trains, generates = ("first", "second") if first.workload.training else ("second", "first")
        raise UsageError(
            f"the {trains} plan is for training and the {generates} one for generating: nothing "
            "of them can be compared",
            hint="compare plans for the same kind of work",
        )
    return Comparison(
        differences=tuple(_differences(first, second)),
        devices=tuple(_devices(first, second)),
        moves=_moves(first, second),
        seconds=tuple(_seconds(first, second)),
    )


def _differences(first: Plan, second: Plan) -> Iterator[Difference]:
    said = (
        ("model", first.model, second.model),
        ("checkpoint", first.source, second.source),
        ("fingerprint", first.fingerprint, second.fingerprint),
        ("GPUs", _fleet(first), _fleet(second)),
        *_workloads(first, second),
        ("objective", first.objective, second.objective),
        ("GPUs used", ", ".join(first.devices), ", ".join(second.devices)),
        ("tightest GPU", first.binding_device, second.binding_device),
        ("offloaded modules", str(len(first.offloaded)), str(len(second.offloaded))),
    )
    yield from (Difference(what=what, first=a, second=b) for what, a, b in said if a != b)


def _fleet(plan: Plan) -> str:
    return plan.request.gpus or ", ".join(
        device.product or device.name for device in plan.fleet.devices
    )


def _workloads(first: Plan, second: Plan) -> Iterator[tuple[str, str, str]]:
    for part in fields(first.workload):
        values = [getattr(plan.workload, part.name) for plan in (first, second)]
        one, other = ("none" if value is None else str(value) for value in values)
        yield part.name.replace("_", " "), one, other


def _devices(first: Plan, second: Plan) -> Iterator[DevicePair]:
    both = [{device.device: device for device in plan.forecast.devices} for plan in (first, second)]
    for name in dict.fromkeys((*first.devices, *second.devices)):
        yield DevicePair(device=name, first=both[0].get(name), second=both[1].get(name))


def _moves(first: Plan, second: Plan) -> tuple[Move, ...] | None:
    before, after = dict(first.placement.entries), dict(second.placement.entries)
    if before.keys() != after.keys():
        return None
    moved: dict[tuple[str, str], list[str]] = {}
    for name, source in first.placement.entries:
        if after[name] != source:
            moved.setdefault((source, after[name]), []).append(name)
    return tuple(
        Move(source=source, target=target, modules=tuple(names))
        for (source, target), names in moved.items()
    )


def _seconds(first: Plan, second: Plan) -> Iterator[tuple[str, float | None, float | None]]:
    one, other = first.forecast.seconds, second.forecast.seconds
    if one is None and other is None:
        return
    known = one or other
    assert known is not None
    for part in fields(known):
        if part.name != "stages":
            values = [None if s is None else getattr(s, part.name) for s in (one, other)]
            if values != [None, None]:
                yield part.name, values[0], values[1]
