"""Pictures in prompts: written out, and where their tokens are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from duoka.models.image_tokens import ImageTokens

BEGIN, END = 90, 91
TOKENS = ImageTokens(BEGIN, END, patches=2)
PICTURE = [BEGIN] * 4


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


def test_a_published_prompt_is_written_out() -> None:
    """What is replaced is the padding token, too; tokenizers say so in the mask."""
    prompt = ids([1, BEGIN, 7, END, 2], [3, 4, 5, 6, 8])
    arguments = TOKENS.write_out(
        prompt,
        attention_mask=ids([1, 1, 0, 1, 1], [1, 1, 1, 1, 1]),
        labels=ids([-100, 90, 7, 91, 2], [3, 4, 5, 6, 8]),
        position_ids=torch.arange(5)[None],
    )
    assert {name: rows.tolist() for name, rows in arguments.items()} == {
        "input_ids": [[1, *PICTURE, 2], [3, 4, 5, 6, 8, 0]],
        "attention_mask": [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]],
        "labels": [[-100, 90, -100, -100, 91, 2], [3, 4, 5, 6, 8, -100]],
        "position_ids": [[0, 1, 2, 2, 3, 4], [0, 1, 2, 3, 4, 0]],
    }


def test_padding_goes_on_where_it_is() -> None:
    prompt = ids([0, 1, BEGIN, 7, END], [BEGIN, 7, END, 2, 3], [4, 5, 6, 7, 8])
    mask = (prompt != 0).long()
    assert TOKENS.write_out(prompt, mask)["input_ids"].tolist() == [
        [0, 1, *PICTURE],
        [*PICTURE, 2, 3],
        [0, 4, 5, 6, 7, 8],
    ]
    assert TOKENS.write_out(prompt, mask)["attention_mask"][2].tolist() == [0, 1, 1, 1, 1, 1]
    left = TOKENS.write_out(prompt[1:], on_the_left=True)["input_ids"]
    assert left[1].tolist() == [0, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("row", [[1, 2, 3], [1, *PICTURE, 2], [BEGIN, END, END], [BEGIN]])
def test_what_is_written_out_already_stays(row: list[int]) -> None:
    prompt = ids(row)
    arguments = TOKENS.write_out(prompt)
    assert arguments["input_ids"] is prompt
    assert arguments["attention_mask"] is None


def slowly(row: list[int], mask: list[int]) -> list[int]:
    """One token after another: the same position for all of a picture between its ends."""
    positions, at, number = [], -1, 0
    for token, counts in zip(row, mask, strict=True):
        number = number % TOKENS.num_tokens + 1 if token == BEGIN else 0
        at += counts and number not in range(3, TOKENS.num_tokens)
        positions.append(at)
    return positions


@pytest.mark.parametrize(
    "row",
    [[1, 2, 3, 4], [1, *PICTURE, 2], [*PICTURE, *PICTURE], [0, 0, *PICTURE, 5, *PICTURE], [BEGIN]],
)
def test_positions(row: list[int]) -> None:
    """Of the whole prompt, and of pieces of it one after another."""
    mask = [int(token != 0) for token in row]
    positions, begun = TOKENS.positions(ids(row), ids(mask))
    assert positions.tolist() == [slowly(row, mask)]
    assert begun.tolist() == [[int(row == [BEGIN])]]
    first, begun, pieces = 0, 0, []
    for piece, seen in zip(ids(row).split(1, 1), ids(mask).split(1, 1), strict=True):
        positions, begun = TOKENS.positions(piece, seen, begun)
        pieces.append(positions + first)
        first = pieces[-1][:, -1:] + 1
    assert torch.cat(pieces, 1).tolist() == [slowly(row, mask)]
