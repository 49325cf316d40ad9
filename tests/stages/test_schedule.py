from __future__ import annotations

import pytest

from duoka.forecast.replay_training import in_flight
from duoka.forecast.workload import Training
from duoka.stages.schedule import ScheduledPass, busy_shares, order_passes


def of_device(devices: list[str], device: str, training: Training) -> str:
    """What a device does: F1 for the second micro-batch forward."""
    steps = [timed.step for timed in order_passes(devices, training)]
    return " ".join(
        f"{'B' if step.is_backward else 'F'}{step.micro_batch}"
        for step in steps
        if devices[step.stage] == device
    )


def test_one_forward_one_backward() -> None:
    training = Training(micro_batches=4, schedule="1f1b")
    assert of_device(["a", "b", "c"], "a", training) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert of_device(["a", "b", "c"], "b", training) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert of_device(["a", "b", "c"], "c", training) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_gpipe_runs_all_forward_first() -> None:
    training = Training(micro_batches=3, schedule="gpipe")
    for device in "ab":
        assert of_device(["a", "b"], device, training) == "F0 F1 F2 B0 B1 B2"


def test_sequential_has_one_micro_batch_at_a_time() -> None:
    training = Training(micro_batches=2, schedule="sequential")
    steps = [timed.step for timed in order_passes(["a", "b"], training)]
    assert steps == [
        ScheduledPass(0, 0, False), ScheduledPass(1, 0, False),
        ScheduledPass(1, 0, True), ScheduledPass(0, 0, True),
        ScheduledPass(0, 1, False), ScheduledPass(1, 1, False),
        ScheduledPass(1, 1, True), ScheduledPass(0, 1, True),
    ]  # fmt: skip


@pytest.mark.parametrize("devices", [["a"], ["a", "b"], ["a", "b", "a"], list("abcb")])
@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 2, 7])
def test_every_pass_once_after_what_it_needs(
    devices: list[str], schedule: str, micro_batches: int
) -> None:
    training = Training(micro_batches=micro_batches, schedule=schedule)  # type: ignore[arg-type]
    passes = order_passes(devices, training)
    done: set[ScheduledPass] = set()
    flying = [0] * len(devices)
    order = list(dict.fromkeys(devices))
    for stage, number, is_backward in (timed.step for timed in passes):
        last = len(devices) - 1
        if is_backward:
            needed = (
                ScheduledPass(stage + 1, number, True)
                if stage < last
                else ScheduledPass(stage, number, False)
            )
        else:
            needed = ScheduledPass(stage - 1, number, False)
        assert needed.stage < 0 or needed in done
        done.add(ScheduledPass(stage, number, is_backward))
        flying[stage] += -1 if is_backward else 1
        place = len(order) - order.index(devices[stage])
        assert flying[stage] <= in_flight(training, place)
    assert len(done) == len(passes) == 2 * micro_batches * len(devices)


def test_the_bubble_is_that_of_the_formula() -> None:
    stages, micro_batches = ["a", "b", "c"], 8
    for schedule in ("gpipe", "1f1b"):
        training = Training(micro_batches=micro_batches, schedule=schedule)  # type: ignore[arg-type]
        shares = busy_shares(stages, order_passes(stages, training))
        expected = micro_batches / (micro_batches + len(stages) - 1)
        assert shares == pytest.approx(dict.fromkeys(stages, expected))
