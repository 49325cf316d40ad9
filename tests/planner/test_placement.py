from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka.base.serialization import from_dict, to_dict
from duoka.errors import PlacementError
from duoka.planner.placement import Placement

LAYERS = Placement(
    entries=(
        ("model.embed", "cuda:0"),
        ("model.layers.1", "cuda:0"),
        ("model.layers.10", "cuda:1"),
        ("model.layers.10.mlp", "cuda:2"),
        ("head", "cuda:0"),
    ),
    fingerprint="abc",
)


def test_device_map_keeps_the_order_of_execution() -> None:
    assert list(LAYERS.device_map) == [name for name, _ in LAYERS.entries]
    assert LAYERS.device_map["model.layers.10"] == "cuda:1"


def test_devices_in_order_of_first_use() -> None:
    assert LAYERS.devices == ("cuda:0", "cuda:1", "cuda:2")


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("model.embed.weight", "cuda:0"),
        ("model.embed", "cuda:0"),
        ("model.layers.1.weight", "cuda:0"),
        ("model.layers.10.attention.weight", "cuda:1"),
        ("model.layers.10.mlp.up.weight", "cuda:2"),
        ("model.layers.100.weight", None),
        ("model.layers.10_extra", None),
        ("model", None),
        ("", None),
    ],
)
def test_the_longest_entry_on_a_dot_boundary_decides(name: str, device: str | None) -> None:
    assert LAYERS.device_of(name) == device


def test_the_empty_name_is_the_whole_model() -> None:
    whole = Placement(entries=(("", "cpu"), ("head", "cuda:0")))
    assert whole.device_of("any.weight") == "cpu"
    assert whole.device_of("head.weight") == "cuda:0"
    assert whole.device_of("") == "cpu"
    whole.check(["any.weight", "head.weight"])


def test_an_entry_may_be_a_parameter() -> None:
    Placement(entries=(("scale", "cpu"), ("layer.weight", "cuda:0"))).check(
        ["scale", "layer.weight"]
    )


def test_check_lists_all_that_is_missing_and_unknown() -> None:
    with pytest.raises(PlacementError) as caught:
        LAYERS.check(
            ["model.embed.weight", "model.layers.1.weight", "model.norm.weight", "model.rotary"]
        )
    assert caught.value.missing == ("model.norm.weight", "model.rotary")
    assert caught.value.unknown == ("model.layers.10", "model.layers.10.mlp", "head")
    for name in (*caught.value.missing, *caught.value.unknown):
        assert name in str(caught.value)
    assert "2 parameters and buffers have no device" in str(caught.value)
    assert caught.value.hint


def test_check_reads_any_iterable_once() -> None:
    Placement(entries=(("a", "cpu"),)).check(iter(["a.weight", "a.bias"]))


def test_doubled_names_are_refused_at_once() -> None:
    with pytest.raises(PlacementError, match="2 names are placed twice: a, b") as caught:
        Placement(entries=(("a", "cpu"), ("b", "cpu"), ("a", "cuda:0"), ("b", "cpu"), ("c", "cpu")))
    assert caught.value.doubled == ("a", "b")


def test_an_empty_placement_is_refused() -> None:
    with pytest.raises(PlacementError, match="empty"):
        Placement(entries=())


def test_round_trip_through_its_json_form() -> None:
    assert from_dict(Placement, to_dict(LAYERS)) == LAYERS


NAMES = st.lists(
    st.lists(st.sampled_from(["a", "b", "ab"]), max_size=3).map(".".join),
    min_size=1,
    max_size=6,
    unique=True,
)


@given(NAMES, NAMES)
def test_device_of_equals_trying_every_entry(entries: list[str], names: list[str]) -> None:
    placement = Placement(entries=tuple((name, f"cuda:{i}") for i, name in enumerate(entries)))
    for name in names:
        holding = [e for e in entries if not e or e == name or name.startswith(e + ".")]
        expected = placement.device_map[max(holding, key=len)] if holding else None
        assert placement.device_of(name) == expected
