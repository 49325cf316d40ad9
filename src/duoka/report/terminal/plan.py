"""Render a plan: a table and a bar for each GPU, readable without color."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from duoka.base.text import printable
from duoka.base.units import format_bytes, format_count, format_roughly, format_seconds, unit_for
from duoka.forecast.latency import Seconds
from duoka.forecast.stage_bytes import StageBytes
from duoka.forecast.workload import Training, Workload
from duoka.hardware.device import Device
from duoka.planner.limits import reserves
from duoka.planner.plan import Plan
from duoka.planner.room import cache_tokens, is_tight

from .serving import render_serving
from .words import modules_of, name_modules

_WIDEST_BAR = 60
_OBJECTIVE_FACTS = {"given": "device map", "balance": "balanced", "order": "filled in order"}
_SPEEDS = ("memory_bytes_per_second", "flops_per_second")


class _Kind(NamedTuple):
    """Color, bar character, ASCII bar character and column title of a kind of memory."""

    style: str
    sign: str
    plain: str
    column: str


KINDS = {
    "weights": _Kind("blue", "█", "#", "weights"),
    "KV cache": _Kind("green", "▓", "=", "KV"),
    "activations": _Kind("yellow", "▒", "+", "activ."),
    "gradients": _Kind("cyan", "▚", "%", "grad."),
    "optimizer": _Kind("green", "▓", "=", "optim."),
    "overhead": _Kind("magenta", "░", "-", "overh."),
    "free": _Kind("dim", "·", ".", ""),
    "CUDA": _Kind("red", "c", "c", ""),
    "others": _Kind("red", "x", "x", ""),
}
_NOT_RESERVED = ("free", "CUDA", "others")


def render_plan(plan: Plan) -> RenderableType:
    """Return a rich renderable of a plan: request, table, bars, reasons."""
    return _View(plan)


def plan_text(plan: Plan) -> str:
    """Render a plan as plain text in the width of the terminal."""
    console = Console(color_system=None, highlight=False)
    with console.capture() as printed:
        console.print(render_plan(plan))
    return "\n".join(printable(line.rstrip()) for line in printed.get().rstrip().split("\n"))


class _View:
    """Rich renderable of a plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _heading(self._plan)
        yield ""
        yield _table(self._plan)
        yield from _describe_budgets(self._plan)
        yield from _describe_emulation(self._plan)
        yield from _describe_offloaded(self._plan)
        yield ""
        yield _bars(self._plan, options.max_width, ascii_only=options.ascii_only)
        if self._plan.workload.is_paged:
            yield from render_serving(self._plan)
        else:
            yield from _describe_cache(self._plan)
            yield from render_seconds(self._plan)
        for reason in self._plan.why:
            yield Text(reason.text)


def _heading(plan: Plan) -> Text:
    kind = "devices" if "cpu" in plan.fleet.names else "GPUs"
    where = f"on {len(plan.devices)} of {len(plan.fleet.devices)} {kind}"
    facts = " · ".join(_plan_facts(plan))
    return Text.assemble((plan.model or "model", "bold"), f" {where}\n{facts}")


def _table(plan: Plan) -> Table:
    """Render the modules and memory of each GPU as a table."""
    unit, divisor = unit_for(max(device.budget_bytes for device in plan.forecast.devices))
    # Training has one more column: without the edges, names still fit in 80 columns.
    wide = plan.workload.training is None
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=wide)
    table.add_column("GPU", no_wrap=True)
    table.add_column("modules", overflow="fold", ratio=1)
    kinds = [kind for kind in _kinds(plan) if kind not in _NOT_RESERVED]
    for name in (*(KINDS[kind].column for kind in kinds), "reserved", "budget"):
        table.add_column(name, justify="right", no_wrap=True)
    for device in plan.forecast.devices:
        parts = device.kinds
        sizes = (*(parts[kind] for kind in kinds), device.reserved_bytes, device.budget_bytes)
        numbers = [f"{size / divisor:.2f}" for size in sizes]
        table.add_row(device.device, _name_modules_on(plan, device.device), *numbers)
    table.caption = f"in {unit}; overhead: reserved by the allocator, not used by tensors"
    # Devices where at least a tenth of the budget is reserved but not allocated.
    cached = [d for d in plan.forecast.devices if 10 * d.overhead_bytes >= d.budget_bytes]
    if cached:
        allocated = ", ".join(f"{d.device} {d.allocated_bytes / divisor:.2f}" for d in cached)
        table.caption += (
            f";\ncached memory is released under pressure; allocated by tensors: {allocated}"
        )
    table.caption_justify = "left"
    return table


