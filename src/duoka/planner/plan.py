"""Plan: fleet, workload, placement, forecast and reasons, as a file.

The file is JSON, with a version and a schema (``plan.schema.json`` beside this module). It is for
one checkpoint, by its fingerprint, and for GPUs by their identity: `Plan.on_fleet` finds them again
whatever they are called by now.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from duoka.base.files import read_text, why, write_whole
from duoka.base.serialization import from_dict, parse_json_object, to_dict
from duoka.base.units import format_bytes
from duoka.checkpoint.checkpoint import differences
from duoka.errors import FleetError, FormatError
from duoka.forecast.forecast import Forecast
from duoka.forecast.workload import Workload
from duoka.hardware.detect import tells_memory
from duoka.hardware.device import Device
from duoka.hardware.fleet import Fleet

from .placement import Placement
from .reasons import Reason
from .request import PlanRequest

_FORMAT = "duoka.plan"
_VERSION = 7
_MAX_BYTES = 64 * 2**20
_REPLAN = "plan for the GPUs of this machine: omit --gpus, or use --replan with a saved plan"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan:
    """The device of every module, with its forecast and reasons.

    Parameters
    ----------
    source : str
        The checkpoint's directory; empty for a model that was given as an object.
    model : str
        The model's class.
    fingerprint : str
        Of the checkpoint or model that the plan was made for.
    fleet : Fleet
        The devices that could be used.
    workload : Workload
        With every "auto" resolved.
    placement : Placement
        On devices of the fleet.
    forecast : Forecast
        For the same devices in the same order.
    objective : str
        What was optimised: "headroom" (the least `headroom_bytes` of a device in use), "latency" or
        "throughput"; "given" for a device map, with the least `free_bytes` as value.
    value, bound : float
        The objective's value, and the best that any placement with as much room could reach.
    binding_device : str
        The device that limits the objective.
    request : PlanRequest
        What was asked for.
    why : tuple of Reason
        Each with its `kind`, the numbers and names that belong to it (`values`) and its sentence
        (`text`).
    offloaded : tuple of str
        Modules whose weights stay in the host's memory, in the order in which they run; each is
        copied to its device whenever it is called.
    needs_movers : bool
        Whether arguments must be moved on one device, too: the model's code makes some on the host.

    Raises
    ------
    FormatError
        If these contradict each other.
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
    # What is for people lies above: `duoka.api`, where plans are public, says how to print one.
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
        )
        if not is_consistent:
            raise FormatError("its devices, modules, workload and fingerprints are inconsistent")

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
            # The name of a directory can be bytes that are no text; escaped, they survive.
            return json.dumps(data, indent=1)
        return text

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan.

        Raises
        ------
        FormatError
            If the text is no plan, or one of another version.
        """
        data = parse_json_object(text, "the plan")
        if data.pop("format", None) != _FORMAT:
            raise FormatError(
                "this is not a duoka plan", hint="create one with `duoka plan --save FILE`"
            )
        version = data.pop("version", None)
        if version == 6 and isinstance(data.get("request"), dict):  # answers had no limit
            data["request"].setdefault("most_new_tokens", None)
        elif type(version) is not int or version != _VERSION:
            is_newer = type(version) is int and version > _VERSION
            newer = "update duoka, or " if is_newer else ""
            raise FormatError(
                f"the plan has version {str(version)[:40]}; this duoka reads version {_VERSION}",
                hint=f"{newer}make the plan again",
            )
        return from_dict(cls, data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all."""
        write_whole(Path(path), self.to_json() + "\n")

    def lasting(self) -> Plan:
        """Make the checkpoint's path absolute, for use in any directory."""
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
            If the file can't be read, or is no plan of this version.
        """
        try:
            text = read_text(Path(path), most_bytes=_MAX_BYTES)
        except (OSError, ValueError) as error:
            raise FormatError(
                f"the plan {path} can't be read: {why(error)}",
                hint="create one with `duoka plan --save FILE`",
            ) from None
        try:
            return cls.from_json(text)
        except FormatError as error:
            hint = error.hint or "create one with `duoka plan --save FILE`"
            raise FormatError(f"{path}: {error}", hint=hint) from error

    def refuse_other(self, fingerprint: str, source: str) -> None:
        """Raise FormatError for another fingerprint than the plan's."""
        if fingerprint != self.fingerprint:
            differ = ", ".join(differences(self.fingerprint, fingerprint))
            raise FormatError(
                f"{source} is not the checkpoint of the plan, or has changed; different: {differ}",
                hint="use that checkpoint, or --replan to make a new plan",
            )

    def on_this_machine(self) -> Plan:
        """Move the plan to this machine's GPUs, as they are now; see `on_fleet`.

        Where the driver doesn't tell memory, as of GPUs that share the processor's, there is
        nothing to hold a plan for declared GPUs against: it stays as it is.
        """
        if not any(name.startswith("cuda") for name in self.devices):
            return self
        try:
            present = Fleet.detect()
        except FleetError:
            if any(self.fleet.device(name).uuid for name in self.devices) or tells_memory():
                raise
            return self
        return self.on_fleet(present)

    def on_fleet(self, present: Fleet) -> Plan:
        """Move the plan to the GPUs present now, as found by `Fleet.detect`.

        GPUs are found by their UUID, and have the names and no more than the budgets that they
        have now. Declared ones are found by name. Other devices stay as they are.

        Raises
        ------
        FleetError
            If a GPU is gone, or has less memory now than the plan needs: with every difference.
        """
        # Names like cuda:1 change with CUDA_VISIBLE_DEVICES and reboots; UUIDs don't. A detected
        # GPU is found by its UUID and takes its current name. All differences are collected, so
        # that one error reports them together.
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
        """Move the plan to other devices, by old names; each keeps the smaller budget."""
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
        return replace(
            self,
            # That of the GPUs that are here, with which the plan is proved.
            workload=replace(self.workload, gpu_generation=fleet.gpu_generation),
            fleet=fleet,
            placement=replace(self.placement, entries=entries),
            forecast=replace(self.forecast, devices=forecasts),
            binding_device=now[self.binding_device].name,
        )

    def _problems(self, devices: dict[str, Device | None]) -> Iterator[str]:
        """Yield the reasons against running on the devices found."""
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
    """Find the same GPU among the present ones; declared GPUs by name alone."""
    for candidate in present.devices:
        if candidate.uuid == device.uuid if device.uuid else candidate.name == device.name:
            return candidate
    return None


def _label(device: Device, separator: str = " ") -> str:
    return separator.join(filter(None, (device.name, device.product, device.uuid)))
