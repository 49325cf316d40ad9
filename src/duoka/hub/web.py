"""Web: requests to the Hub, within limits of time, size, redirects and attempts.

huggingface_hub says where the Hub is and makes the session, with its proxies and certificates.
Redirects are followed here, so that the token goes to no other host, and every answer is counted
while it is read, because a server may say one length and send another.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

from huggingface_hub import constants, get_session
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from duoka.errors import CheckpointError

from .answers import ATTEMPTS, Passing, offline, refuse
from .names import Wanted
from .places import endpoint, is_trusted, origin, plain

T = TypeVar("T")

# What a request may cost; attempts are counted anew after every byte that arrived.
WAITS_SECONDS = (1.0, 2.0, 4.0, 8.0)
CONNECT_ATTEMPTS = 2
MAX_RETRY_AFTER_SECONDS = 60
MAX_REDIRECTS = 10
SMALL_SECONDS = 120  # for an answer that is read into memory

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})", re.ASCII)
# httpx or its successor, whichever this version of huggingface_hub is built on.
_http: Any = sys.modules[HfHubHTTPError.__mro__[1].__module__.partition(".")[0]]


def persist(action: Callable[[], T], *, moved: Callable[[], int] = lambda: 0) -> T:
    """Do something until it succeeds, within limits.

    Parameters
    ----------
    action : callable
        Raises `Passing` when it may go better next time.
    moved : callable
        Says how far it got; when that is further than before, attempts are counted anew.

    Raises
    ------
    CheckpointError
        When the attempts are used up.
    """
    failures, before = 0, moved()
    while True:
        try:
            return action()
        except Passing as passing:
            failures = failures + 1 if moved() <= before else 1
            before = moved()
            if failures >= passing.attempts:
                raise passing.error from passing.__cause__
            wait = WAITS_SECONDS[failures - 1]
            asked = passing.wait_seconds
            if asked is not None and asked > MAX_RETRY_AFTER_SECONDS:
                raise passing.error from passing.__cause__
            time.sleep(wait if asked is None else asked)


def read_small(url: str, wanted: Wanted, *, most_bytes: int) -> bytes:
    """Read an answer into memory.

    Parameters
    ----------
    url : str
    wanted : Wanted
        For messages.
    most_bytes : int
        More than that is refused, before it is read where its length is told.

    Raises
    ------
    CheckpointError
    """

    def attempt() -> bytes:
        with request(url, wanted) as response:
            declared = _length(response)
            if declared is not None and declared > most_bytes:
                raise CheckpointError(
                    f"{endpoint()} sends {declared} bytes as {wanted}; at most {most_bytes} are "
                    "read"
                )
            return _collect(response, wanted, most_bytes)

    return persist(attempt)


def read_range(url: str, wanted: Wanted, start: int, stop: int, size: int) -> bytes:
    """Read some bytes of a file.

    Parameters
    ----------
    url : str
    wanted : Wanted
    start, stop : int
        Half-open.
    size : int
        Of the file, which the server must confirm.

    Raises
    ------
    CheckpointError
    """

    def attempt() -> bytes:
        with request(url, wanted, start=start, stop=stop) as response:
            check_range(response, wanted, start, size)
            content = _collect(response, wanted, stop - start, cut=response.status_code == 200)
        if len(content) < stop - start:
            raise Passing(broken(wanted))
        return content

    return persist(attempt)


def check_range(response: Any, wanted: Wanted, start: int, size: int) -> None:
    """Refuse an answer that isn't what was asked for: from `start` on, of a file of `size` bytes.

    Raises
    ------
    CheckpointError
    """
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise CheckpointError(
            f"{endpoint()} sends {wanted} compressed ({encoding[:20]!r}), which was not asked for"
        )
    if response.status_code == 206:
        match = _RANGE.fullmatch(response.headers.get("content-range", ""))
        told = None if match is None else (int(match[1]), int(match[3]))
    else:
        length = _length(response)
        told = (0, size if length is None else length)
    if told is not None and told[1] != size:
        raise CheckpointError(
            f"{endpoint()} sends {wanted} with {told[1]} bytes, and told of {size}",
            hint="the repository may have changed, or a proxy is in between: try again",
        )
    if told is None or (told[0] != start and response.status_code == 206) or told[0] > start:
        raise CheckpointError(f"{endpoint()} sends another part of {wanted} than was asked for")
    if response.status_code == 200 and start > 0:
        raise NoRanges(f"{endpoint()} sends {wanted} from its beginning only")


class NoRanges(CheckpointError):
    """The server doesn't send parts of files."""


