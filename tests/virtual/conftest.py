"""What the tests of virtual GPUs share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from duoka import virtual

MIB = 2**20


@pytest.fixture
def world() -> Iterator[virtual.World]:
    """Three GPUs with real numbers and no limit, in this thread."""
    with virtual.gpus([None, None, None]) as world:
        yield world


@pytest.fixture
def meta_world() -> Iterator[virtual.World]:
    """Two GPUs without numbers, in this thread."""
    with virtual.gpus([None, None], data="meta") as world:
        yield world
