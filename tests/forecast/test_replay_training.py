"""Steps of training, run through the allocator's model."""

from __future__ import annotations

from typing import Any

import pytest
import rehearsing
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from rehearsing import Layer, load

from duoka.errors import UsageError
from duoka.forecast import replay_training
from duoka.forecast.allocator import rounded_bytes
from duoka.forecast.replay_training import TrainingReplay, in_flight
from duoka.forecast.stage_bytes import StageBytes
from duoka.forecast.workload import Training

KIB = 1024
MIB = 2**20
# One token, so that what depends on tokens is what the layer says.
LAYERS = [Layer(weight=64 * KIB, result=8 * KIB, saved=32 * KIB)] * 3
PROFILE = rehearsing.made_up(LAYERS)


def peaks(workload: Any, blocks: list[int], place: int = 1) -> StageBytes:
    found = TrainingReplay(PROFILE, workload, place=place).run(blocks)
    assert found is not None
    return found


def test_what_training_holds_at_its_peak() -> None:
    # In the optimizer's step: weights, gradients, two states and a temporary one.
    found = peaks(load(1, method="full"), [0, 1, 2])
    weights = 3 * 64 * KIB
    assert found == StageBytes(
        weight_bytes=weights,
        kv_cache_bytes=0,
        activation_bytes=0,
        gradient_bytes=weights,
        optimizer_bytes=3 * weights,
        allocated_bytes=5 * weights,
        reserved_bytes=2 * 2**20,
        requested_bytes=5 * weights,
    )


@pytest.mark.parametrize("weight", [9 * MIB + 700 * KIB, 11 * MIB + 5])
def test_what_a_block_leaves_unsplit_of_a_state_is_the_optimizers(weight: int) -> None:
    """At the update nothing else is there: no activation is."""
    profile = rehearsing.made_up([Layer(weight=weight, result=512, saved=512)] * 3)
    found = TrainingReplay(profile, load(1, method="full")).run([0, 1, 2])
    assert found is not None
    assert found.activation_bytes == 0
    assert found.requested_bytes == 15 * rounded_bytes(weight)
    assert (
        found.allocated_bytes == found.weight_bytes + found.gradient_bytes + found.optimizer_bytes
    )
    assert found.optimizer_bytes > 9 * rounded_bytes(weight)


@pytest.mark.parametrize("optimizer", ["adamw8bit", "adafactor"])
def test_optimizers_of_few_states(optimizer: Any) -> None:
    """Of a row of 32 Ki numbers, each of two bytes."""
    weight = 64 * KIB
    states = {"adamw8bit": 3 * (weight + KIB) + 2 * KIB, "adafactor": 3 * (weight + 512)}
    temporary = {"adamw8bit": 0, "adafactor": 2 * weight}[optimizer]
    found = peaks(load(1, method="full", optimizer=optimizer), [0, 1, 2])
    assert found.optimizer_bytes == states[optimizer] + temporary
    assert found.gradient_bytes == 3 * weight


def test_sgd_has_no_states() -> None:
    found = peaks(load(1, method="full", optimizer="sgd"), [0, 1, 2])
    assert found.optimizer_bytes == 0
    # At the first block's backward pass: all gradients, and the activation that it still needs.
    assert (found.weight_bytes, found.gradient_bytes) == (3 * 64 * KIB, 3 * 64 * KIB)
    assert found.activation_bytes == 32 * KIB + 8 * KIB + 512  # its own, its gradient, none to give


def activations(saved: int, **training: Any) -> int:
    profile = rehearsing.made_up([Layer(weight=512, result=512, saved=saved)] * 3)
    found = TrainingReplay(profile, load(1, method="full", **training), place=2).run([0, 1, 2])
    assert found is not None
    return found.activation_bytes // saved


@pytest.mark.parametrize(
    ("training", "alive"),
    [
        ({"micro_batches": 5}, 3),
        ({"micro_batches": 5, "schedule": "gpipe"}, 15),
        ({"micro_batches": 5, "schedule": "1f1b"}, 6),  # at the second stage from the end
        ({"micro_batches": 1, "schedule": "1f1b"}, 3),
    ],
)
def test_micro_batches_in_flight_keep_their_activations(
    training: dict[str, Any], alive: int
) -> None:
    assert activations(2**22, **training) == alive


def test_how_many_are_in_flight() -> None:
    schedules = {
        name: [in_flight(Training(micro_batches=3, schedule=name), place) for place in (1, 2, 9)]
        for name in ("sequential", "gpipe", "1f1b")
    }
    assert schedules == {"sequential": [1, 1, 1], "gpipe": [3, 3, 3], "1f1b": [1, 2, 3]}


def test_what_comes_from_another_stage_is_there_until_it_was_used() -> None:
    alone = peaks(load(1, method="full", optimizer="sgd"), [1])
    # Weight and its gradient, what it was given and what it saved, the gradients in and out.
    assert alone.allocated_bytes <= (64 + 64 + 8 + 32 + 8 + 8) * KIB
    assert alone.allocated_bytes >= (64 + 64 + 8 + 8) * KIB


def test_a_budget_that_is_too_small() -> None:
    replay = TrainingReplay(PROFILE, load(1, method="full"))
    assert replay.run([0, 1, 2], 2**20) is None
    assert replay.run([0, 1, 2], 2**21) is not None


def test_a_profile_for_training_answers_for_nothing_else() -> None:
    with pytest.raises(UsageError, match="doesn't cover training"):
        TrainingReplay(PROFILE, load(1, method="lora"))


@settings(max_examples=examples(40), deadline=None)
@given(
    st.lists(
        st.builds(
            Layer,
            weight=st.integers(1, 4).map(lambda number: number * 2**19),
            result=st.integers(1, 40).map(lambda number: number * 100 * KIB),
            saved=st.integers(1, 40).map(lambda number: number * 130 * KIB),
        ),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["sequential", "1f1b"]),
    st.integers(1, 14),
    st.integers(1, 3),
)
def test_micro_batches_that_are_left_out_do_what_others_did(
    made: list[Layer], schedule: str, number: int, place: int
) -> None:
    workload = load(1, method="full", micro_batches=number, schedule=schedule)
    profile, blocks = rehearsing.made_up(made), range(len(made))
    found = TrainingReplay(profile, workload, place=place).run(blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_training, "_allocator_state", lambda *_: object())
        assert found == TrainingReplay(profile, workload, place=place).run(blocks)
