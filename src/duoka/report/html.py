"""Render a plan as one HTML page without scripts or network access.

All text of a plan is untrusted: the template escapes it for HTML, and control and bidirectional
characters are replaced by visible escapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from duoka.base.text import printable
from duoka.base.units import format_bytes, format_count, unit_for
from duoka.forecast.stage_bytes import KIND_FIELDS, StageBytes
from duoka.forecast.tensor_names import layer_of, main_list
from duoka.hardware.device import Device
from duoka.planner.command_line import command
from duoka.planner.explain import Explanation
from duoka.planner.plan import Plan

from .terminal import explain
from .terminal.plan import plan_facts, plan_title, render_seconds, unplanned_bytes
from .terminal.words import without_prefix


def render_page(plan: Plan, explanation: Explanation | None = None) -> str:
    """Return the page of a plan as HTML, with the reasons of an explanation if given."""
    return _template().render(
        title=" ".join(plan_title(plan)),
        subtitle=plan.source,
        facts=list(plan_facts(plan)),
        gpus=list(_gpu_views(plan, explanation)),
        unused=list(_placement_notes(plan)),
        table=_table(plan),
        seconds=[line.plain for line in render_seconds(plan)],
        why=list(_plan_reasons(plan, explanation)),
        by_gpu=[] if explanation is None else list(_gpu_reasons(explanation)),
        rivals=[] if explanation is None else list(explain.describe_alternatives(explanation)),
        command=command(plan),
        footer=f"A plan of duoka {version('duoka')}, for the model with the fingerprint "
        f"{plan.fingerprint}.",
    )


@cache
def _template() -> Template:
    """Load the template, with autoescaping and errors for undefined values."""
    environment = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_escape_controls,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["zip"] = zip
    return environment.get_template("plan.html.jinja")


def _escape_controls(value: object) -> object:
    """Replace control and bidirectional characters of a string by visible escapes."""
    return printable(value) if type(value) is str else value


def _gpu_views(plan: Plan, explanation: Explanation | None) -> Iterator[dict[str, Any]]:
    """Yield the template's values for each GPU: texts, parts of its bar, and module cells."""
    totals = [
        stage.reserved_bytes + sum(unplanned_bytes(plan, stage).values())
        for stage in plan.forecast.devices
    ]
    links = {} if explanation is None else _incoming_transfers(explanation)
    main = main_list([name for name, _ in plan.placement.entries])
    for place, forecast in enumerate(plan.forecast.devices):
        parts = list(_bar_parts(plan, forecast))
        budget = _amount(plan, forecast.budget_bytes)
        full = f"{_amount(plan, forecast.reserved_bytes)} of {budget}"
        amounts = ", ".join(f"{part['kind']} {part['amount']}" for part in parts if part["is_told"])
        yield {
            "name": forecast.device,
            "product": plan.fleet.device(forecast.device).product,
            "full": full,
            "label": f"{forecast.device}, {full}: {amounts}",
            "width": _percent(totals[place], max(totals)),
            "link": links.get(place, "") if place else "",
            "parts": parts,
            "cells": list(_cells(plan, forecast.device, main)),
        }


def _incoming_transfers(explanation: Explanation) -> dict[int, str]:
    """Describe each stage's incoming transfer by stage; {} if the stages form no simple chain."""
    crossings = list(explain.describe_transfers(explanation))
    is_chain = len(crossings) == len(explanation.shares) - 1
    return dict(enumerate(crossings, 1)) if is_chain else {}


def _bar_parts(plan: Plan, forecast: StageBytes) -> Iterator[dict[str, Any]]:
    """Yield the kinds of memory of a GPU with their shares of its bar in percent."""
    sizes = [*forecast.kinds.items(), *unplanned_bytes(plan, forecast).items()]
    # The values come from an untrusted plan file: the bar is never longer than 100 %.
    total = max(forecast.budget_bytes, sum(max(size, 0) for _, size in sizes), 1)
    for kind, size in sizes:
        yield {
            "kind": kind,
            "css": kind.rpartition(" ")[2],
            "amount": _amount(plan, size),
            "percent": _percent(size, total),
            "is_told": kind == "free" or size != 0,
        }


def _amount(plan: Plan, size: int) -> str:
    """Format bytes in the unit of the page's table."""
    unit, divisor = unit_for(max(device.budget_bytes for device in plan.forecast.devices))
    return f"{size / divisor:,.2f} {unit}"


def _percent(part: int, total: int) -> float:
    return max(0.0, min(100.0, round(100 * part / max(total, 1), 3)))


def _cells(plan: Plan, device: str, main: str | None) -> Iterator[dict[str, Any]]:
    """Yield a cell for each module of a device; a layer of the list `main` is only a number."""
    names = [name for name, at in plan.placement.entries if at == device]
    offloaded = frozenset(plan.offloaded)
    for name in names:
        at = layer_of(name)
        is_layer = at is not None and name == f"{main}.{at[1]}"
        is_away = name in offloaded
        yield {
            "text": (name.rpartition(".")[2] if is_layer else without_prefix(name))
            + " ↑" * is_away,
            "title": f"{name}, weights in CPU memory" if is_away else name,
            "is_away": is_away,
        }


def _placement_notes(plan: Plan) -> Iterator[str]:
    """Describe offloaded modules and unused GPUs."""
    if plan.offloaded:
        yield (
            f"↑: the weights of {format_count(len(plan.offloaded), 'module')} are offloaded to "
            "CPU memory, and copied to their GPU for each call."
        )
    unused = [device for device in plan.fleet.devices if device.name not in plan.devices]
    if unused:
        yield f"Not used: {', '.join(map(_gpu_name, unused))}."


def _gpu_name(device: Device) -> str:
    details = [device.product, f"budget {format_bytes(device.budget_bytes)}"]
    return f"{device.name} ({', '.join(filter(None, details))})"


def _table(plan: Plan) -> dict[str, Any]:
    """Return the memory of each GPU by kind: unit, headings and rows."""
    devices = plan.forecast.devices
    unit, divisor = unit_for(max(device.budget_bytes for device in devices))
    kinds = [kind for kind in KIND_FIELDS if any(device.kinds[kind] for device in devices)]
    rows = []
    for device in devices:
        sizes = [device.kinds[kind] for kind in kinds]
        sizes += [device.allocated_bytes, device.reserved_bytes, device.budget_bytes]
        rows.append((device.device, [f"{size / divisor:,.2f}" for size in sizes]))
    heads = [*kinds, "allocated", "reserved", "budget"]
    return {"unit": unit, "heads": heads, "rows": rows}


def _plan_reasons(plan: Plan, explanation: Explanation | None) -> Iterator[str]:
    """Yield the plan's reasons; an explanation adds the objective and replaces the GPU count."""
    if explanation is None:
        yield from (reason.text for reason in plan.why)
        return
    yield from explain.describe_objective(explanation)
    yield from filter(None, [explain.explain_gpu_count(explanation)])
    # The explanation already gives the reason for the number of GPUs, with bytes.
    yield from (reason.text for reason in plan.why if reason.kind != "gpus")


def _gpu_reasons(explanation: Explanation) -> Iterator[tuple[str, list[str]]]:
    """Yield for each GPU the sentences on its memory, and on fewer or more modules."""
    for share in explanation.shares:
        sentences = explain.explain_neighbors(explanation, share.device)
        yield share.device, [explain.describe_memory(share), *sentences]
