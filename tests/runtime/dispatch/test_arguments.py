"""Which tensors of a call are brought to a block."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from transformers.modeling_outputs import BaseModelOutput

from duoka import virtual
from duoka.runtime.dispatch.arguments import brought, caches_of, mapped, stays

Pair = namedtuple("Pair", ("one", "other"))


class Layers(nn.Module):
    def forward(self, x: torch.Tensor, mems: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
        return x


def test_everything_comes_from_everywhere_but_numbers_on_the_host() -> None:
    with virtual.gpus([None] * 2):
        here = torch.device("vgpu:1")
        mask, number, far = torch.ones(2), torch.tensor(2.0), torch.ones(3, device="vgpu:0")
        value = {"a": [mask, (number,)], "b": Pair(far, None), "c": BaseModelOutput(far)}
        result = brought(value, here)
        assert result["a"][0].device == result["b"].one.device == here
        assert result["c"].last_hidden_state.device == here
        assert type(result["b"]) is Pair
        assert result["a"][1][0] is number
        assert value["a"][0] is mask
        assert brought(result, here) is result


def test_packed_sequences_keep_their_lengths_on_the_host() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    with virtual.gpus([None]):
        moved = brought(packed, torch.device("vgpu:0"))
        assert (str(moved.data.device), str(moved.batch_sizes.device)) == ("vgpu:0", "cpu")
    assert mapped(packed, lambda tensor: tensor) is packed


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("mems", (torch.ones(1),), True),
        (1, [torch.ones(1)], True),
        ("past_key_values", torch.ones(1), False),  # one tensor is no part of each block's
        (0, [torch.ones(1)], False),
    ],
)
def test_a_cache_with_parts_stays_where_they_were_made(
    key: int | str, value: object, expected: bool
) -> None:
    assert stays(key, value, caches_of(Layers())) is expected
