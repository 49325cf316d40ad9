"""Which tensors of a call are brought to a block."""

from __future__ import annotations

from collections import namedtuple
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPast

from duoka import virtual
from duoka.runtime.dispatch.arguments import bring, caches_in, caches_of, mapped, mapped_call

Pair = namedtuple("Pair", ("one", "other"))


class Layers(nn.Module):
    def forward(self, x: torch.Tensor, mems: tuple[torch.Tensor, ...] = ()) -> torch.Tensor:
        return x


def test_everything_comes_from_everywhere_but_numbers_on_the_host() -> None:
    with virtual.gpus([None] * 2):
        here = torch.device("vgpu:1")
        mask, number, far = torch.ones(2), torch.tensor(2.0), torch.ones(3, device="vgpu:0")
        value = {"a": [mask, (number,)], "b": Pair(far, None), "c": BaseModelOutput(far)}
        result = mapped(value, partial(bring, device=here))
        assert result["a"][0].device == result["b"].one.device == here
        assert result["c"].last_hidden_state.device == here
        assert type(result["b"]) is Pair
        assert result["a"][1][0] is number
        assert value["a"][0] is mask
        assert mapped(result, partial(bring, device=here)) is result


def test_packed_sequences_keep_their_lengths_on_the_host() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    with virtual.gpus([None]):
        moved = mapped(packed, partial(bring, device=torch.device("vgpu:0")))
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
    args = (0, value) if key == 1 else (value,) if key == 0 else ()
    kwargs = {key: value} if isinstance(key, str) else {}
    args, kwargs = mapped_call(args, kwargs, torch.neg, caches_of(Layers()))
    assert ((args[-1] if args else kwargs[key]) is value) is expected


def test_caches_in_outputs_are_found_by_name_and_by_their_depth() -> None:
    tensor = torch.ones(1)
    presents, states = ((tensor, tensor), (tensor, tensor)), (tensor, tensor)
    assert caches_in(BaseModelOutputWithPast(tensor, presents)) == [presents]
    assert caches_in((tensor, presents, states)) == [presents]
    assert caches_in(tensor) == []
