"""Images: decode untrusted files and bytes into images for a model's image processor."""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from duoka.errors import UsageError

from .files import read_bytes, why

MOST_BYTES = 2**26
LONGEST_PIXELS = 16384
MOST_PIXELS = 2**26
_MOST_RATIO = 200
_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,", re.ASCII | re.IGNORECASE)
# A subset of Pillow's formats: Pillow runs external programs to read some others.
_FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
# Formats that servers accept. Without JPEG 2000, whose decoder blocks all threads for seconds.
WEB_FORMATS = ("GIF", "JPEG", "PNG", "WEBP")
_SMALLER = "reduce its size; models don't use that many pixels"
_HINT = "give a PNG, JPEG, WebP, GIF, BMP or TIFF file"


def read_image(path: Path) -> Image.Image:
    """Read an image file; see `decode_image`."""
    return decode_image(read_content(path), str(path))


def read_content(path: Path) -> bytes:
    """Read the bytes of an image file."""
    try:
        return read_bytes(path.expanduser(), most_bytes=MOST_BYTES)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error) if isinstance(error, RuntimeError) else why(error)
        raise _unreadable(str(path), reason) from error


def decode_data_url(url: str) -> bytes | None:
    """Return the bytes of an image in a data: URL; None for another text."""
    match = _DATA_URL.match(url)
    if match is None:
        return None
    try:
        return base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise UsageError(f"an image is not base64: {error}") from error


def decode_image(content: bytes, source: str, formats: tuple[str, ...] = _FORMATS) -> Image.Image:
    """Decode an image to 8-bit RGB, rotated upright, with transparent parts in white.

    If there are several images, as in a GIF, the first one is decoded. Only `formats` are accepted.
    """
    if not content:
        raise _unreadable(source, "it is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns about defects that it tolerates
            with Image.open(io.BytesIO(content), formats=formats) as image:
                refuse_size(*image.size)
                return _rgb(ImageOps.exif_transpose(image))
    except UsageError as error:
        raise _unreadable(source, str(error), error.hint) from error
    except UnidentifiedImageError as error:
        raise _unreadable(source, "it is not a supported image") from error
    except Image.DecompressionBombError as error:
        reason = f"it has more than {MOST_PIXELS} pixels; larger images are not decoded"
        raise _unreadable(source, reason, _SMALLER) from error
    except Exception as error:  # a damaged file makes Pillow raise nearly anything
        reason = why(error) if isinstance(error, OSError | ValueError) else str(error)
        raise _unreadable(source, f"it is damaged: {reason or type(error).__name__}") from error


def refuse_size(width: int, height: int) -> None:
    """Refuse images that are too large to decode, or too narrow for any model."""
    if max(width, height) > LONGEST_PIXELS or width * height > MOST_PIXELS:
        raise UsageError(
            f"an image of {width}x{height} is too large: at most {LONGEST_PIXELS} pixels a side, "
            f"and {MOST_PIXELS} in all",
            hint=_SMALLER,
        )
    if max(width, height) > _MOST_RATIO * min(width, height):
        raise UsageError(
            f"an image of {width}x{height} is too narrow: at most {_MOST_RATIO} times as long as "
            "wide",
            hint="crop it",
        )


def _unreadable(source: str, reason: str, hint: str | None = _HINT) -> UsageError:
    """Return the error for an unreadable picture."""
    return UsageError(f"the image {source!r} can't be read: {reason}", hint=hint)


def _rgb(image: Image.Image) -> Image.Image:
    """Convert an image to 8-bit RGB on white; raise ValueError for more than 8 bits of gray."""
    if image.mode.startswith(("I", "F")):
        # Pillow's conversion to RGB would clip all values above 255 to white.
        raise ValueError("it has more than 8 bits of gray per pixel; save it with 8")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")
