"""Which runs of a chain are alike."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tiny
from tiny import MIB

from duoka.forecast.profile import Profile
from duoka.forecast.replay import stage_signature
from duoka.forecast.stages import Chain

PROFILES = [
    tiny.made_up([MIB] * 7),
    tiny.made_up([MIB, *[200] * 3, 300, *[200] * 3, MIB], tiny.Costs(cache=700)),
    tiny.made_up([MIB, 200, 200, 200, 0, 200, 200, MIB], tied_to={4: 0}),
    tiny.made_up([MIB, 200, 200, 200, 200, 200, 0], tied_to={6: 2}),
]


@pytest.mark.parametrize("profile", PROFILES)
def test_stages_are_alike_where_their_signatures_are(profile: Profile) -> None:
    chain = Chain(profile)
    stages = list(itertools.combinations(range(len(chain) + 1), 2))
    signatures = [stage_signature(profile, chain.stage(*stage)) for stage in stages]
    numbers = [chain.alike[stage] for stage in stages]
    for (one, number), (other, again) in itertools.combinations(
        zip(signatures, numbers, strict=True), 2
    ):
        assert number != again or one == other


def test_repeated_layers_are_alike() -> None:
    alike = Chain(tiny.made_up([MIB, *[200] * 9, MIB])).alike
    assert alike[2, 5] == alike[4, 7] == alike[6, 9]
    assert len(np.unique(alike[1:-1, 3:][alike[1:-1, 3:] > 0])) < 30


def test_what_lies_between_blocks_counts() -> None:
    """The fourth block goes with the first one, so the third and the fifth aren't neighbours."""
    profile = tiny.made_up([MIB, 200, 200, 0, 200, 200, 200, MIB], tied_to={3: 0})
    chain = Chain(profile)
    assert chain.blocks[1:6] == [1, 2, 4, 5, 6]
    assert len({profile.blocks[block].kind for block in (2, 4, 5, 6)}) == 1
    assert chain.alike[2, 4] != chain.alike[3, 5] == chain.alike[4, 6]
