"""Pictures in prompts of GLM-4V: their tokens and the positions of these.

A published prompt has three tokens for a picture: its begin, a placeholder, and its end. Written
out, the begin is repeated for each feature of the picture. All features between the first and the
last have the same position; the tokens behind continue as if there were a single one:

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
"""The label that no loss is computed of, as in torch's cross entropy."""


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The tokens of a picture's begin and end, and the number of patches between them."""

    begin: int
    end: int
    patches: int

    @property
    def num_tokens(self) -> int:
        """The number of tokens of a picture, its begin and end included."""
        return self.patches + 2

    def positions(
        self, ids: Tensor, mask: Tensor | None = None, begun: Tensor | int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return the position of each token, and how many tokens of a cut-off picture come last.

        Parameters
        ----------
        ids, mask : Tensor
            [batch, tokens]; without a mask nothing is padding.
        begun : Tensor or int
            Tokens of a picture that come before these, [batch, 1]; 0 where there are none.

        Returns
        -------
        tuple of Tensor
            Positions from 0, [batch, tokens], -1 for padding on the left; and the next call's
            `begun`, [batch, 1].
        """
        # Two patches, four tokens for the picture; B is the begin, t is text:
        #
        #   ids         t   B   B   B   B   t
        #   number      0   1   2   3   4   0     within the run of B, after `begun` of them
        #   part        .   0   1   2   3   .     (number - 1) % 4, also in a run of two pictures
        #   counted     1   1   1   0   1   1     all but the patches after the first
        #   positions   0   1   2   2   3   4     cumulative sum of `counted`, minus 1
        inside = ids == self.begin
        numbers = inside.cumsum(1) + begun
        number = numbers - numbers.masked_fill(inside, 0).cummax(1).values  # 1, 2, … in a run
        part = (number - 1) % self.num_tokens
        # The first patch has a position of its own, and so has what ends the picture.
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
        """Write out published prompts among the arguments of `forward`, [batch, tokens] each.

        Shorter rows are padded, on the left if the mask has padding there already. Tokens that the
        prompt doesn't have are without labels.
        """
        rows: dict[str, Any] = {
            "attention_mask": attention_mask,
            "labels": labels,
            "position_ids": position_ids,
        }
        replaced = self._replaced(input_ids)
        if not bool(replaced.any()):
            return {"input_ids": input_ids, **rows}
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        source, padding = self._source(replaced, on_the_left or bool((mask[:, 0] == 0).any()))
        rows["input_ids"] = input_ids.masked_fill(replaced, self.begin)
        rows["input_ids"] = rows["input_ids"].masked_fill(replaced.roll(1, 1), self.begin)
        rows["attention_mask"] = mask.masked_fill(replaced, 1)  # tokenizers pad with that token
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
        """Return the source of each written-out token, and a mask of padding."""
        # For "t B P E t" with two patches repeats are 1 1 2 1 1, so they end at 1 2 4 5 6, and
        # columns 0 to 5 come from the tokens 0 1 2 2 3 4: the first whose end is beyond a column.
        repeats = torch.where(replaced, self.patches, 1)
        lengths = repeats.sum(1, keepdim=True)
        columns = torch.arange(int(lengths.max()), device=replaced.device)
        columns = columns - (lengths.max() - lengths) * int(on_the_left)  # a row for each prompt
        source = torch.searchsorted(repeats.cumsum(1), columns, right=True)
        padding = (columns < 0) | (columns >= lengths)
        return source.masked_fill(padding, 0), padding

    def _replaced(self, ids: Tensor) -> Tensor:
        """Return a mask of the placeholders in published prompts."""
        between = (ids != self.begin) & (ids != self.end)
        between &= ids.roll(1, 1) == self.begin
        between &= ids.roll(-1, 1) == self.end
        between[:, 0] = between[:, -1] = False
        return between
