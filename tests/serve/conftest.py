"""One server for all tests that can share it, its client, and a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Chromium, executable, running_chromium
from openai import OpenAI
from page_server import FakeServer, running_server
from served import Served, serving
from tuning import write_model


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that talks in bytes."""
    return write_model("llama", tmp_path_factory.mktemp("served") / "llama")


@pytest.fixture(scope="session")
def served(
    llama: Path, tmp_path_factory: pytest.TempPathFactory, forking_python: Path
) -> Iterator[Served]:
    """A server of it; loopback, and without a key."""
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(llama, log, python=forking_python) as server:
        yield server


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[OpenAI]:
    """OpenAI's client of the server, which takes nothing but what its types say."""
    with OpenAI(
        base_url=f"{served.url}/v1",
        api_key="x",
        max_retries=0,
        _strict_response_validation=True,
    ) as client:
        yield client


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A server for the page, which answers what a test tells it to."""
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    """A browser for the page; where none is here its tests are left out."""
    path = executable()
    if path is None:
        pytest.skip("no Chromium: see test_page.py")
    with running_chromium(path) as running:
        yield running
