"""Device maps in all their forms: a dict, a single device, or an untrusted JSON file."""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsIndex

from duoka.base.files import read_text, reading
from duoka.errors import FormatError, UsageError
from duoka.hardware import cuda_driver
from duoka.hardware.device import MAX_DEVICES
from duoka.hardware.fleet import Fleet

_MAX_BYTES = 16 * 2**20
_DEVICE = re.compile(r"([a-z]+)(?::(0|[1-9][0-9]{0,3}))?", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,4}", re.ASCII)
_AUTOMATIC = frozenset({"auto", "balanced", "balanced_low_0", "sequential"})
_LEAVE_OUT = "omit the device map: duoka finds one"
_NO_OFFLOAD = "duoka doesn't offload to disk; use a GPU, or cpu to compute there"


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """Pairs (name, device) in the given order, not validated; a name may occur twice.

    Examples
    --------
    >>> DeviceMap.of({"model.embed_tokens": 0, "model.layers": "cuda:1"}).entries
    (('model.embed_tokens', 0), ('model.layers', 'cuda:1'))
    >>> DeviceMap.of("cuda:0").entries
    (('', 'cuda:0'),)
    """

    entries: tuple[tuple[str, object], ...]

    @classmethod
    def of(cls, value: object) -> DeviceMap:
        """Make a map from a mapping or one device, as transformers' ``device_map=`` accepts."""
        if isinstance(value, DeviceMap):
            return value
        if isinstance(value, Mapping):
            pairs = ((key if isinstance(key, str) else repr(key), value[key]) for key in value)
            return cls(tuple(pairs))
        if isinstance(value, str) and value.strip().lower() in _AUTOMATIC:
            raise UsageError(f"{value!r} is not a device map", hint=_LEAVE_OUT)
        if isinstance(value, str) or _as_number(value) is not None or _is_torch_device(value):
            return cls((("", value),))
        raise UsageError(
            f"a device map must map names to devices, not be of type {type(value).__name__}",
            hint='{"": 0} puts the whole model on the first GPU',
        )

    @classmethod
    def parse(cls, text: str, source: str) -> DeviceMap:
        """Parse JSON text; duplicate names are kept, so that `judge` can report them."""
        try:
            value = json.loads(text, object_pairs_hook=_Object, parse_constant=str)
        except (ValueError, RecursionError) as error:
            problem = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise FormatError(
                f"{source} is not valid JSON: {problem}",
                hint='a device map must be a JSON object, such as {"model.embed_tokens": 0, '
                '"model.layers": 1}',
            ) from None
        return cls(tuple(value)) if isinstance(value, _Object) else cls.of(value)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DeviceMap:
        """Read a device map from a JSON file."""
        with reading(f"the device map {path}", "give a JSON file with a device map", FormatError):
            text = read_text(Path(path), most_bytes=_MAX_BYTES)
        return cls.parse(text, f"the device map {path}")

    @property
    def names_cpu(self) -> bool:
        """True if an entry's device is the CPU."""
        return any(str(value) == "cpu" for _, value in self.entries)


class _Object(list[tuple[str, object]]):
    """The pairs of a JSON object, with duplicate keys."""


def _as_number(value: object) -> int | None:
    """Return an integer of Python, numpy or another library as int; None for other values."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        return None
    try:
        return operator.index(value)
    except TypeError:  # an array of several
        return None


def _is_torch_device(value: object) -> bool:
    # Compares the name of the class, because torch isn't imported here.
    return type(value).__module__ == "torch" and type(value).__name__ == "device"


class NoDevice(Exception):
    """Raised for a value that isn't a device of the fleet."""


