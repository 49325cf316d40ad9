"""What is left to the night is tested at each commit in another way, or at another commit."""

from __future__ import annotations

import re
from pathlib import Path

import turns

ROOT = Path(__file__).resolve().parents[1]


def is_there(test: str) -> bool:
    path, _, name = test.partition("[")[0].partition("::")
    source = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
    return bool(re.search(rf"^def {name or 'test_'}", source, re.MULTILINE))


def test_all_turns_have_all_cases() -> None:
    cases = list("abcdefgh")
    found = [case for turn in range(6) for case in turns.in_turn(cases, 6, str(turn))]
    assert sorted(found) == cases == turns.in_turn(cases, 6, "all")


def test_a_commit_has_one_turn() -> None:
    assert (
        turns.commit_turn(ROOT)
        == turns.commit_turn(ROOT / "tests")
        in set(map(str, range(turns.PARTS)))
    )
    assert turns.commit_turn(Path("/")) == "0"


def test_what_is_left_to_the_night_is_held_by_others() -> None:
    for test, others in turns.NIGHTLY.items():
        assert others
        missing = [each for each in (test, *others) if not is_there(each)]
        assert not missing, f"turns.NIGHTLY names {missing}"


def test_slow_tests_are_there() -> None:
    missing = [test for test in turns.SLOW if not is_there(test)]
    assert not missing, f"slow_tests.txt names {missing}"
