"""What would fit instead of a run: in the options of `duoka tune`, and true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tuning

import duoka
from duoka import TuneSettings
from duoka.cli.suggestions import command_line
from duoka.errors import InfeasibleError, WayOut
from duoka.planner.plan import Plan
from duoka.tuner.prepare import plans_for
from duoka.tuner.suggestions import with_suggestions


def way(*options: str, kind: str = "batch", text: str = "a micro-batch of 3") -> WayOut:
    return WayOut(
        kind=kind, text=text, options=options, context_tokens=1, batch=3, num_gpus=1, free_bytes=0
    )


@pytest.mark.slow
def test_each_way_fits(tmp_path: Path) -> None:
    model = duoka.Checkpoint.open(tuning.write_model("large", tmp_path / "model"))
    sizes: dict[str, Any] = {"batch": 8, "micro_batch": 4}
    settings = TuneSettings(seq_length=512, **sizes)
    gpus = "virtual:2x160MiB"
    with pytest.raises(InfeasibleError) as stopped:
        plans_for(model, gpus, settings, "auto")
    ways = {way.kind: way for way in stopped.value.ways_out}
    again, shorter = ways["checkpointing"], ways["context"]
    assert again.options == ("--checkpointing",)
    name, length = shorter.options
    assert name == "--context"
    plans_for(model, gpus, TuneSettings(seq_length=512, checkpointing=True, **sizes), "auto")
    plans_for(model, gpus, TuneSettings(seq_length=int(length), **sizes), "auto")


def test_a_way_is_planned_again_as_a_run(plan: Plan) -> None:
    asked = []

    def attempt(settings: TuneSettings, gpus: str | None) -> Plan:
        asked.append((settings.micro_batch, settings.checkpointing, gpus))
        return plan

    error = InfeasibleError("no", ways_out=[way("--micro-batch", "2", "--checkpointing")])
    (found,) = with_suggestions(error, TuneSettings(batch=8, micro_batch=4), attempt).ways_out
    assert asked == [(2, True, None)]
    assert found.num_gpus == len(plan.devices)
    words = ["tune", "m", "d", "--batch", "8", "--micro-batch", "4"]
    assert command_line(words, found) == "duoka tune m d --batch 8 --micro-batch 2 --checkpointing"


def test_a_way_that_a_run_does_not_have_is_left_out(plan: Plan) -> None:
    ways = [way("--pin", "lm_head=cuda:1"), way("--gpus", "24GiB", kind="gpu", text="a larger GPU")]
    error = InfeasibleError("no", ways_out=ways, hint="old")
    told = with_suggestions(error, TuneSettings(), lambda settings, gpus: plan)
    assert [way.options for way in told.ways_out] == [("--gpus", "24GiB")]
    none = with_suggestions(
        InfeasibleError("no", ways_out=ways[:1]), TuneSettings(), lambda *_: plan
    )
    assert none.ways_out == ()
    assert "larger GPUs" in str(none.hint)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    path = tuning.write_model("llama", tmp_path_factory.mktemp("models") / "llama")
    model = duoka.Checkpoint.open(path)
    return plans_for(model, "virtual:256MiB", TuneSettings(seq_length=32), 1)[0]