class Devices:
    """Resolves the devices of a map to those of a fleet; without a fleet any cuda, vgpu or cpu.

    A number N means ``cuda:N`` or ``vgpu:N``, whichever kind the fleet has. "cuda" alone means the
    fleet's only such GPU, or number 0 of several.
    """

    def __init__(self, fleet: Fleet | None) -> None:
        self.names = () if fleet is None else fleet.names
        kinds = dict.fromkeys(name.partition(":")[0] for name in self.names if name != "cpu")
        self._kinds = ("cuda",) if fleet is None else tuple(kinds)
        every = (f"{kind}:{number}" for kind in ("cuda", "vgpu") for number in range(MAX_DEVICES))
        self._known = frozenset(self.names) if fleet is not None else frozenset(("cpu", *every))

    @property
    def default(self) -> str:
        """The device for all modules if a map has no valid device: the fleet's first."""
        return self.names[0] if self.names else "cuda:0"

    def resolve(self, value: object) -> str:
        """Return the name of the device that a map's value means; raise NoDevice if none."""
        number = _as_number(value)
        if number is not None:
            return self._resolve_number(number)
        if not isinstance(value, str) and not _is_torch_device(value):
            raise NoDevice(f"{type(value).__name__.strip('_')} is not a device")
        text = str(value)
        if _NUMBER.fullmatch(text):
            return self._resolve_number(int(text))
        if text in ("disk", "meta"):
            raise NoDevice(_NO_OFFLOAD)
        match = _DEVICE.fullmatch(text)
        if match is None:
            raise NoDevice("no device has this name")
        kind, index = match.groups()
        if kind == "cpu" or index is not None:
            return self._refuse_absent(text)
        devices = [name for name in self.names if name.partition(":")[0] == kind]
        return self._refuse_absent(devices[0] if len(devices) == 1 else f"{kind}:0")

    def guess(self, values: Mapping[str, object]) -> dict[str, str]:
        """Guess the fleet's devices for a map with devices that the fleet doesn't have.

        `values` are the map's devices by name. Guesses assume that the map has the numbers before
        CUDA_VISIBLE_DEVICES, or those of another machine, whose GPUs correspond to the fleet's in
        order. A single absent device is only replaced by a GPU that the map doesn't use.
        """
        # Three cases, in this order, for the devices of a map that aren't all in the fleet:
        #
        #   CUDA_VISIBLE_DEVICES=3,1, map of 3 and 1    by position: 3 -> cuda:0, 1 -> cuda:1
        #   two GPUs, map of 0, 1, 2 and 3              in order: 0, 1 -> cuda:0; 2, 3 -> cuda:1
        #   two GPUs, map of 0 and 5                    the absent gets the unused: 5 -> cuda:1
        texts = {name: str(value) for name, value in values.items()}
        numbered = {text for text in texts.values() if text.rpartition(":")[2].isdecimal()}
        ordered = sorted(numbered, key=lambda text: (len(text), text))
        gpus = [name for name in self.names if name != "cpu"]
        device_of: dict[str, str] = {}
        for text in ordered:
            with suppress(NoDevice):
                device_of[text] = self.resolve(text)
        absent = [text for text in ordered if text not in device_of]
        numbers = [str(number) for number in cuda_driver.renumbered()]
        plain = [text.removeprefix("cuda:") for text in ordered]
        if numbers and {*plain} <= {*numbers}:
            translated = (f"{self._kinds[0]}:{numbers.index(text)}" for text in plain)
            likely = dict(zip(ordered, translated, strict=True))
        elif len(absent) > 1 and len(ordered) > len(gpus) > 0:
            likely = {text: gpus[at * len(gpus) // len(ordered)] for at, text in enumerate(ordered)}
        else:
            spare = (gpu for gpu in gpus if gpu not in device_of.values())
            likely = dict(zip(absent, spare, strict=False))
        return {name: likely[text] for name, text in texts.items() if likely.get(text) in gpus}

    def describe(self) -> str:
        """List the fleet's devices and their renumbering by CUDA_VISIBLE_DEVICES, if any."""
        parts = [f"the devices are {', '.join(self.names)}", cuda_driver.describe_renumbered()]
        return "; ".join(filter(None, parts)) if self.names else ""

    def _resolve_number(self, number: int) -> str:
        if len(self._kinds) > 1:
            raise NoDevice(f"add a number: {' or '.join(self._kinds)}?")
        if not 0 <= number < 10_000 or not self._kinds:
            raise NoDevice("no GPU has this number")
        return self._refuse_absent(f"{self._kinds[0]}:{number}")

    def _refuse_absent(self, name: str) -> str:
        if name not in self._known:
            absent = f"{name} is not in the fleet"
            raise NoDevice(absent if self.names else "use cuda:N, vgpu:N or cpu")
        return name