def _describe_budgets(plan: Plan) -> Iterator[Text]:
    """Describe how the budgets of detected GPUs and cards are computed; equal ones are merged."""
    names_by_text: dict[str, list[str]] = {}
    reserved = reserves(plan.request.constraints, plan.fleet)
    for name in plan.devices:
        device = plan.fleet.device(name)
        if device.reserve_bytes:
            names_by_text.setdefault(_budget_text(device, reserved.get(name, 0)), []).append(name)
    for text, names in names_by_text.items():
        yield Text(f"{', '.join(names)}: {text}")


def _describe_offloaded(plan: Plan) -> Iterator[Text]:
    """Describe the weights in CPU memory (the table only has their buffers on the GPU)."""
    if plan.offloaded:
        forecast = plan.forecast
        seconds = forecast.copy_seconds
        took = f"about {seconds:.2g} s" if seconds else "speed unknown"
        yield Text(
            f"in CPU memory: {name_modules(plan.offloaded)}, {format_bytes(forecast.host_bytes)}, "
            f"copied over PCIe for each token: {took}"
        )


def _describe_emulation(plan: Plan) -> Iterator[Text]:
    """Name the GPUs in use that emulate bfloat16, if it is the plan's dtype."""
    if plan.workload.dtype != "bfloat16":
        return
    lacking = [name for name in plan.devices if plan.fleet.device(name).has_bfloat16 is False]
    if lacking:
        products = sorted({plan.fleet.device(name).product for name in lacking})
        yield Text(
            f"{', '.join(lacking)}: no bfloat16 in {', '.join(filter(None, products)) or 'it'}; "
            "torch emulates it slowly; --dtype float16 is faster"
        )


def _budget_text(device: Device, asked_bytes: int) -> str:
    """Describe how a GPU's budget results from its free memory; `asked_bytes` is --reserve."""
    offered = format_bytes(device.budget_bytes + device.reserve_bytes)
    if device.uuid:
        total = "" if device.memory_bytes is None else f" of {format_bytes(device.memory_bytes)}"
        place = f" at {device.pci_address}" if device.pci_address else ""
        what = f"{device.product}{place}, {offered} free{total}"
    else:
        what = f"{device.product}, {offered} when empty" if device.product else offered
    overhead_bytes = device.reserve_bytes - asked_bytes
    measured = " (measured)" if "reserve_bytes" in device.measured else ""
    if overhead_bytes > 0:
        what += f", less {format_bytes(overhead_bytes)} reserved for CUDA{measured}"
    if asked_bytes:
        what += f", less {format_bytes(asked_bytes)} left free (--reserve)"
    return what


def _bars(plan: Plan, columns: int, *, ascii_only: bool) -> Group:
    """Render a bar per GPU, with lengths in proportion to its memory, and the legend."""
    devices = plan.forecast.devices
    label = max(len(device.device) for device in devices) + 1
    parts_of = [{**device.kinds, **_unplanned_bytes(plan, device)} for device in devices]
    longest = max(sum(parts.values()) for parts in parts_of)
    room = max(min(columns - label, _WIDEST_BAR), 8)
    rows: list[Text] = []
    kinds = [kind for kind in _kinds(plan) if any(parts.get(kind) for parts in parts_of)]
    for device, parts in zip(devices, parts_of, strict=True):
        width = max(round(room * sum(parts.values()) / longest), 1)
        parts = {kind: parts[kind] for kind in kinds}
        rows.append(
            Text(device.device.ljust(label)) + draw_bar(parts, width, ascii_only=ascii_only)
        )
    return Group(*rows, Text(" " * label) + draw_legend(kinds, ascii_only=ascii_only))


