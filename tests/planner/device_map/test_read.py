from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st

from duoka import Fleet
from duoka.errors import FormatError, UsageError
from duoka.planner.device_map import DeviceMap
from duoka.planner.device_map.read import Devices, NoDevice


def test_one_device_is_the_whole_model() -> None:
    for given_, value in ((0, 0), ("cuda:1", "cuda:1"), (torch.device("cuda:1"), None)):
        ((name, found),) = DeviceMap.of(given_).entries
        assert name == ""
        assert found == (torch.device("cuda:1") if value is None else value)


@pytest.mark.parametrize("text", ["auto", "balanced", "balanced_low_0", "sequential", " Auto "])
def test_automatic_maps_are_what_duoka_does(text: str) -> None:
    with pytest.raises(UsageError, match="is not a device map") as caught:
        DeviceMap.of(text)
    assert "omit the device map" in str(caught.value.hint)
    with pytest.raises(UsageError):
        DeviceMap.parse(json.dumps(text), "map.json")


@pytest.mark.parametrize("value", [None, 1.5, True, ["cuda:0"], object()])
def test_what_is_no_map(value: object) -> None:
    with pytest.raises(UsageError, match="a device map must map"):
        DeviceMap.of(value)


def test_names_that_are_no_text_are_kept_to_be_told() -> None:
    assert DeviceMap.of({1: 0, None: 1}).entries == (("1", 0), ("None", 1))


def test_json_keeps_names_that_stand_twice() -> None:
    found = DeviceMap.parse('{"a": 0, "b": {"c": 1, "c": 2}, "a": 1}', "map.json")
    assert [name for name, _ in found.entries] == ["a", "b", "a"]


@pytest.mark.parametrize("text", ["", "{", '{"a": 0,}', "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_what_is_no_json(text: str) -> None:
    with pytest.raises(FormatError, match=r"map\.json is not valid JSON"):
        DeviceMap.parse(text, "map.json")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    with pytest.raises(FormatError, match="can't be read"):
        DeviceMap.load(path)
    path.write_bytes(b"\xff{}")
    with pytest.raises(FormatError, match="can't be read"):
        DeviceMap.load(path)
    with pytest.raises(FormatError, match="can't be read"):
        DeviceMap.load(tmp_path)
    path.write_text(" " * (16 * 2**20 + 1))
    with pytest.raises(FormatError, match="more than 16777216 bytes"):
        DeviceMap.load(path)
    path.write_text('{"": 0}')
    assert DeviceMap.load(path).entries == (("", 0),)


FLEETS: dict[str, Fleet | None] = {
    "any": None,
    "two": Fleet.parse("2x1GiB"),
    "virtual": Fleet.parse("virtual:2x1GiB"),
}


@pytest.mark.parametrize(
    ("fleet", "value", "device"),
    [
        ("two", 0, "cuda:0"),
        ("two", 1, "cuda:1"),
        ("two", "1", "cuda:1"),
        ("two", "cuda:1", "cuda:1"),
        ("two", "cuda", "cuda:0"),
        ("two", torch.device("cuda", 1), "cuda:1"),
        ("two", torch.tensor(1), "cuda:1"),
        ("virtual", 1, "vgpu:1"),
        ("virtual", "vgpu", "vgpu:0"),
        ("any", 5, "cuda:5"),
        ("any", "vgpu:5", "vgpu:5"),
        ("any", "cpu", "cpu"),
    ],
)
def test_devices(fleet: str, value: object, device: str) -> None:
    assert Devices(FLEETS[fleet]).resolve(value) == device


@pytest.mark.parametrize(
    ("fleet", "value", "problem"),
    [
        ("two", 2, "cuda:2 is not in the fleet"),
        ("two", -1, "no GPU has this number"),
        ("two", 10**30, "no GPU has this number"),
        ("two", "cpu", "cpu is not in the fleet"),
        ("two", "vgpu:0", "not in the fleet"),
        ("virtual", "cuda:0", "not in the fleet"),
        ("two", "disk", "doesn't offload"),
        ("two", "meta", "doesn't offload"),
        ("two", "cuda:01", "no device has this name"),
        ("two", "GPU 0", "no device has this name"),
        ("two", "", "no device has this name"),
        ("two", True, "bool is not a device"),
        ("two", None, "NoneType is not a device"),
        ("two", [0], "list is not a device"),
        ("two", torch.zeros(2), "Tensor is not a device"),
        ("any", "mps", "use cuda:N"),
        ("any", 64, "use cuda:N"),
    ],
)
def test_what_is_no_device(fleet: str, value: object, problem: str) -> None:
    with pytest.raises(NoDevice, match=problem):
        Devices(FLEETS[fleet]).resolve(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@fuzz()
@given(JSON.map(json.dumps) | st.text() | st.dictionaries(st.text(), JSON).map(json.dumps))
def test_any_text_is_a_map_or_refused(text: str) -> None:
    try:
        found: Any = DeviceMap.parse(text, "map.json")
    except (FormatError, UsageError):
        return
    devices = Devices(FLEETS["two"])
    for _, value in found.entries:
        with suppress(NoDevice):
            assert devices.resolve(value) in ("cuda:0", "cuda:1")
