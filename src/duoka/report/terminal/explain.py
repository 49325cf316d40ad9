"""Why a plan is as it is, in sentences; for the terminal and for the page alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from duoka.base.units import format_bytes, format_count
from duoka.planner.explain import Alternative, BoundaryMove, Explanation, Share

from .words import count_layers, joined, name_modules

_AIMS = {
    "headroom": "what tensors leave of the tightest GPU's budget, as large as can be",
    "latency": "the time of a {work}, from its beginning to its end, as short as can be",
    "throughput": "the time that a {work} spends in its slowest stage, as short as can be",
    "balance": "the share of its budget that tensors leave of the fullest GPU, as large as can be",
    "order": "each GPU filled as far as it goes before the next one",
}
_REACHED = {
    "headroom": ("The tightest, {},", "has", "leaves more headroom than"),
    "balance": ("The fullest, {},", "has", "leaves more headroom than"),
    "latency": ("A {work}", "takes", "takes less than"),
    "throughput": ("The slowest, on {},", "takes", "has one that takes less than"),
}
_MOST_NAMED = 3
_LEAST_TOLD = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """An alternative in words: what it is, how it deals the model, and what comes of it."""

    name: str
    dealt: str
    verdict: str
    fits: bool
    is_plan: bool


def aim(explanation: Explanation) -> Iterator[str]:
    """What was optimised, what was reached, and what proves that nothing is better."""
    objective = explanation.objective
    reached, bound = amount(explanation, explanation.value), amount(explanation, explanation.bound)
    binding = explanation.binding_device
    if objective not in _AIMS:
        yield f"Nothing was optimised, the map was given; {binding} is tightest: {reached} free."
        return
    num = len(explanation.shares)
    where = "on one GPU" if num == 1 else f"on {num} GPUs"
    if objective not in _REACHED:
        yield f"The GPUs are taken in the order given: {_AIMS[objective]}."
        return
    subject, verb, beyond = _REACHED[objective]
    who = subject.format(binding, work=explanation.work)
    yield f"Optimised was {objective}: {_AIMS[objective].format(work=explanation.work)}."
    unit = "" if objective in ("latency", "throughput") else " of headroom"
    room = " with room on each" if explanation.leaves_room and num > 1 else ""
    proof = f"{where} no placement{room} {beyond} {bound}, which is the bound"
    yield f"{who} {verb} {reached}{unit}; {proof}."


def amount(explanation: Explanation, value: float) -> str:
    """A value of the objective, with its unit."""
    if explanation.objective in ("latency", "throughput"):
        return shortly(value)
    if explanation.objective == "balance":
        return f"{value:.1%}"
    if explanation.objective == "order":
        return format_count(round(value), "block")
    return format_bytes(round(value))


def shortly(seconds: float) -> str:
    """A time for people."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def holds(share: Share) -> str:
    """How full a device is."""
    needed, budget = format_bytes(share.requested_bytes), format_bytes(share.budget_bytes)
    return (
        f"Its tensors need {needed} of {budget}: {format_bytes(share.headroom_bytes)} of headroom."
    )


def why_not_else(explanation: Explanation, device: str) -> Iterator[str]:
    """Why a device has no less and no more."""
    now = {share.device: share for share in explanation.shares}
    for change in explanation.changes:
        if change.giver.device == device:
            yield f"No less: {_less(change, now)}{_judgement(change, explanation)}"
    for change in explanation.changes:
        if change.taker.device == device:
            yield f"No more: {_more(change)}{_judgement(change, explanation)}"


def _less(change: BoundaryMove, now: dict[str, Share]) -> str:
    what, taker = name_modules(change.modules), change.taker
    if taker.is_fragmented:
        return f"with {what} the memory of {taker.device} would be too fragmented"
    if taker.is_tight:
        return f"with {what} {taker.device} would have too little room left"
    more = taker.requested_bytes - now[taker.device].requested_bytes
    headroom = now[taker.device].headroom_bytes
    return (
        f"{what} would go to {taker.device}, which has {format_bytes(headroom)} of headroom and "
        f"needs {format_bytes(more)} for it"
    )


def _more(change: BoundaryMove) -> str:
    what, taker = name_modules(change.modules), change.taker
    if taker.is_fragmented:
        return f"with {what} of {change.giver.device} its memory would be too fragmented"
    if taker.is_tight:
        return f"with {what} of {change.giver.device} it would have too little room left"
    return (
        f"with {what} of {change.giver.device} it would need {format_bytes(taker.requested_bytes)} "
        f"of {format_bytes(taker.budget_bytes)}"
    )


def _judgement(change: BoundaryMove, explanation: Explanation) -> str:
    """What becomes of the objective, as the end of a sentence."""
    if change.outcome == "forbidden":
        return ": the pins forbid it."
    if change.taker.is_fragmented or change.outcome == "tight":
        return "."
    if change.value is None:
        return f": {_missing(-min(change.giver.headroom_bytes, change.taker.headroom_bytes))}."
    now = {share.device: share for share in explanation.shares}
    then = {**now, change.giver.device: change.giver, change.taker.device: change.taker}
    least = [format_bytes(min(s.headroom_bytes for s in shares.values())) for shares in (then, now)]
    tightest = f"the tightest GPU would have {least[0]} of headroom instead of {least[1]}"
    if change.outcome == "equal":
        but = f", but {tightest}" if least[0] != least[1] else ""
        return f": as good for the objective{but}."
    if explanation.objective in ("latency", "throughput"):
        reached = [amount(explanation, value) for value in (change.value, explanation.value)]
        return f": that would be {reached[0]} instead of {reached[1]}."
    return f": {tightest}."


