from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_doubled_names_are_refused_at_once() -> None:
    with pytest.raises(PlacementError, match="2 names have two devices: a, b") as caught:
        Placement(entries=(("a", "cpu"), ("b", "cpu"), ("a", "cuda:0"), ("b", "cpu"), ("c", "cpu")))
    assert caught.value.doubled == ("a", "b")


def test_an_empty_placement_is_refused() -> None:
    with pytest.raises(PlacementError, match="empty"):
        Placement(entries=())


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