def draw_bar(parts: Mapping[str, int], width: int, *, ascii_only: bool) -> Text:
    """Draw bytes by kind as a bar of `width` characters."""
    text = Text()
    for kind, cells in zip(parts, _distribute_cells([*parts.values()], width), strict=True):
        text.append(_sign(kind, ascii_only=ascii_only) * cells, style=KINDS[kind].style)
    return text


def draw_legend(kinds: Iterable[str], *, ascii_only: bool) -> Text:
    """Draw the legend of the bar characters."""
    text = Text()
    for kind in kinds:
        text.append(_sign(kind, ascii_only=ascii_only), style=KINDS[kind].style)
        text.append(f" {kind}  ")
    return text


def _sign(kind: str, *, ascii_only: bool) -> str:
    return KINDS[kind].plain if ascii_only else KINDS[kind].sign


def _kinds(plan: Plan) -> list[str]:
    """Return the kinds of memory of a plan: with KV cache, or with training states."""
    hidden = {"KV cache"} if plan.workload.training is not None else {"gradients", "optimizer"}
    return [kind for kind in KINDS if kind not in hidden]


def _unplanned_bytes(plan: Plan, stage: StageBytes) -> dict[str, int]:
    """Return the bytes that the plan doesn't reserve: free, for CUDA, and of other processes."""
    device = plan.fleet.device(stage.device)
    # Memory left free by --reserve is part of `reserve_bytes`, but is not for CUDA.
    kept_bytes = reserves(plan.request.constraints, plan.fleet).get(stage.device, 0)
    offered = device.budget_bytes + device.reserve_bytes
    return {
        "free": max(stage.free_bytes, 0) + kept_bytes,
        "CUDA": max(device.reserve_bytes - kept_bytes, 0),
        "others": (device.memory_bytes or offered) - offered,
    }


def _distribute_cells(parts: Sequence[int], width: int) -> list[int]:
    """Distribute `width` cells over the parts, each within one cell of its exact share."""
    # Running sums are rounded instead of the parts, so that the cells add up to the width. Parts 1,
    # 1, 1 in 10 cells end at 3.33, 6.67 and 10, rounded to 3, 7 and 10: 3, 4 and 3 cells. Negative
    # parts, possible in an untrusted plan file, count as 0: other parts would exceed the bar.
    parts = [max(part, 0) for part in parts]
    total = sum(parts) or 1
    cells = [round(end * width / total) for end in accumulate(parts, initial=0)]
    return [stop - start for start, stop in pairwise(cells)]


