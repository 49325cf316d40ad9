"""Translate errors of huggingface_hub and its HTTP library, and retry requests.

Requests with a transient error are repeated, in addition to huggingface_hub's own retries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar
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

from .repo_name import HubName

T = TypeVar("T")
Messages: TypeAlias = tuple[tuple[Any, str, str], ...]
"""Error class or HTTP statuses, message and hint; the first match counts."""

WAITS_SECONDS = (1.0, 2.0, 4.0, 8.0)
_HOME = "https://huggingface.co"
_UNREACHED = (http.ConnectError, http.ConnectTimeout)
_BROKEN = (http.TimeoutException, http.NetworkError, http.RemoteProtocolError)
_TRANSIENT_STATUSES = {408, 425, 429, 500, 502, 503, 504}


def endpoint() -> str:
    """Return the Hub's address, without the name and password in HF_ENDPOINT."""
    return without_password(HfApi().endpoint)


def without_password(url: str) -> str:
    """Return a URL without its user's name and password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _is_transient(error: Exception) -> bool:
    """Return True for an error that may not recur: a busy server, or a broken transfer."""
    if isinstance(error, HfHubHTTPError):
        return _http_status(error) in _TRANSIENT_STATUSES
    return isinstance(error, _BROKEN) and not isinstance(error, _UNREACHED)


def _http_status(error: BaseException) -> int | None:
    """Return the HTTP status of an error; None without a response."""
    return getattr(getattr(error, "response", None), "status_code", None)


# The placeholders are filled for the Hub or for ModelScope.
MESSAGES: Messages = (
    (
        GatedRepoError,
        "{repo} is gated: its authors must grant you access",
        f"request access at {_HOME}/{{repo}}{{log_in}}",
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
        "the repository is incomplete, or changed meanwhile: try again",
    ),
    ({401, 403}, "{hub} denies access to {wanted}: {token}", "{access}"),
    (
        {*range(400, 600)},
        "{hub} answers with status {status} to the request for {wanted}",
        "try again later; after 429 log in (`{command}`): the rate limit is higher with a token",
    ),
    (
        _UNREACHED,
        "{hub} can't be reached for {wanted}: {error}",
        "check the network and {variable}; HF_HUB_OFFLINE=1 uses the files in the cache",
    ),
    (
        http.TimeoutException,
        "{hub} sent nothing of {wanted} for {timeout} seconds",
        "try again, or set a longer HF_HUB_DOWNLOAD_TIMEOUT",
    ),
    (
        (http.HTTPError, http.InvalidURL),
        "{wanted} can't be fetched from {hub}: {error}",
        "run the command again: complete files are kept",
    ),
    (
        (FileMetadataError, ValueError, TypeError, KeyError, OSError),
        "{hub} sent other content than announced for {wanted}",
        "try again; check that {variable} is the URL of a Hub and that no network log-in page "
        "intercepts requests",
    ),
)


def _translate(error: BaseException, name: HubName) -> CheckpointError | None:
    """Translate an error; return None for errors unrelated to the Hub."""
    # huggingface_hub reports that a file is not in its cache; the cause tells why.
    while isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OfflineModeIsEnabled):
        return offline_error(name)
    if isinstance(error, OSError) and error.errno is not None:
        return None
    status, token = _http_status(error), get_token()
    trouble = "the token is wrong, expired, or lacks permission"
    values = {
        "hub": endpoint(),
        "wanted": name,
        "repo": name.repo,
        "error": str(error) or "no answer in time",
        "status": status,
        "token": trouble if token else "there is no token",
        "log_in": "" if token else "; for private repositories log in: hf auth login",
        "timeout": constants.HF_HUB_DOWNLOAD_TIMEOUT,
        "access": "log in (`hf auth login`), or correct or unset HF_TOKEN",
        "command": "hf auth login",
        "variable": "HF_ENDPOINT",
    }
    return choose_message(MESSAGES, error, status, values)


def choose_message(
    messages: Messages, error: BaseException, status: int | None, values: Mapping[str, object]
) -> CheckpointError | None:
    """Make the error of the first message that matches an error; None without a match."""
    for kind, message, hint in messages:
        if status in kind if isinstance(kind, set) else isinstance(error, kind):
            return CheckpointError(message.format(**values), hint=hint.format(**values))
    return None


def query(
    name: HubName,
    request: Callable[[], T],
    *,
    is_transient: Callable[[Exception], bool] = _is_transient,
    translate: Callable[[Exception, HubName], CheckpointError | None] = _translate,
) -> T:
    """Make a request, with retries; raise CheckpointError for errors of the server."""
    for wait_seconds in (*WAITS_SECONDS, None):
        try:
            return request()
        except Exception as error:  # translated if it is of the server or the network
            if wait_seconds is None or not is_transient(error):
                translated = translate(error, name)
                if translated is None:
                    raise
                # Without the cause: its message may contain a signed URL, which is a secret.
                raise translated from None
        time.sleep(wait_seconds)
    raise AssertionError("the last attempt returns or raises")


def offline_error(name: HubName) -> CheckpointError:
    """Make the error for a file or repository not in the cache while HF_HUB_OFFLINE is set."""
    place = "not in the cache" if name.file else "neither a local directory nor in the cache"
    return CheckpointError(
        f"{name} is {place}, and HF_HUB_OFFLINE forbids requests to the Hub",
        hint="unset HF_HUB_OFFLINE to download it",
    )
