"""Plan: fleet, workload, placement, forecast and why, as one file that can be kept."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .errors import FormatError
from .fleet import Fleet
from .forecast import Forecast
from .placement import Placement
from .serial import from_dict, parse_json_object, to_dict
from .workload import Workload

_FORMAT = "duoka.plan"
_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Where every module goes, what that will cost, and why.

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
        What was optimised: "headroom", "latency" or "throughput".
    value, bound : float
        The objective's value, and the best that any placement could reach.
    binding_device : str
        The device that limits the objective.
    why : tuple of str
        The reasons, as sentences.

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
    why: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known = {device.name for device in self.fleet.devices}
        strangers = [name for name in self.devices if name not in known]
        if strangers:
            raise FormatError(f"the fleet has no device {', '.join(strangers)}")
        if self.devices != tuple(device.device for device in self.forecast.devices):
            raise FormatError("the forecast is for other devices than the placement")
        if self.workload.prefill_chunk_tokens == "auto" or self.fingerprint != (
            self.placement.fingerprint
        ):
            raise FormatError("the workload or the placement is not this plan's")

    @property
    def device_map(self) -> dict[str, str]:
        """The form that transformers' ``from_pretrained(device_map=…)`` takes."""
        return self.placement.device_map

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that are used, in order of first use."""
        return self.placement.devices

    def to_json(self) -> str:
        """The plan as JSON text, with its format and version."""
        return json.dumps(
            {"format": _FORMAT, "version": _VERSION, **to_dict(self)}, indent=1, ensure_ascii=False
        )

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
            raise FormatError("this is no plan of duoka", hint="`duoka plan --save FILE` makes one")
        version = data.pop("version", None)
        if type(version) is not int or version != _VERSION:
            raise FormatError(
                f"the plan has version {version}; this duoka reads version {_VERSION}",
                hint="make the plan again",
            )
        return from_dict(cls, data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, whole or not at all."""
        write_whole(Path(path), self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan from a file.

        Raises
        ------
        FormatError
            If the file can't be read, or is no plan of this version.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FormatError(f"the plan {path} can't be read: {error}") from None
        return cls.from_json(text)


def write_whole(path: Path, text: str) -> None:
    """Write a file under another name, then rename it, so that it is never seen half-written."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink()
        raise
