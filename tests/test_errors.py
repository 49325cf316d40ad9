"""Errors are an interface: one tree, a hint, an exit code of its own for each."""

from __future__ import annotations

import inspect
import re
import traceback

from duoka import errors
from duoka.errors import DuokaError, Faults, InfeasibleError, PlacementError, WayOut


def classes() -> list[type[DuokaError]]:
    return [
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, DuokaError)
    ]


def test_each_class_has_an_exit_code_of_its_own() -> None:
    codes = [cls.exit_code for cls in classes()]
    assert len(set(codes)) == len(codes)
    assert all(0 < code < 64 for code in codes)


def test_the_tree_in_the_docstring_is_true() -> None:
    drawn = re.findall(r"(\w+Error)\s+(\d+) ", errors.__doc__ or "")
    assert {name: int(code) for name, code in drawn} == {
        cls.__name__: cls.exit_code for cls in classes()
    }


def test_message_and_hint() -> None:
    error = DuokaError("what happened", hint="do this")
    assert (str(error), error.hint) == ("what happened", "do this")
    assert DuokaError("what happened").hint is None


def test_a_traceback_shows_the_hint() -> None:
    shown = "".join(traceback.format_exception(DuokaError("what happened", hint="do this")))
    assert shown == "duoka.errors.DuokaError: what happened\nhint: do this\n"
    plain = "".join(traceback.format_exception(DuokaError("what happened")))
    assert plain == "duoka.errors.DuokaError: what happened\n"


def test_data_is_on_the_exception() -> None:
    faults = Faults(missing=("a",), unknown=("b",), doubled=("c",), split=("d",), misplaced=("e",))
    placement = PlacementError("x", faults=faults, hint="h")
    assert (placement.missing, placement.unknown, placement.doubled) == (("a",), ("b",), ("c",))
    assert (placement.split, placement.misplaced, placement.completed) == (("d",), ("e",), None)
    assert faults
    assert not Faults()
    way = WayOut(
        kind="batch",
        text="smaller",
        options=("--batch", "1"),
        context_tokens=9,
        batch=1,
        num_gpus=1,
        free_bytes=0,
    )
    infeasible = InfeasibleError("x", shortfall_bytes=3, ways_out=[way], hint="h")
    assert (infeasible.shortfall_bytes, infeasible.ways_out) == (3, (way,))
    assert infeasible.hint == "smaller (--batch 1)"
    assert InfeasibleError("x", hint="h").hint == "h"
