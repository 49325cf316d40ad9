"""Flash attention's parts, as PyTorch 2.13's kernel was seen to take them on the CUDA rig."""

from __future__ import annotations

import pytest

from duoka.forecast.flash_splits import FlashShape, PartBytes

GEMMA, LLAMA, GLM, SMALL = (8, 4, 256), (32, 8, 128), (32, 2, 128), (9, 3, 64)


@pytest.mark.parametrize(
    ("shape", "batch", "query", "keys", "splits"),
    [
        (GEMMA, 1, 1000, 1000, 6),
        (GEMMA, 1, 1024, 1024, 6),
        (GEMMA, 1, 1025, 1025, 1),
        (GEMMA, 2, 600, 600, 1),
        (LLAMA, 1, 4000, 4000, 1),
        (SMALL, 1, 513, 513, 2),
        (GLM, 1, 1, 128, 1),
        (GLM, 1, 1, 4000, 32),
        (GLM, 1, 1, 32000, 63),
        (LLAMA, 4, 1, 4000, 5),
        (GEMMA, 1, 1, 1000, 16),
    ],
)
def test_how_many_splits(
    shape: tuple[int, int, int], batch: int, query: int, keys: int, splits: int
) -> None:
    rows = FlashShape(*shape).part_rows(batch, query, keys)
    assert rows == (splits * batch * shape[0] * query if splits > 1 else 0)


def test_what_is_not_split_is_charged_next_to_nothing() -> None:
    shape = FlashShape(*LLAMA)
    whole = PartBytes.of(shape, 512, 1, 4000, 4000)
    assert (whole, whole.shape, whole.row_bytes) == (1, shape, 512)
    assert PartBytes.of(FlashShape(*GEMMA), 1024, 1, 1000, 1000) == 6 * 8 * 1000 * 1024
