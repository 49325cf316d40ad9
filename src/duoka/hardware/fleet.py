"""Fleet: usable devices with their budgets, and the links between them.

A device's name is torch's: ``cuda:0``, ``cpu``, ``vgpu:1``. A budget limits the memory *reserved*
by the caching allocator. CUDA's context and library overhead are not part of a budget: they are
subtracted when a budget is derived from free memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from duoka.base.units import format_bytes
from duoka.errors import FleetError

from . import parse
from .detect import detect
from .device import MAX_DEVICES, Device, Link
from .gpu_generation import GpuGeneration, has_expandable_segments
from .host import HOST_PRODUCT


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Devices to place a model on.

    Parameters
    ----------
    devices : tuple of Device
        In the user's order.
    links : tuple of Link
        Known links; the speed between two devices without a link is unknown.

    Raises
    ------
    FleetError
        If there is no device, if there are more than `MAX_DEVICES`, or if a name occurs twice.
    """

    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        names = [device.name for device in self.devices]
        if not names:
            raise FleetError("the fleet has no device", hint=parse.FORMS)
        if len(names) > MAX_DEVICES:
            raise FleetError(f"{len(names)} devices; the limit is {MAX_DEVICES}")
        for name, count in Counter(names).items():
            if count > 1:
                raise FleetError(f"the device {name} occurs twice in the fleet")

    @classmethod
    def parse(cls, text: str) -> Fleet:
        """Parse a fleet in the form of ``--gpus``; docs/gpus.md explains every form.

        Parameters
        ----------
        text : str
            Entries, joined by commas or "+":

            - GPUs of this machine: "2,3" are `nvidia-smi`'s indices; UUIDs and beginnings of UUIDs
              work too, and "all" stands for all usable ones (`detect`);
            - budgets, in the order of torch's CUDA devices: "24GiB,12GiB" is 24 GiB on
              ``cuda:0`` and 12 GiB on ``cuda:1``, "2x24GiB" stands for two equal ones;
            - cards of the catalogue: "2xRTX4090+1xRTX3090". The budget of a card is the memory
              offered by an empty one, less `RESERVE_BYTES`;
            - cards with their figures: "MyCard:24GiB,936GB/s,71TFLOPs". Commas up to the next "+"
              belong to the card; the speeds are optional.

            Budgets and cards may be mixed, and with "virtual:" before them they are virtual GPUs,
            ``vgpu:0`` and so on.

        Raises
        ------
        FleetError
            If the text names no device, more than `MAX_DEVICES`, or an unusable one.
        UsageError
            If the text is invalid; for an unknown card with the nearest known ones.

        Examples
        --------
        >>> Fleet.parse("virtual:2x24GiB,12GiB").names
        ('vgpu:0', 'vgpu:1', 'vgpu:2')
        >>> Fleet.parse("RTX4090+rtx 3060").devices[1].product
        'RTX 3060'
        """
        devices, links = parse.read(text)
        return cls(devices=devices, links=links)

    @classmethod
    def detect(cls, which: str | None = None) -> Fleet:
        """Detect the GPUs of this machine, with their free memory.

        A device has torch's name in this process, under CUDA_VISIBLE_DEVICES and
        CUDA_DEVICE_ORDER. The budget is the free memory less `RESERVE_BYTES`, in whole
        `STEP_BYTES`; the speeds are the catalogue's (None for an unknown product), and the links
        follow from NVML's data about NVLink and PCIe.

        Parameters
        ----------
        which : str, optional
            `nvidia-smi`'s indices, or UUIDs or beginnings of UUIDs, separated by commas, in the
            fleet's order. By default all usable GPUs in `nvidia-smi`'s order.

        Raises
        ------
        FleetError
            If there is no driver, or a given GPU doesn't exist, is named twice, hidden from this
            process, lost, divided (MIG), full or closed by its compute mode; with a list of the
            machine's GPUs.
        """
        devices, links = detect(which)
        return cls(devices=devices, links=links)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the devices, in order."""
        return tuple(device.name for device in self.devices)

    @property
    def budget_bytes(self) -> int:
        """Sum of the budgets; a device can't use the budget of another."""
        return sum(device.budget_bytes for device in self.devices)

    @property
    def host(self) -> Device | None:
        """The device ``cpu`` beside GPUs; None if the fleet has no GPU or no ``cpu``.

        Its budget is the memory for weights that stay on the host; its memory bandwidth is None if
        unknown.
        """
        return self.device("cpu") if "cpu" in self.names and len(self.names) > 1 else None

    @property
    def gpu_generation(self) -> GpuGeneration:
        """The generation with the highest memory needs, which the forecast assumes for all GPUs."""
        # A workload has one generation, and any stage may run on any GPU: so the largest workspace
        # and the attention of the oldest generation are assumed for all GPUs.
        gpus = [device for device in self.devices if device.name != "cpu"]
        return GpuGeneration(
            workspace_bytes=max((gpu.workspace_bytes for gpu in gpus), default=0),
            before_ampere=any(gpu.has_bfloat16 is False for gpu in gpus),
            expandable_segments=bool(gpus) and has_expandable_segments(),
        )

    def reserving(self, sizes: Mapping[str, int]) -> Fleet:
        """Return the fleet with bytes subtracted from the budgets of some devices.

        Parameters
        ----------
        sizes : mapping of str to int
            Bytes by device name. A negative number enlarges the budget.

        Raises
        ------
        FleetError
            If no bytes of a budget remain, or a device isn't in the fleet.

        Examples
        --------
        >>> Fleet.parse("24GiB,12GiB").reserving({"cuda:1": 2 * 2**30}).budget_bytes // 2**30
        34
        """
        for name, size in sizes.items():
            budget = self.device(name).budget_bytes
            if size >= budget:
                raise FleetError(
                    f"{format_bytes(size)} are reserved on {name}, whose budget is "
                    f"{format_bytes(budget)}: no memory remains",
                    hint="reserve less, or remove that GPU from --gpus",
                )
        return replace(self, devices=tuple(_shrink(d, sizes.get(d.name, 0)) for d in self.devices))

    def with_host(self, host: Device | str) -> Fleet:
        """Return the fleet with host memory for weights, in place of a device ``cpu``.

        No module runs there: a plan uses it with `Constraints(offload=True)` only.

        Parameters
        ----------
        host : Device or str
            A device ``cpu``, such as `host_of_this_machine` returns, or the size and optionally the
            bandwidth in the form of ``--host-memory``.

        Raises
        ------
        FleetError
            If the fleet has no GPU.
        UsageError
            If the text is invalid.

        Examples
        --------
        >>> host = Fleet.parse("2xRTX3090").with_host("64GiB,60GB/s").host
        >>> host.budget_bytes // 2**30, host.memory_bytes_per_second
        (64, 60000000000.0)
        """
        device = parse.read_host(host) if isinstance(host, str) else host
        gpus = self._only_gpus()
        return replace(gpus, devices=(*gpus.devices, replace(device, product=HOST_PRODUCT)))

    def split_host(self) -> tuple[Fleet, Device | None]:
        """Separate the host memory that `with_host` added; None if the fleet has none.

        Another device ``cpu``, on which modules may run, stays in the fleet.
        """
        host = self.host
        is_declared = host is not None and host.product == HOST_PRODUCT
        return (self._only_gpus(), host) if is_declared else (self, None)

    def _only_gpus(self) -> Fleet:
        return self.only([name for name in self.names if name != "cpu"])

    def only(self, names: Collection[str]) -> Fleet:
        """Return the fleet of the given devices alone, with the links between them."""
        return Fleet(
            devices=tuple(device for device in self.devices if device.name in names),
            links=tuple(link for link in self.links if {link.source, link.target} <= {*names}),
        )

    def device(self, name: str) -> Device:
        """Find a device by its name.

        Raises
        ------
        FleetError
            If there is no device of this name.
        """
        for device in self.devices:
            if device.name == name:
                return device
        raise FleetError(f"{name!r} is not in the fleet", hint=f"it has {', '.join(self.names)}")

    def link(self, source: str, target: str) -> Link | None:
        """Return the link from one device to another; None if its speed is unknown."""
        links = (link for link in self.links if (link.source, link.target) == (source, target))
        return next(links, None)


def _shrink(device: Device, num_bytes: int) -> Device:
    """Move bytes from the budget of a device to its reserve."""
    return replace(
        device,
        budget_bytes=device.budget_bytes - num_bytes,
        reserve_bytes=device.reserve_bytes + num_bytes,
    )