@contextmanager
def request(
    url: str, wanted: Wanted, *, start: int | None = None, stop: int | None = None
) -> Iterator[Any]:
    """Ask for something and follow redirects; the body isn't read yet.

    Raises
    ------
    CheckpointError
        For what won't go better next time.
    Passing
        For what may.
    """
    headers = build_hf_headers(library_name="duoka") | {"Accept-Encoding": "identity"}
    if start is not None:
        headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
    with _troubles(wanted):
        for _ in range(MAX_REDIRECTS + 1):
            with get_session().stream(
                "GET",
                url,
                headers=headers if is_trusted(url) else _anonymous(headers),
                follow_redirects=False,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            ) as response:
                if response.status_code not in _REDIRECTS:
                    refuse(response, wanted)
                    yield response
                    return
                url = _target(url, response.headers.get("location", ""), wanted)
        raise CheckpointError(
            f"{endpoint()} redirects more than {MAX_REDIRECTS} times for {wanted}",
            hint="is HF_ENDPOINT right, or a proxy in between?",
        )


def _anonymous(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() != "authorization"}


def _target(url: str, location: str, wanted: Wanted) -> str:
    try:
        target = urljoin(url, location)
        before, after = urlsplit(url), urlsplit(target)
        possible = after.scheme in ("http", "https") and bool(after.hostname)
        origin(target)
    except ValueError:
        possible = False
    if not possible or (before.scheme, after.scheme) == ("https", "http"):
        raise CheckpointError(f"{plain(url)} redirects {wanted} to an address that isn't followed")
    return target


@contextmanager
def _troubles(wanted: Wanted) -> Iterator[None]:
    """Turn what the HTTP library raises into what a person can understand."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise offline(wanted) from error
    except _http.ConnectTimeout as error:
        raise Passing(
            _unreachable(wanted, "no answer in time"), attempts=CONNECT_ATTEMPTS
        ) from error
    except _http.ConnectError as error:
        reason = str(error) or "the connection was refused"
        raise Passing(_unreachable(wanted, reason), attempts=CONNECT_ATTEMPTS) from error
    except _http.TimeoutException as error:
        seconds = constants.HF_HUB_DOWNLOAD_TIMEOUT
        raise Passing(
            CheckpointError(
                f"{endpoint()} sent nothing of {wanted} for {seconds} seconds",
                hint="try again; HF_HUB_DOWNLOAD_TIMEOUT allows for slower servers",
            )
        ) from error
    except (_http.NetworkError, _http.RemoteProtocolError) as error:
        raise Passing(broken(wanted)) from error
    except (_http.HTTPError, _http.InvalidURL, ValueError) as error:
        raise CheckpointError(f"{wanted} can't be asked for at {endpoint()}: {error}") from error


def _unreachable(wanted: Wanted, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{endpoint()} can't be reached for {wanted}: {reason}",
        hint="check the network and HF_ENDPOINT; HF_HUB_OFFLINE=1 uses what was downloaded before",
    )


def broken(wanted: Wanted) -> CheckpointError:
    """The error for a connection that breaks off again and again."""
    return CheckpointError(
        f"the connection to {endpoint()} broke off in {wanted}, {ATTEMPTS} times",
        hint="run the command again: what has arrived is kept",
    )


def _length(response: Any) -> int | None:
    text = response.headers.get("content-length", "")
    return int(text) if re.fullmatch("[0-9]{1,19}", text, re.ASCII) else None


def _collect(response: Any, wanted: Wanted, most_bytes: int, *, cut: bool = False) -> bytes:
    """Read a body, as it may be long; `cut` takes its beginning."""
    content = bytearray()
    end = time.monotonic() + SMALL_SECONDS
    for chunk in response.iter_bytes():
        content += chunk
        if len(content) >= most_bytes and cut:
            return bytes(content[:most_bytes])
        if len(content) > most_bytes:
            raise CheckpointError(
                f"{endpoint()} sends more than {most_bytes} bytes as {wanted}; that is not read"
            )
        if time.monotonic() > end:
            raise Passing(
                CheckpointError(f"{endpoint()} needs more than {SMALL_SECONDS} s to send {wanted}")
            )
    return bytes(content)