def _describe_cache(plan: Plan) -> Iterator[Text]:
    """Describe the capacity of the KV cache in tokens and concurrent requests."""
    context = plan.workload.context_tokens
    tokens = cache_tokens(plan.forecast, plan.workload)
    if not tokens:
        return
    requests = format_count(tokens // context, "concurrent request")
    hint = "; --max-batch plans for them" if tokens >= 2 * context else ""
    yield Text(f"KV cache capacity: {tokens:,} tokens ({requests} of {context:,} tokens{hint})")


def _name_modules_on(plan: Plan, device: str) -> str:
    return name_modules(modules_of(plan.placement.entries, device))


def _plan_facts(plan: Plan) -> Iterator[str]:
    """Yield the facts of a plan's request as short phrases."""
    yield from workload_facts(plan.workload)
    if plan.workload.gpu_generation.expandable_segments:
        yield "expandable segments (PYTORCH_ALLOC_CONF)"
    yield _OBJECTIVE_FACTS.get(plan.objective, f"objective: {plan.objective}")
    if any(map(is_tight, plan.forecast.devices)):
        yield "low headroom"


def workload_facts(workload: Workload) -> Iterator[str]:
    """Yield the facts of a workload as short phrases."""
    yield workload.dtype
    if workload.quantize != "none":
        yield f"{workload.quantize} weights"
    if workload.training is None:
        yield from _inference_facts(workload)
    else:
        yield from _training_facts(workload, workload.training)


def _inference_facts(workload: Workload) -> Iterator[str]:
    new = f"({workload.prompt_tokens} + {workload.new_tokens} new)"
    chunk = workload.prefill_chunk_tokens
    is_served = workload.is_paged and not workload.pages_for_batch
    yield f"up to {workload.batch} requests" if is_served else f"batch {workload.batch}"
    yield f"context {workload.context_tokens} {new}"
    yield from _image_facts(workload)
    if workload.adapters:
        yield f"adapters {', '.join(name for name, _ in workload.adapters)}"
    if workload.is_paged:
        yield f"steps of {chunk or workload.prompt_tokens} tokens"
    else:
        yield "prefill in a single pass" if chunk is None else f"prefill in chunks of {chunk}"
    if not is_served and workload.cache != "dynamic":
        yield f"{workload.cache} KV cache"


def _image_facts(workload: Workload) -> Iterator[str]:
    if workload.images:
        height, width = workload.image_size
        at_once = f", {workload.vision_batch} at a time" if workload.vision_batch else ""
        yield f"{format_count(workload.images, 'image')} of {width}x{height}{at_once}"


def _training_facts(workload: Workload, training: Training) -> Iterator[str]:
    lora = training.method == "lora"
    targets = f" on {', '.join(training.lora_targets)}" if training.lora_targets else ""
    yield f"LoRA training, rank {training.lora_rank}{targets}" if lora else "full training"
    yield f"{workload.batch} x {workload.prompt_tokens} tokens"
    yield from _image_facts(workload)
    if training.micro_batches > 1:
        yield f"{training.micro_batches} micro-batches, {training.schedule}"
    yield training.optimizer
    if training.train_vision:
        yield "vision tower trained"
    if training.gradient_checkpointing:
        yield "gradient checkpointing"
    if training.master_weights:
        yield "float32 master weights"


def render_seconds(plan: Plan) -> Iterator[Text]:
    """Yield the forecast speed, and the source of the GPU speeds; nothing if unknown."""
    seconds = plan.forecast.seconds
    if seconds is None:
        return
    yield Text(_describe_speed(plan, seconds))
    yield Text(_describe_speed_source(plan))


def _describe_speed(plan: Plan, seconds: Seconds) -> str:
    """Describe the forecast speed of generation, or of a training step."""
    busy = f"{format_roughly(seconds.tokens_per_second)} tokens/s"
    if seconds.first_token_seconds is None:
        return f"step time: about {format_seconds(seconds.total_seconds)}, about {busy}"
    pace = f"time to first token: about {format_seconds(seconds.first_token_seconds)}"
    if seconds.token_seconds:
        pace += (
            f", then about {format_roughly(plan.workload.batch / seconds.token_seconds)} tokens/s"
        )
    if len(seconds.stages) > 1:
        pace += f"; with all GPUs busy, including prefill, about {busy}"
    return pace


def _describe_speed_source(plan: Plan) -> str:
    """Describe which speeds of GPUs and links are measured and which are published."""
    measured = [
        name for name in plan.devices if set(_SPEEDS) <= set(plan.fleet.device(name).measured)
    ]
    if len(measured) == len(plan.devices):
        pairs = pairwise(plan.devices)
        links = [plan.fleet.link(source, target) for source, target in pairs]
        published = any(link is None or not link.measured for link in links)
        source = "speeds as measured on this machine"
        return f"{source}, links as published" if published else source
    stated = "speeds as published (duoka bench --calibrate measures a GPU)"
    if not measured:
        return stated
    return f"{', '.join(measured)}: speeds as measured on this machine; others: {stated}"
