"""The plugin that pytest loads: a fixture, and nothing else until a test asks for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def assert_device_safe() -> Callable[..., None]:
    """`duoka.testing.assert_device_safe`, imported with torch when a test first uses it."""
    from duoka.testing import assert_device_safe

    return assert_device_safe
