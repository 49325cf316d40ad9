"""Images given on the command line, as files or URLs.

Only options of a command download images; text of a chat never does. The number of bytes, the
number of redirects and the time without data are limited.
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

_URL_PREFIXES = ("http://", "https://")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions(OptionGroup):
    """Option for the images of a prompt."""

    image: list[str] | None = option(
        "FILE|URL", "An image for the prompt, as a file or an http or https URL; repeatable."
    )

    def read(self) -> tuple[Image, ...]:
        """Read or download the images, in the order given."""
        return tuple(_read_source(source) for source in self.image or ())


def with_images(options: PlanOptions, images: tuple[Image, ...]) -> PlanOptions:
    """Return options that plan for these images.

    Explicit --images and --image-size are kept, and a saved plan is not changed.
    """
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
    """Return True for an http or https URL, False for a file."""
    return source.lower().startswith(_URL_PREFIXES)


def _read_source(source: str) -> Image:
    """Read an image from a file, or download it from a URL."""
    from duoka.base.images import MOST_BYTES, decode_image, read_image

    if is_address(source):
        from duoka.base.web import fetch

        with working("downloading the image"):
            content = asyncio.run(fetch(source, most_bytes=MOST_BYTES))
        return decode_image(content, source)
    return read_image(Path(source))
