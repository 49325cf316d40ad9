"""``duoka plan --dtypes``: weights of each precision side by side."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rich import box
from rich.table import Table

from duoka.api.plan import find_or_trace
from duoka.base.units import GIB
from duoka.errors import UsageError
from duoka.planner.limits import on_fleet
from duoka.planner.weight_forms import WeightForm, weight_forms

from .options import ModelOptions, PlanOptions
from .planning import read_request
from .terminal import stdout, working
from .training_options import TrainingOptions


def make_forms(
    model: ModelOptions, options: PlanOptions, training: TrainingOptions
) -> list[WeightForm]:
    """Plan each form."""
    said = {
        "--dtype": options.dtype is not None,
        "--quantize": options.quantize is not None,
        "--train": training.train is not None,
        "--plan": options.plan_file is not None,
        "--device-map": options.device_map is not None,
        "--replicas": options.replicas is not None,
        "--offload": options.offload,
    }
    beside = [name for name, is_said in said.items() if is_said]
    if beside:
        raise UsageError(
            f"{', '.join(beside)} can't be given with --dtypes, which plans for every precision",
            hint="leave out one of the two",
        )
    checkpoint, request = read_request(model, options, None)
    with working():
        problem = on_fleet(request, request.gpus)
        return list(weight_forms(checkpoint, problem, partial(find_or_trace, checkpoint)))


def show_forms(forms: Sequence[WeightForm]) -> None:
    """Print them as a table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("weights in", no_wrap=True)
    for name in ("size", "GPUs", "reserved", "least left", "tokens in the cache"):
        table.add_column(name, justify="right")
    for form in forms:
        size = f"{form.weight_bytes / GIB:.2f}" if form.weight_bytes else "–"
        if form.plan is None or form.left_bytes is None:
            table.add_row(form.name, size, "–", "–" if form.trouble else "does not fit")
            continue
        stages = form.plan.forecast.devices
        table.add_row(
            form.name,
            size,
            str(len(stages)),
            " + ".join(f"{stage.reserved_bytes / GIB:.2f}" for stage in stages),
            f"{form.left_bytes / GIB:.2f}",
            f"{form.cache_tokens:,}" if form.cache_tokens else "–",
        )
    table.caption, table.caption_justify = "in GiB; training is in 16 bit, with AdamW", "left"
    console = stdout()
    console.print(table)
    for form in forms:
        if form.trouble:
            console.print(f"{form.name}: {form.trouble}", markup=False, soft_wrap=True)
