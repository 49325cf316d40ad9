from __future__ import annotations

from typing import Any

import pytest

from duoka.base.serialization import from_dict, to_dict
from duoka.errors import UsageError
from duoka.planner.constraints import Constraints, strategy_of


def test_transformers_words_for_a_device_map() -> None:
    words = ("auto", "Balanced ", "sequential", "map.json", {"": 0}, None, 0)
    found = ["auto", "balanced", "sequential", None, None, None, None]
    assert [strategy_of(word) for word in words] == found
    with pytest.raises(UsageError, match="keeps the first GPU free") as caught:
        strategy_of("balanced_low_0")
    assert "--reserve" in str(caught.value.hint)


def test_constraints_survive_their_json_form() -> None:
    demanded = Constraints(
        strategy="sequential",
        pins=(("lm_head", "cuda:1"), ("lm_head", "cuda:1")),
        reserve=(("cuda:0", 2**31),),
        offload=True,
    )
    assert from_dict(Constraints, to_dict(demanded)) == demanded
    assert demanded.demands
    assert not Constraints(reserve=demanded.reserve, offload=True).demands


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"strategy": "even"}, "strategy 'even' is unknown"),
        ({"pins": (("lm_head", "cuda:0"), ("lm_head", "cuda:1"))}, "lm_head is given twice"),
        ({"reserve": (("cuda:0", 0),)}, "the reserve of cuda:0 is 0 bytes"),
        ({"reserve": (("cuda:0", -5),)}, "the reserve of cuda:0 is -5 bytes"),
    ],
)
def test_what_contradicts_itself_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Constraints(**values)
