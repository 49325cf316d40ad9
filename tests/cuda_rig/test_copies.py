"""GPUs whose copies to one another don't arrive: noticed, and gone around."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import duoka
from duoka.base.progress import heard_by
from duoka.runtime.dispatch.copies import arrives, carry, copy_fault

pytestmark = pytest.mark.cuda_rig(gpus="3x4GiB", peers=1, bad_peers="0>1=zeros,1>0=garbage")
CUDA = [torch.device("cuda", index) for index in range(3)]


class Unchanged(nn.Module):
    """Has a weight to be placed by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers


def test_what_arrives_where() -> None:
    ways = [(0, 1), (1, 0), (0, 2), (2, 0), (1, 2), (2, 1)]
    assert [arrives(*way) for way in ways] == [False, False, True, True, True, True]
    assert copy_fault("cuda:0", "cuda:1") == "zeros arrive"
    assert copy_fault("cuda:1", "cuda:0") == "65536 of 65536 numbers are corrupted"


def test_tensors_go_around() -> None:
    numbers = torch.arange(5.0).to("cuda:0")
    assert numbers.to("cuda:1").cpu().tolist() == [0.0] * 5  # what PyTorch does
    assert carry(numbers, CUDA[1]).cpu().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert carry(numbers, CUDA[2]).cpu().tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


@pytest.mark.cuda_rig(peers=0)
def test_without_peer_access_nothing_is_tested() -> None:
    assert arrives(0, 1)
    assert torch.cuda.memory_reserved(0) == 0


def test_a_model_says_so_once_when_it_is_spread() -> None:
    said: list[str] = []
    model = nn.Sequential(Unchanged(), Unchanged())
    where = {"0": "cuda:0", "1": "cuda:1"}
    with heard_by(said.append):
        duoka.dispatch(model, where, outputs="stay")
        duoka.dispatch(model, where, outputs="stay")
    assert [text.partition(" in direct")[0] for text in said] == [
        "cuda:0 → cuda:1: zeros arrive",
        "cuda:1 → cuda:0: 65536 of 65536 numbers are corrupted",
    ]
    assert torch.cuda.memory_reserved(1) == 2 * 2**20  # of its weights alone
    answer = model(torch.arange(4.0))
    assert (answer.device, answer.cpu().tolist()) == (CUDA[1], [0.0, 1.0, 2.0, 3.0])
