"""Image tokens in prompts of GLM-4V, and their positions.

A published prompt has three tokens for an image: begin, a placeholder, and end. In the expanded
prompt ("written out") the begin token is repeated for each feature of the image. All features
between the first and the last have the same position; following tokens continue from there:

    published    text  begin  placeholder  end  text
    written out  text  begin  begin … begin  begin  text      (patches + 2 times)
    positions    0     1      2     … 2      3      4
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_IGNORED = -100
"""The label of tokens without a loss: the default `ignore_index` of cross entropy."""


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The begin and end tokens of an image, and the number of patches between them."""

    begin: int
    end: int
    patches: int

    @property
    def num_tokens(self) -> int:
        """The number of expanded tokens of an image, its begin and end included."""
        return self.patches + 2

    def positions(
        self, ids: Tensor, mask: Tensor | None = None, begun: Tensor | int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return the position of each expanded token, and the length of an unfinished last image.

        Parameters
        ----------
        ids, mask : Tensor
            [batch, tokens]; without a mask there is no padding.
        begun : Tensor or int
            Number of tokens of an unfinished image before `ids`, [batch, 1]; 0 for none.

        Returns
        -------
        tuple of Tensor
            Positions from 0, [batch, tokens], with -1 for padding on the left; and `begun`,
            [batch, 1], for a call with the following tokens.
        """
        # Two patches, so an image has four tokens; B is the begin token, t is text:
        #
        #   ids         t   B   B   B   B   t
        #   number      0   1   2   3   4   0     within the run of B, after `begun` of them
        #   part        .   0   1   2   3   .     (number - 1) % 4, also in a run of two images
        #   counted     1   1   1   0   1   1     all but the patches after the first
        #   positions   0   1   2   2   3   4     cumulative sum of `counted`, minus 1
        inside = ids == self.begin
        numbers = inside.cumsum(1) + begun
        number = numbers - numbers.masked_fill(inside, 0).cummax(1).values  # 1, 2, … in a run
        part = (number - 1) % self.num_tokens
        # The begin, the first patch and the end of an image each advance the position.
        counted = ~inside | (part < 2) | (part == self.num_tokens - 1)
        if mask is not None:
            counted &= mask.bool()
        return counted.cumsum(1) - 1, number[:, -1:] % self.num_tokens

    def write_out(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        on_the_left: bool = False,
    ) -> dict[str, Any]:
        """Expand published prompts, given as arguments of `forward`, [batch, tokens] each.

        Expanded rows of unequal length are padded: on the left if `on_the_left`, or if the mask has
        padding there already. Added tokens have no labels. Prompts without placeholders are
        returned unchanged.
        """
        rows: dict[str, Any] = {
            "attention_mask": attention_mask,
            "labels": labels,
            "position_ids": position_ids,
        }
        replaced = self._find_placeholders(input_ids)
        if not bool(replaced.any()):
            return {"input_ids": input_ids, **rows}
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        source, padding = self._source(replaced, on_the_left or bool((mask[:, 0] == 0).any()))
        rows["input_ids"] = input_ids.masked_fill(replaced, self.begin)
        rows["input_ids"] = rows["input_ids"].masked_fill(replaced.roll(1, 1), self.begin)
        rows["attention_mask"] = mask.masked_fill(replaced, 1)  # tokenizers may mask it
        rows["labels"] = None if labels is None else labels.masked_fill(replaced, _IGNORED)
        return {
            name: None
            if values is None
            else values.expand(len(input_ids), -1)
            .gather(1, source)
            .masked_fill(padding, _IGNORED if name == "labels" else 0)
            for name, values in rows.items()
        }

    def _source(self, replaced: Tensor, on_the_left: bool) -> tuple[Tensor, Tensor]:
        """Return the index of each expanded token's published token, and a mask of padding."""
        # For "t B P E t" with two patches the repeats are 1 1 2 1 1, and end at columns 1 2 4 5 6.
        # Columns 0 to 5 come from the tokens 0 1 2 2 3 4: the first token that ends after a column.
        repeats = torch.where(replaced, self.patches, 1)
        lengths = repeats.sum(1, keepdim=True)
        columns = torch.arange(int(lengths.max()), device=replaced.device)
        columns = columns - (lengths.max() - lengths) * int(on_the_left)  # a row for each prompt
        source = torch.searchsorted(repeats.cumsum(1), columns, right=True)
        padding = (columns < 0) | (columns >= lengths)
        return source.masked_fill(padding, 0), padding

    def _find_placeholders(self, ids: Tensor) -> Tensor:
        """Return a mask of the placeholders: tokens between a begin and an end token."""
        between = (ids != self.begin) & (ids != self.end)
        between &= ids.roll(1, 1) == self.begin
        between &= ids.roll(-1, 1) == self.end
        between[:, 0] = between[:, -1] = False
        return between
