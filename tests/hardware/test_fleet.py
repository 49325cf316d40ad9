"""Fleets: what people write is understood, and what can't be is refused with the forms."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fuzzing import fuzz
from hypothesis import given
from hypothesis import strategies as st
from recordings import replay

from duoka.base.serialization import from_dict, to_dict
from duoka.errors import DuokaError, FleetError, UsageError
from duoka.hardware import catalogue, parse
from duoka.hardware.device import MAX_DEVICES, RESERVE_BYTES, Device, Link
from duoka.hardware.fleet import Fleet

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
        ("2×24GB", [("cuda:0", 24 * GIB), ("cuda:1", 24 * GIB)]),
        ("24G,24g", [("cuda:0", 24 * GIB), ("cuda:1", 24 * GIB)]),
        ("512M*2", [("cuda:0", GIB // 2), ("cuda:1", GIB // 2)]),
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
        ("   ", FleetError),
        ("virtual:", FleetError),
        ("24GiB,,12GiB", UsageError),
        ("lots", UsageError),
        ("-24GiB", UsageError),
        ("24GiB 12GiB", UsageError),
        ("0x24GiB", FleetError),
        (f"{MAX_DEVICES}x1GiB,1GiB", FleetError),
        ("9" * 3000 + "x1GiB", FleetError),
    ],
)
def test_parse_refuses(text: str, error: type[DuokaError]) -> None:
    with pytest.raises(error) as caught:
        Fleet.parse(text)
    if "more than" not in str(caught.value):
        assert "24GiB" in str(caught.value.hint)


RTX4090 = catalogue.find_card("RTX 4090")
RTX3090 = catalogue.find_card("RTX 3090")


def test_cards_have_budgets_and_speeds() -> None:
    first, _, third = Fleet.parse("2xRTX4090+1xRTX3090").devices
    # From pinned memory over PCIe 4.0 with 16 lanes.
    assert first.host_bytes_per_second == pytest.approx(0.77 * 31.5e9, rel=1e-3)
    assert replace(first, host_bytes_per_second=None) == Device(
        name="cuda:0",
        budget_bytes=RTX4090.usable_bytes - RESERVE_BYTES,
        product="RTX 4090",
        memory_bytes=RTX4090.usable_bytes,
        reserve_bytes=RESERVE_BYTES,
        memory_bytes_per_second=1008e9,
        flops_per_second=165.2e12,
        has_bfloat16=True,
        float32_flops_per_second=82.6e12,
    )
    assert (third.name, third.product) == ("cuda:2", "RTX 3090")
    assert RESERVE_BYTES == 768 * 2**20


@pytest.mark.parametrize(
    "text",
    [
        "2xRTX4090+1xRTX3090",
        "2xRTX4090,RTX3090",
        " 2 x rtx 4090 , rtx-3090 ",
        "2*GeForce RTX 4090 + NVIDIA GeForce RTX 3090",
        "2x4090,1x3090",
        "4090x2,3090",
        "4090*2+RTX 3090 x1",
        "4090,RTX 4090 24GB,3090 24G",
        "24GB 4090x2+24G RTX 3090",
    ],
)
def test_cards_are_written_in_many_ways(text: str) -> None:
    assert Fleet.parse(text) == Fleet.parse("RTX4090,RTX4090,RTX3090")


def test_which_cards_have_bfloat16() -> None:
    fleet = Fleet.parse("P100,V100-16GB,T4,RTX 2080 Ti,A100-80GB,RTX 3060,L4,B200,24GiB+My:24GiB")
    has = [device.has_bfloat16 for device in fleet.devices]
    assert has == [False] * 4 + [True] * 4 + [None] * 2


def test_cards_and_budgets_may_be_mixed() -> None:
    fleet = Fleet.parse("virtual:RTX4090+24GiB,2xMyCard:24GiB")
    assert fleet.names == ("vgpu:0", "vgpu:1", "vgpu:2", "vgpu:3")
    assert [device.product for device in fleet.devices] == ["RTX 4090", "", "MyCard", "MyCard"]
    assert fleet.devices[1] == Device(name="vgpu:1", budget_bytes=24 * GIB)
    assert fleet.links == ()


@pytest.mark.parametrize(
    "text",
    [
        "MyCard:24GiB,936GB/s,71TFLOPs",
        "MyCard:71TFLOPS,936GB/s,24GiB",
        " MyCard : 936 GB/s , 24 GiB , 71 tflop/s ",
        "1xMyCard:0.936TB/s,71000GFLOPs,24GiB",
        "MyCard:24GiB,936GBps,0.071PFLOPS",
    ],
)
def test_a_card_with_its_figures(text: str) -> None:
    assert Fleet.parse(text).devices == (
        Device(
            name="cuda:0",
            budget_bytes=24 * GIB - RESERVE_BYTES,
            product="MyCard",
            memory_bytes=24 * GIB,
            reserve_bytes=RESERVE_BYTES,
            memory_bytes_per_second=936e9,
            flops_per_second=71e12,
        ),
    )


def test_the_figures_of_a_card_end_at_a_plus() -> None:
    fleet = Fleet.parse("4GiB,My Card v2:24GiB,936GB/s+RTX3090,Other:8GiB")
    assert [device.product for device in fleet.devices] == ["", "My Card v2", "RTX 3090", "Other"]
    assert fleet.devices[3].memory_bytes_per_second is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("MyCard:", "has '', which is not a memory size"),
        ("MyCard:936GB/s", "has no memory"),
        ("MyCard:24GiB,24GiB", "two figures for its memory"),
        ("MyCard:24GiB,1GB/s,2GB/s", "two figures for its memory speed"),
        ("MyCard:24GiB,RTX4090", "has 'RTX4090', which is not a memory size"),
        ("MyCard:24GiB,0TFLOPs", "has '0TFLOPs'"),
        ("MyCard:24GiB,0GB/s", "not a positive size"),
        ("MyCard:99999999999TiB", r"more than 1024\.00 TiB"),
        ("\x1b[31m:24GiB", "is not a valid card"),
        ("cuda:0", "'cuda:0' is a PyTorch device name"),
        ("virtual:virtual:24GiB", "'virtual' is not a valid card name"),
        ("RTX4095", "similar names: RTX 4090"),
        ("910B", "no GPU '910B' is in the catalogue; similar names: A10"),
        ("8x910B", "no GPU '910B' is in the catalogue"),
        ("H100x8", "'H100' matches several GPUs: H100-PCIe"),
        ("4090 48G", "no GPU '4090 48G' is in the catalogue; similar names: RTX 4090"),
        ("A100", "matches several GPUs: A100-40GB-PCIe"),
        ("2,24GiB", "names a GPU of this machine .'2'. beside other ones"),
        ("RTX4090+GPU-8932f937", "names a GPU of this machine .'GPU-8932f937'."),
        ("virtual:2", "a GPU of this machine .'2'. beside virtual ones"),
        ("virtual:all", "a GPU of this machine .'all'. beside virtual ones"),
        ("all,2", '"all" stands alone'),
        ("24GiB+", "has an empty entry"),
        ("2x24", "'24' is not a size"),
        ("99999999TiB", r"is more than 1024\.00 TiB"),
    ],
)
def test_what_isnt_understood_is_told(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Fleet.parse(text)
    assert caught.value.hint


def test_a_card_smaller_than_the_reserve() -> None:
    with pytest.raises(
        FleetError, match=r"Tiny has 512\.00 MiB, of which CUDA reserves 768\.00 MiB"
    ) as e:
        Fleet.parse("Tiny:512MiB")
    assert '"512MiB"' in str(e.value.hint)


def test_links_between_cards() -> None:
    fleet = Fleet.parse("RTX4090+RTX 4060 Ti+2xH100-SXM+2xV100-16GB-SXM+H100-NVL")

    def speed(source: int, target: int) -> float:
        link = fleet.link(f"cuda:{source}", f"cuda:{target}")
        assert link is not None
        return link.bytes_per_second / 1e9

    assert speed(0, 2) == pytest.approx(0.6 * 31.5, rel=1e-3)  # PCIe 4.0 on 16 lanes
    assert speed(0, 1) == speed(1, 0) == pytest.approx(0.6 * 15.75, rel=1e-3)  # on 8
    assert speed(2, 3) == pytest.approx(0.8 * 450)  # over switches
    assert speed(4, 5) == pytest.approx(0.8 * 25)  # one link of a mesh
    assert speed(3, 4) == pytest.approx(0.6 * 15.75, rel=1e-3)
    assert speed(2, 6) == pytest.approx(0.6 * 63, rel=1e-3)  # another kind of card
    bridged = Fleet.parse("2xRTX3090").links[0]  # a bridge is not taken to be there
    assert bridged.bytes_per_second == pytest.approx(0.6 * 31.5e9, rel=1e-3)
    assert bridged.latency_seconds == 15e-6


_PIECES = (
    "2x 1x 0x 64x 65x 99999999999x x X × * 24GiB 12 GiB 8 0GiB 1e9 .5GiB 1..2GiB -1GiB 24G TiB "
    "RTX4090 rtx 3090 A100 A100-80GB MyCard : :24GiB 936GB/s 71TFLOPs 0TFLOPs /s virtual: virtual "
    "all ALL 2 3 007 GPU- GPU-0 MIG-1/2/3 cuda:0 , + ,, ++ \x00 \x1b[31m ٣ 卡 \ud800"
)
PIECES = st.sampled_from(_PIECES.split(" "))
SPLIT = st.sampled_from(["", "", ",", "+", " ", ":"])


def read(text: str) -> Fleet | DuokaError:
    try:
        return Fleet.parse(text)
    except DuokaError as error:
        return error


@fuzz()
@given(
    st.one_of(
        st.text(max_size=60),
        st.text(alphabet="0123456789xGiBMvrtual:,. -+", max_size=40),
        st.lists(st.tuples(PIECES, SPLIT), max_size=12).map(
            lambda pairs: "".join(piece + split for piece, split in pairs)
        ),
    )
)
def test_any_text_is_a_fleet_or_a_duoka_error(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        recording = replay(patch, "eight-3090")
        fleet = read(text)
    if isinstance(fleet, DuokaError):
        assert len(str(fleet)) < 1000
        assert str(fleet).isprintable()
        assert fleet.hint
        return
    assert 0 < len(fleet.devices) <= MAX_DEVICES
    assert len(set(fleet.names)) == len(fleet.devices)
    assert all(0 < device.budget_bytes <= 2**50 for device in fleet.devices)
    there = [device.uuid in recording.uuids for device in fleet.devices]
    assert all(there) or not any(there)
    assert from_dict(Fleet, json.loads(json.dumps(to_dict(fleet)))) == fleet


@fuzz()
@given(st.lists(st.sampled_from([card.name for card in catalogue.cards()]), min_size=1, max_size=8))
def test_any_cards_are_a_fleet(names: list[str]) -> None:
    fleet = Fleet.parse("+".join(names))
    assert [device.product for device in fleet.devices] == names
    assert Fleet.parse(",".join(names)) == fleet
    assert all(link.bytes_per_second > 1e9 for link in fleet.links)


@pytest.mark.slow
@fuzz()
@given(st.data())
def test_any_choice_of_gpus_is_that_choice(data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(8)))
    chosen = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True))
    with pytest.MonkeyPatch.context() as patch:
        recording = replay(patch, "eight-3090", visible=order)
        as_uuid = data.draw(st.lists(st.booleans(), min_size=8, max_size=8))
        texts = [recording.uuids[i] if as_uuid[i] else str(i) for i in chosen]
        fleet = Fleet.parse(",".join(texts))
    assert [device.uuid for device in fleet.devices] == [recording.uuids[i] for i in chosen]
    assert fleet.names == tuple(f"cuda:{order.index(i)}" for i in chosen)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"budget_bytes": 0}, "budget of cpu is 0 bytes"),
        ({"flops_per_second": 0.0}, "flops_per_second of cpu is 0"),
        ({"reserve_bytes": -1}, "the reserve of cpu is -1 bytes"),
        ({"workspace_bytes": -1}, "the workspace of cpu is -1 bytes"),
        ({"reserve_bytes": 1, "memory_bytes": 5}, "has 5 B of memory, and a budget and reserve"),
    ],
)
def test_what_a_device_refuses(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(FleetError, match=message):
        Device(**{"name": "cpu", "budget_bytes": 5, **fields})


def test_what_links_and_fleets_refuse() -> None:
    (first,) = Fleet.parse("1GiB").devices
    link = Link(source="cuda:0", target="cuda:1", bytes_per_second=1.0, latency_seconds=0.0)
    with pytest.raises(FleetError, match="to itself"):
        replace(link, target="cuda:0")
    with pytest.raises(FleetError, match="-1"):
        replace(link, latency_seconds=-1.0)
    for devices, message in (
        ((), "the fleet has no device"),
        ((first, first), "cuda:0 occurs twice"),
    ):
        with pytest.raises(FleetError, match=message):
            Fleet(devices=devices)


def test_finding_devices_and_links() -> None:
    link = Link(source="cuda:0", target="cuda:1", bytes_per_second=1.0, latency_seconds=0.0)
    fleet = Fleet(devices=Fleet.parse("2x1GiB").devices, links=(link,))
    assert fleet.device("cuda:1").name == "cuda:1"
    assert fleet.link("cuda:0", "cuda:1") is link
    assert fleet.link("cuda:1", "cuda:0") is None
    with pytest.raises(FleetError, match="'cuda:2' is not in the fleet") as caught:
        fleet.device("cuda:2")
    assert caught.value.hint == "it has cuda:0, cuda:1"


@pytest.mark.parametrize(
    ("text", "budget", "rate", "told"),
    [
        ("64GiB", 64 * GIB, None, "64GiB"),
        (" 64 GB , 60 GB/s ", 64 * GIB, 60e9, "64GiB,60GB/s"),
        ("1.5T,0.25TB/s", 3 * 2**39, 250e9, "1536GiB,250GB/s"),
        ("1000B,1234567890B/s", 1000, 1234567890, "1000B,1.23456789GB/s"),
    ],
)
def test_a_host_is_declared(text: str, budget: int, rate: float | None, told: str) -> None:
    fleet = Fleet.parse("2xRTX4090+12GiB").with_host(text)
    assert fleet.names == ("cuda:0", "cuda:1", "cuda:2", "cpu")
    host = fleet.host
    assert host is not None
    assert (host.budget_bytes, host.memory_bytes_per_second) == (budget, rate)
    assert parse.format_host(host) == told
    assert parse.read_host(told) == host
    assert fleet.split_host() == (Fleet.parse("2xRTX4090+12GiB"), host)
    assert fleet.gpu_generation == Fleet.parse("2xRTX4090+12GiB").gpu_generation
    assert from_dict(Fleet, to_dict(fleet)) == fleet


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lots", "'lots' is not host memory: 'lots' is not a size"),
        ("", "'' is not host memory: '' is not a size"),
        ("64", "'64' is not host memory: '64' is not a size"),
        ("0GiB", "'0GiB' is not host memory: '0GiB' is not a positive size"),
        ("2000TiB", "'2000TiB': '2000TiB' is more than 1024.00 TiB"),
        ("64GiB,", "'64GiB,' is not host memory: '' is not a memory bandwidth"),
        ("64GiB,60GB", "'64GiB,60GB' is not host memory: '60GB' is not a memory bandwidth"),
        ("64GiB,0GB/s", "'64GiB,0GB/s' is not host memory: '0GB' is not a positive size"),
        ("64GiB,1GB/s,2GB/s", "'1GB/s,2GB/s' is not a memory bandwidth"),
    ],
)
def test_what_is_no_host_memory_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Fleet.parse("24GiB").with_host(text)
    assert message in str(caught.value)
    assert "64GiB,60GB/s" in str(caught.value.hint)


def test_a_host_takes_the_place_of_the_processor() -> None:
    cpu = Device(name="cpu", budget_bytes=30 * GIB)
    fleet = Fleet(devices=(*Fleet.parse("10GiB").devices, cpu))
    assert fleet.host == fleet.device("cpu")
    assert fleet.split_host() == (fleet, None)  # modules may run on that one
    declared = fleet.with_host("5GiB")
    assert declared.device("cpu").budget_bytes == 5 * GIB
    assert declared.names == fleet.names
    alone = Fleet(devices=(cpu,))
    assert alone.host is Fleet.parse("24GiB").host is None
    with pytest.raises(FleetError, match="no device"):
        alone.with_host("5GiB")
