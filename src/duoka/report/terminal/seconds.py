"""Seconds for people: a line on how fast a plan is, and one on where that is known from."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import floor, log10

from rich.text import Text

from duoka.forecast.latency import Seconds
from duoka.hardware.device import Device
from duoka.planner.plan import Plan

_SPEEDS = ("memory_bytes_per_second", "flops_per_second")


def render_seconds(plan: Plan) -> Iterator[Text]:
    """Yield how fast a plan is about, and whether that was measured; nothing where unknown."""
    seconds = plan.forecast.seconds
    if seconds is None:
        return
    yield Text(_pace(plan, seconds))
    yield Text(_origin(plan))


def _is_measured(device: Device) -> bool:
    return set(_SPEEDS) <= set(device.measured)


def roughly(number: float) -> str:
    """Write a number with two digits that count.

    Examples
    --------
    >>> roughly(1234.5), roughly(31.4), roughly(1.94), roughly(0.0351)
    ('1,200', '31', '1.9', '0.035')
    """
    if not number:
        return "0"
    digits = max(1 - floor(log10(abs(number))), -15)
    rounded = round(number, digits)
    return f"{rounded:,.{max(digits, 0)}f}"


def roughly_seconds(seconds: float) -> str:
    """Write a time with two digits that count.

    Examples
    --------
    >>> roughly_seconds(0.0314), roughly_seconds(1.94), roughly_seconds(400)
    ('31 ms', '1.9 s', '6.7 min')
    """
    if seconds < 0.1:
        return f"{roughly(seconds * 1e3)} ms"
    return f"{roughly(seconds)} s" if seconds < 100 else f"{roughly(seconds / 60)} min"


def _pace(plan: Plan, seconds: Seconds) -> str:
    busy = f"{roughly(seconds.tokens_per_second)} tokens/s"
    if seconds.step_seconds is not None:
        return f"a step takes about {roughly_seconds(seconds.step_seconds)}: about {busy}"
    if seconds.first_token_seconds is None:
        return f"about {busy}"
    told = f"first token after about {roughly_seconds(seconds.first_token_seconds)}"
    if seconds.token_seconds:
        told += f", then about {roughly(plan.workload.batch / seconds.token_seconds)} tokens/s"
    if len(seconds.stages) > 1:
        told += f"; with every GPU busy, prompts included, about {busy}"
    return told


def _origin(plan: Plan) -> str:
    measured = [name for name in plan.devices if _is_measured(plan.fleet.device(name))]
    if len(measured) == len(plan.devices):
        pairs = pairwise(plan.devices)
        links = [plan.fleet.link(one, other) for one, other in pairs]
        published = any(link is None or not link.measured for link in links)
        told = "as fast as GPUs of this kind were measured here"
        return f"{told}, links as published" if published else told
    stated = "as fast as published figures say (duoka bench --calibrate measures a GPU)"
    return f"{', '.join(measured)} as measured here, the others {stated}" if measured else stated
