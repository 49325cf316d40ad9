"""Where pictures are in prompts of GLM-4V, and which positions their tokens have.

A published prompt has three tokens for a picture: its beginning, one that is to be replaced, and
its end. Written out, the one in the middle is there as often as the picture has tokens. All of
these stand at one position; what comes behind goes on as if there were one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_IGNORED = -100
"""The label that no loss is computed of, as in torch's cross entropy."""


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The tokens that begin and end a picture, and how many are between."""

    begin: int
    end: int
    count: int

    def where(self, ids: Tensor) -> Tensor:
        """Which tokens stand for a picture, its beginning and end included: [batch, tokens]."""
        begins, ends = ids == self.begin, ids == self.end
        begun = begins.cumsum(1) > ends.cumsum(1) - ends.long()
        ended = ends.flip(1).cumsum(1).flip(1) > 0
        return begun & ended

    def positions(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """The position of each token, padding aside: [batch, tokens]."""
        inside = self.where(ids) & (ids != self.begin) & (ids != self.end)
        repeats = torch.zeros_like(inside)
        repeats[:, 1:] = inside[:, 1:] & inside[:, :-1]
        counted = ~repeats if mask is None else ~repeats & mask.bool()
        return (counted.cumsum(1) - 1).clamp(min=0)

    def written_out(self, ids: Tensor) -> bool:
        """Whether a prompt with pictures has a token for each of theirs."""
        pictures = int((ids == self.begin).sum())
        return int(self.where(ids).sum()) == pictures * (self.count + 2)

    def write_out(
        self, ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Write pictures out in prompts: ids, and the mask and the labels beside them.

        Rows with fewer pictures are padded, where the mask says that padding is: on the left if
        any row begins with it. Text alone stays as it is.
        """
        mask = torch.ones_like(ids) if mask is None else mask
        rows = [self._spread(row) for row in ids]
        longest = max(len(row) for row in rows)
        on_the_left = bool((mask[:, 0] == 0).any())

        def taken(values: Tensor, inside: int | None, padding: int) -> Tensor:
            filled = values.new_full((len(rows), longest), padding)
            for number, row in enumerate(rows):
                columns = slice(longest - len(row), None) if on_the_left else slice(len(row))
                filled[number, columns] = values[number, row]
                if inside is not None:
                    filled[number, columns][self.where(ids[number, row][None])[0]] = inside
            return filled

        return (
            taken(ids, None, int(ids[0, 0])),
            taken(mask, None, 0),
            None if labels is None else taken(labels, _IGNORED, _IGNORED),
        )

    def _spread(self, row: Tensor) -> Tensor:
        """Of which of a row's tokens the row consists when pictures are written out."""
        inside = self.where(row[None])[0] & (row != self.begin) & (row != self.end)
        return torch.arange(len(row), device=row.device).repeat_interleave(
            torch.where(inside, self.count, 1)
        )
