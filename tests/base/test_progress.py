from __future__ import annotations

from duoka.base.progress import heard_by, say, say_import


def test_what_is_said_goes_to_the_innermost_listener() -> None:
    outer: list[str] = []
    inner: list[str] = []
    say("to nobody")
    with heard_by(outer.append):
        say("one")
        with heard_by(inner.append):
            say("two")
        say_import("sys")
        say_import("no_such_library")
    say("to nobody")
    assert (outer, inner) == (["one", "importing no_such_library"], ["two"])
