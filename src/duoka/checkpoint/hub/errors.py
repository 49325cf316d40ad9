"""Errors: what huggingface_hub and its HTTP library raise, as a person can understand it.

What may go better next time is tried again, within limits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
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


_ADDRESS = "is HF_ENDPOINT the address of a Hub?"
_CHANGED = "the repository may have changed, or a proxy is in between: try again"
# What an error means and what to do, by the first class or status that it has.
_MEANINGS: tuple[tuple[Any, str, str], ...] = (
    (TooLong, "{hub} sends more than {error} bytes as {wanted}; that is not read", _CHANGED),
    (
        GatedRepoError,
        "{repo} is gated: its authors must grant you access",
        f"ask for it at {HOME}/{{repo}}{{log_in}}",
    ),
    (
        RevisionNotFoundError,
        "{hub} has no such revision: {wanted}",
        "give a branch, a tag or a commit",
    ),
    (
        RepositoryNotFoundError,
        "{hub} has no such repository: {repo}",
        "check the spelling, or give the path of a local directory{log_in}",
    ),
    (
        EntryNotFoundError,
        "{hub} has no such file: {wanted}",
        "the repository is incomplete, or has changed: try again",
    ),
    (
        401,
        "{hub} wants to know who asks for {wanted}, and {token}",
        "log in (`hf auth login`), or correct or unset HF_TOKEN",
    ),
    (
        403,
        "{hub} doesn't let this token read {wanted}",
        "the token needs the permission to read this repository",
    ),
    (
        429,
        "{hub} gets too many requests from here{wait}; it was about {wanted}",
        "try again later; with a token (`hf auth login`) the Hub allows more",
    ),
    (
        Busy,
        "{hub} answers with status {error} to the request for {wanted}",
        "the Hub has a problem of its own: try again later",
    ),
    (HfHubHTTPError, "{hub} answers with status {status} to the request for {wanted}", _ADDRESS),
    (
        (http.ConnectError, http.ConnectTimeout),
        "{hub} can't be reached for {wanted}: {error}",
        "check the network and HF_ENDPOINT; HF_HUB_OFFLINE=1 uses what was downloaded before",
    ),
    (
        http.TimeoutException,
        "{hub} sent nothing of {wanted} for {timeout} seconds",
        "try again; HF_HUB_DOWNLOAD_TIMEOUT allows for slower servers",
    ),
    (
        http.TooManyRedirects,
        "{hub} redirects again and again for {wanted}",
        "is HF_ENDPOINT right, or a proxy in between?",
    ),
    (
        (Broken, http.NetworkError, http.RemoteProtocolError),
        "the connection to {hub} broke off in {wanted} again and again",
        "run the command again: files that are complete are kept",
    ),
    ((http.HTTPError, http.InvalidURL), "{wanted} can't be asked for: {error}", _ADDRESS),
    (
        (FileMetadataError, ValueError, TypeError, KeyError),
        "{hub} answers with something else than a Hub does to the request for {wanted}",
        "is HF_ENDPOINT the address of a Hub, or does a network log-in page answer?",
    ),
    (OSError, "{hub} sends {wanted} with another length than it told of", _CHANGED),
)


def _explain(error: BaseException, wanted: Wanted) -> CheckpointError | None:
    """What an error means; None for what has nothing to do with the Hub."""
    if isinstance(error, OfflineModeIsEnabled):
        return offline(wanted)
    if isinstance(error, OSError) and error.errno is not None:
        return None
    response = getattr(error, "response", None) if isinstance(error, HfHubHTTPError) else None
    status = getattr(response, "status_code", getattr(error, "status", None))
    seconds = getattr(error, "wait_seconds", None)
    for kind, message, hint in _MEANINGS:
        if kind == status if isinstance(kind, int) else isinstance(error, kind):
            values = {
                "hub": endpoint(),
                "wanted": wanted,
                "repo": wanted.name.repo,
                "error": str(error) or "no answer in time",
                "status": status,
                "token": "the token is wrong, or has expired"
                if get_token()
                else "there is no token",
                "log_in": "" if get_token() else "; for what isn't public log in: hf auth login",
                "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT,
                "wait": "" if seconds is None else f" and asks to wait {seconds:.0f} s",
            }
            return CheckpointError(message.format(**values), hint=hint.format(**values))
    return None


def offline(wanted: Wanted) -> CheckpointError:
    """The error for something that would have to be asked for, where nothing may be."""
    place = "in the cache" if wanted.file else "a directory here, nor in the cache"
    nor = "not" if wanted.file else "neither"
    return CheckpointError(
        f"{wanted} is {nor} {place}, and the Hub may not be asked: HF_HUB_OFFLINE is set",
        hint="unset HF_HUB_OFFLINE to download it",
    )