def fewer(explanation: Explanation) -> str:
    """Why so many GPUs; empty where there is nothing to say."""
    fewer_devices = explanation.fewer
    if fewer_devices is None:
        return ""
    names = joined(fewer_devices.devices)
    which = f"on the largest one, {names}," if len(fewer_devices.devices) == 1 else f"on {names},"
    largest = "" if len(fewer_devices.devices) == 1 else " the largest,"
    missing = _missing(fewer_devices.missing_bytes, "at least ")
    number = f"{len(explanation.shares)} GPUs and not {len(fewer_devices.devices)}"
    room = ", for what is needed and the room beside it" if explanation.leaves_room else ""
    return f"{number}: {which}{largest} {missing}{room}."


def _missing(num_bytes: int, least: str = "") -> str:
    # As a bound it may be next to nothing, where it is the cut or fragmentation that is in the way.
    if num_bytes < _LEAST_TOLD:
        return "it doesn't fit by a little" + (", whatever the cut" if least else "")
    return f"{least}{format_bytes(num_bytes)} are missing"


def crossings(explanation: Explanation) -> Iterator[str]:
    """What goes from GPU to GPU."""
    for crossing in explanation.crossings:
        took = "" if crossing.seconds is None else f", {shortly(crossing.seconds)}"
        what = f"{format_bytes(crossing.num_bytes)} a {crossing.per}{took}"
        yield f"{crossing.source} → {crossing.target}: {what}"


def rivals(explanation: Explanation) -> Iterator[Rival]:
    """The alternatives in words."""
    for other in explanation.alternatives:
        yield Rival(
            name=other.name,
            dealt=dealt(other.shares),
            verdict=_verdict(other, explanation),
            fits=other.fits,
            is_plan=other.is_plan,
        )


def dealt(shares: Sequence[Share]) -> str:
    """How many layers are on which device."""
    counts = count_layers([share.modules for share in shares])
    if counts is None:
        return ", ".join(share.device for share in shares)
    return ", ".join(
        f"{share.device} {format_count(count, 'layer') if count else name_modules(share.modules)}"
        for share, count in zip(shares, counts, strict=True)
    )


def _verdict(other: Alternative, explanation: Explanation) -> str:
    if other.is_plan:
        return "that is this plan"
    if other.value is None:
        over = [share for share in other.shares if not share.holds]
        verdict = "leaves too little room" if other.least_headroom_bytes >= 0 else "does not fit"
        return f"{verdict}: {_shortages(over)}"
    verdict = amount(explanation, other.value)
    headroom = f"{format_bytes(other.least_headroom_bytes)} of headroom on the tightest GPU"
    if explanation.objective in ("latency", "throughput"):
        verdict += f", {headroom}"
    elif other.request_seconds is not None:
        verdict = f"{headroom}, {shortly(other.request_seconds)} for a {explanation.work}"
    else:
        verdict = headroom
    used, planned = len(other.shares), len(explanation.shares)
    return (
        verdict
        if used == planned
        else f"{verdict}; {format_count(used, 'GPU')} instead of {planned}"
    )


def _shortages(over: Sequence[Share]) -> str:
    shortages = [
        f"the memory of {share.device} would be too fragmented"
        if share.is_fragmented
        else f"{share.device} would need {format_bytes(share.requested_bytes)} of "
        f"{format_bytes(share.budget_bytes)}"
        for share in over[:_MOST_NAMED]
    ]
    more = len(over) - _MOST_NAMED
    return joined([*shortages, f"{more} more lack memory"] if more > 0 else shortages)


def render_explanation(explanation: Explanation) -> RenderableType:
    """What rich prints: the objective, each GPU, and the alternatives."""
    return Group(*_parts(explanation))


def _parts(explanation: Explanation) -> Iterator[RenderableType]:
    yield Text("why", style="bold")
    yield from map(_indent, filter(None, (*aim(explanation), fewer(explanation))))
    for share in explanation.shares:
        yield Text.assemble((share.device, "bold"), " has ", name_modules(share.modules))
        yield _indent(holds(share))
        yield from map(_indent, why_not_else(explanation, share.device))
    yield from map(Text, crossings(explanation))
    if explanation.alternatives:
        yield Text("alternatives", style="bold")
    for rival in rivals(explanation):
        yield _indent(rival.name, style="bold" if rival.is_plan else "")
        yield _indent(rival.dealt, by=4)
        yield _indent(rival.verdict, by=4, style="" if rival.fits else "red")


def _indent(text: str, *, by: int = 2, style: str = "") -> RenderableType:
    return Padding(Text(text, style=style), (0, 0, 0, by))
