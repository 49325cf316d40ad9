"""``max_memory`` as transformers has it, understood as budgets."""

from __future__ import annotations

from typing import Any

import pytest

from duoka import Fleet
from duoka.errors import FleetError, UsageError

GIB = 2**30


@pytest.mark.parametrize(
    ("given_", "names", "budgets"),
    [
        ({0: "10GiB", 1: "20GiB"}, ("cuda:0", "cuda:1"), (10 * GIB, 20 * GIB)),
        ({1: "10GB", 0: 7}, ("cuda:1", "cuda:0"), (10**10, 7)),
        ({"0": "1.5 GiB", "cpu": "30GiB"}, ("cuda:0", "cpu"), (GIB * 3 // 2, 30 * GIB)),
        ({"cuda:3": 5, "vgpu:1": 6}, ("cuda:3", "vgpu:1"), (5, 6)),
        ({0: 0, 1: "0GB", 2: "10GiB", 3: "0"}, ("cuda:2",), (10 * GIB,)),
    ],
)
def test_budgets(given_: Any, names: tuple[str, ...], budgets: tuple[int, ...]) -> None:
    fleet = Fleet.from_max_memory(given_)
    assert fleet.names == names
    assert tuple(device.budget_bytes for device in fleet.devices) == budgets


@pytest.mark.parametrize(
    ("given_", "kind", "text"),
    [
        ("10GiB", UsageError, "must map devices to sizes, not be of type str"),
        ({0: True}, UsageError, "which is not a size"),
        ({0: -1}, UsageError, "which is not a size"),
        ({0: "much"}, UsageError, "is not a size"),
        ({0: 0}, FleetError, "the fleet has no device"),
        ({0: 1, "disk": "100GB"}, FleetError, "not a device"),
        ({"mps": 5}, FleetError, "is not a device"),
        ({True: 5}, FleetError, "is not a device"),
        ({"0": 5, 0: 6}, FleetError, "twice"),
    ],
)
def test_what_is_refused(given_: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        Fleet.from_max_memory(given_)
