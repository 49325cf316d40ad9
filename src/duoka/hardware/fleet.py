"""Fleet: the devices that may be used, what each may hold, and the links between them.

A device's name is torch's: ``cuda:0``, ``cpu``, ``vgpu:1``. A budget is what the caching
allocator may *reserve* on it; the CUDA context and library overhead come on top and were
subtracted before a budget was made from free memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from duoka.base.units import format_bytes
from duoka.errors import FleetError

from . import parse
from .detect import detect
from .device import MAX_DEVICES, Device, Link
from .gpu_generation import GpuGeneration


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The devices that may be used.

    Parameters
    ----------
    devices : tuple of Device
        In the user's order.
    links : tuple of Link
        Those that are known; a pair without one has an unknown speed.

    Raises
    ------
    FleetError
        If there is no device, more than `MAX_DEVICES`, a name stands twice, or a link is doubled
        or names another device.
    """

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        names = [device.name for device in self.devices]
        if not names:
            raise FleetError("no device to use", hint=parse.FORMS)
        if len(names) > MAX_DEVICES:
            raise FleetError(f"{len(names)} devices; at most {MAX_DEVICES} can be planned for")
        _refuse_doubled("the device", names)
        _refuse_doubled("the link", [f"{link.source} → {link.target}" for link in self.links])
        for link in self.links:
            for name in (link.source, link.target):
                if name not in names:
                    raise FleetError(f"a link names {name[:40]}, which is not in the fleet")

    @classmethod
    def parse(cls, text: str) -> Fleet:
        """Read a fleet as people write it; docs/gpus.md explains every form.

        Parameters
        ----------
        text : str
            Entries, joined by commas or "+":

            - GPUs of this machine: "2,3" are indices as `nvidia-smi` shows them, a UUID or the
              beginning of one works too, and "all" stands for all that can be used (`detect`);
            - budgets, in the order of torch's CUDA devices: "24GiB,12GiB" is 24 GiB on
              ``cuda:0`` and 12 GiB on ``cuda:1``, "2x24GiB" stands for two equal ones;
            - cards of the catalogue: "2xRTX4090+1xRTX3090". The budget of a card is what an empty
              one offers, less `RESERVE_BYTES`;
            - cards with their figures: "MyCard:24GiB,936GB/s,71TFLOPs". Commas up to the next "+"
              belong to the card; the speeds may be left out.

            Budgets and cards may be mixed, and with "virtual:" before them they are virtual GPUs,
            ``vgpu:0`` and so on.

        Raises
        ------
        FleetError
            If the text names no device, more than `MAX_DEVICES`, or one that can't be used.
        UsageError
            If it can't be understood; a card that isn't known is told with the nearest ones.

        Examples
        --------
        >>> Fleet.parse("virtual:2x24GiB,12GiB").names
        ('vgpu:0', 'vgpu:1', 'vgpu:2')
        >>> Fleet.parse("RTX4090+rtx 3060").devices[1].product
        'RTX 3060'
        """
        result = parse.read(text)
        return cls(devices=result.devices, links=result.links)

    @classmethod
    def detect(cls, which: str | None = None) -> Fleet:
        """The GPUs of this machine, with the memory that is free now.

        Each is named as torch names it in this process, whatever CUDA_VISIBLE_DEVICES and
        CUDA_DEVICE_ORDER say. Its budget is its free memory less `RESERVE_BYTES`, in whole
        `STEP_BYTES`; its speeds are the catalogue's (None for a product that isn't in it), and its
        links are what NVML tells of NVLink and PCIe.

        Parameters
        ----------
        which : str, optional
            Indices as `nvidia-smi` shows them, or UUIDs or beginnings of them, separated by
            commas. The fleet has their order. Without it, all that can be used in `nvidia-smi`'s
            order.

        Raises
        ------
        FleetError
            If there is no driver, or a GPU that is named doesn't exist, is named twice, hidden
            from this process, lost, divided (MIG), full or closed by its compute mode: with a
            list of what there is.
        """
        result = detect(which)
        return cls(devices=result.devices, links=result.links)

    @classmethod
    def from_max_memory(cls, max_memory: object) -> Fleet:
        """Take budgets as transformers' and accelerate's ``max_memory`` states them.

        Parameters
        ----------
        max_memory : mapping of int or str to int or str
            Bytes, or sizes like "10GiB" and "10GB", by the number of a CUDA device or the name of
            any. A device with 0 is left out. "cpu" is a device that computes, and is used where a
            device map names it, or when there is no other; with `Constraints(offload=True)` it
            says how much memory the offloaded weights may take.

        Raises
        ------
        FleetError
            If it leaves no device, or names one that can't be.
        UsageError
            If it can't be understood.

        Examples
        --------
        >>> Fleet.from_max_memory({0: "10GiB", 1: 20 * 2**30, "cpu": "30GiB"}).names
        ('cuda:0', 'cuda:1', 'cpu')
        """
        return cls(devices=parse.read_max_memory(max_memory))

    @property
    def names(self) -> tuple[str, ...]:
        """The devices' names, in order."""
        return tuple(device.name for device in self.devices)

    @property
    def budget_bytes(self) -> int:
        """All budgets together; no device can use another one's."""
        return sum(device.budget_bytes for device in self.devices)

    @property
    def gpu_generation(self) -> GpuGeneration:
        """What a workload's memory is reckoned with, on all of them: what takes most on any."""
        gpus = [device for device in self.devices if device.name != "cpu"]
        return GpuGeneration(
            workspace_bytes=max((gpu.workspace_bytes for gpu in gpus), default=0),
            before_ampere=any(gpu.has_bfloat16 is False for gpu in gpus),
        )

    def reserving(self, sizes: Mapping[str, int]) -> Fleet:
        """The same fleet with bytes taken off the budgets of some devices.

        Parameters
        ----------
        sizes : mapping of str to int
            By device. What is negative is given back.

        Raises
        ------
        FleetError
            If nothing is left of a budget, or a device isn't in the fleet.

        Examples
        --------
        >>> Fleet.parse("24GiB,12GiB").reserving({"cuda:1": 2 * 2**30}).budget_bytes // 2**30
        34
        """
        for name, size in sizes.items():
            budget = self.device(name).budget_bytes
            if size >= budget:
                raise FleetError(
                    f"{format_bytes(size)} are to be left free on {name}, and its budget is "
                    f"{format_bytes(budget)}: nothing remains",
                    hint="reserve less, or leave that GPU out",
                )
        return replace(self, devices=tuple(_less(d, sizes.get(d.name, 0)) for d in self.devices))

    def only(self, names: Collection[str]) -> Fleet:
        """The fleet without its other devices, and with the links between those that remain."""
        return Fleet(
            devices=tuple(device for device in self.devices if device.name in names),
            links=tuple(link for link in self.links if {link.source, link.target} <= {*names}),
        )

    def device(self, name: str) -> Device:
        """Find a device by its name.

        Raises
        ------
        FleetError
            If there is none of that name.
        """
        for device in self.devices:
            if device.name == name:
                return device
        raise FleetError(f"{name!r} is not in the fleet", hint=f"it has {', '.join(self.names)}")

    def link(self, source: str, target: str) -> Link | None:
        """Find the link from one device to another; None when its speed is unknown."""
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        return None


def _less(device: Device, num_bytes: int) -> Device:
    return replace(
        device,
        budget_bytes=device.budget_bytes - num_bytes,
        reserve_bytes=device.reserve_bytes + num_bytes,
    )


def _refuse_doubled(what: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise FleetError(f"{what} {name} stands twice in the fleet")
