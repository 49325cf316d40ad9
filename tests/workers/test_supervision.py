from __future__ import annotations

import pytest

from duoka.workers import supervision
from duoka.workers.supervision import RestartPolicy, SilenceCounter


def test_each_start_waits_longer_and_the_third_loss_within_ten_minutes_is_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(supervision.time, "monotonic", lambda: now)
    policy, delays = RestartPolicy(), []
    for _ in range(7):
        now += 400.0  # three losses take longer than ten minutes
        delays.append(policy.delay_after_loss(lived_seconds=400.0))
    assert delays == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    now += 700.0
    assert policy.delay_after_loss(lived_seconds=700.0) == 1.0  # it has run long enough
    now += 1.0
    assert policy.delay_after_loss(lived_seconds=1.0) == 2.0
    now += 1.0
    assert policy.delay_after_loss(lived_seconds=1.0) is None


def test_silence_is_counted_since_the_last_sign_of_life() -> None:
    silence = SilenceCounter(look_seconds=0.5)
    assert [silence.count(is_alive=False) for _ in range(3)] == [0.5, 1.0, 1.5]
    assert silence.count(is_alive=True) == 0.0
    assert silence.count(is_alive=False) == silence.seconds == 0.5
