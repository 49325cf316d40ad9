"""Answers: what the status of an answer means, and what can be done about it."""

from __future__ import annotations

import re
from typing import Any

from huggingface_hub import get_token

from duoka.errors import CheckpointError

from .names import Wanted
from .places import HOME, endpoint

ATTEMPTS = 5
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


class Passing(Exception):
    """What may go better next time.

    Parameters
    ----------
    error : CheckpointError
        What to raise when it doesn't.
    attempts : int
        How many are worth while in all.
    wait_seconds : float, optional
        What the server asked for.
    """

    def __init__(
        self,
        error: CheckpointError,
        *,
        attempts: int = ATTEMPTS,
        wait_seconds: float | None = None,
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.attempts = attempts
        self.wait_seconds = wait_seconds


def refuse(response: Any, wanted: Wanted) -> None:
    """Raise what an answer's status means, unless it means that all is well.

    Raises
    ------
    CheckpointError, Passing
    """
    status = response.status_code
    if status in (200, 206):
        return
    code = response.headers.get("x-error-code", "")
    if status in _PASSING:
        raise _passing(response, wanted)
    if code == "GatedRepo":
        raise _gated(wanted)
    if status == 404 or code in ("RepoNotFound", "RevisionNotFound", "EntryNotFound"):
        raise _not_found(code, wanted)
    if status == 401:
        raise _unauthorized(wanted)
    if status == 403:
        raise CheckpointError(
            f"{endpoint()} doesn't let this token read {wanted}",
            hint="the token needs the permission to read this repository",
        )
    raise CheckpointError(f"{endpoint()} answers with status {status} to the request for {wanted}")


def _passing(response: Any, wanted: Wanted) -> Passing:
    status = response.status_code
    if status != 429:
        return Passing(
            CheckpointError(
                f"{endpoint()} answers with status {status} to the request for {wanted}, "
                f"{ATTEMPTS} times",
                hint="the Hub has a problem of its own: try again later",
            )
        )
    text = response.headers.get("retry-after", "")
    asked = float(text) if re.fullmatch("[0-9]{1,6}", text, re.ASCII) else None
    wait = "" if asked is None else f" and asks to wait {asked:.0f} s"
    return Passing(
        CheckpointError(
            f"{endpoint()} gets too many requests from here{wait}; it was about {wanted}",
            hint="try again later; with a token (`hf auth login`) the Hub allows more",
        ),
        wait_seconds=asked,
    )


def _gated(wanted: Wanted) -> CheckpointError:
    repo = wanted.name.repo
    log_in = "" if get_token() else ", then log in: hf auth login"
    return CheckpointError(
        f"{repo} is gated: its authors must grant you access",
        hint=f"ask for it at {HOME}/{repo}{log_in}",
    )


def _unauthorized(wanted: Wanted) -> CheckpointError:
    if get_token():
        return CheckpointError(
            f"{endpoint()} doesn't accept the token: it is wrong, or has expired; it was about "
            f"{wanted}",
            hint="log in again (`hf auth login`), or correct or unset HF_TOKEN",
        )
    return CheckpointError(
        f"{endpoint()} wants to know who asks for {wanted}, and there is no token",
        hint="log in (`hf auth login`), or set HF_TOKEN",
    )


def _not_found(code: str, wanted: Wanted) -> CheckpointError:
    if code == "RevisionNotFound":
        return CheckpointError(
            f"{endpoint()} has no such revision: {wanted}", hint="give a branch, a tag or a commit"
        )
    if code == "EntryNotFound":
        return CheckpointError(f"{endpoint()} has no such file: {wanted}")
    private = "" if get_token() else "; if it is private, log in: hf auth login"
    return CheckpointError(
        f"{endpoint()} has no such repository: {wanted.name.repo}",
        hint=f"check the spelling, or give the path of a local directory{private}",
    )


def offline(wanted: Wanted) -> CheckpointError:
    """The error for something that would have to be asked for, where nothing may be."""
    place = "in the cache" if wanted.file else "a directory here, nor in the cache"
    nor = "not" if wanted.file else "neither"
    return CheckpointError(
        f"{wanted} is {nor} {place}, and the Hub may not be asked: HF_HUB_OFFLINE is set",
        hint="unset HF_HUB_OFFLINE to download it",
    )
