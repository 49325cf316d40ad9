"""Flash attention's parts, as PyTorch 2.13's kernel was seen to take them on the CUDA rig."""

from __future__ import annotations

import pytest

from duoka.forecast.flash_splits import FlashShape, PartBytes


@pytest.mark.parametrize(
    ("shape", "batch", "tokens", "splits"),
    [
        ((8, 256), 1, 1000, 6),
        ((8, 256), 1, 1024, 6),
        ((8, 256), 1, 1025, 1),
        ((8, 256), 2, 600, 1),
        ((16, 128), 1, 128, 1),
        ((32, 128), 1, 4000, 1),
        ((9, 64), 1, 513, 2),
    ],
)
def test_how_many_splits(shape: tuple[int, int], batch: int, tokens: int, splits: int) -> None:
    rows = FlashShape(*shape).part_rows(batch, tokens)
    assert rows == (splits * batch * shape[0] * tokens if splits > 1 else 0)


def test_a_whole_prompt_is_charged_next_to_nothing() -> None:
    whole = PartBytes.of(FlashShape(32, 128), 1, 4000, 512)
    assert (whole, whole.shape, whole.row_bytes) == (1, FlashShape(32, 128), 512)
    assert PartBytes.of(FlashShape(8, 256), 1, 1000, 1024) == 6 * 8 * 1000 * 1024
