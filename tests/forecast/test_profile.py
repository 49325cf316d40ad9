from __future__ import annotations

from dataclasses import replace

import pytest
import tiny

from duoka.base.serialization import from_dict, to_dict
from duoka.errors import ModelError, UsageError
from duoka.forecast.profile import MONOMIALS, Profile, Regime, evaluate, monomials


def test_monomials_are_what_their_names_say() -> None:
    b, q, k = 3, 5, 13
    values = dict(zip(MONOMIALS, monomials(b, q, k), strict=True))
    letters = {"1": 1, "b": b, "q": q, "k": k, "p": 16}
    for name, value in values.items():
        expected = 1
        for letter in name:
            expected *= letters[letter]
        assert value == expected, name


def test_padded_keys_of_an_aligned_length_are_the_keys() -> None:
    values = dict(zip(MONOMIALS, monomials(1, 1, 16), strict=True))
    assert values["p"] == values["k"] == 16


def test_a_rule_may_leave_out_trailing_zeros() -> None:
    values = monomials(2, 3, 7)
    assert evaluate((10.0, 2.0), values) == 10 + 2 * 3
    assert evaluate((), values) == 0
    assert evaluate((0.5,), values) == round(0.5)


REGIME = Regime(
    phase="extend", is_batched=True, query=(2, 10), past=(1, 100), keys=(16, 64), aligned=False
)


@pytest.mark.parametrize(
    ("batch", "query", "keys", "holds"),
    [
        (2, 2, 17, True),
        (2, 9, 63, True),
        (1, 2, 17, False),  # one sequence only
        (2, 10, 17, False),  # half-open
        (2, 2, 15, False),
        (2, 2, 65, False),
        (2, 9, 24, False),  # aligned
    ],
)
def test_where_a_regime_holds(batch: int, query: int, keys: int, holds: bool) -> None:
    assert REGIME.holds("extend", batch=batch, query=query, keys=keys) is holds
    assert not REGIME.holds("decode", batch=batch, query=query, keys=keys)


def test_the_past_bounds_a_regime() -> None:
    assert not replace(REGIME, past=(20, 100)).holds("extend", batch=2, query=2, keys=17)


def test_the_first_regime_that_holds_counts() -> None:
    profile = tiny.made_up([1024, 2048])
    first, *rest = profile.regimes
    narrow = replace(first, query=(0, 8))
    regimes = (narrow, *rest, first)
    kinds = tuple(replace(kind, traces=(*kind.traces, kind.traces[0])) for kind in profile.kinds)
    profile = replace(profile, regimes=regimes, kinds=kinds)
    assert profile.regime_of("prefill", batch=1, query=7, keys=7) == 0
    assert profile.regime_of("prefill", batch=1, query=8, keys=8) == len(regimes) - 1


def test_a_step_that_no_regime_holds_is_refused_with_the_limit() -> None:
    profile = tiny.made_up([1024, 2048])
    short = tuple(replace(regime, keys=(0, 101)) for regime in profile.regimes)
    profile = replace(profile, regimes=short)
    with pytest.raises(UsageError, match=r"prefill step of 200 tokens .* ends at 100 tokens"):
        profile.regime_of("prefill", batch=1, query=200, keys=200)


def test_weights_count_ties_once() -> None:
    profile = tiny.made_up([1000, 500, 500, 1000], tied_to={3: 0})
    assert profile.weight_bytes == 2000


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ModelError, match="no parameters"):
        replace(tiny.made_up([1]), blocks=())


def test_a_profile_survives_its_json_form() -> None:
    profile = tiny.made_up([1000, 500, 500, 1000], tiny.Costs(cache=64), tied_to={3: 0})
    assert from_dict(type(profile), to_dict(profile)) == profile


def test_the_outline_is_named_block_by_block() -> None:
    profile = tiny.made_up([10, 20, 0], tied_to={2: 0})
    blocks = profile.outline.blocks
    assert [block.modules for block in blocks] == [("block.0",), ("block.1",), ("block.2",)]
    assert [block.tied_to for block in blocks] == [None, None, 0]
    assert blocks[2].tensors[0].tied_to == "block.0.weight"
    assert from_dict(Profile, to_dict(profile)).outline == profile.outline
    with pytest.raises(ModelError, match="holds no names"):
        _ = replace(profile, tensor_names=None).outline
