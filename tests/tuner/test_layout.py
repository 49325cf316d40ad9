"""Which process has what."""

from __future__ import annotations

from pathlib import Path

import pytest
from trainers import make_layout, make_uneven_layout

from duoka import TuneSettings
from duoka.tuner.layout import Layout

SETTINGS = TuneSettings(seq_length=32)
FIRST, LAST = (f"model.layers.{n}.mlp.up_proj.lora_A.default.weight" for n in (0, 1))


@pytest.fixture
def uneven(llama: Path) -> Layout:
    return make_uneven_layout(llama, SETTINGS)


def test_every_device_of_every_copy_is_a_process(uneven: Layout) -> None:
    assert uneven.world_size == 3
    places = [uneven.place(rank) for rank in range(3)]
    assert places == [(0, "vgpu:0"), (1, "vgpu:1"), (1, "vgpu:2")]
    assert [uneven.rank(*place) for place in places] == [0, 1, 2]
    assert [uneven.forecast(rank).device for rank in range(3)] == ["vgpu:0", "vgpu:1", "vgpu:2"]
    assert [uneven.label(rank) for rank in range(3)] == [
        *("vgpu:0 (copy 1)", "vgpu:1 (copy 2)", "vgpu:2 (copy 2)")
    ]
    with pytest.raises(AssertionError, match="more processes than devices"):
        uneven.place(3)


def test_machines_have_devices_of_the_same_names(llama: Path) -> None:
    layout = Layout(make_layout(llama, SETTINGS, stages=2).plans * 2)
    assert [layout.place(rank) for rank in range(4)] == [
        *((0, "vgpu:0"), (0, "vgpu:1"), (1, "vgpu:0"), (1, "vgpu:1"))
    ]
    assert [layout.rank(*layout.place(rank)) for rank in range(4)] == [0, 1, 2, 3]
    assert len({layout.label(rank) for rank in range(4)}) == 4


def test_a_parameter_is_one_process_s_in_each_copy(uneven: Layout) -> None:
    assert uneven.owners(FIRST) == uneven.owners("model.embed_tokens.weight") == (0, 1)
    assert uneven.owners(LAST) == uneven.owners("lm_head.weight") == (0, 2)
