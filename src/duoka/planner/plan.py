"""Plan: fleet, workload, placement, forecast and reasons, as a file.

The file is JSON, with a version and a schema (``plan.schema.json`` beside this module). A plan is
valid for one checkpoint, identified by its fingerprint, and for GPUs identified by UUID:
`Plan.on_fleet` finds the GPUs again if their names have changed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from duoka.base.files import read_text, reading, write_whole
from duoka.base.serialization import from_dict, parse_json_object, to_dict
from duoka.base.units import format_bytes
from duoka.checkpoint.checkpoint import differences
from duoka.errors import FleetError, FormatError
from duoka.forecast.forecast import Forecast
from duoka.forecast.workload import Workload
from duoka.hardware.detect import reports_memory
from duoka.hardware.device import Device
from duoka.hardware.fleet import Fleet

from .placement import Placement
from .reasons import Reason
from .request import PlanRequest

_FORMAT = "duoka.plan"
_VERSION = 9
_MAX_BYTES = 64 * 2**20
_CREATE = "create one with `duoka plan --save FILE`"
_REPLAN = "plan for the GPUs of this machine: omit --gpus, or use --replan with a saved plan"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """The device of every module, with its forecast and reasons.

    Parameters
    ----------
    source : str
        The checkpoint's directory; empty for a model that was given as an object.
    model : str
        Name of the model's class.
    fingerprint : str
        Fingerprint of the checkpoint or model that the plan was made for.
    fleet : Fleet
        The devices that could be used.
    workload : Workload
        The workload, with every "auto" resolved.
    placement : Placement
        The device of every module, among the devices of the fleet.
    forecast : Forecast
        The forecast of the devices in use, in order of first use.
    objective : str
        "headroom" (the least `headroom_bytes` of a device in use), "latency", "throughput" or
        "pages"; "balance" and "order" for the strategies balanced and sequential; "given" for a
        device map, with the least `free_bytes` as value.
    value : float
        The objective's value.
    bound : float
        The best value that a placement under the same conditions (number of devices, free memory,
        constraints) can have.
    binding_device : str
        The device that limits the objective.
    request : PlanRequest
        The request that the plan answers, with "auto" unresolved.
    why : tuple of Reason
        The reasons, each with its `kind`, the `values` of its placeholders and its sentence
        (`text`).
    offloaded : tuple of str
        Modules whose weights stay in CPU memory, in execution order. The weights of a module are
        copied to its device at each call.
    needs_movers : bool
        True if inputs of modules must be moved even on a single device, because the model's code
        creates tensors on the CPU.

    Raises
    ------
    FormatError
        If the fields contradict each other.
    """

    source: str
    model: str
    fingerprint: str
    fleet: Fleet
    workload: Workload
    placement: Placement
    forecast: Forecast
    objective: str
    value: float
    bound: float
    binding_device: str
    request: PlanRequest
    why: tuple[Reason, ...] = ()
    offloaded: tuple[str, ...] = ()
    needs_movers: bool = False
    # Set by `duoka.api`, because the package that formats tables may not be imported here.
    format_table: ClassVar[Callable[[Plan], str]] = repr

    def __post_init__(self) -> None:
        modules = {module for module, _ in self.placement.entries}
        is_consistent = (
            {*self.devices} <= {*self.fleet.names}
            and self.devices == tuple(stage.device for stage in self.forecast.devices)
            and self.binding_device in self.devices
            and self.workload.prefill_chunk_tokens != "auto"
            and self.fingerprint == self.placement.fingerprint
            and modules.issuperset(self.offloaded)
            and all(self.placement.device_of(name) for name in self.host_experts)
        )
        if not is_consistent:
            raise FormatError("its devices, modules, workload and fingerprints are inconsistent")

    @property
    def host_experts(self) -> tuple[str, ...]:
        """The modules of experts whose weights stay in host memory, in execution order."""
        return self.workload.host_experts

    @property
    def device_map(self) -> dict[str, str]:
        """The map for transformers' ``from_pretrained(device_map=…)``."""
        return self.placement.device_map

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices in use, in order of first use."""
        return self.placement.devices

    def __repr__(self) -> str:
        load = self.workload
        sizes = f"batch {load.batch}, {load.prompt_tokens} + {load.new_tokens} tokens"
        return f"<Plan: {self.model or 'model'} on {', '.join(self.devices)}; {sizes}>"

    def __str__(self) -> str:
        """Return the table of ``duoka plan``."""
        return type(self).format_table(self)

    def to_json(self) -> str:
        """Write the plan as JSON text, with its format and version."""
        data = {"format": _FORMAT, "version": _VERSION, **to_dict(self)}
        text = json.dumps(data, indent=1, ensure_ascii=False)
        try:
            text.encode()
        except UnicodeEncodeError:
            # The name of a directory may be invalid UTF-8; as JSON escapes its bytes are preserved.
            return json.dumps(data, indent=1)
        return text

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan from its JSON text.

        Raises
        ------
        FormatError
            If the text isn't a plan, or is a plan of an unsupported version.
        """
        data = parse_json_object(text, "the plan")
        if data.pop("format", None) != _FORMAT:
            raise FormatError("this is not a duoka plan", hint=_CREATE)
        version = data.pop("version", None)
        if type(version) is not int or version != _VERSION:
            is_newer = type(version) is int and version > _VERSION
            newer = "update duoka, or " if is_newer else ""
            raise FormatError(
                f"the plan has version {str(version)[:40]}; this duoka reads version {_VERSION}",
                hint=f"{newer}make the plan again",
            )
        return from_dict(cls, data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file; after an error the old file is unchanged."""
        write_whole(Path(path), self.to_json() + "\n")

    def lasting(self) -> Plan:
        """Return the plan with an absolute path of its checkpoint, for use in any directory."""
        source = Path(self.source)
        if not self.source or not source.exists():  # given as an object, or on the Hub
            return self
        return replace(self, source=str(source.absolute()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a file.

        Raises
        ------
        FormatError
            If the file can't be read, or isn't a plan of a supported version.
        """
        with reading(f"the plan {path}", _CREATE, FormatError):
            text = read_text(Path(path), most_bytes=_MAX_BYTES)
        try:
            return cls.from_json(text)
        except FormatError as error:
            raise FormatError(f"{path}: {error}", hint=error.hint or _CREATE) from error

    def refuse_other(self, fingerprint: str, source: str) -> None:
        """Raise FormatError if the fingerprint of the model from `source` isn't the plan's."""
        if fingerprint != self.fingerprint:
            differ = ", ".join(differences(self.fingerprint, fingerprint))
            raise FormatError(
                f"{source} is not the checkpoint of the plan, or has changed; different: {differ}",
                hint="use that checkpoint, or --replan to make a new plan",
            )

    def on_this_machine(self) -> Plan:
        """Move the plan to this machine's GPUs in their current state; see `on_fleet`.

        A plan without CUDA devices is returned unchanged. If no GPU can be detected, FleetError is
        raised for a plan that names physical GPUs (by UUID), or if the driver reports free memory;
        otherwise (budgets declared by hand, unified memory) the plan is returned unchanged.
        """
        if not any(name.startswith("cuda") for name in self.devices):
            return self
        try:
            present = Fleet.detect()
        except FleetError:
            if any(self.fleet.device(name).uuid for name in self.devices) or reports_memory():
                raise
            return self
        return self.on_fleet(present)

    def on_fleet(self, present: Fleet) -> Plan:
        """Move the plan to the present GPUs, as found by `Fleet.detect`.

        A detected GPU of the plan is found by its UUID, a declared GPU by its name. It takes the
        present name, and the smaller of the planned and the present budget. Other devices are
        unchanged.

        Raises
        ------
        FleetError
            If a GPU is missing, or has less memory now than the plan needs; reports all such GPUs.
        """
        # Names like cuda:1 change with CUDA_VISIBLE_DEVICES and reboots; UUIDs don't. All problems
        # are collected, so that one error reports them together.
        devices = {
            device.name: _find_device(device, present) if device.name.startswith("cuda") else device
            for device in self.fleet.devices
        }
        problems = list(self._problems(devices))
        if problems:
            lines = (
                f"  {_label(device, '  ')}  has a budget of {format_bytes(device.budget_bytes)}"
                for device in present.devices
            )
            raise FleetError(
                f"the plan doesn't fit the GPUs of this machine: {'; '.join(problems)}",
                hint="\n".join([_REPLAN, *lines]),
            )
        now = {name: device for name, device in devices.items() if device is not None}
        return self.move_to(now)

    def move_to(self, now: Mapping[str, Device]) -> Plan:
        """Move the plan to the devices that `now` maps its device names to.

        Each device has the smaller of the old and the new budget.
        """
        now = {
            name: replace(
                device, budget_bytes=min(device.budget_bytes, self.fleet.device(name).budget_bytes)
            )
            for name, device in now.items()
        }
        links = tuple(
            replace(link, source=now[link.source].name, target=now[link.target].name)
            for link in self.fleet.links
            if link.source in now and link.target in now
        )
        entries = tuple((module, now[at].name) for module, at in self.placement.entries)
        forecasts = tuple(
            replace(
                stage,
                device=now[stage.device].name,
                budget_bytes=now[stage.device].budget_bytes,
                reserved_bytes=min(stage.reserved_bytes, now[stage.device].budget_bytes),
            )
            for stage in self.forecast.devices
        )
        fleet = Fleet(devices=tuple(now.values()), links=links)
        # The generation of the new GPUs, for which the plan is checked, and still the allocator
        # that the forecast is made for.
        expandable = self.workload.gpu_generation.expandable_segments
        generation = replace(fleet.gpu_generation, expandable_segments=expandable)
        return replace(
            self,
            workload=replace(self.workload, gpu_generation=generation),
            fleet=fleet,
            placement=replace(self.placement, entries=entries),
            forecast=replace(self.forecast, devices=forecasts),
            binding_device=now[self.binding_device].name,
        )

    def _problems(self, devices: dict[str, Device | None]) -> Iterator[str]:
        """Yield a problem for each device in use that is missing or has too little memory."""
        for stage in self.forecast.devices:
            label, gpu = _label(self.fleet.device(stage.device)), devices[stage.device]
            if gpu is None:
                yield f"{label} is missing, hidden, or full"
            elif gpu.budget_bytes < stage.requested_bytes:
                yield (
                    f"{label} has {format_bytes(gpu.budget_bytes)} available, and the plan needs "
                    f"{format_bytes(stage.requested_bytes)} there: "
                    f"{format_bytes(stage.requested_bytes - gpu.budget_bytes)} are missing"
                )


def _find_device(device: Device, present: Fleet) -> Device | None:
    """Find a GPU of the plan among the present ones by UUID; without a UUID, by name."""
    for candidate in present.devices:
        if candidate.uuid == device.uuid if device.uuid else candidate.name == device.name:
            return candidate
    return None


def _label(device: Device, separator: str = " ") -> str:
    return separator.join(filter(None, (device.name, device.product, device.uuid)))
