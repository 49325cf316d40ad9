"""What GPUs nodes have, which are alike, which are left out, and how many replicas they get."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from duoka.errors import InfeasibleError, MachineError, UsageError
from duoka.hardware.device import Device
from duoka.hardware.fleet import Fleet
from duoka.serve.on_ray import nodes
from duoka.serve.on_ray.nodes import (
    choose_bounds,
    connect,
    look,
    plan_nodes,
    read_bounds,
    sort_visible,
)

VERSION = version("duoka")


class Plan(SimpleNamespace):
    """What is asked of a plan here."""

    def move_to(self, now: Mapping[str, Device]) -> Plan:
        fleet = Fleet(devices=tuple(now.values()))
        return Plan(fleet=fleet, devices=fleet.names)


def plan_last(fleet: Fleet, are_alike: bool) -> Any:
    """A plan for the last GPU alone, where they are alike, and for all otherwise."""
    if fleet.budget_bytes < 2**30:
        raise InfeasibleError("it doesn't fit")
    return Plan(fleet=fleet, devices=fleet.names[-1:] if are_alike else fleet.names)


def cluster(monkeypatch: pytest.MonkeyPatch, *gpus: str) -> None:
    """Nodes with these GPUs, or with an error; and one without any."""
    fleets = {
        f"{number}": text if " " in text else Fleet.parse(text) for number, text in enumerate(gpus)
    }
    told = [
        {
            "NodeID": node_id,
            "NodeName": "node",
            "Alive": True,
            "Resources": {"GPU": 1.0 if isinstance(fleet, str) else float(len(fleet.devices))},
        }
        for node_id, fleet in fleets.items()
    ]
    told.append({"NodeID": "head", "NodeName": "node", "Alive": True, "Resources": {"CPU": 4.0}})
    monkeypatch.setattr(nodes.ray, "nodes", lambda: told)
    monkeypatch.setattr(
        nodes, "_look_at", lambda told, gpus, source: [fleets[node["NodeID"]] for node in told]
    )


def test_each_kind_of_nodes_has_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, "2x12GiB", "2x24GiB", "3 GPUs are there", "1MiB", "2x24GiB", "24GiB,12GiB")
    planned, left_out = plan_nodes(None, "", plan_last)
    assert planned.names == ("node (0)", "node (1)", "node (4)")
    # Ray gives a replica any of the node's two, which it then calls the first.
    budgets = [plan.fleet.budget_bytes // 2**30 for plan in planned.plans.values()]
    assert (budgets, planned.gpus_per_replica, planned.room) == ([12, 24, 24], 1, 6)
    assert {plan.devices for plan in planned.plans.values()} == {("cuda:0",)}
    assert planned.foreign_ids == ("2", "3", "5")
    assert left_out == [
        "node (2): 3 GPUs are there",
        "node (3): it doesn't fit",
        "node (5): a replica needs 2 GPUs there and 1 elsewhere",
    ]


def test_a_node_of_several_sorts_has_one_replica_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, "24GiB,12GiB")
    planned, _ = plan_nodes(None, "", plan_last)
    assert (planned.gpus_per_replica, planned.room, planned.foreign_ids) == (2, 1, ())
    assert planned.plans["0"].devices == ("cuda:0", "cuda:1")


def test_all_reasons_are_told_where_no_node_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, "1MiB", "3 GPUs are there")
    with pytest.raises(InfeasibleError, match=r"node \(1\): 3 GPUs are there") as raised:
        plan_nodes(None, "", plan_last)
    assert "node (0): it doesn't fit" in str(raised.value)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "local", "ray://127.0.0.1:1"])
def test_a_cluster_that_isnt_there_is_told_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(MachineError, match="no Ray cluster is reachable"):
        connect()


def test_a_node_gives_what_its_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look("virtual:1GiB", "glm", VERSION) == Fleet.parse("virtual:1GiB")
    monkeypatch.setenv(nodes.GPUS, "virtual:2x1GiB")
    assert look("virtual:1GiB", "glm", VERSION) == Fleet.parse("virtual:2x1GiB")
    monkeypatch.setenv(nodes.GPUS, "no such card")
    assert "no such card" in str(look(None, "glm", VERSION))


def test_a_node_of_another_version_or_without_the_model_is_left_out(tmp_path: Path) -> None:
    assert look("1GiB", "glm", "0.0") == f"it has duoka {VERSION}, and the server 0.0"
    assert look("1GiB", str(tmp_path / "glm"), VERSION) == f"{tmp_path / 'glm'} doesn't exist"
    assert isinstance(look("1GiB", str(tmp_path), VERSION), Fleet)


@pytest.mark.parametrize(
    ("visible", "ordered"), [("10,2,1", "1,2,10"), ("GPU-b,GPU-a", "GPU-b,GPU-a"), ("", "")]
)
def test_gpus_are_in_their_machines_order(
    visible: str, ordered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    sort_visible()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ordered


# ── how many replicas ──


def test_bounds_are_read() -> None:
    assert read_bounds(None) is None
    assert read_bounds("auto") is None
    assert read_bounds("3") == (3, 3)
    assert read_bounds("2-12") == (2, 12)


@pytest.mark.parametrize("text", ["", "0", "3-2", "-2", "2-", "1-2-3", "two", "²", "123456"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a number of replicas"):
        read_bounds(text)


def test_as_many_as_fit_unless_bounds_are_given() -> None:
    assert choose_bounds(None, 4) == (4, 4)
    assert choose_bounds((2, 9), 4) == (2, 9)


def test_more_than_there_is_room_for_at_once_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="5 replicas don't fit on these nodes; 4 fit"):
        choose_bounds((5, 5), 4)
