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
from duoka.serve.on_ray.nodes import connect, deal, find_kinds, look, read_bounds, sort_visible

VERSION = version("duoka")


class Plan(SimpleNamespace):
    """What is asked of a plan here."""

    def moved(self, now: Mapping[str, Device]) -> Plan:
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


def test_nodes_with_the_same_gpus_are_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, "24GiB,12GiB", "2x24GiB", "3 GPUs are there", "1MiB", "2x24GiB")
    kinds, left_out = find_kinds(None, "", plan_last)
    assert [kind.nodes for kind in kinds] == [("node (1)", "node (4)"), ("node (0)",)]
    assert left_out == ["node (2): 3 GPUs are there", "node (3): it doesn't fit"]
    alike, mixed = kinds
    # Ray gives it any of the node's two, which it then calls the first.
    assert (alike.plan.devices, alike.gpus, alike.room) == (("cuda:0",), 1, 4)
    assert alike.foreign_ids == ("0", "2", "3")
    assert (mixed.plan.devices, mixed.gpus, mixed.room) == (("cuda:0", "cuda:1"), 2, 1)


def test_all_reasons_are_told_where_no_node_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, "1MiB", "3 GPUs are there")
    with pytest.raises(InfeasibleError, match=r"node \(1\): 3 GPUs are there") as raised:
        find_kinds(None, "", plan_last)
    assert "node (0): it doesn't fit" in str(raised.value)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "local", "ray://127.0.0.1:1"])
def test_a_cluster_that_isnt_there_is_told_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(MachineError, match="no Ray cluster is reached"):
        connect()


def test_a_node_gives_what_its_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look("virtual:1GiB", "glm", VERSION) == Fleet.parse("virtual:1GiB")
    monkeypatch.setenv(nodes.GPUS, "virtual:2x1GiB")
    assert look("virtual:1GiB", "glm", VERSION) == Fleet.parse("virtual:2x1GiB")
    monkeypatch.setenv(nodes.GPUS, "no such card")
    assert "no such card" in str(look(None, "glm", VERSION))


def test_a_node_of_another_version_or_without_the_model_is_left_out(tmp_path: Path) -> None:
    assert look("1GiB", "glm", "0.0") == f"it has duoka {VERSION}, and the server 0.0"
    assert look("1GiB", str(tmp_path / "glm"), VERSION) == f"{tmp_path / 'glm'} isn't there"
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
    with pytest.raises(UsageError, match="no number of replicas"):
        read_bounds(text)


def test_each_kind_has_replicas_in_turn() -> None:
    assert deal(None, [3, 1]) == [(3, 3), (1, 1)]
    assert deal((3, 3), [3, 1]) == [(2, 2), (1, 1)]
    assert deal((1, 1), [3, 1]) == [(1, 1), (0, 0)]
    assert deal((2, 4), [3, 1]) == [(1, 3), (1, 1)]


def test_the_first_kind_may_have_more_than_there_is_room_for() -> None:
    assert deal((2, 9), [3, 1]) == [(1, 8), (1, 1)]
    assert deal((4, 9), [3, 1]) == [(3, 8), (1, 1)]


def test_more_than_there_is_room_for_at_once_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="5 replicas don't fit these nodes; 4 do"):
        deal((5, 5), [3, 1])


def test_no_kind_may_have_none() -> None:
    with pytest.raises(UsageError, match="2 kinds of nodes") as raised:
        deal((1, 3), [3, 1])
    assert raised.value.hint == "--replicas 2-3"
