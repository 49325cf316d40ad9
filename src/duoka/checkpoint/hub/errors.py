"""Errors: what huggingface_hub and its HTTP library raise, as a person can understand it.

What may go better next time is tried again, within limits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import urlsplit

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from duoka.errors import CheckpointError

from .limits import Busy, TooLong, guarded, http
from .repo_name import Wanted

T = TypeVar("T")

WAITS_SECONDS = (1.0, 2.0, 4.0, 8.0)
MAX_RETRY_AFTER_SECONDS = 60
HOME = "https://huggingface.co"


def endpoint() -> str:
    """Where the Hub is, without a name and password that HF_ENDPOINT may hold."""
    parts = urlsplit(HfApi().endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def ask(wanted: Wanted, action: Callable[[], T], *, most_bytes: int) -> T:
    """Ask the Hub for something, several times if need be."""
    with _explained(wanted), guarded(most_bytes):
        for wait in WAITS_SECONDS:
            try:
                return action()
            except Exception as error:
                seconds = _delay(error if isinstance(error, Broken) else _root(error), wait)
                if seconds is None:
                    raise
            time.sleep(seconds)
        return action()


class Broken(Exception):
    """A connection that ended before all had arrived; asking again may help."""


@contextmanager
def breaking() -> Iterator[None]:
    """Raise Broken for what a connection may suffer, but for one that never came about."""
    try:
        yield
    except (http.ConnectError, http.ConnectTimeout):
        raise
    except (http.TimeoutException, http.NetworkError, http.RemoteProtocolError) as error:
        raise Broken from error


def _root(error: BaseException) -> BaseException:
    """What went wrong when huggingface_hub says no more than that a file isn't in its cache."""
    while isinstance(error, (Broken, LocalEntryNotFoundError)) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _delay(error: BaseException, wait: float) -> float | None:
    """Seconds after which to try again; None if that is of no use."""
    if isinstance(error, Busy):
        seconds = wait if error.wait_seconds is None else error.wait_seconds
        return seconds if seconds <= MAX_RETRY_AFTER_SECONDS else None
    return wait if isinstance(error, Broken) else None


@contextmanager
def _explained(wanted: Wanted) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        explained = _explain(_root(error), wanted)
        if explained is None:
            raise
        # Without what the libraries said: addresses of large files are signed, as a password is.
        raise explained from None


def _explain(error: BaseException, wanted: Wanted) -> CheckpointError | None:
    """What an error means; None for what has nothing to do with the Hub."""
    if isinstance(error, OfflineModeIsEnabled):
        return offline(wanted)
    if isinstance(error, Busy):
        return _busy(error, wanted)
    if isinstance(error, TooLong):
        return CheckpointError(
            f"{endpoint()} sends more than {error.limit_bytes} bytes as {wanted}; that is not read",
            hint="the repository may have changed, or a proxy is in between: try again",
        )
    if isinstance(error, HfHubHTTPError):
        return _refused(error, wanted)
    if isinstance(error, (Broken, http.HTTPError, http.InvalidURL)):
        return _unreachable(error, wanted)
    if isinstance(error, (FileMetadataError, ValueError, TypeError, KeyError)):
        return CheckpointError(
            f"{endpoint()} answers with something else than a Hub does to the request for {wanted}",
            hint="is HF_ENDPOINT the address of a Hub, or does a network log-in page answer?",
        )
    if isinstance(error, OSError) and error.errno is None:  # a length that isn't as told
        return CheckpointError(
            f"{endpoint()} sends {wanted} with another length than it told of",
            hint="the repository may have changed, or a proxy is in between: try again",
        )
    return None


def _unreachable(error: BaseException, wanted: Wanted) -> CheckpointError:
    if isinstance(error, (http.ConnectError, http.ConnectTimeout)):
        reason = str(error) or "no answer in time"
        return CheckpointError(
            f"{endpoint()} can't be reached for {wanted}: {reason}",
            hint="check the network and HF_ENDPOINT; HF_HUB_OFFLINE=1 uses what was downloaded "
            "before",
        )
    if isinstance(error, http.TimeoutException):
        return CheckpointError(
            f"{endpoint()} sent nothing of {wanted} for {constants.HF_HUB_DOWNLOAD_TIMEOUT} "
            "seconds",
            hint="try again; HF_HUB_DOWNLOAD_TIMEOUT allows for slower servers",
        )
    if isinstance(error, http.TooManyRedirects):
        return CheckpointError(
            f"{endpoint()} redirects again and again for {wanted}",
            hint="is HF_ENDPOINT right, or a proxy in between?",
        )
    if isinstance(error, (Broken, http.NetworkError, http.RemoteProtocolError)):
        return CheckpointError(
            f"the connection to {endpoint()} broke off in {wanted} again and again",
            hint="run the command again: files that are complete are kept",
        )
    return CheckpointError(
        f"{wanted} can't be asked for: {error}", hint="is HF_ENDPOINT the address of a Hub?"
    )


def _refused(error: HfHubHTTPError, wanted: Wanted) -> CheckpointError:
    """What a status means."""
    repo, status = wanted.name.repo, error.response.status_code
    log_in = "" if get_token() else "log in: hf auth login"
    if isinstance(error, GatedRepoError):
        return CheckpointError(
            f"{repo} is gated: its authors must grant you access",
            hint=f"ask for it at {HOME}/{repo}" + (f", then {log_in}" if log_in else ""),
        )
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError(
            f"{endpoint()} has no such revision: {wanted}", hint="give a branch, a tag or a commit"
        )
    if isinstance(error, RepositoryNotFoundError):
        return CheckpointError(
            f"{endpoint()} has no such repository: {repo}",
            hint="check the spelling, or give the path of a local directory"
            + (f"; if it is private, {log_in}" if log_in else ""),
        )
    if isinstance(error, EntryNotFoundError):
        return CheckpointError(
            f"{endpoint()} has no such file: {wanted}",
            hint="the repository is incomplete, or has changed: try again",
        )
    if status == 401:
        return _unauthorized(wanted)
    if status == 403:
        return CheckpointError(
            f"{endpoint()} doesn't let this token read {wanted}",
            hint="the token needs the permission to read this repository",
        )
    return CheckpointError(
        f"{endpoint()} answers with status {status} to the request for {wanted}",
        hint="is HF_ENDPOINT the address of a Hub?",
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


def _busy(error: Busy, wanted: Wanted) -> CheckpointError:
    if error.status == 429:
        seconds = error.wait_seconds
        wait = "" if seconds is None else f" and asks to wait {seconds:.0f} s"
        return CheckpointError(
            f"{endpoint()} gets too many requests from here{wait}; it was about {wanted}",
            hint="try again later; with a token (`hf auth login`) the Hub allows more",
        )
    return CheckpointError(
        f"{endpoint()} answers with status {error.status} to the request for {wanted}",
        hint="the Hub has a problem of its own: try again later",
    )


def offline(wanted: Wanted) -> CheckpointError:
    """The error for something that would have to be asked for, where nothing may be."""
    place = "in the cache" if wanted.file else "a directory here, nor in the cache"
    nor = "not" if wanted.file else "neither"
    return CheckpointError(
        f"{wanted} is {nor} {place}, and the Hub may not be asked: HF_HUB_OFFLINE is set",
        hint="unset HF_HUB_OFFLINE to download it",
    )
