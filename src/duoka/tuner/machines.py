"""Several machines with the same GPUs: their fleet, and a plan as one of them sees it.

GPUs are numbered on from one machine to the next: of two machines with cuda:0 and cuda:1 the second
one has cuda:2 and cuda:3. A process sees its own machine first, where these are torch's names.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from duoka.hardware.fleet import Fleet
from duoka.planner.plan import Plan


def num_machines() -> int:
    """How many machines torchrun has started processes on."""
    if not torch.distributed.is_torchelastic_launched():
        return 1
    return int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"])


def this_machine() -> int:
    """The number of the machine that this process is on."""
    return int(os.environ["RANK"]) // int(os.environ["LOCAL_WORLD_SIZE"])


def machine_of(device: str, fleet: Fleet, machines: int) -> int:
    """The machine that has a device of a fleet over several."""
    return _index(device) // _stride(fleet, machines)


def over_machines(fleet: Fleet, machines: int) -> Fleet:
    """The GPUs of machines that all have a fleet's; which ones these are there isn't known."""
    stride = _stride(fleet, 1)

    def renumbered(name: str, machine: int) -> str:
        return _named(name, _index(name) + machine * stride)

    numbers = range(machines)
    return Fleet(
        devices=tuple(
            replace(device, name=renumbered(device.name, number), uuid="", pci_address="")
            for number in numbers
            for device in fleet.devices
        ),
        links=tuple(
            replace(
                link, source=renumbered(link.source, number), target=renumbered(link.target, number)
            )
            for number in numbers
            for link in fleet.links
        ),
    )


def of_first_machine(fleet: Fleet, machines: int) -> Fleet:
    """The GPUs that the first one of some machines has."""
    devices = [d for d in fleet.devices if machine_of(d.name, fleet, machines) == 0]
    names = {device.name for device in devices}
    links = (link for link in fleet.links if {link.source, link.target} <= names)
    return Fleet(devices=tuple(devices), links=tuple(links))


def seen_from(plan: Plan, machine: int, machines: int) -> Plan:
    """A plan over several machines in the names that one of them has: its own GPUs are first."""
    stride = _stride(plan.fleet, machines)

    def seen(name: str) -> str:
        return _named(name, (_index(name) - machine * stride) % (machines * stride))

    return plan.moved({d.name: replace(d, name=seen(d.name)) for d in plan.fleet.devices})


def _stride(fleet: Fleet, machines: int) -> int:
    """How many numbers a machine's GPUs take."""
    return (max(map(_index, fleet.names)) + 1) // machines


def _index(name: str) -> int:
    return int(name.partition(":")[2] or 0)


def _named(name: str, index: int) -> str:
    return f"{name.partition(':')[0]}:{index}"
