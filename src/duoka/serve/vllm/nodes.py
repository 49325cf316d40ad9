"""Nodes: the machines that share a plan, each with its GPUs.

A plan knows GPUs and not where they are. They are numbered through: the first node has the first
ones of the fleet, the second one those after them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from duoka.base.units import format_count
from duoka.errors import UsageError
from duoka.hardware.device import Device
from duoka.report.export.stages import Pipeline

_ADDRESS = re.compile(r"[A-Za-z0-9.:_-]{1,253}", re.ASCII)
_EXAMPLE = "10.0.0.1=2,10.0.0.2=2"
_MOST_NODES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine: the address that the others know it by, and how many GPUs it has."""

    address: str
    num_gpus: int


def parse_nodes(text: str) -> tuple[Node, ...]:
    """Read the machines as people write them, the one that is to answer first.

    Raises
    ------
    UsageError
        If it can't be understood, or names a machine twice.

    Examples
    --------
    >>> [node.num_gpus for node in parse_nodes("10.0.0.1=2,10.0.0.2=2")]
    [2, 2]
    """
    nodes = tuple(_node(part.strip()) for part in text.split(","))
    addresses = [node.address for node in nodes]
    if len(set(addresses)) < len(addresses) or len(nodes) > _MOST_NODES:
        raise UsageError(
            f"{text[:80]!r} names a machine twice, or more than {_MOST_NODES}",
            hint="each machine once, with all of its GPUs",
        )
    return nodes


def _node(part: str) -> Node:
    address, sign, number = part.rpartition("=")
    is_number = number.isascii() and number.isdecimal() and len(number) <= 4 and int(number) > 0
    if not sign or not is_number or not _ADDRESS.fullmatch(address):
        raise UsageError(
            f"{part[:80]!r} is not a machine and how many GPUs it has",
            hint=f"write an address and a number for each: {_EXAMPLE}",
        )
    return Node(address=address, num_gpus=int(number))


def devices_by_node(
    pipeline: Pipeline, nodes: Sequence[Node]
) -> list[tuple[Node, tuple[Device, ...]]]:
    """The machines that have stages, in order, and the GPUs of these by their number there.

    vLLM gives every machine as many ranks as the next one, and the ranks in order.
    """
    devices = [stage.device for stage in pipeline.stages]
    _refuse_detected(devices)
    parts = [
        (node, tuple(replace(device, name=f"cuda:{number}") for _, number, device in run))
        for node, run in (
            (node, list(run))
            for node, run in groupby(
                ((*_place(device, nodes), device) for device in devices), key=lambda part: part[0]
            )
        )
    ]
    order = [node for node, _ in parts]
    if len(set(order)) < len(order):
        again = next(node for node in order if order.count(node) > 1)
        raise UsageError(
            f"the plan comes to {again.address} twice, and vLLM to each machine once",
            hint="give the GPUs to --gpus in the order in which the machines come",
        )
    if order[0] != nodes[0]:
        raise UsageError(
            f"the plan begins on {order[0].address}, which is where vLLM answers, and the first "
            f"of the machines is {nodes[0].address}",
            hint=f"plan with the GPUs of {order[0].address} first, and name that machine first",
        )
    counts = [len(run) for _, run in parts]
    if len(set(counts)) > 1:
        uses = ", ".join(
            f"{node.address} {format_count(count, 'GPU')}"
            for (node, _), count in zip(parts, counts, strict=True)
        )
        raise UsageError(
            f"vLLM runs as many stages on each machine as on the next one; the plan has: {uses}",
            hint="plan with equally many GPUs of each; how large they are may differ",
        )
    return parts


def _place(device: Device, nodes: Sequence[Node]) -> tuple[Node, int]:
    """The node of a GPU, and the GPU's number there."""
    number = int(device.name.partition(":")[2] or 0)
    for node in nodes:
        if number < node.num_gpus:
            return node, number
        number -= node.num_gpus
    total = sum(node.num_gpus for node in nodes)
    raise UsageError(
        f"the plan uses {device.name}, and the machines have {format_count(total, 'GPU')}",
        hint="count the GPUs of all machines as they stand in --gpus",
    )


def _refuse_detected(devices: Sequence[Device]) -> None:
    detected = next((device for device in devices if device.uuid), None)
    if detected is not None:
        raise UsageError(
            f"{detected.name} was found on this machine, and the plan is for several",
            hint="declare the GPUs of all machines, one after another: --gpus 2x24GiB,2x16GiB",
        )
