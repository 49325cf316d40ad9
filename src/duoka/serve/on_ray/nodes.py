"""The nodes of a Ray cluster: their GPUs, and a plan for the replicas on each node.

Ray only counts a node's GPUs, so a task on each node detects their models and memory. Nodes with
the same GPUs get the same plan. If the GPUs of a node are identical, several replicas share the
node, each with as many GPUs as its plan uses. If they differ, one replica gets all of them, since
Ray can't assign specific GPUs to a replica.
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
"""The variable in a node's environment that selects its GPUs, in the syntax of ``--gpus``."""
PlanFor = Callable[[Fleet, bool], Plan]
"""A function that plans a replica for a node's GPUs.

The second argument is True if the GPUs are identical; the plan may then use only some of them.
"""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_CONNECT_SECONDS, _LOOK_SECONDS = 5.0, 120.0
_NUMBERS = re.compile(r"([1-9]\d{0,3})(?:-([1-9]\d{0,3}))?", re.ASCII)
Node = dict[str, Any]
"""A node, as `ray.nodes` describes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The plans of replicas on the nodes of a cluster.

    Parameters
    ----------
    plans : mapping of str to Plan
        The plan of a replica on each node, by the node's id.
    names : tuple of str
        The names of these nodes.
    gpus_per_replica : int
    room : int
        The most replicas for which these nodes have GPUs.
    foreign_ids : tuple of str
        The ids of the nodes with GPUs on which no replica may run.
    """

    plans: Mapping[str, Plan]
    names: tuple[str, ...]
    gpus_per_replica: int
    room: int
    foreign_ids: tuple[str, ...]


def connect() -> None:
    """Connect to the cluster at RAY_ADDRESS, by default the cluster of this machine."""
    handler, address = signal.getsignal(signal.SIGTERM), os.environ.get("RAY_ADDRESS") or "auto"
    try:
        if address != "auto":  # fail fast: Ray would retry for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except Exception as error:  # Ray raises half a dozen classes
        raise MachineError(
            f"no Ray cluster is reachable: {_last_line(error)}",
            hint="run `ray start --head` here, and `ray start --address …` on the other machines",
        ) from error
    finally:
        signal.signal(signal.SIGTERM, handler)  # which Ray replaces


