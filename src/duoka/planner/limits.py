"""Limits: the user's constraints, translated to the blocks of one model and the GPUs of one fleet.

Pins name any module or tensor, as the model or its checkpoint does. The search finds out if a
placement that satisfies the constraints fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from duoka.base.text import choose
from duoka.errors import FleetError, UsageError
from duoka.forecast.allocator import refuse_options
from duoka.forecast.profile import Profile
from duoka.forecast.workload import Workload
from duoka.hardware.device import Device
from duoka.hardware.fleet import Fleet
from duoka.hardware.host import available_bytes, host_of_this_machine

from .constraints import Constraints
from .device_map import DeviceMap, Spelling, find_device
from .plan import Plan
from .request import LARGEST, PlanProblem, PlanRequest
from .search import PlacementLimits


def fleet_for(
    fleet: Fleet, device_map: DeviceMap | None, *, offload: bool = False, host: Device | None = None
) -> Fleet:
    """Add the CPU to a fleet that lacks it, if needed, with the available CPU memory as its budget.

    The CPU is needed if the device map names it, and to offload weights if the GPUs are this
    machine's: the CPU memory of another machine is unknown. Offloaded weights go to the declared
    `host` if there is one; nothing else uses it.
    """
    if offload and host is not None:
        return fleet.with_host(host)
    is_named = device_map is not None and device_map.names_cpu
    is_present = offload and any(device.uuid for device in fleet.devices)
    if "cpu" in fleet.names or not (is_named or is_present):
        return fleet
    budget = available_bytes()
    if not budget:
        raise FleetError(
            "the CPU memory budget is unknown",
            hint="give it with --host-memory to offload weights, or omit cpu from the device map",
        )
    return replace(fleet, devices=(*fleet.devices, Device(name="cpu", budget_bytes=budget)))


def host_of(problem: PlanProblem) -> Device | None:
    """Return the host's memory for weights: declared, or this machine's; None if unknown."""
    if problem.host is not None or not any(device.uuid for device in problem.fleet.devices):
        return problem.host
    with suppress(FleetError):
        return host_of_this_machine()
    return None


def on_fleet(
    request: PlanRequest, fleet: Fleet | str, device_map: DeviceMap | None = None
) -> PlanProblem:
    """Make the problem of a request on a fleet; a text is parsed by `Fleet.parse`.

    Adds the CPU if needed, subtracts reserves from the budgets, and sets the GPU generation.
    """
    for name, value, kind in (
        ("fleet", fleet, Fleet | str),
        ("workload", request.workload, Workload),
        ("constraints", request.constraints, Constraints),
    ):
        if not isinstance(value, kind):
            raise UsageError(
                f"{name} can't be {type(value).__name__}", hint=f"give duoka.{name.title()}(…)"
            )
    if request.largest is not None:
        choose("largest", request.largest, LARGEST)
    fleet, host = (Fleet.parse(fleet) if isinstance(fleet, str) else fleet).split_host()
    request = replace(request, host=host or request.host)
    # A device with a UUID is a GPU of this machine, where the allocator's options of this process
    # apply: options that the forecast can't model are refused.
    if any(device.uuid for device in fleet.devices):
        refuse_options()
    fleet = fleet_for(fleet, device_map, offload=request.constraints.offload, host=request.host)
    for name, target in request.constraints.pins:
        with _naming_pin(name, target):
            find_device(target, fleet)
    # The generation determines the size of cuBLAS's workspace, and of attention before Ampere.
    workload = replace(request.workload, gpu_generation=fleet.gpu_generation)
    request = replace(request, workload=workload)
    return PlanProblem.of(request, usable(fleet, request.constraints), device_map)


@contextmanager
def _naming_pin(name: str, target: str) -> Iterator[None]:
    """Put the pin in front of the message of a UsageError that is raised within the scope."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"the pin {name}={target}: {error}", hint=error.hint) from None


