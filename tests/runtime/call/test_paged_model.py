"""Pages of 8 bit; those of 16 and 32 are held to the whole model in `matrix.paged`."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import families
import pytest
import torch
from matrix.paged import CAPACITY, steps_of

from duoka.runtime.call.paged_model import PagedModel


@pytest.mark.parametrize("name", ["llama", "gemma2", "glm"])
def test_pages_of_8_bit_give_nearly_the_same_logits(name: str) -> None:
    model: Any = families.build(name).eval()
    steps, found = steps_of(random.Random(name), 6), []
    for is_int8 in (False, True):
        paged = PagedModel(model, replace(CAPACITY, is_int8=is_int8))
        found.append(torch.cat([paged.run(chunks) for chunks in steps]))
        paged.close()
    distance = (found[0] - found[1]).norm() / found[0].norm()
    assert 0 < distance < 0.02
