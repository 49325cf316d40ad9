"""Which process has what, and sums of gradients over those that share a parameter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run_together
from torch import nn
from trainers import Gradients, make_layout, renamed, sum_gradients

from duoka import TuneSettings
from duoka.tuner.layout import GradientSum, Layout

SETTINGS = TuneSettings(seq_length=32)
FIRST, LAST = (f"model.layers.{n}.mlp.up_proj.lora_A.default.weight" for n in (0, 1))


@pytest.fixture
def uneven(llama: Path) -> Layout:
    """A copy on one GPU, and another one on two."""
    one = renamed(make_layout(llama, SETTINGS).plans[0], {"cpu": "vgpu:0"})
    (two,) = make_layout(llama, SETTINGS, stages=2).plans
    return Layout((one, renamed(two, {"vgpu:0": "vgpu:1", "vgpu:1": "vgpu:2"})))


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


def test_one_copy_needs_no_sum(llama: Path) -> None:
    """Nor a process group, which isn't there."""
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([1.0, 2.0])
    GradientSum(make_layout(llama, SETTINGS, stages=2), [FIRST]).reduce({FIRST: parameter})
    assert parameter.grad.tolist() == [1, 2]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("bucket_bytes", [1, 2**26])
def test_gradients_are_summed_over_those_that_share_them(
    uneven: Layout, tmp_path: Path, bucket_bytes: int
) -> None:
    unequal = torch.arange(6.0).view(3, 2).t()  # not contiguous, as a parameter may be
    alone, nowhere = (name.replace("lora_A", "lora_B") for name in (FIRST, LAST))
    processes: list[Gradients] = [
        {FIRST: unequal, alone: None, LAST: torch.ones(2, 3), nowhere: None},
        {FIRST: torch.full((2, 3), 10.0), alone: torch.full((2, 3), 7.0)},
        {LAST: torch.full((2, 3), torch.inf), nowhere: None},
    ]
    sums = run_together(3, sum_gradients, tmp_path / "store", uneven, processes, bucket_bytes)
    first, second, third = sums
    assert first.keys() == processes[0].keys()
    for process in (first, second):
        assert torch.equal(process[FIRST], unequal + 10)
        assert torch.equal(process[alone], torch.full((2, 3), 7.0))
    for process in (first, third):
        assert torch.equal(process[LAST], torch.full((2, 3), torch.inf))
        assert process[nowhere] is None  # as on one GPU
