"""The page: whole, without a network or scripts, and safe whatever a plan says."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from staged import GIB, rearranged, staged
from tiny import MIB, Costs, fleet, made_up

from duoka import explain
from duoka.forecast.workload import Training, Workload
from duoka.hardware.fleet import Fleet
from duoka.planner.plan import Plan
from duoka.planner.reasons import Reason
from duoka.planner.request import PlanProblem
from duoka.planner.solve import find_plan
from duoka.report.html import render_page

VOID = {"meta", "br", "path"}
WORKLOAD = Workload(prompt_tokens=1000, new_tokens=24, prefill_chunk_tokens=None, dtype="bfloat16")


class Page(HTMLParser):
    """Tags, attributes and text of a page; what isn't closed in order is an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_everything_is_told() -> None:
    profile = made_up([12 * MIB, *[8 * MIB] * 10, 20 * MIB], Costs(cache=4096))
    plan = find_plan(profile, PlanProblem(fleet=fleet(100, 96, 4), workload=WORKLOAD))
    page = Page(render_page(plan, explain(plan, profile)))
    for wanted in (
        "MadeUp on 2 of 3 GPUs",
        "context 1024 (1000 + 24 new)",
        "94.00 MiB of 100.00 MiB",
        "vgpu:0 → vgpu:1: 1.00 KiB a token",
        "Not used: vgpu:2 (budget 4.00 MiB)",
        "Objective: headroom",
        "2 GPUs and not 1",
        "No fewer modules: with block.6 fragmentation on vgpu:1 would exceed its budget",
        "equal numbers of layers",
    ):
        assert wanted in page.text, wanted


def test_every_picture_has_words() -> None:
    page = Page(render_page(staged([20, 12])))
    pictures = [attributes for _, attributes in page.tags if attributes.get("role") == "img"]
    assert [picture["aria-label"].partition(",")[0] for picture in pictures] == ["cuda:0", "cuda:1"]
    for picture in pictures:
        assert "weights" in picture["aria-label"]
        assert "free" in picture["aria-label"]
    for tag, attributes in page.tags:
        if tag == "svg":
            assert attributes["aria-hidden"] == "true"
    (language,) = (attributes["lang"] for tag, attributes in page.tags if tag == "html")
    assert language == "en"


def test_nothing_comes_from_elsewhere() -> None:
    text = render_page(staged([20, 12]))
    assert not re.search(r"https?:|//[a-z]|url\(|@import|<script|<link|<img|<iframe|srcset", text)
    page = Page(text)
    (policy,) = (a["content"] for _, a in page.tags if a.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)


HOSTILE = "\"><script>alert(1)</script><b onclick='x'>&amp;{{ 7*7 }}\u202eevil\x00"


def test_markup_of_a_plan_stays_text() -> None:
    plan = staged([2, 2], gpus="24GiB,12GiB,8GiB")
    entries = tuple((name.replace("layers", HOSTILE), at) for name, at in plan.placement.entries)
    plan = rearranged(plan, entries)
    devices = tuple(replace(d, product='<i title="x">') for d in plan.fleet.devices)
    plan = replace(
        plan,
        model=HOSTILE,
        source=HOSTILE + "\udcff",
        why=(Reason("note", {"text": HOSTILE}),),
        fleet=Fleet(devices=devices),
        request=replace(plan.request, gpus=HOSTILE),
    )
    text = render_page(plan)
    text.encode()
    page = Page(text)
    assert "script" not in {tag for tag, _ in page.tags}
    assert not any("onclick" in attributes for _, attributes in page.tags)
    assert page.text.count("<script>alert(1)</script>") >= 6
    assert "{{ 7*7 }}" in page.text
    assert "\u202e" not in text
    assert "\x00" not in text
    assert r"\u202eevil\x00" in page.text


def widths(page: Page) -> list[float]:
    styles = [attributes.get("style", "") for _, attributes in page.tags]
    return [float(found[1]) for style in styles if (found := re.fullmatch(r"width: (.+)%", style))]


@pytest.mark.parametrize("weights", [0, 2**62, -(2**62)])
def test_bars_of_a_hostile_plan_stay_within_bounds(weights: int) -> None:
    plan = staged([3, 2])
    first, second = plan.forecast.devices
    wrong = replace(first, weight_bytes=weights, kv_cache_bytes=-weights, reserved_bytes=weights)
    plan = replace(plan, forecast=replace(plan.forecast, devices=(wrong, second)))
    assert all(0 <= width <= 100 for width in widths(Page(render_page(plan))))


def test_bars_are_as_long_as_budgets() -> None:
    page = Page(render_page(staged([20, 12])))
    tracks = [
        attributes["style"] for _, attributes in page.tags if attributes.get("class") == "track"
    ]
    assert tracks == ["width: 100.0%", "width: 50.0%"]
    weights = [
        attributes["style"] for _, attributes in page.tags if attributes.get("class") == "weights"
    ]
    assert weights[0] == f"width: {round(100 * 5 / 24, 3)}%"  # 20 layers of 0.25 GiB of 24 GiB


def test_training_has_its_own_kinds() -> None:
    training = Training(optimizer="adamw", micro_batches=4, schedule="gpipe")
    plan: Plan = staged([3, 2])
    plan = replace(
        plan,
        workload=replace(WORKLOAD, new_tokens=0, training=training),
        forecast=replace(
            plan.forecast,
            devices=tuple(
                replace(device, gradient_bytes=GIB, optimizer_bytes=2 * GIB)
                for device in plan.forecast.devices
            ),
        ),
    )
    text = Page(render_page(plan)).text
    for wanted in ("LoRA training, rank 8", "4 micro-batches, gpipe", "gradients 1.00 GiB"):
        assert wanted in text
    usual = Page(render_page(staged([3, 2]))).text
    assert "gradients" not in usual
    assert "KV cache" not in usual  # this plan has none, and a bar of nothing tells nothing


def test_small_models_are_in_mib() -> None:
    profile = made_up([MIB] * 4)
    plan = find_plan(profile, PlanProblem(fleet=fleet(64), workload=WORKLOAD))
    assert "In MiB." in Page(render_page(plan)).text
