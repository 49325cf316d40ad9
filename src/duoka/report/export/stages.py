"""Convert a plan to stages of whole layers, the form that most tools take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, permutations, repeat, takewhile

from duoka.forecast.stage_bytes import StageBytes
from duoka.forecast.tensor_names import layer_of, main_list
from duoka.hardware.device import Device
from duoka.planner.plan import Plan

from .text import export_error

Pins = tuple[tuple[str, str], ...]
_AFTER = "after them"
_OTHER_PLAN = "plan with another objective or other GPUs, or load the plan with duoka"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStage:
    """Layers [start, stop) of the model on one device, with the device's forecast."""

    device: Device
    forecast: StageBytes
    start: int
    stop: int

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPipeline:
    """A plan in stages of whole layers, in execution order.

    `layers` is the name of the model's list of layers; it is empty if the plan, for one device,
    doesn't list layers. The modules before the first layer are on the first stage's device. The
    modules after the last layer are on the last stage's device, except the modules `returning` to
    the first stage's device: a head tied to the embedding.
    """

    layers: str
    stages: tuple[LayerStage, ...]
    returning: tuple[str, ...]

    @property
    def devices(self) -> list[Device]:
        """Device of each stage."""
        return [stage.device for stage in self.stages]

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return self.stages[-1].stop

    @property
    def counts(self) -> list[int]:
        """Number of layers of each stage."""
        return [stage.num_layers for stage in self.stages]


# Entries are in execution order: modules before the layers, the layers, modules after them. A
# tool configured by layer counts runs the modules before on its first rank, those after on its
# last:
#
#     embed 0 | layers.0 0, layers.1 0, layers.2 1, layers.3 1 | norm 1, lm_head 1 → counts 2, 2
#     the same, but lm_head 0: tied to the embedding, it is `returning`
def to_layer_pipeline(plan: Plan, tool: str) -> LayerPipeline:
    """Convert a plan to stages of whole layers; UsageError if they can't express it."""
    if plan.offloaded:
        why = "modules are offloaded to CPU memory"
        raise export_error(tool, f"{len(plan.offloaded)} {why}", "plan without offload")
    if "cpu" in plan.devices:
        raise export_error(tool, "modules run on the CPU", "plan for GPUs only")
    if plan.workload.adapters:
        why = "it has adapters that requests choose"
        raise export_error(tool, why, f"plan without --adapter, and give the adapters to {tool}")
    entries = plan.placement.entries
    main = main_list([name for name, _ in entries])
    if main is None:
        if len(plan.devices) > 1:
            raise export_error(tool, "its modules are not a numbered list of layers", _OTHER_PLAN)
        stages = _stages(plan, tool, plan.devices)
        return LayerPipeline(layers="", stages=stages, returning=())
    layer_devices = _devices_of_layers(plan, tool, main)
    first, last = layer_devices[0], layer_devices[-1]
    is_layer = [(layer_of(name) or ("",))[0] == main for name, _ in entries]
    start, stop = is_layer.index(True), len(is_layer) - is_layer[::-1].index(True)
    before, after = entries[:start], entries[stop:]
    inner = zip(entries[start:stop], is_layer[start:stop], strict=True)
    between = [name for (name, _), layer in inner if not layer]
    if between and len(set(layer_devices)) > 1:
        raise export_error(tool, f"{between[0]} runs between the layers of {main}", _OTHER_PLAN)
    # Trailing modules on the first rank, such as a tied lm_head.
    returning = [*takewhile(lambda entry: entry[1] == first != last, reversed(after))][::-1]
    staying = after[: len(after) - len(returning)]
    for modules, device, place in ((before, first, "before its layers"), (staying, last, _AFTER)):
        for name, where in modules:
            if where != device:
                why = f"{name}, which runs {place}, is on {where}, and the layers of {main} next to"
                raise export_error(tool, f"{why} it are on {device}", _OTHER_PLAN)
    return LayerPipeline(
        layers=main,
        stages=_stages(plan, tool, layer_devices),
        returning=tuple(name for name, _ in returning),
    )


def pipeline_pins(plan: Plan) -> list[Pins]:
    """Return pins that force whole layers: modules beside the layers go to the ends.

    There is one set of pins per pair of GPUs for the first and the last layer; of pairs with equal
    products and budgets only one is used. A tied head stays with the embedding.
    """
    # If everything up to the first layer is pinned to one GPU, and everything from the last layer
    # on to another, the planner can only cut between whole layers.
    names = [name for name, _ in plan.placement.entries]
    main = main_list(names)
    at = [place for place, name in enumerate(names) if (layer_of(name) or ("",))[0] == main]
    if not at:
        return []
    is_tied = any(reason.kind == "tied" for reason in plan.why)
    begin, end = names[: at[0] + 1], names[at[-1] : len(names) - is_tied]
    gpus = [plan.fleet.device(name) for name in plan.devices]
    kinds = {gpu.name: (gpu.product, gpu.budget_bytes) for gpu in gpus}
    pairs = {(kinds[name], kinds[peer]): (name, peer) for name, peer in permutations(kinds, 2)}
    return [
        (*zip(begin, repeat(source), strict=False), *zip(end, repeat(target), strict=False))
        for source, target in pairs.values()
    ]


def _devices_of_layers(plan: Plan, tool: str, main: str) -> list[str]:
    """Return the device of each layer in order; UsageError if a layer is split."""
    devices: dict[int, set[str]] = {}
    for name, device in plan.placement.entries:
        layer = layer_of(name)
        if layer is not None and layer[0] == main:
            devices.setdefault(layer[1], set()).add(device)
    cut = next((number for number, at in devices.items() if len(at) > 1), None)
    if cut is not None:
        names = " and ".join(sorted(devices[cut]))
        pin = f"--pin {main}.{cut}={min(devices[cut])}"
        raise export_error(
            tool, f"{main}.{cut} is split between {names}", f"keep it on one GPU: {pin}"
        )
    if sorted(devices) != list(range(len(devices))):
        raise export_error(tool, f"the layers of {main} aren't numbered from 0", _OTHER_PLAN)
    return [next(iter(devices[number])) for number in range(len(devices))]


def _stages(plan: Plan, tool: str, at: Sequence[str]) -> tuple[LayerStage, ...]:
    """Group consecutive layers on one device to stages; `at` is the device of each layer."""
    forecasts = {forecast.device: forecast for forecast in plan.forecast.devices}
    stages: list[LayerStage] = []
    start = 0
    for name, run in groupby(at):
        stop = start + len(list(run))
        device = plan.fleet.device(name)
        stages.append(LayerStage(device=device, forecast=forecasts[name], start=start, stop=stop))
        start = stop
    used = [stage.device.name for stage in stages]
    again = [name for name in used if used.count(name) > 1]
    if again:
        raise export_error(tool, f"{again[0]} has layers in several places", _OTHER_PLAN)
    empty = set(plan.devices) - set(used)
    if empty:
        raise export_error(tool, f"{min(empty)} has no layer", "remove that GPU from --gpus")
    return tuple(stages)
