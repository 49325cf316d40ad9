"""Fleets: what people write is understood, and what can't be is refused with the forms."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka.errors import DuokaError, FleetError, UsageError
from duoka.fleet import MAX_DEVICES, Device, Fleet, Link
from duoka.serial import from_dict, to_dict

GIB = 2**30


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", [("cuda:0", 24 * GIB)]),
        ("24GiB,12GiB", [("cuda:0", 24 * GIB), ("cuda:1", 12 * GIB)]),
        ("2x24GiB,12GiB", [("cuda:0", 24 * GIB), ("cuda:1", 24 * GIB), ("cuda:2", 12 * GIB)]),
        (
            " 2 x 24 GiB , 512MiB ",
            [("cuda:0", 24 * GIB), ("cuda:1", 24 * GIB), ("cuda:2", GIB // 2)],
        ),
        ("virtual:2x24GiB", [("vgpu:0", 24 * GIB), ("vgpu:1", 24 * GIB)]),
        ("virtual:24GiB,12GiB", [("vgpu:0", 24 * GIB), ("vgpu:1", 12 * GIB)]),
        ("VIRTUAL: 1X64KiB", [("vgpu:0", 64 * 1024)]),
        ("2×24GB", [("cuda:0", 24 * 10**9), ("cuda:1", 24 * 10**9)]),
        ("virtual:1.5GiB", [("vgpu:0", 3 * GIB // 2)]),
    ],
)
def test_parse(text: str, expected: list[tuple[str, int]]) -> None:
    fleet = Fleet.parse(text)
    assert [(device.name, device.budget_bytes) for device in fleet.devices] == expected
    assert fleet.links == ()
    assert fleet.budget_bytes == sum(size for _, size in expected)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", FleetError),
        ("   ", FleetError),
        ("virtual:", FleetError),
        (",", UsageError),
        ("24GiB,", UsageError),
        ("24GiB,,12GiB", UsageError),
        ("2x24", UsageError),
        ("lots", UsageError),
        ("-24GiB", UsageError),
        ("24GiB 12GiB", UsageError),
        ("24GiB;12GiB", UsageError),
        ("2xRTX4099", UsageError),
        ("24GiB," * 1000, UsageError),
        ("cuda:0", UsageError),
        ("virtual:virtual:24GiB", UsageError),
        ("0GiB", UsageError),
        ("0x24GiB", FleetError),
        ("x24GiB", UsageError),
        (f"{MAX_DEVICES + 1}x1GiB", FleetError),
        (f"{MAX_DEVICES}x1GiB,1GiB", FleetError),
        ("9" * 3000 + "x1GiB", FleetError),
    ],
)
def test_parse_refuses(text: str, error: type[DuokaError]) -> None:
    with pytest.raises(error) as caught:
        Fleet.parse(text)
    if "more than" not in str(caught.value):
        assert "24GiB" in str(caught.value.hint)


@given(st.text(alphabet="0123456789xGiBMvrtual:,. -", max_size=30))
def test_any_text_is_a_fleet_or_a_duoka_error(text: str) -> None:
    try:
        fleet = Fleet.parse(text)
    except DuokaError:
        return
    assert len(fleet.devices) == len(set(fleet.names)) > 0


def test_json_form() -> None:
    fleet = Fleet(
        devices=(
            Device(name="cuda:2", budget_bytes=5, product="NVIDIA X", uuid="GPU-1"),
            Device(name="cpu", budget_bytes=7, memory_bytes_per_second=1e9, flops_per_second=2e9),
        ),
        links=(Link(source="cpu", target="cuda:2", bytes_per_second=1e9, latency_seconds=1e-5),),
    )
    assert from_dict(Fleet, json.loads(json.dumps(to_dict(fleet)))) == fleet


@pytest.mark.parametrize(
    "name", ["", "cuda:", "cuda:-1", "cuda:01", "CUDA:0", "cuda:0 ", "0", "a:1:2"]
)
def test_device_names_are_torchs(name: str) -> None:
    with pytest.raises(FleetError, match="is not the name of a device"):
        Device(name=name, budget_bytes=1)


def test_what_a_device_and_a_link_refuse() -> None:
    with pytest.raises(FleetError, match="budget of cpu is 0 bytes"):
        Device(name="cpu", budget_bytes=0)
    with pytest.raises(FleetError, match="flops_per_second of cpu is 0"):
        Device(name="cpu", budget_bytes=1, flops_per_second=0.0)
    with pytest.raises(FleetError, match="reserve of cpu is -1 bytes"):
        Device(name="cpu", budget_bytes=1, reserve_bytes=-1)
    with pytest.raises(FleetError, match=r"has 5 B of memory, and a budget and reserve of 6 B"):
        Device(name="cpu", budget_bytes=5, reserve_bytes=1, memory_bytes=5)
    with pytest.raises(FleetError, match=r"product of cpu can't be shown: '\\x1b"):
        Device(name="cpu", budget_bytes=1, product="\x1b[31m")
    with pytest.raises(FleetError, match="uuid of cpu can't be shown"):
        Device(name="cpu", budget_bytes=1, uuid="x" * 121)
    with pytest.raises(FleetError, match="to itself"):
        Link(source="cpu", target="cpu", bytes_per_second=1.0, latency_seconds=0.0)
    with pytest.raises(FleetError, match="-1"):
        Link(source="cpu", target="cuda:0", bytes_per_second=1.0, latency_seconds=-1.0)


def test_what_a_fleet_refuses() -> None:
    one, two = Device(name="cuda:0", budget_bytes=1), Device(name="cuda:1", budget_bytes=1)
    link = Link(source="cuda:0", target="cuda:1", bytes_per_second=1.0, latency_seconds=0.0)
    with pytest.raises(FleetError, match="no device to use"):
        Fleet(devices=())
    with pytest.raises(FleetError, match="cuda:0 stands twice"):
        Fleet(devices=(one, one))
    with pytest.raises(FleetError, match="names cuda:1, which is not in the fleet"):
        Fleet(devices=(one,), links=(link,))
    with pytest.raises(FleetError, match="the link cuda:0 → cuda:1 stands twice"):
        Fleet(devices=(one, two), links=(link, link))


def test_finding_devices_and_links() -> None:
    link = Link(source="cuda:0", target="cuda:1", bytes_per_second=1.0, latency_seconds=0.0)
    fleet = Fleet(devices=Fleet.parse("2x1GiB").devices, links=(link,))
    assert fleet.device("cuda:1").name == "cuda:1"
    assert fleet.link("cuda:0", "cuda:1") is link
    assert fleet.link("cuda:1", "cuda:0") is None
    with pytest.raises(FleetError, match="'cuda:2' is not in the fleet") as caught:
        fleet.device("cuda:2")
    assert caught.value.hint == "it has cuda:0, cuda:1"
