"""The nodes of a Ray cluster: their GPUs, and a plan of replicas for each kind of node.

Ray counts a node's GPUs and doesn't know them: a task on each node looks. Nodes with the same GPUs
are of one kind. Where the GPUs of a node are alike, several replicas share it, each with as many
as its plan has; where they aren't, Ray can't be told which of them a replica is for, and one
replica has them all.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from duoka.base.units import format_count
from duoka.errors import DuokaError, InfeasibleError, MachineError, UsageError
from duoka.hardware.fleet import Fleet
from duoka.planner.plan import Plan

GPUS = "DUOKA_GPUS"
"""In a node's environment: which GPUs it gives, as ``--gpus`` has it."""
PlanFor = Callable[[Fleet, bool], Plan]
"""Plans for a node's GPUs; where they are alike (True), the plan need not use all of them."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_CONNECT_SECONDS, _LOOK_SECONDS = 5.0, 120.0
_NUMBERS = re.compile(r"([1-9]\d{0,3})(?:-([1-9]\d{0,3}))?", re.ASCII)
Node = dict[str, Any]
"""A node, as `ray.nodes` tells of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The plans of replicas on the nodes of a cluster.

    Parameters
    ----------
    plans : mapping of str to Plan
        By the id of the node.
    names : tuple of str
        Of these nodes.
    gpus_per_replica : int
    room : int
        Replicas that the nodes have GPUs for.
    foreign_ids : tuple of str
        The ids of nodes with GPUs that hold no replica.
    """

    plans: Mapping[str, Plan]
    names: tuple[str, ...]
    gpus_per_replica: int
    room: int
    foreign_ids: tuple[str, ...]


def connect() -> None:
    """Join the cluster of this machine, or of RAY_ADDRESS."""
    handler, address = signal.getsignal(signal.SIGTERM), os.environ.get("RAY_ADDRESS") or "auto"
    try:
        if address != "auto":  # Ray tries for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except Exception as error:  # of half a dozen classes
        raise MachineError(
            f"no Ray cluster is reachable: {_line(error)}",
            hint="run `ray start --head` here, and `ray start --address …` on the other machines",
        ) from error
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray takes it


def plan_nodes(gpus: str | None, source: str, plan_for: PlanFor) -> tuple[ClusterPlan, list[str]]:
    """Plan a replica for each kind of node; return the plans, and the nodes left out.

    A node gives `gpus`, where its environment doesn't say. Ray keeps equally many GPUs for each
    replica: nodes whose plan needs another number of them are left out.
    """
    nodes_by_fleet: dict[Fleet, list[Node]] = {}
    left_out = []
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    nodes.sort(key=lambda node: node["NodeName"])
    for node, outcome in zip(nodes, _look_at(nodes, gpus, source), strict=True):
        if isinstance(outcome, Fleet):
            nodes_by_fleet.setdefault(outcome, []).append(node)
        else:
            left_out.append(f"{_name(node)}: {outcome}")
    planned: dict[int, list[tuple[Node, Plan]]] = {}
    for fleet, group in nodes_by_fleet.items():
        try:
            plan, number = _plan_replica(fleet, plan_for)
        except InfeasibleError as error:
            left_out += [f"{_name(node)}: {error}" for node in group]
        else:
            planned.setdefault(number, []).extend((node, plan) for node in group)
    if not planned:
        raise InfeasibleError(
            "\n".join(["no node of the cluster can hold the model", *left_out]),
            hint="check the GPUs that Ray counted at its start: `ray status`",
        )
    # Ray keeps equally many GPUs for each replica of a deployment. With two nodes of 2 equal GPUs
    # whose replicas need 1 (room for 4), and a node of unequal GPUs whose replica needs both (room
    # for 1), replicas have 1 GPU, and the last node is left out.
    rooms = {n: sum(_num_gpus(node) // n for node, _ in pairs) for n, pairs in planned.items()}
    num_gpus = max(rooms, key=rooms.__getitem__)
    for number in planned.keys() - {num_gpus}:
        reason = f"a replica needs {format_count(number, 'GPU')} there and {num_gpus} elsewhere"
        left_out += [f"{_name(node)}: {reason}" for node, _ in planned[number]]
    plans = {node["NodeID"]: plan for node, plan in planned[num_gpus]}
    cluster = ClusterPlan(
        plans=plans,
        names=tuple(_name(node) for node, _ in planned[num_gpus]),
        gpus_per_replica=num_gpus,
        room=rooms[num_gpus],
        foreign_ids=tuple(node["NodeID"] for node in nodes if node["NodeID"] not in plans),
    )
    return cluster, left_out


def _plan_replica(fleet: Fleet, plan_for: PlanFor) -> tuple[Plan, int]:
    """Plan a replica for a node's GPUs; return the plan and the number of GPUs for Ray."""
    are_alike = len({replace(device, name="cuda:0") for device in fleet.devices}) == 1
    plan = plan_for(fleet, are_alike)
    if not are_alike:
        return plan, len(fleet.devices)
    # Ray gives a replica any of them, and torch counts those from 0 on.
    kind = fleet.names[0].partition(":")[0]
    names = {name: f"{kind}:{number}" for number, name in enumerate(plan.devices)}
    renamed = plan.move_to(
        {name: replace(plan.fleet.device(name), name=now) for name, now in names.items()}
    )
    return renamed, len(plan.devices)