def plan_nodes(gpus: str | None, source: str, plan_for: PlanFor) -> tuple[ClusterPlan, list[str]]:
    """Plan a replica for each node with GPUs; return the plans, and the reasons for excluded nodes.

    `gpus` selects a node's GPUs unless its environment does (`GPUS`). `source` is the model, which
    must exist on a node if it is an absolute path. Ray reserves the same number of GPUs for each
    replica of a deployment. The number that gives the most replicas is chosen; nodes whose plan
    needs another number are excluded.
    """
    nodes_by_fleet: dict[Fleet, list[Node]] = {}
    exclusions = []
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    nodes.sort(key=lambda node: node["NodeName"])
    for node, outcome in zip(nodes, _look_at(nodes, gpus, source), strict=True):
        if isinstance(outcome, Fleet):
            nodes_by_fleet.setdefault(outcome, []).append(node)
        else:
            exclusions.append(f"{_describe_node(node)}: {outcome}")
    planned: dict[int, list[tuple[Node, Plan]]] = {}
    for fleet, group in nodes_by_fleet.items():
        try:
            plan, number = _plan_replica(fleet, plan_for)
        except InfeasibleError as error:
            exclusions += [f"{_describe_node(node)}: {error}" for node in group]
        else:
            planned.setdefault(number, []).extend((node, plan) for node in group)
    if not planned:
        raise InfeasibleError(
            "\n".join(["no node of the cluster can hold the model", *exclusions]),
            hint="check the GPUs that Ray counted at its start: `ray status`",
        )
    # Example: on two nodes with 2 identical GPUs each, a replica needs 1 GPU, so 4 fit; on a node
    # with 2 different GPUs, a replica needs both, so 1 fits. Replicas get 1 GPU each, and the last
    # node is excluded.
    rooms = {n: sum(_num_gpus(node) // n for node, _ in pairs) for n, pairs in planned.items()}
    num_gpus = max(rooms, key=rooms.__getitem__)
    for number in planned.keys() - {num_gpus}:
        reason = f"a replica needs {format_count(number, 'GPU')} there and {num_gpus} elsewhere"
        exclusions += [f"{_describe_node(node)}: {reason}" for node, _ in planned[number]]
    plans = {node["NodeID"]: plan for node, plan in planned[num_gpus]}
    cluster = ClusterPlan(
        plans=plans,
        names=tuple(_describe_node(node) for node, _ in planned[num_gpus]),
        gpus_per_replica=num_gpus,
        room=rooms[num_gpus],
        foreign_ids=tuple(node["NodeID"] for node in nodes if node["NodeID"] not in plans),
    )
    return cluster, exclusions


def _plan_replica(fleet: Fleet, plan_for: PlanFor) -> tuple[Plan, int]:
    """Plan a replica for a node's GPUs; return the plan and the number of GPUs to reserve."""
    are_identical = len({replace(device, name="cuda:0") for device in fleet.devices}) == 1
    plan = plan_for(fleet, are_identical)
    if not are_identical:
        return plan, len(fleet.devices)
    # Ray gives the replica any of the identical GPUs, which torch numbers from 0 on.
    kind = fleet.names[0].partition(":")[0]
    names = {name: f"{kind}:{number}" for number, name in enumerate(plan.devices)}
    renamed = plan.move_to(
        {name: replace(plan.fleet.device(name), name=now) for name, now in names.items()}
    )
    return renamed, len(plan.devices)


def _look_at(nodes: Sequence[Node], gpus: str | None, source: str) -> Iterator[Fleet | str]:
    """Call `look` on each node; yield the node's fleet, or the reason to exclude the node."""
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
            outcome = f"duoka fails there: {_last_line(error)}"
        if isinstance(outcome, Fleet) and len(outcome.devices) != _num_gpus(node):
            outcome = f"{len(outcome.devices)} GPUs are there, and Ray counts {_num_gpus(node)}"
        yield outcome


def look(gpus: str | None, source: str, server_version: str) -> Fleet | str:
    """Return this node's GPUs, without UUIDs and PCI addresses, or a reason for exclusion."""
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
    """Sort CUDA_VISIBLE_DEVICES, so that GPUs are in the machine's order, whatever Ray's is."""
    visible = os.environ.get(_VISIBLE, "").split(",")
    if all(map(str.isdecimal, visible)):
        os.environ[_VISIBLE] = ",".join(sorted(visible, key=int))


def _num_gpus(node: Node) -> int:
    """Return the number of a node's GPUs by Ray's count."""
    return int(node["Resources"]["GPU"])


def _describe_node(node: Node) -> str:
    """Return a node's name and the beginning of its id, for messages."""
    return f"{node['NodeName']} ({node['NodeID'][:8]})"


def _last_line(error: Exception) -> str:
    """Return the last line of an error's text, or its class if the text is empty."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[-1].strip()[:300]


# ── number of replicas ──


def read_bounds(text: str | None) -> tuple[int, int] | None:
    """Parse ``N`` or ``MIN-MAX``; return None, as many as fit, for ``auto`` or no text."""
    if text in (None, "auto"):
        return None
    match = _NUMBERS.fullmatch(text or "")
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if low > high:
        hint = 'use a number, a range such as 2-6, or "auto" for as many as fit'
        raise UsageError(f"{text!r:.40} is not a number of replicas", hint=hint)
    return low, high


def choose_bounds(bounds: tuple[int, int] | None, room: int) -> tuple[int, int]:
    """Return the smallest and largest number of replicas; by default as many as fit (`room`)."""
    low, high = bounds or (room, room)
    if low > room:
        hint = f"use --replicas {room}, or more nodes"
        raise InfeasibleError(f"{low} replicas don't fit on these nodes; {room} fit", hint=hint)
    return low, high
