"""What was measured on GPUs (`duoka bench --calibrate`), in the place of published figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from duoka.errors import FleetError

from . import calibration, catalogue, nvml
from .calibration import Calibration, GpuFigures
from .device import RESERVE_BYTES, Device, Link

NOTHING = Calibration(driver="", torch="")


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """One end of a link: a device's name, and its GPU's UUID and product, empty where unknown."""

    name: str
    uuid: str = ""
    product: str = ""


def for_driver(driver: str) -> Calibration:
    """What was measured under a version of the driver."""
    return NOTHING if calibration.is_empty() else calibration.find(driver)


def for_this_driver() -> Calibration:
    """What was measured under this machine's driver; nothing where there is none."""
    if calibration.is_empty():
        return NOTHING
    try:
        return calibration.find(nvml.driver_version())
    except FleetError:
        return NOTHING


def of_card(card: catalogue.Card, found: Calibration) -> GpuFigures | None:
    """What was measured on cards of one kind of the catalogue."""
    for figures in found.gpus:
        if catalogue.of_product(figures.product, figures.memory_bytes) == card:
            return figures
    return None


def reserve_bytes(figures: GpuFigures | None) -> int:
    """What is kept out of a budget."""
    return RESERVE_BYTES if figures is None else figures.reserve_bytes


def with_figures(device: Device, figures: GpuFigures | None) -> Device:
    """The device as fast as it was measured; what it keeps out of its budget isn't changed."""
    if figures is None:
        return device
    told = ["memory_bytes_per_second", "flops_per_second", "float32_flops_per_second"]
    told += ["launch_seconds", "reserve_bytes"]
    from_host = figures.from_pinned_bytes_per_second
    return replace(
        device,
        memory_bytes_per_second=figures.memory_bytes_per_second,
        flops_per_second=figures.flops_per_second,
        float32_flops_per_second=figures.float32_flops_per_second,
        launch_seconds=figures.launch_seconds,
        host_bytes_per_second=device.host_bytes_per_second if from_host is None else from_host,
        measured=(*told, *(() if from_host is None else ("host_bytes_per_second",))),
    )


def with_links(links: Iterable[Link], ends: Sequence[End], found: Calibration) -> tuple[Link, ...]:
    """The links, those that were measured as fast as that was."""
    known = {(link.source, link.target): link for link in links}
    for link in _measured(ends, found):
        known[link.source, link.target] = link
    return tuple(known.values())


def _measured(ends: Sequence[End], found: Calibration) -> Iterator[Link]:
    for source in ends if found.links else ():
        for target in ends:
            figures = None
            if source.uuid:
                figures = found.between(source.uuid, target.uuid)
            elif source.product:
                figures = found.between_products(source.product, target.product)
            if figures is not None and source != target:
                yield Link(
                    source=source.name,
                    target=target.name,
                    bytes_per_second=figures.bytes_per_second,
                    latency_seconds=figures.latency_seconds,
                    measured=True,
                )
