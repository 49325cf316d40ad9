"""The machines of a plan: how they are written, and which GPUs are whose."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from staged import rearranged, renamed, staged

from duoka.errors import UsageError
from duoka.hardware.fleet import Fleet
from duoka.planner.plan import Plan
from duoka.report.export.stages import to_layer_pipeline
from duoka.serve.vllm.nodes import Node, devices_by_node, parse_nodes


def test_machines_are_read_in_order() -> None:
    assert parse_nodes("gpu-1.lan=4, [::1]=2".replace("[::1]", "fe80::1")) == (
        Node(address="gpu-1.lan", num_gpus=4),
        Node(address="fe80::1", num_gpus=2),
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a=",
        "=2",
        "a=0",
        "a=-1",
        "a=2,a=2",
        "a=2,",
        "a b=2",
        "a=2;rm -rf=2",
        "a=٢",
        "a=99999",
    ],
)
def test_what_is_no_list_of_machines_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_nodes(text)
    assert error.value.hint


@settings(max_examples=examples(100))
@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        nodes = parse_nodes(text)
    except UsageError:
        return
    assert all(node.num_gpus > 0 for node in nodes)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 2))
def test_every_stage_is_on_one_machine_and_in_order(nodes: int, uses: int, spare: int) -> None:
    """A machine may have GPUs that the plan doesn't use."""
    numbers = [node * (uses + spare) + gpu for node in range(nodes) for gpu in range(uses)]
    plan = staged([2] * len(numbers), gpus=",".join(["8GiB"] * len(numbers)))
    wide = Fleet.parse(",".join(["8GiB"] * (nodes * (uses + spare))))
    names = dict(zip(plan.devices, (f"cuda:{number}" for number in numbers), strict=True))
    plan = replace(renamed(plan, names), fleet=wide)
    machines = tuple(Node(address=f"m{node}", num_gpus=uses + spare) for node in range(nodes))
    parts = devices_by_node(to_layer_pipeline(plan, "vLLM"), machines)
    assert [node for node, _ in parts] == list(machines)
    for _, devices in parts:
        assert [device.name for device in devices] == [f"cuda:{gpu}" for gpu in range(uses)]


def refusal(plan: Plan, nodes: str) -> str:
    with pytest.raises(UsageError) as error:
        devices_by_node(to_layer_pipeline(plan, "vLLM"), parse_nodes(nodes))
    assert error.value.hint
    return str(error.value)


def test_machines_with_unequal_numbers_of_stages_are_refused() -> None:
    """vLLM divides the ranks by the machines (`vllm/config/parallel.py`, `local_world_size`)."""
    told = refusal(staged([4, 3, 2]), "a=2,b=1")
    assert "a 2 GPUs, b 1 GPU" in told


def test_a_gpu_beyond_all_machines_is_refused() -> None:
    assert "uses cuda:3, and the machines have 3 GPUs" in refusal(staged([4, 3, 2, 1]), "a=2,b=1")


def order_of(numbers: list[int], nodes: str) -> str:
    """The refusal of a plan whose stages are on these GPUs."""
    plan = staged([2] * len(numbers))
    names = dict(zip(plan.devices, (f"cuda:{number}" for number in numbers), strict=True))
    entries = [(name, names[device]) for name, device in plan.placement.entries]
    return refusal(rearranged(plan, entries), nodes)


@pytest.mark.parametrize(
    ("numbers", "uses"),
    [([0, 2, 1, 3], "a 1 GPU, b 1 GPU, a 1 GPU, b 1 GPU"), ([2, 3, 0, 1], "b 2 GPUs, a 2 GPUs")],
    ids=["it comes back to a machine", "it begins elsewhere"],
)
def test_a_plan_in_another_order_of_machines_is_refused(numbers: list[int], uses: str) -> None:
    told = order_of(numbers, "a=2,b=2")
    assert "starts on the first machine, a," in told
    assert told.endswith(f"the plan has: {uses}")


def test_detected_gpus_are_of_this_machine_alone() -> None:
    plan = staged([2, 2])
    devices = tuple(
        replace(device, uuid=f"GPU-{number}") for number, device in enumerate(plan.fleet.devices)
    )
    pipeline = to_layer_pipeline(replace(plan, fleet=Fleet(devices=devices)), "vLLM")
    with pytest.raises(UsageError, match="detected on this machine"):
        devices_by_node(pipeline, parse_nodes("a=1,b=1"))


def test_the_example_of_the_hint_can_be_read() -> None:
    with pytest.raises(UsageError) as error:
        parse_nodes("x")
    assert error.value.hint is not None
    nodes = parse_nodes(error.value.hint.rpartition(": ")[2])
    assert all(one.address != other.address for one, other in pairwise(nodes))