def _look_at(nodes: Sequence[Node], gpus: str | None, source: str) -> Iterator[Fleet | str]:
    """Yield the GPUs of each node, or the reason against it."""
    task = ray.remote(look)
    answers = [
        task.options(
            num_cpus=0,
            num_gpus=_num_gpus(node),
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote(gpus, source, version("duoka"))
        for node in nodes
    ]
    deadline = time.monotonic() + _LOOK_SECONDS
    for node, answer in zip(nodes, answers, strict=True):
        outcome: Fleet | str
        try:
            outcome = ray.get(answer, timeout=max(1.0, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            ray.cancel(answer, force=True)
            outcome = "its GPUs are in use: no answer within two minutes"
        except ray.exceptions.RayError as error:
            outcome = f"duoka fails there: {_line(error)}"
        if isinstance(outcome, Fleet) and len(outcome.devices) != _num_gpus(node):
            outcome = f"{len(outcome.devices)} GPUs are there, and Ray counts {_num_gpus(node)}"
        yield outcome


def look(gpus: str | None, source: str, server_version: str) -> Fleet | str:
    """Return the GPUs of this node without their identities, or the reason against it."""
    if version("duoka") != server_version:
        return f"it has duoka {version('duoka')}, and the server {server_version}"
    if Path(source).is_absolute() and not Path(source).is_dir():
        return f"{source} doesn't exist"
    sort_visible()
    try:
        fleet = Fleet.parse(os.environ.get(GPUS) or gpus or "all")
    except DuokaError as error:
        return str(error)
    devices = [replace(device, uuid="", pci_address="") for device in fleet.devices]
    return replace(fleet, devices=tuple(devices))


def sort_visible() -> None:
    """Number this process's GPUs as their machine does, in whatever order Ray gives them."""
    visible = os.environ.get(_VISIBLE, "").split(",")
    if all(map(str.isdecimal, visible)):
        os.environ[_VISIBLE] = ",".join(sorted(visible, key=int))


def _num_gpus(node: Node) -> int:
    return int(node["Resources"]["GPU"])


def _name(node: Node) -> str:
    return f"{node['NodeName']} ({node['NodeID'][:8]})"


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip()[:300]


# ── how many replicas ──


def read_bounds(text: str | None) -> tuple[int, int] | None:
    """Read ``N`` or ``MIN-MAX``; None for ``auto``, and for nothing: as many as fit."""
    if text in (None, "auto"):
        return None
    match = _NUMBERS.fullmatch(text or "")
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if low > high:
        raise UsageError(
            f"{text!r:.40} is not a number of replicas",
            hint='use a number, a range such as 2-6, or "auto" for as many as fit',
        )
    return low, high


def choose_bounds(bounds: tuple[int, int] | None, room: int) -> tuple[int, int]:
    """Return the least and the most replicas; by default as many as there is room for."""
    low, high = bounds or (room, room)
    if low > room:
        raise InfeasibleError(
            f"{low} replicas don't fit on these nodes; {room} fit",
            hint=f"use --replicas {room}, or more nodes",
        )
    return low, high
