"""Pictures that are named on the command line: files, and addresses on the web.

Only a person's own command fetches from the web, and only what it names; what is written in a chat
never does. A server gets a limit of bytes, of redirects, and of time in which it is silent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from duoka.base.units import format_bytes
from duoka.errors import UsageError

from .groups import option
from .options import PlanOptions
from .terminal import working

if TYPE_CHECKING:
    from PIL.Image import Image

_WEB = ("http://", "https://")
_SILENT_SECONDS = 15
_MOST_REDIRECTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """Pictures that belong to what is asked."""

    image: list[str] | None = option(
        "FILE|URL",
        "A picture that is asked about; repeatable. One at an http or https address is fetched.",
    )

    def read(self) -> tuple[Image, ...]:
        """Read them, in their order."""
        return tuple(_read(source) for source in self.image or ())


def with_images(options: PlanOptions, images: tuple[Image, ...]) -> PlanOptions:
    """The options with room for pictures, where nothing was said of it and no plan is there."""
    if not images or options.plan_file is not None:
        return options
    width = max(image.width for image in images)
    height = max(image.height for image in images)
    return replace(
        options,
        images=options.images or len(images),
        image_size=options.image_size or f"{width}x{height}",
    )


def is_address(source: str) -> bool:
    """Whether it is one on the web, and no file."""
    return source.lower().startswith(_WEB)


def _read(source: str) -> Image:
    from duoka.base.images import decode_image, read_image

    if is_address(source):
        with working("fetching the picture"):
            content = _fetch(source)
        return decode_image(content, source)
    return read_image(Path(source))


def _fetch(address: str) -> bytes:
    """What a server sends, within a limit."""
    from duoka.base.images import MOST_BYTES
    from duoka.checkpoint.hub.errors import http

    client = http.Client(
        follow_redirects=True, max_redirects=_MOST_REDIRECTS, timeout=_SILENT_SECONDS
    )
    content = bytearray()
    try:
        with client, client.stream("GET", address) as response:
            if not response.is_success:
                status = response.status_code
                raise _unfetched(address, f"the server answers with status {status}")
            for chunk in response.iter_bytes():
                content += chunk
                if len(content) > MOST_BYTES:
                    reason = f"it has more than {format_bytes(MOST_BYTES)}, which are not read"
                    raise _unfetched(address, reason)
    except (http.HTTPError, http.InvalidURL, ValueError, OSError) as error:
        raise _unfetched(address, _why(error, http)) from error
    return bytes(content)


def _why(error: Exception, http: Any) -> str:
    if isinstance(error, http.TooManyRedirects):
        return f"the server redirects more than {_MOST_REDIRECTS} times"
    if isinstance(error, http.TimeoutException):
        return f"the server is silent for {_SILENT_SECONDS} seconds"
    return str(error) or type(error).__name__


def _unfetched(address: str, reason: str) -> UsageError:
    return UsageError(
        f"the picture {address!r} can't be fetched: {reason}",
        hint="check the address, or save the picture and give its file",
    )
