"""Maps are complete or refused with every name at fault, and the completed map is always good."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from duoka import Fleet
from duoka.errors import PlacementError
from duoka.forecast.tensor_names import Outline
from duoka.hardware.device import Device
from duoka.planner.device_map import DeviceMap, judge

from .outlines import SMALL, block, tensor

FLEET = Fleet.parse("virtual:3x1GiB")
NATIVE = {
    "m.emb": 0,
    "m.rot": 0,
    "m.layers.0": 0,
    "m.layers.1": 1,
    "m.norm": 1,
    "out": 1,
    "head": 0,
}
PUBLISHED = {"p.e": 0, "p.r": 0, "p.enc.0": 0, "p.enc.1": 1, "m.norm": 1, "out": 1}
PLACED = tuple((name, f"vgpu:{device}") for name, device in NATIVE.items())


def placed(device_map: object, outline: Outline = SMALL) -> tuple[tuple[str, str], ...]:
    judgement = judge(device_map, outline, FLEET)
    assert not judgement.notes
    return judgement.placed


def refused(device_map: object, outline: Outline = SMALL) -> PlacementError:
    with pytest.raises(PlacementError) as caught:
        judge(device_map, outline, FLEET)
    error = caught.value
    assert error.completed is not None
    judge(error.completed, outline, FLEET)
    return error


@pytest.mark.parametrize(
    "device_map",
    [
        NATIVE,
        PUBLISHED,
        {"": 0, "m.layers.1": 1, "m.norm": 1, "out": 1},
        {"m": 0, "p.enc.1": "vgpu:1", "m.layers.1": "1", "m.norm": 1, "out": 1, "head": 0},
        {"m.emb": 0, "p.r.freq": 0, "m.layers": 0, "m.layers.1": 1, "m.norm": 1, "out.weight": 1},
        {"": 1, "p.e": 0, "p.r": 0, "m.layers.0": 0, "head": 0},
        {"p": 1, "p.e": 0, "p.r": 0, "p.enc.0": 0, "m.norm.step": 1, "out": 1},
    ],
)
def test_forms_that_mean_the_same(device_map: object) -> None:
    assert placed(device_map) == PLACED


BUFFERED = replace(
    SMALL,
    blocks=tuple(
        replace(
            each,
            tensors=tuple(
                replace(held, is_buffer=held.name in ("m.rot.freq", "m.rot.kept", "m.norm.step"))
                for held in each.tensors
            ),
        )
        for each in SMALL.blocks
    ),
)


def test_buffers_follow_the_parameters_of_their_block() -> None:
    away = judge({**NATIVE, "m.rot": 2, "m.norm.step": 0}, BUFFERED, FLEET)
    assert away.placed == PLACED
    assert away.notes == (
        "m.rot goes to vgpu:0 with m.emb, and not to vgpu:2: it holds no parameters",
        "m.norm.step goes to vgpu:1 with m.norm, and not to vgpu:0: it holds no parameters",
    )
    several = judge({**NATIVE, "m.rot.freq": 2, "m.rot.kept": 1}, BUFFERED, FLEET)
    assert several.placed == PLACED
    assert len(several.notes) == 2
    assert not judge(NATIVE, BUFFERED, FLEET).notes


def test_a_buffer_without_a_device_is_missing_all_the_same() -> None:
    assert refused(without("m.rot"), BUFFERED).missing == ("m.rot.freq", "m.rot.kept")
    assert refused({**NATIVE, "m.rot": 7}, BUFFERED).misplaced


def without(*names: str, given: dict[str, int] = NATIVE) -> dict[str, int]:
    return {name: device for name, device in given.items() if name not in names}


def test_a_tied_tensor_has_the_device_of_any_of_its_names() -> None:
    assert placed(without("head")) == PLACED
    error = refused({**without("m.emb"), "head": 1})
    assert error.missing == ()
    assert error.split == ("m.emb", "m.rot", "head")  # the rotary frequencies stay at 0
    assert error.completed == {**NATIVE, "m.emb": 0}
    error = refused({"": 1, "m.emb": 0, "m.rot": 0})
    assert "m.emb, m.rot, head, which share weights (on vgpu:0 and vgpu:1)" in str(error)


IN_A_LAYER = ("attn.q.weight", "attn.k.weight", "norm.weight", "experts")
PUBLISHED_IN_A_LAYER = ("qkv.weight", "n.weight", "x.0.weight", "x.1.weight")


@pytest.mark.parametrize(
    ("given", "names", "missing"),
    [
        (
            NATIVE,
            ("m.rot", "m.layers.0"),
            ("m.rot.freq", "m.rot.kept", *(f"m.layers.0.{name}" for name in IN_A_LAYER)),
        ),
        (
            PUBLISHED,
            ("p.r", "p.enc.0"),
            ("p.r.freq", *(f"p.enc.0.{name}" for name in PUBLISHED_IN_A_LAYER)),
        ),
    ],
)
def test_missing_names_are_those_of_the_author(
    given: dict[str, int], names: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    error = refused(without(*names, given=given))
    assert error.missing == missing
    assert f"no device for: {', '.join(names)}" in str(error)
    assert error.completed == {**given, "head": 0}


def test_unknown_names_and_what_they_mean() -> None:
    wrong = {
        "m.emb.": 0,
        " m.rot": 0,
        "layers.0": 0,
        "M.Layers.1": 1,
        "m.nrom": 1,
        "out": 1,
        "m.layers.7": 2,
        "nothing.like.it": 2,
    }
    error = refused(wrong)
    assert error.unknown == tuple(name for name in wrong if name != "out")
    assert {name: near[0] for name, near in error.nearest.items()} == {
        "m.emb.": "m.emb",
        " m.rot": "m.rot",
        "layers.0": "m.layers.0",
        "M.Layers.1": "m.layers.1",
        "m.nrom": "m.norm",
        "m.layers.7": "m.layers.1",
    }
    assert error.completed == NATIVE
    assert "m.nrom → m.norm" in str(error)
    assert "' m.rot' → m.rot" in str(error)


def test_two_conventions_that_contradict_each_other() -> None:
    error = refused({**NATIVE, "p.enc.1": 0})
    assert error.doubled == ("m.layers.1", "p.enc.1")
    assert error.split == ()
    assert "two devices for: m.layers.1, p.enc.1" in str(error)
    # Of one opinion they may be.
    assert placed({**NATIVE, "p.enc.1": 1}) == PLACED


def test_what_must_stay_whole() -> None:
    error = refused({**NATIVE, "m.layers.0.attn": 1, "m.layers.1.norm": 2, "m.rot": 1})
    assert error.split == ("m.emb", "m.rot", "head", "m.layers.0", "m.layers.1")
    assert "m.layers.0 (on vgpu:1 and vgpu:0)" in str(error)
    # Where most of the bytes are.
    assert error.completed == {**NATIVE, "m.layers.0": 1}
    error = refused({**NATIVE, "m.layers.0.attn.q": 2})
    assert error.completed == {**NATIVE, "m.layers.0": 2}
    error = refused({**PUBLISHED, "p.enc.0.qkv": 2})
    assert error.split == ("p.enc.0",)
    assert error.completed is not None
    assert error.completed["p.enc.0"] == 2


def test_everything_at_once() -> None:
    entries = {"m.emb": 0, "m.layers.0": 0, "m.layers.0.norm": 1, "p.enc.1": "disk", "m.nrom": 7}
    error = refused(DeviceMap((*entries.items(), ("out", 1), ("out", 2))))
    assert error.missing == ("m.rot.freq", "m.rot.kept", "m.norm.weight", "m.norm.step")
    assert error.unknown == ("m.nrom",)
    assert error.doubled == ("out",)
    assert error.split == ("m.layers.0",)
    assert error.misplaced == ("p.enc.1", "m.nrom")
    assert len(str(error).splitlines()) == 6
    assert "the devices are vgpu:0, vgpu:1, vgpu:2" in str(error)


@pytest.mark.parametrize(("device", "shown"), [(1, 1), ("1", 1), ("vgpu:1", "vgpu:1")])
def test_the_completed_map_is_written_as_the_map_was(device: object, shown: object) -> None:
    names = ("p.e", "p.r", "p.enc.0", "p.enc.1", "m.norm", "out", "head")
    assert refused({"p.e": device, "p.enc": device}).completed == dict.fromkeys(names, shown)


def test_neighbours_decide_about_what_is_missing() -> None:
    error = refused({"m.layers.0": 1, "m.norm": 2})
    assert error.completed == {**dict.fromkeys(NATIVE, 1), "m.norm": 2, "out": 2}


def test_names_cannot_break_the_terminal() -> None:
    error = refused({"\x1b[2Jm.emb": 0, "\ud800": "\x1b[31mred", "a" * 10_000: 0})
    str(error).encode("utf-8")
    assert "\x1b" not in str(error)
    assert max(map(len, str(error).splitlines())) < 1000
    assert error.unknown[-1] == "a" * 10_000


@pytest.mark.slow
def test_a_million_unknown_names_are_told_in_time() -> None:
    huge: dict[str, Any] = {f"m.layer{n % 977}.{n}.x{n % 13}": 0 for n in range(60_000)}
    error = refused(huge)
    assert len(error.unknown) == 60_000
    assert len(str(error)) < 20_000


def test_names_alone_are_enough_for_completeness() -> None:
    outline = Outline.of_names(["a.w", "a.b", "b.c.w", "b.w", "top"])
    assert [block.modules for block in outline.blocks] == [("a",), ("b.c",), ("b.w",), ("top",)]
    placed = dict(judge({"a": 0, "b": 1, "b.c": 0, "top": 1}, outline).placed)
    assert placed == {"a": "cuda:0", "b.c": "cuda:0", "b.w": "cuda:1", "top": "cuda:1"}
    with pytest.raises(PlacementError) as caught:
        judge({"a": 0, "b": 1}, outline)
    assert caught.value.missing == ("top",)
    assert caught.value.completed == {"a": 0, "b.c": 1, "b.w": 1, "top": 1}


def test_a_module_whose_published_name_holds_more_is_called_natively() -> None:
    both = ("p.z.a.w", "p.z.b.w"), ("p.z.c.w",)
    blocks = tuple(
        block([name], *(tensor(f"{name}.{n}", source) for n, source in enumerate(sources)))
        for name, sources in zip(("m.x", "m.y"), both, strict=True)
    )
    outline = replace(SMALL, blocks=(*SMALL.blocks[:2], *blocks))
    error = refused({"p.e": 0, "p.enc": 1, "p.z.c": 2}, outline)
    assert error.missing == ("p.r.freq", "p.z.a.w", "p.z.b.w")
    assert error.completed == {"p.e": 0, "p.r": 0, "p.enc.0": 1, "m.x": 1, "p.z.c": 2}


def test_names_that_are_exchanged_between_the_conventions() -> None:
    # Native a is published as b, and the other way round: a known name is a native one.
    blocks = SMALL.blocks[:1]
    tensors = tuple(
        replace(tensor, published=(other.name,))
        for tensor, other in zip(blocks[0].tensors, reversed(blocks[0].tensors), strict=True)
    )
    outline = replace(SMALL, blocks=(replace(blocks[0], tensors=tensors),))
    assert placed({"m.emb": 0, "m.rot": 0}, outline) == (
        ("m.emb", "vgpu:0"),
        ("m.rot", "vgpu:0"),
    )
    assert refused({"m.emb": 0}, outline).missing == ("m.rot.freq", "m.rot.kept")


@pytest.mark.parametrize(
    ("visible", "given", "expected"),
    [
        ("2,3", (2, 3), (0, 1)),
        ("1,2", (1, 2), (0, 1)),
        ("3,2", (2, 3), (1, 0)),
        ("2,3", ("cuda:2", "cuda:3"), ("cuda:0", "cuda:1")),
        (None, (2, 3), (0, 1)),
        (None, (0, 7), (0, 1)),
        (None, (0, 1, 2, 3), (0, 0, 1, 1)),  # balanced over fewer
    ],
)
def test_devices_of_another_numbering_are_translated(
    visible: str | None,
    given: tuple[Any, ...],
    expected: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    one, *others, last = given
    middle = others or [one, last]
    device_map = {"m.emb": one, "m.rot": one, "m.layers.0": middle[0], "head": one}
    device_map |= {"m.layers.1": middle[1], "m.norm": last, "out": last}
    fleet = Fleet(devices=tuple(Device(name=f"cuda:{n}", budget_bytes=2**30) for n in range(2)))
    with pytest.raises(PlacementError) as caught:
        judge(device_map, SMALL, fleet)
    translated = dict(zip(given, expected, strict=True))
    assert caught.value.completed == {name: translated[at] for name, at in device_map.items()}
    if visible == "3,2":
        assert "CUDA_VISIBLE_DEVICES=3,2: 3 is cuda:0, 2 is cuda:1" in str(caught.value)


def test_modules_without_tensors_may_be_named() -> None:
    outline = replace(SMALL, empty_modules=("m.drop", "m.layers.0.act"))
    complete = {"m": 0, "out": 1, "m.layers.0.act": 1, "m.drop": 0}
    assert placed(complete, outline) == placed({"m": 0, "out": 1})
    assert refused({**complete, "m.dropp": 0}, outline).unknown == ("m.dropp",)
    assert refused({**complete, "m.drop": "disk"}, outline).misplaced == ("m.drop",)


def test_a_buffer_that_no_checkpoint_holds_may_be_left_out() -> None:
    step = replace(SMALL.blocks[3].tensors[1], is_buffer=True, is_saved=False)
    norm = replace(SMALL.blocks[3], tensors=(SMALL.blocks[3].tensors[0], step))
    outline = replace(SMALL, blocks=(*SMALL.blocks[:3], norm, *SMALL.blocks[4:]))
    named = {"m.emb": 0, "m.rot": 0, "m.layers": 0, "out": 0}
    assert dict(placed({**named, "m.norm.weight": 1}, outline))["m.norm"] == "vgpu:1"
    assert refused(named, outline).missing == ("m.norm.weight", "m.norm.step")
