"""Pictures of the command line: files, and addresses on the web.

Only the command's own options fetch from the web; text of a chat never does. Bytes, redirects and
seconds of silence are limited.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .groups import OptionGroup, option
from .options import PlanOptions
from .terminal import working

if TYPE_CHECKING:
    from PIL.Image import Image

_WEB = ("http://", "https://")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions(OptionGroup):
    """The pictures of a question."""

    image: list[str] | None = option(
        "FILE|URL",
        "An image for the prompt, as a file or an http or https URL; repeatable.",
    )

    def read(self) -> tuple[Image, ...]:
        """Read the pictures, in their order."""
        return tuple(_read(source) for source in self.image or ())


def with_images(options: PlanOptions, images: tuple[Image, ...]) -> PlanOptions:
    """Return options that plan for the pictures, unless options or a saved plan already do."""
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
    """Return True for an address on the web, False for a file."""
    return source.lower().startswith(_WEB)


def _read(source: str) -> Image:
    from duoka.base.images import MOST_BYTES, decode_image, read_image

    if is_address(source):
        from duoka.base.web import fetch

        with working("downloading the image"):
            content = asyncio.run(fetch(source, most_bytes=MOST_BYTES))
        return decode_image(content, source)
    return read_image(Path(source))