def limits_for(constraints: Constraints, profile: Profile, fleet: Fleet) -> PlacementLimits:
    """Translate pins of names to pins of blocks, by index in the chain, and of fleet devices."""
    # The search cuts a chain without tied blocks, which are on the device of their root. Example:
    # blocks 0 embedding, 1 and 2 layers, 3 head tied to 0; the chain is [0, 1, 2].
    #
    #   pin                          blocks    root's place in the chain
    #   lm_head=cuda:1               3         0: the embedding goes to cuda:1 as well
    #   model.layers=cuda:0          1, 2      1 and 2
    #   model.embed_tokens=cuda:0    0         0: contradicts the first pin, and is refused
    if not constraints.pins:
        return PlacementLimits()
    spelling = Spelling(profile.outline)
    chain = [index for index, block in enumerate(profile.blocks) if block.tied_to is None]
    pinned: dict[int, tuple[int, str]] = {}
    for name, target in constraints.pins:
        with _naming_pin(name, target):
            device = fleet.names.index(find_device(target, fleet))
            blocks = spelling.blocks_of(name)
            if not blocks:
                nearest = ", ".join(spelling.finder.search(name).names)
                raise UsageError(
                    f"{profile.model} has no module or tensor {name[:120]!r}",
                    hint=f"did you mean {nearest}?"
                    if nearest
                    else "`duoka plan` lists the modules",
                )
        for block in blocks:
            place = chain.index(profile.root_of(block))
            other_device, other_name = pinned.setdefault(place, (device, name))
            if other_device != device:
                is_tied = profile.blocks[block].tied_to is not None
                raise UsageError(
                    f"{name} is pinned to {fleet.names[device]}, but {other_name}, which is "
                    f"{'tied to it' if is_tied else 'of the same block'}, on "
                    f"{fleet.names[other_device]}",
                    hint="remove one of the two pins",
                )
    return PlacementLimits(pins=tuple((place, device) for place, (device, _) in pinned.items()))


# A reserve is subtracted from a budget once, when a problem is made (`usable`), so that the search,
# the forecast and the check all have the smaller budget. The plan keeps the smaller budget and the
# request with the reserve. Planning again starts from `given_back`, which adds the reserve back;
# otherwise it would be subtracted twice.
# Example: 24 GiB and a reserve of 2 GiB: the plan's fleet has 22 GiB, `given_back` has 24 GiB.
def reserves(constraints: Constraints, fleet: Fleet) -> Mapping[str, int]:
    """Return the reserved bytes by the names of the fleet's devices."""
    sizes: dict[str, int] = {}
    for device, size in constraints.reserve:
        name = find_device(device, fleet)
        if name in sizes:
            raise UsageError(f"the reserve of {name} is given twice", hint="give it once")
        sizes[name] = size
    return sizes


def usable(fleet: Fleet, constraints: Constraints) -> Fleet:
    """Return the fleet with the reserved bytes subtracted from its budgets."""
    return fleet.reserving(reserves(constraints, fleet)) if constraints.reserve else fleet


def given_back(plan: Plan) -> Fleet:
    """Return the fleet of a plan with the reserved bytes added to its budgets again."""
    reserved = reserves(plan.request.constraints, plan.fleet)
    return plan.fleet.reserving({name: -size for name, size in reserved.items()})


def limit_graphs(profile: Profile, problem: PlanProblem) -> PlanProblem:
    """Return the problem with CUDA graphs of as many tokens as the profile allows."""
    workload, tokens = problem.workload, profile.graph_tokens
    if tokens is None or not workload.cuda_graphs:
        return problem
    return replace(problem, workload=replace(workload, cuda_graphs=tokens))


def refuse_unplannable(profile: Profile, problem: PlanProblem) -> None:
    """Refuse a context beyond the model's limit, and offloading with training or quantization."""
    check_context(problem.workload, profile.max_context_tokens, profile.model)
    if not problem.constraints.offload:
        return
    if problem.workload.training is not None:
        raise UsageError(
            "offloaded weights can't be trained",
            hint="omit --offload; use gradient checkpointing or LoRA to save memory",
        )
    if problem.workload.quantize != "none":
        raise UsageError(
            f"quantized weights ({problem.workload.quantize}) can't be offloaded",
            hint="omit one of them",
        )


def check_context(workload: Workload, limit: int | None, model: str) -> None:
    """Refuse a context longer than the model's limit."""
    if limit is not None and workload.context_tokens > limit:
        raise UsageError(
            f"{workload.prompt_tokens} prompt and {workload.new_tokens} new tokens are "
            f"{workload.context_tokens}; {model} supports {limit}",
            hint=f"use a context of at most {limit} tokens",
        )
