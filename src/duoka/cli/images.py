"""Pictures on the command line: files, and addresses on the web.

Only a person's own command fetches from the web, and only what it names; what is written in a chat
never does. A server gets a limit of bytes, of redirects, and of time in which it is silent.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .groups import option
from .options import PlanOptions
from .terminal import working

if TYPE_CHECKING:
    from PIL.Image import Image

_WEB = ("http://", "https://")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """Pictures of a prompt."""

    image: list[str] | None = option(
        "FILE|URL",
        "A picture that is asked about; repeatable. One at an http or https address is fetched.",
    )

    def read(self) -> tuple[Image, ...]:
        """Read the pictures, in their order."""
        return tuple(_read(source) for source in self.image or ())


def with_images(options: PlanOptions, images: tuple[Image, ...]) -> PlanOptions:
    """Add the sizes of pictures to the options, unless given or decided by a plan."""
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
    """Return True for an address on the web."""
    return source.lower().startswith(_WEB)


def _read(source: str) -> Image:
    from duoka.base.images import MOST_BYTES, decode_image, read_image

    if is_address(source):
        from duoka.base.web import fetch

        with working("fetching the picture"):
            content = asyncio.run(fetch(source, most_bytes=MOST_BYTES))
        return decode_image(content, source)
    return read_image(Path(source))
