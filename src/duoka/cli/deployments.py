"""``duoka bench MODEL``: plan, run and compare deployments."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

import duoka
from duoka.base.progress import say, say_import
from duoka.base.units import format_seconds, unit_for
from duoka.errors import InfeasibleError
from duoka.forecast.workload import QUANTIZED, read_quantization
from duoka.hardware.calibration import with_figures, with_links
from duoka.hardware.fleet import Fleet

from . import planning
from .options import ModelOptions, PlanOptions
from .terminal import new_table, note, print_json, stdout, working

if TYPE_CHECKING:
    from duoka.tools.bench.deployments import Bench, Deployment, Rates

    from .bench import BenchOptions


def bench_deployments(choice: BenchOptions, options: PlanOptions, model: ModelOptions) -> None:
    """Plan and run all deployments, and print a table; after Ctrl-C print the results so far."""
    runs = not choice.forecast
    served = replace(options, serve=True)
    checkpoint, request, fleet = planning.read_request(model, served, to_run=runs)
    fleet = duoka.Fleet.parse(fleet) if isinstance(fleet, str) else fleet
    if runs and any(gpu.name.startswith("cuda") and not gpu.uuid for gpu in fleet.devices):
        note(
            f"{request.gpus}: declared GPUs that this machine doesn't have; all numbers are "
            "forecasts"
        )
        runs = False
    with working():
        if choice.calibrate:
            fleet = _calibrate_fleet(fleet, request.gpus)
        from duoka.tools.bench.deployments import plan_deployments

        forms = ["none", *(read_quantization(name, QUANTIZED) for name in choice.quantize or ())]
        bench = plan_deployments(checkpoint, request, fleet, forms)
    if not runs:
        _report(bench, as_json=choice.json)
        return
    cases = list(bench.deployments)
    try:
        _measure_planned(cases, checkpoint)
    finally:
        bench = replace(bench, deployments=tuple(cases))
        _report(bench, as_json=choice.json)


def _calibrate_fleet(fleet: Fleet, gpus: str) -> Fleet:
    """Measure the GPUs of a fleet, and return the fleet with the measured speeds.

    Figures of real GPUs are saved for later plans.
    """
    say_import("torch")
    from duoka.tools.bench.calibrate import calibrate

    calibrated = calibrate(fleet)
    if calibrated.path is not None:
        return duoka.Fleet.parse(gpus)
    figures = calibrated.calibration
    return replace(
        fleet,
        devices=tuple(with_figures(device, figures.gpus[0]) for device in fleet.devices),
        links=with_links(fleet.links, {name: name for name in fleet.names}, figures),
    )


def _measure_planned(cases: list[Deployment], checkpoint: duoka.Checkpoint) -> None:
    """Run each planned deployment, and replace it in the list by its measured copy."""
    with working():
        say_import("torch")
        from duoka.tools.bench.deployments import title
        from duoka.tools.bench.measure import measure

        if any(case.plans for case in cases):
            checkpoint.fetch()
        for index, case in enumerate(cases):
            if case.plans:
                say(f"{index + 1} of {len(cases)}: {title(case)}")
                cases[index] = measure(case, trust_remote_code=checkpoint.trust_remote_code)


def _report(bench: Bench, *, as_json: bool) -> None:
    """Print the deployments and the recommendation; InfeasibleError if none is usable."""
    from duoka.tools.bench.deployments import recommend, serve_command, title

    best, reasons = recommend(bench)
    if as_json:
        print_json(bench.to_dict())
    else:
        console = stdout()
        console.print(_table(bench))
        console.print(*map(Text, reasons), sep="\n", soft_wrap=True)
        if best is not None:
            words = ": ".join(filter(None, (title(best), serve_command(best))))
            console.print(Text(f"recommended: {words}", style="bold"), soft_wrap=True)
    if best is None:
        hint = "see the reason beside each deployment"
        raise InfeasibleError(f"{bench.model} fits none of these deployments", hint=hint)


def _table(bench: Bench) -> Table:
    """Build the table: a row per deployment, measurements above forecasts in parentheses."""
    sizes = [gpu["forecast_bytes"] for case in bench.deployments for gpu in case.memory()]
    unit, divisor = unit_for(max(sizes, default=0))
    work = bench.workload
    table = new_table(
        *("deployment", "one", "all", "prompts", "first", "idle"),
        caption=f"{bench.model}: {work.batch} requests of up to {work.prompt_tokens} + "
        f"{work.new_tokens} tokens. tokens/s of one answer alone, of all at once, and of "
        "all prompts; time to first token of one; idle: of the GPUs' time with all "
        "requests; memory reserved. Forecasts are in parentheses.",
    )
    table.add_column(unit)
    for case in bench.deployments:
        pairs = zip(_format_rates(case.measured), _format_rates(case.forecast), strict=True)
        cells = ["\n".join([now, f"({then})" * bool(then)]).strip() or "–" for now, then in pairs]
        memory = Text("\n".join(filter(None, [case.trouble, *_format_memory(case, divisor)])))
        table.add_row(f"{case.name}\n{case.weights}", *cells, memory)
    return table


def _format_rates(rates: Rates | None) -> list[str]:
    """Format the rates for the columns of the table; "" for unknown rates."""
    from duoka.tools.bench.deployments import Rates, format_speed

    rates = rates or Rates()
    speeds = rates.one_tokens_per_second, rates.many_tokens_per_second
    cells = [speed and format_speed(speed) for speed in (*speeds, rates.prefill_tokens_per_second)]
    seconds, idle = rates.first_token_seconds, rates.idle_share
    cells += [seconds and format_seconds(seconds), None if idle is None else f"{idle:.0%}"]
    return [cell or "" for cell in cells]


def _format_memory(case: Deployment, divisor: int) -> Iterator[str]:
    """Format the measured and forecast reserved memory of each device."""
    for gpu in case.memory():
        measured, forecast = gpu["measured_bytes"], gpu["forecast_bytes"]
        size = "" if measured is None else f" {measured / divisor:.1f}"
        yield f"{gpu['device']}{size} ({forecast / divisor:.1f})"
