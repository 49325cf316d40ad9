"""Plans of a model for other workloads need no second trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import duoka
from duoka import Workload
from duoka.tracing import get_profile

from .conftest import LOAD, TWO


def test_a_model_is_traced_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = duoka.plan(checkpoint, TWO, LOAD)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("traced again")

    for name in ("trace", "trace_workload"):
        monkeypatch.setattr(get_profile, name, fail)
    assert duoka.plan(checkpoint, TWO, LOAD) == first
    other = Workload(batch=3, prompt_tokens=301, new_tokens=7, prefill_chunk_tokens=100)
    assert duoka.plan(checkpoint, TWO, other).workload.batch == 3
