"""What was measured, as printed."""

from __future__ import annotations

import expert_plans
import pytest
from rich.console import Console

from duoka.report.measured import Measured
from duoka.report.terminal import render_measured

pytestmark = pytest.mark.usefixtures("single_sequences")


@pytest.mark.parametrize(
    ("hits", "printed"), [(None, ""), (0.784, "78% of the chosen experts were in the GPUs' caches")]
)
def test_hits_of_caches_are_said_where_there_are_caches(hits: float | None, printed: str) -> None:
    console = Console(width=100)
    with console.capture() as capture:
        console.print(render_measured(expert_plans.base(1), Measured(devices=(), expert_hits=hits)))
    assert capture.get().strip() == printed
