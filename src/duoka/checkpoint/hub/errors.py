"""Errors: what huggingface_hub and its HTTP library raise, as a person can understand it.

What may go better next time is tried again, beside what huggingface_hub tries again by itself.
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

from duoka.base.web import http
from duoka.errors import CheckpointError

from .repo_name import Wanted

T = TypeVar("T")

WAITS_SECONDS = (1.0, 2.0, 4.0, 8.0)
HOME = "https://huggingface.co"
_UNREACHED = (http.ConnectError, http.ConnectTimeout)
_BROKEN = (http.NetworkError, http.RemoteProtocolError)
_MAY_PASS = {408, 425, 429, 500, 502, 503, 504}


def endpoint() -> str:
    """Where the Hub is, without a name and password that HF_ENDPOINT may hold."""
    parts = urlsplit(HfApi().endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def ask(wanted: Wanted, action: Callable[[], T]) -> T:
    """Ask the Hub for something, several times if need be."""
    with _explained(wanted):
        for seconds in WAITS_SECONDS:
            try:
                return action()
            except Exception as error:
                if not _may_pass(error):
                    raise
            time.sleep(seconds)
        return action()


def _may_pass(error: Exception) -> bool:
    """Whether asking again may help."""
    if isinstance(error, HfHubHTTPError):
        return _status(error) in _MAY_PASS
    return isinstance(error, (http.TimeoutException, *_BROKEN)) and not isinstance(
        error, _UNREACHED
    )


def _status(error: BaseException) -> int | None:
    """The status of the answer that an error is about."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _root(error: BaseException) -> BaseException:
    """What went wrong when huggingface_hub says no more than that a file isn't in its cache."""
    while isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


@contextmanager
def _explained(wanted: Wanted) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        known = _explain(_root(error), wanted)
        if known is None:
            raise
        # Without what the libraries said: addresses of large files are signed, as a password is.
        raise known from None


# What an error means and what to do, by the first class or status that it has.
_MEANINGS: tuple[tuple[Any, str, str], ...] = (
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
        {401, 403},
        "{hub} doesn't let you read {wanted}: {token}",
        "log in (`hf auth login`), or correct or unset HF_TOKEN",
    ),
    (
        HfHubHTTPError,
        "{hub} answers with status {status} to the request for {wanted}",
        "try again later; after 429 with a token (`hf auth login`), for which the Hub allows more",
    ),
    (
        _UNREACHED,
        "{hub} can't be reached for {wanted}: {error}",
        "check the network and HF_ENDPOINT; HF_HUB_OFFLINE=1 uses what was downloaded before",
    ),
    (
        http.TimeoutException,
        "{hub} sent nothing of {wanted} for {timeout} seconds",
        "try again; HF_HUB_DOWNLOAD_TIMEOUT allows for slower servers",
    ),
    (
        (http.HTTPError, http.InvalidURL),
        "{wanted} can't be fetched from {hub}: {error}",
        "run the command again: files that are complete are kept",
    ),
    (
        (FileMetadataError, ValueError, TypeError, KeyError, OSError),
        "{hub} answers with something else than it told of to the request for {wanted}",
        "try again; is HF_ENDPOINT the address of a Hub, or does a network log-in page answer?",
    ),
)


def _explain(error: BaseException, wanted: Wanted) -> CheckpointError | None:
    """What an error means; None for what has nothing to do with the Hub."""
    if isinstance(error, OfflineModeIsEnabled):
        return offline(wanted)
    if isinstance(error, OSError) and error.errno is not None:
        return None
    status = _status(error)
    for kind, message, hint in _MEANINGS:
        if status in kind if isinstance(kind, set) else isinstance(error, kind):
            values = {
                "hub": endpoint(),
                "wanted": wanted,
                "repo": wanted.name.repo,
                "error": str(error) or "no answer in time",
                "status": status,
                "token": "the token is wrong, has expired, or lacks the permission"
                if get_token()
                else "there is no token",
                "log_in": "" if get_token() else "; for what isn't public log in: hf auth login",
                "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT,
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
