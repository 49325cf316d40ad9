"""Which runs of a chain are alike, and what they reserve at the least if they leave room."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tiny
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import MIB

from duoka.forecast import stages
from duoka.forecast.profile import Profile
from duoka.forecast.replay import Replay, stage_signature
from duoka.forecast.stages import Chain, Growth, lower_bounds
from duoka.forecast.workload import Workload

PROFILES = [
    tiny.made_up([MIB] * 7),
    tiny.made_up([MIB, *[200] * 3, 300, *[200] * 3, MIB], tiny.Costs(cache=700)),
    tiny.made_up([MIB, 200, 200, 200, 0, 200, 200, MIB], tied_to={4: 0}),
    tiny.made_up([MIB, 200, 200, 200, 200, 200, 0], tied_to={6: 2}),
]


@pytest.mark.parametrize("profile", PROFILES)
def test_stages_are_alike_where_their_signatures_are(profile: Profile) -> None:
    chain = Chain(profile)
    runs = list(itertools.combinations(range(len(chain) + 1), 2))
    signatures = [stage_signature(profile, chain.stage(*run)) for run in runs]
    numbers = [chain.stage_classes[run] for run in runs]
    for (one, number), (other, again) in itertools.combinations(
        zip(signatures, numbers, strict=True), 2
    ):
        assert number != again or one == other


@settings(max_examples=examples(60), deadline=None)
@given(
    weights=st.lists(st.sampled_from([200, 5000, MIB]), min_size=3, max_size=6),
    numbers=st.data(),
    num_steps=st.integers(1, 6),
)
def test_steps_that_are_left_out_decide_about_no_bound(
    weights: list[int], numbers: st.DataObject, num_steps: int
) -> None:
    profile = tiny.made_up(weights)
    workload = Workload(prompt_tokens=8, dtype="bfloat16", prefill_chunk_tokens=None)
    replay = Replay(profile, workload)
    chain = Chain(profile)
    drawn = {
        kind: [
            (*numbers.draw(st.tuples(*[st.integers(0, 2)] * 2)), peak, peak + more, back)
            for peak, more, back in numbers.draw(
                st.lists(
                    st.tuples(st.integers(0, 3), st.integers(0, 2), st.integers(0, 2)),
                    min_size=num_steps,
                    max_size=num_steps,
                )
            )
        ]
        for kind in range(len(profile.kinds))
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            stages,
            "_cache_and_peaks",
            lambda chain, _, block: drawn[chain.profile.blocks[block].kind],
        )
        few = lower_bounds(chain, replay)
        patch.setattr(stages, "_undominated", lambda costs: costs.swapaxes(0, 1))
        assert np.array_equal(few, lower_bounds(chain, replay))


def test_of_equal_steps_one_is_kept_and_of_others_the_larger_ones() -> None:
    small, large, deep = (1, 1, 2, 4, 1), (1, 2, 2, 4, 1), (1, 1, 2, 4, 0)
    costs = np.array([[small, small, large, deep], [small, small, small, small]])
    assert stages._undominated(costs).tolist() == [[[*deep], [*small]], [[*large], [*small]]]


def test_repeated_layers_are_alike() -> None:
    alike = Chain(tiny.made_up([MIB, *[200] * 9, MIB])).stage_classes
    assert alike[2, 5] == alike[4, 7] == alike[6, 9]
    assert len(np.unique(alike[1:-1, 3:][alike[1:-1, 3:] > 0])) < 30


def test_what_lies_between_blocks_counts() -> None:
    """The fourth block goes with the first one, so the third and the fifth aren't neighbours."""
    profile = tiny.made_up([MIB, 200, 200, 0, 200, 200, 200, MIB], tied_to={3: 0})
    chain = Chain(profile)
    assert chain.blocks[1:6] == [1, 2, 4, 5, 6]
    assert len({profile.blocks[block].kind for block in (2, 4, 5, 6)}) == 1
    assert chain.stage_classes[2, 4] != chain.stage_classes[3, 5] == chain.stage_classes[4, 6]


@pytest.mark.parametrize(
    ("room_mib", "grown_mib"),
    [(19, 0), (63, 0), (64, 64), (191, 64 + 128), (512, 64 * 36), (4096, 64 * 36)],
)
def test_a_tensor_larger_than_all_segments_of_earlier_steps_takes_one_more(
    room_mib: int, grown_mib: int
) -> None:
    """The cache of a layer is made anew in each of 8 chunks, 64 MiB larger each time."""
    profile = tiny.made_up([MIB, *[3 * MIB] * 3, MIB], tiny.Costs(cache=128 * 1024))
    workload = Workload(
        prompt_tokens=4096, new_tokens=1, dtype="bfloat16", prefill_chunk_tokens=512
    )
    replay = Replay(profile, workload)
    bounds = Growth(Chain(profile), replay).bounds(room_mib * MIB)
    assert bounds[1, 2] == (3 + grown_mib) * MIB
    assert bounds[0, 4] == (10 + grown_mib) * MIB
    assert bounds[0, 1] == MIB
    found = replay.run([1])
    assert found is not None
    assert bounds[1, 2] <= found.reserved_bytes < (64 * 36 + 100) * MIB


@settings(max_examples=examples(60), deadline=None)
@given(
    weights=st.lists(st.sampled_from([MIB, 7 * MIB, 30 * MIB]), min_size=3, max_size=5),
    costs=st.builds(
        tiny.Costs,
        cache=st.sampled_from([0, 900, 20_000, 150_000]),
        result=st.sampled_from([1024, 60_000]),
        work=st.sampled_from([4096, 90_000]),
    ),
    workload=st.builds(
        Workload,
        prompt_tokens=st.integers(2, 1500),
        new_tokens=st.sampled_from([1, 5, 40]),
        dtype=st.just("bfloat16"),
        prefill_chunk_tokens=st.sampled_from([None, 64, 100, 300]),
    ),
    data=st.data(),
)
def test_no_stage_that_leaves_room_reserves_less_than_its_bound(
    weights: list[int], costs: tiny.Costs, workload: Workload, data: st.DataObject
) -> None:
    profile = tiny.made_up(weights, costs)
    replay = Replay(profile, workload)
    growth = Growth(Chain(profile), replay)
    for start, stop in itertools.combinations(range(len(weights) + 1), 2):
        without_limit = replay.run(range(start, stop))
        assert without_limit is not None
        most, least = without_limit.reserved_bytes, without_limit.requested_bytes
        assert growth.bounds(1 << 50)[start, stop] <= most
        budget = data.draw(st.integers(least, most + 200 * MIB))
        found = replay.run(range(start, stop), budget)
        # What is left of the budget is the largest room that the stage leaves.
        if found is not None:
            room = budget - found.reserved_bytes
            assert growth.bounds(room)[start, stop] <= found.reserved_bytes
