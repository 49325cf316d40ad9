"""Nodes: what GPUs the nodes of a Ray cluster have; a plan and replicas for each kind of them.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from duoka.errors import DuokaError, InfeasibleError, MachineError, UsageError
from duoka.hardware.fleet import Fleet
from duoka.planner.plan import Plan

GPUS = "DUOKA_GPUS"
"""In a node's environment: which GPUs it gives, as ``--gpus`` has it."""
PlanFor = Callable[[Fleet, bool], Plan]
"""The plan for a node's GPUs. Where they are alike, which is said, it need not use all of them."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_CONNECT_SECONDS, _LOOK_SECONDS = 5.0, 120.0
_NUMBERS = re.compile(r"([1-9]\d{0,3})(?:-([1-9]\d{0,3}))?", re.ASCII)
Node = dict[str, Any]
"""A node, as `ray.nodes` tells of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """Nodes with the same GPUs, which have room for so many replicas.

    A replica there has a `plan`, and Ray keeps so many `gpus` for it; `foreign_ids` are the other
    nodes with GPUs.
    """

    nodes: tuple[str, ...]
    plan: Plan
    gpus: int
    room: int
    foreign_ids: tuple[str, ...]


def connect() -> None:
    """Join the cluster that runs on this machine, or the one that RAY_ADDRESS names."""
    handler, address = signal.getsignal(signal.SIGTERM), os.environ.get("RAY_ADDRESS") or "auto"
    try:
        if address != "auto":  # Ray tries for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level="error")
    except Exception as error:  # of half a dozen classes
        raise MachineError(
            f"no Ray cluster is reached: {_line(error)}",
            hint="`ray start --head` here, and `ray start --address …` on the other machines",
        ) from error
    finally:
        signal.signal(signal.SIGTERM, handler)  # Ray takes it


def find_kinds(
    gpus: str | None, source: str, plan_for: PlanFor
) -> tuple[list[NodeKind], list[str]]:
    """The kinds of nodes that hold the model, and why others don't.

    A node gives `gpus`, where its environment doesn't say.
    """
    alike: dict[Fleet, list[Node]] = {}
    left_out = []
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    for node, seen in zip(nodes, _look_at(nodes, gpus, source), strict=True):
        if isinstance(seen, Fleet):
            alike.setdefault(seen, []).append(node)
        else:
            left_out.append(f"{_name(node)}: {seen}")
    kinds = []
    for fleet, group in alike.items():
        try:
            kinds.append(_kind(fleet, group, nodes, plan_for))
        except InfeasibleError as error:
            left_out += [f"{_name(node)}: {error}" for node in group]
    if not kinds:
        raise InfeasibleError(
            "\n".join(["no node of the cluster holds the model", *left_out]),
            hint="Ray counts the GPUs of a node when it starts: `ray status` shows them",
        )
    return sorted(kinds, key=lambda kind: -kind.room), left_out


def _kind(
    fleet: Fleet, group: Sequence[Node], nodes: Sequence[Node], plan_for: PlanFor
) -> NodeKind:
    are_alike = len({replace(device, name="cuda:0") for device in fleet.devices}) == 1
    plan, num_gpus = plan_for(fleet, are_alike), len(fleet.devices)
    if are_alike:  # Ray gives a replica any of them, and torch counts those from 0 on
        num_gpus, kind = len(plan.devices), fleet.names[0].partition(":")[0]
        names = {name: f"{kind}:{number}" for number, name in enumerate(plan.devices)}
        plan = plan.move_to(
            {name: replace(plan.fleet.device(name), name=now) for name, now in names.items()}
        )
    return NodeKind(
        nodes=tuple(map(_name, group)),
        plan=plan,
        gpus=num_gpus,
        room=sum(int(node["Resources"]["GPU"]) // num_gpus for node in group),
        foreign_ids=tuple(node["NodeID"] for node in nodes if node not in group),
    )


def _look_at(nodes: Sequence[Node], gpus: str | None, source: str) -> Iterator[Fleet | str]:
    """What each node gives, or why it can't be used."""
    task = ray.remote(look)
    answers = [
        task.options(
            num_cpus=0,
            num_gpus=node["Resources"]["GPU"],
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote(gpus, source, version("duoka"))
        for node in nodes
    ]
    ready, _ = ray.wait(answers, num_returns=len(answers), timeout=_LOOK_SECONDS)
    for node, answer in zip(nodes, answers, strict=True):
        seen: Fleet | str = "others have its GPUs: it wasn't reached in two minutes"
        if answer not in ready:
            ray.cancel(answer, force=True)
        else:
            try:
                seen = ray.get(answer)
            except ray.exceptions.RayError as error:
                seen = f"duoka doesn't run there: {_line(error)}"
        number = int(node["Resources"]["GPU"])
        if isinstance(seen, Fleet) and len(seen.devices) != number:
            seen = f"{len(seen.devices)} GPUs are there, and Ray counts {number}"
        yield seen


def look(gpus: str | None, source: str, server_version: str) -> Fleet | str:
    """On a node: the GPUs that it gives, without their identities; or why it can't be used."""
    if version("duoka") != server_version:
        return f"it has duoka {version('duoka')}, and the server {server_version}"
    if Path(source).is_absolute() and not Path(source).is_dir():
        return f"{source} isn't there"
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
            f"{text!r:.40} is no number of replicas",
            hint='write a number, two as in 2-6, or "auto" for as many as fit',
        )
    return low, high


def deal(bounds: tuple[int, int] | None, room: Sequence[int]) -> list[tuple[int, int]]:
    """The least and the most replicas of each kind of nodes, which have room for so many.

    Each kind has one in turn. A kind that has any has one at least: where none runs, nothing tells
    that one is wanted. What there is no room for is for nodes of the first kind that come later.
    """
    low, high = bounds or (sum(room), sum(room))
    if low > sum(room):
        raise InfeasibleError(
            f"{low} replicas don't fit these nodes; {sum(room)} do",
            hint=f"--replicas {sum(room)}, or more nodes",
        )
    most = _in_turn(high, room)
    most[0] += high - sum(most)
    num_kinds = sum(map(bool, most))
    if low < num_kinds:
        raise UsageError(
            f"there are {num_kinds} kinds of nodes, and each has one replica at least",
            hint=f"--replicas {num_kinds}-{high}",
        )
    return list(
        zip(_in_turn(low, [min(pair) for pair in zip(most, room, strict=True)]), most, strict=True)
    )


def _in_turn(number: int, room: Sequence[int]) -> list[int]:
    dealt = [0] * len(room)
    for _ in range(min(number, sum(room))):
        free = [kind for kind, count in enumerate(dealt) if count < room[kind]]
        dealt[min(free, key=dealt.__getitem__)] += 1
    return dealt
