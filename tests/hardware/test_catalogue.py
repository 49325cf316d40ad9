"""The catalogue: every card's figures are plausible and sourced, and names are found or refused."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duoka.errors import UsageError
from duoka.hardware import catalogue
from duoka.hardware.catalogue import Card

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
SOURCES = tomllib.loads(Path(catalogue.__file__).with_name("gpus.toml").read_text())["source"]

every_card = pytest.mark.parametrize("card", catalogue.cards(), ids=lambda card: card.name)


def test_common_gpus_are_there() -> None:
    assert len(catalogue.cards()) >= 40
    for name in """GTX 1080 Ti; RTX 2080 Ti; RTX 3060; RTX 3090; RTX 4090; RTX 5090; RTX A6000
        RTX 6000 Ada; RTX PRO 6000; T4; P100; V100-16GB; V100-32GB; A10; A30; A40; A100-40GB
        A100-80GB; L4; L40; L40S; H100-PCIe; H100-SXM; H100-NVL; H200; H20; GH200-96GB; B200
        RTX 4090 Laptop""".replace("\n", ";").split(";"):
        assert catalogue.find_card(name).usable_bytes > 0


def test_names_are_unique() -> None:
    names = Counter(
        catalogue._key(name)
        for card in catalogue.cards()
        for name in {catalogue._key(name): name for name in (card.name, *card.aliases)}.values()
    )
    assert names.most_common(1)[0][1] == 1


def test_cards_of_one_product_differ_in_memory() -> None:
    seen = Counter(
        (product, card.memory_gib) for card in catalogue.cards() for product in card.products
    )
    assert seen.most_common(1)[0][1] == 1


@every_card
def test_memory(card: Card) -> None:
    assert card.memory_gib in (6, 8, 10, 11, 12, 16, 20, 24, 32, 40, 48, 80, 94, 96, 141, 144, 180)
    # GDDR with error correction keeps a sixteenth of the memory for it.
    assert 0.89 < card.usable_gib / card.memory_gib < 1
    assert 190 <= card.bandwidth_gb_per_second <= 8000


@every_card
def test_rates(card: Card) -> None:
    rates = card.tflops
    assert set(rates) <= {"fp32", "tf32", "fp16", "bf16", "fp8", "int8"}
    assert 4 <= rates["fp32"] <= 150
    sixteen = rates.get("bf16", rates.get("fp16", rates["fp32"]))
    assert card.speeds["flops_per_second"] == sixteen * 1e12
    assert rates["fp32"] <= sixteen <= 2500
    if "bf16" in rates:  # from Ampere on
        assert rates["bf16"] == rates["fp16"]
        assert rates["bf16"] / rates["tf32"] == pytest.approx(2, rel=0.03) or (
            rates["tf32"] == rates["fp32"]
        )
        assert rates["int8"] / rates["bf16"] == pytest.approx(2, rel=0.02) or (
            rates["int8"] / rates["bf16"] == pytest.approx(4, rel=0.03)
        )
    if "fp8" in rates:  # from Ada on
        assert rates["fp8"] / rates["bf16"] == pytest.approx(2, rel=0.03)
        assert rates["fp8"] <= rates["int8"]
    # A card that computes fast reads fast: operations for each byte.
    assert 10 < card.speeds["flops_per_second"] / card.speeds["memory_bytes_per_second"] < 500


@every_card
def test_links(card: Card) -> None:
    if card.pcie is None:
        assert "Laptop" in card.name
    else:
        assert card.pcie.generation in (3, 4, 5)
        assert card.pcie.lanes in (4, 8, 16)
    if card.nvlink is not None:
        assert card.nvlink.gb_per_second / card.nvlink.num_links in (14.0625, 20, 25, 50)
        assert (card.nvlink.form == "bridge") == (
            "SXM" not in card.name and card.name not in ("H20", "B200")
        )


@every_card
def test_every_card_has_its_sources(card: Card) -> None:
    assert card.sources
    for key in card.sources:
        assert set(SOURCES[key]) <= {"title", "url", "checked"}
        assert SOURCES[key]["title"]
        assert SOURCES[key]["url"].startswith("https://")
    if card.usable_seen is not None:
        assert re.fullmatch(r"github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", card.usable_seen)


@pytest.mark.parametrize("name", ["gpus.md", "gpus.zh-CN.md"])
def test_the_documentation_lists_every_card(name: str) -> None:
    page = (ROOT / "docs" / name).read_text(encoding="utf-8")
    rows = [
        f"| {card.name} | {', '.join(card.aliases)} | {card.usable_gib:g} "
        f"| {card.bandwidth_gb_per_second:g} | {card.speeds['flops_per_second'] / 1e12:g} |"
        for card in catalogue.cards()
    ]
    assert page.splitlines()[-len(rows) :] == rows


def test_every_source_is_used() -> None:
    used = {key for card in catalogue.cards() for key in card.sources}
    assert used == set(SOURCES)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtx 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("geforce-rtx-4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("RTX4060Ti", "RTX 4060 Ti"),
        ("rtx_4060_ti_16gb", "RTX 4060 Ti 16GB"),
        ("1080ti", "GTX 1080 Ti"),
        ("A100-80GB", "A100-80GB-PCIe"),
        ("a100 sxm4 80gb", "A100-80GB-SXM"),
        ("Tesla V100-SXM2-16GB", "V100-16GB-SXM"),
        ("V100 16GB", "V100-16GB-PCIe"),
        ("H200", "H200-SXM"),
        ("Tesla T4", "T4"),
        ("RTX 4090 laptop", "RTX 4090 Laptop"),
        ("A100 80G", "A100-80GB-PCIe"),
        ("A100-40G", "A100-40GB-PCIe"),
        ("RTX 3080 12G", "RTX 3080 12GB"),
        ("4090 24GB", "RTX 4090"),
        ("A10G", "A10G"),
    ],
)
def test_names_are_read_forgivingly(text: str, name: str) -> None:
    assert catalogue.find_card(text).name == name
    assert catalogue.is_card(text)


@every_card
def test_every_name_and_product_leads_to_its_card(card: Card) -> None:
    for name in (card.name, *card.aliases):
        assert catalogue.find_card(name) is card
    for product in card.products:
        assert catalogue.of_product(product, int(card.memory_gib * GIB)) is card
        assert catalogue.of_product(product.upper(), int(card.usable_bytes)) is card


@pytest.mark.parametrize(
    ("text", "choices"),
    [
        ("A100", "A100-40GB-PCIe, A100-40GB-SXM, A100-80GB-PCIe, A100-80GB-SXM"),
        ("h100", "H100-PCIe, H100-SXM, H100-NVL"),
        ("V100", "V100-16GB-PCIe, V100-16GB-SXM, V100-32GB-PCIe, V100-32GB-SXM"),
        ("RTX 6000", "Quadro RTX 6000, RTX 6000 Ada"),
        ("GH200", "GH200-96GB, GH200-144GB"),
        ("GTX", "GTX 1060 6GB, GTX 1070, GTX 1080, GTX 1080 Ti, GTX 1660 Ti"),
        ("RTX", "and 4. more"),
    ],
)
def test_names_of_several_cards_are_refused_with_all(text: str, choices: str) -> None:
    with pytest.raises(UsageError, match=f"matches several GPUs: .*{choices}") as caught:
        catalogue.find_card(text)
    assert caught.value.hint == "use one of these names"
    assert not catalogue.is_card(text)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("RTX 4091", "RTX 4090"),
        ("RTX3090Ti Super", "RTX 3090 Ti"),
        ("L4O", "L40"),
        ("H1000", "H100"),
    ],
)
def test_an_unknown_card_is_told_with_the_nearest(text: str, nearest: str) -> None:
    with pytest.raises(UsageError, match=f"similar names: .*{nearest}") as caught:
        catalogue.find_card(text)
    assert '--gpus "MyCard:24GiB,936GB/s,71TFLOPs"' in str(caught.value.hint)


def test_nonsense_has_no_nearest() -> None:
    with pytest.raises(UsageError, match=r"^no GPU 'qqqqqq' is in the catalogue\n"):
        catalogue.find_card("qqqqqq")


def test_products_share_names() -> None:
    ti = "NVIDIA GeForce RTX 4060 Ti"
    assert catalogue.of_product(ti, 8188 * 2**20) is catalogue.find_card("RTX 4060 Ti")
    assert catalogue.of_product(ti, 16380 * 2**20) is catalogue.find_card("RTX 4060 Ti 16GB")
    assert catalogue.of_product(ti, None) is catalogue.find_card("RTX 4060 Ti")
    assert catalogue.of_product("GeForce GTX 1080 Ti", None) is catalogue.find_card("GTX 1080 Ti")
    assert catalogue.of_product("", None) is None
    assert catalogue.of_product("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40192 * 2**20) is None


@given(st.text(max_size=40))
def test_any_text_is_a_card_or_a_usage_error(text: str) -> None:
    if catalogue.is_card(text):
        assert catalogue.find_card(text) in catalogue.cards()
    else:
        with pytest.raises(UsageError):
            catalogue.find_card(text)
