"""One server for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Served, serving
from tuning import write_model


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that talks in bytes."""
    return write_model("llama", tmp_path_factory.mktemp("served") / "llama")


@pytest.fixture(scope="module")
def served(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of it; loopback, and without a key."""
    with serving(llama, tmp_path_factory.mktemp("server") / "log") as server:
        yield server
