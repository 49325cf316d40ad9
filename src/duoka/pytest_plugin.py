"""pytest plugin with one fixture; torch is imported only when a test uses it."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def assert_device_safe() -> Callable[..., None]:
    """Return `duoka.testing.assert_device_safe`."""
    from duoka.testing import assert_device_safe

    return assert_device_safe
