"""Scripts that people have run unchanged with a model that is spread: they do the same as whole."""

from __future__ import annotations

import pytest
from scripts import placing

from duoka import virtual

HEAVY = ("trainer", "peft_trainer")
# What these libraries and their own versions warn of is none of a script's business here.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in HEAVY else name
        for name in placing.SCRIPTS
    ],
)
def test_a_script_runs_unchanged(script: str) -> None:
    virtual.set_gpus([None, None])  # for every thread
    assert placing.alike(placing.result(script, "duoka"), placing.result(script, "one"))
