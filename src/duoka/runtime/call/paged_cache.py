"""The pages of a KV cache: the keys and values of each layer, on the layer's device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from duoka.forecast.serving import Capacity
from duoka.models.kv_cache import round_to_int8


# The slot of a token is its row if all pages are seen as one list of tokens:
# page * page_tokens + position % page_tokens. With pages of 4 tokens and the block table [7, 2],
# position 5 is in the second page of its sequence, page 2, and its slot is 2 * 4 + 1 = 9.
class Pages(NamedTuple):
    """Keys or values of a layer: `states` [pages, page_tokens, heads, head_dim].

    In 8 bit there are `scales` [pages, page_tokens, heads, 1], else None.
    """

    states: Tensor
    scales: Tensor | None

    @classmethod
    def new(cls, states: Tensor, number: int, page_tokens: int, *, is_int8: bool) -> Pages:
        """Allocate `number` pages for states shaped like `states`, [1, heads, tokens, head_dim]."""
        shape = number, page_tokens, states.shape[1]
        if not is_int8:
            return cls(states.new_zeros(*shape, states.shape[3]), None)
        integers = states.new_zeros(*shape, states.shape[3], dtype=torch.int8)
        return cls(integers, states.new_zeros(*shape, 1))

    def store(self, slots: Tensor, states: Tensor) -> None:
        """Write the states of tokens, [tokens, heads, head_dim], each into its slot."""
        if self.scales is not None:
            states, scales = round_to_int8(states)
            self.scales.flatten(0, 1).index_copy_(0, slots, scales)
        self.states.flatten(0, 1).index_copy_(0, slots, states)

    def gather(self, pages: Tensor, workspace: GatherWorkspace) -> Tensor:
        """Gather pages into the workspace; return their states, [tokens, heads, head_dim]."""
        number = len(pages) * self.states.shape[1]
        out = workspace.states[:number]
        if self.scales is None or workspace.integers is None or workspace.scales is None:
            _gather(self.states, pages, out)
            return out
        integers, scales = workspace.integers[:number], workspace.scales[:number]
        _gather(self.states, pages, integers)
        _gather(self.scales, pages, scales)
        return torch.mul(integers, scales, out=out)


class GatherWorkspace(NamedTuple):
    """A buffer for gathered states; for 8-bit pages, also buffers for their integers and scales."""

    states: Tensor
    integers: Tensor | None
    scales: Tensor | None

    @classmethod
    def new(cls, pages: Pages, tokens: int) -> GatherWorkspace:
        """Allocate the workspace for a number of tokens."""
        shape, scales = (tokens, *pages.states.shape[2:]), pages.scales
        if scales is None:
            return cls(pages.states.new_empty(shape), None, None)
        states, integers = scales.new_empty(shape), pages.states.new_empty(shape)
        return cls(states, integers, scales.new_empty(tokens, *scales.shape[2:]))


def _gather(pages: Tensor, numbers: Tensor, out: Tensor) -> None:
    """Copy the pages with these numbers into `out`, one after another."""
    torch.index_select(pages.flatten(1), 0, numbers, out=out.view(len(numbers), -1))


class PagedCache:
    """Keys and values in pages; a layer's pages are allocated at its first call, on its device.

    Parameters
    ----------
    capacity : Capacity
        One page more is allocated: the scratch page, to which padding is written.
    windows : collection of int
        The sliding windows of the layers, in tokens; 0 for full attention.

    Attributes
    ----------
    rank_owners : sequence of int
        The number of the adapter of each rank of the model's stacked adapters.
    layer_windows : dict
        The window of each layer, once all are known.
    unpacked : dict
        The unpacked weight of each layer that expands latents by a quantized one.
    """

    def __init__(self, capacity: Capacity, windows: Collection[int] = (0,)) -> None:
        self.capacity = capacity
        self.rank_owners: Sequence[int] = ()
        self.windows = tuple(sorted(windows))
        self.layer_windows: dict[int, int] = {}
        self.unpacked: dict[int, Tensor] = {}
        self._layers: dict[int, tuple[Pages, ...]] = {}

    def layer(self, index: int, *states: Tensor) -> tuple[Pages, ...]:
        """Return the pages of a layer's keys and values, or latents; its first call allocates."""
        if index not in self._layers:
            number, size = self.capacity.pages + 1, self.capacity.page_tokens
            is_int8 = self.capacity.is_int8
            self._layers[index] = tuple(
                Pages.new(part, number, size, is_int8=is_int8) for part in states
            )
        return self._layers[index]

    @property
    def scratch_page(self) -> int:
        """The page to which padding is written."""
        return self.capacity.pages
