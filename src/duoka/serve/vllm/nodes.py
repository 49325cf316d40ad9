"""Nodes: the machines that share a plan, each with its GPUs.

A plan has a list of GPUs, without their machines. The GPUs of all machines are numbered
consecutively: the first machine has the first GPUs of the fleet, the second machine the next ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from duoka.base.units import format_count
from duoka.errors import UsageError
from duoka.hardware.device import Device
from duoka.report.export.stages import LayerPipeline

_NODE = re.compile(r"([A-Za-z0-9.:_-]{1,253})=([1-9][0-9]{0,3})", re.ASCII)
_EXAMPLE = "10.0.0.1=2,10.0.0.2=2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine: its address for the other machines, and its number of GPUs."""

    address: str
    num_gpus: int


def parse_nodes(text: str) -> tuple[Node, ...]:
    """Parse a list ``ADDRESS=GPUS,…`` of machines; the first machine serves requests.

    Raises
    ------
    UsageError
        If the text is not such a list, or names a machine twice.

    Examples
    --------
    >>> [node.num_gpus for node in parse_nodes("10.0.0.1=2,10.0.0.2=2")]
    [2, 2]
    """
    matches = [_NODE.fullmatch(part.strip()) for part in text.split(",")]
    nodes = tuple(Node(address=m[1], num_gpus=int(m[2])) for m in matches if m)
    if len({node.address for node in nodes}) < len(matches):
        raise UsageError(
            f"{text[:80]!r} is not a list of distinct machines with their numbers of GPUs",
            hint=f"use an address and a number for each machine: {_EXAMPLE}",
        )
    return nodes


def devices_by_node(
    pipeline: LayerPipeline, nodes: Sequence[Node]
) -> list[tuple[Node, tuple[Device, ...]]]:
    """Return the machines in the order of stages, each with the GPUs of its stages.

    The GPUs are named by their numbers on their machine. Raises UsageError unless the stages are
    as vLLM assigns ranks: the same number on each machine, one machine after another.
    """
    pairs = ((_find_node(device, nodes), device) for device in pipeline.devices)
    parts = [
        (node, tuple(replace(device, name=f"cuda:{number}") for (_, number), device in run))
        for node, run in groupby(pairs, key=lambda part: part[0][0])
    ]
    order = [node for node, _ in parts]
    is_in_order = order[0] == nodes[0] and len(set(order)) == len(order)
    if not is_in_order or len({len(run) for _, run in parts}) > 1:
        uses = ", ".join(f"{n.address} {format_count(len(run), 'GPU')}" for n, run in parts)
        raise UsageError(
            f"vLLM starts on the first machine, {nodes[0].address}, uses each machine once, and "
            f"runs the same number of stages on each; the plan has: {uses}",
            hint="list the GPUs in --gpus in the order of the machines, with the same number of "
            "GPUs for each; their sizes may differ",
        )
    return parts


def _find_node(device: Device, nodes: Sequence[Node]) -> tuple[Node, int]:
    """Return the machine of a GPU, and the GPU's number there."""
    if device.uuid:
        raise UsageError(
            f"{device.name} was detected on this machine, and the plan is for several machines",
            hint="declare the GPUs of all machines, one after another: --gpus 2x24GiB,2x16GiB",
        )
    number = int(device.name.partition(":")[2] or 0)
    for node in nodes:
        if number < node.num_gpus:
            return node, number
        number -= node.num_gpus
    total = sum(node.num_gpus for node in nodes)
    raise UsageError(
        f"the plan uses {device.name}, and the machines have {format_count(total, 'GPU')}",
        hint="list the GPUs of all machines in --gpus",
    )
