"""The program, run in this process."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest import mock

from progress import without_progress

from duoka.cli.main import run


class Done(NamedTuple):
    """The end of a command."""

    code: int
    out: str
    err: str


def duoka(*words: object, stdin: str = "") -> Done:
    """Run a command; its errors stand without its progress."""
    with (
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
        mock.patch.object(sys, "stdin", io.StringIO(stdin)),
    ):
        code = run([str(word) for word in words])
    return Done(code, out.getvalue(), without_progress(err.getvalue()))
