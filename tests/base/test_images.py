from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from duoka.base.images import decode_image, read_image
from duoka.errors import UsageError


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png_of(width: int, height: int) -> bytes:
    """A PNG that says it has this size, and has no pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"x")


def palette() -> Image.Image:
    image = Image.new("P", (3, 2), 1)
    image.putpalette([0, 0, 0, 9, 8, 7])
    return image


def rotated() -> bytes:
    """The upper left pixel of the upright picture is red."""
    image = Image.new("RGB", (2, 3))
    image.putpixel((0, 2), (255, 0, 0))
    exif = Image.Exif()
    exif[0x112] = 6  # a quarter turn clockwise
    return encoded(image, exif=exif)


@pytest.mark.parametrize(
    ("content", "pixel"),
    [
        (encoded(Image.new("RGB", (3, 2), (1, 2, 3))), (1, 2, 3)),
        (encoded(Image.new("RGB", (3, 2), (1, 2, 3)), "TIFF"), (1, 2, 3)),
        (encoded(Image.new("RGBA", (3, 2), (255, 0, 0, 0))), (255, 255, 255)),
        (encoded(Image.new("LA", (3, 2), (0, 128))), (127, 127, 127)),
        (encoded(Image.new("L", (3, 2), 77)), (77, 77, 77)),
        (encoded(Image.new("1", (3, 2), 1)), (255, 255, 255)),
        (encoded(palette()), (9, 8, 7)),
        (encoded(palette(), transparency=1), (255, 255, 255)),
        (encoded(Image.new("CMYK", (3, 2), (0, 255, 0, 0)), "TIFF"), (255, 0, 255)),
        (rotated(), (255, 0, 0)),
        (
            encoded(
                Image.new("RGB", (3, 2), "red"),
                "GIF",
                save_all=True,
                append_images=[Image.new("RGB", (3, 2), "blue")],
            ),
            (255, 0, 0),
        ),
    ],
)
def test_pictures_of_every_kind(content: bytes, pixel: tuple[int, int, int]) -> None:
    image = decode_image(content, "picture")
    assert (image.mode, image.size) == ("RGB", (3, 2))
    assert image.getpixel((0, 0)) == pixel


NOISE = Image.effect_noise((99, 99), 50)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is empty"),
        (b"What is NVLink?", "not a supported image"),
        (b"<!doctype html><title>404</title>", "not a supported image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a supported image"),
        (encoded(NOISE)[:1999], "damaged: image file is truncated"),
        (encoded(NOISE.convert("RGB"), "JPEG")[:999], "damaged: image file is truncated"),
        (png_of(60_000, 60_000), "more than 67108864 pixels"),
        (png_of(9_000, 9_000), "9000x9000 is too large: at most 16384 pixels a side"),
        (png_of(20_000, 20), "20000x20 is too large"),
        (png_of(300, 1), "300x1 is too narrow: at most 200 times"),
        (encoded(Image.fromarray(np.ones((2, 3), np.float32)), "TIFF"), "more than 8 bits"),
        (encoded(Image.fromarray(np.ones((2, 3), np.uint16))), "more than 8 bits"),
    ],
)
def test_what_is_no_picture_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        decode_image(content, "cat.png")
    assert "'cat.png'" in str(caught.value)
    assert caught.value.hint


def test_files(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(encoded(Image.new("RGB", (3, 2))))
    assert read_image(tmp_path / "cat.png").size == (3, 2)
    with (tmp_path / "huge.png").open("wb") as file:
        file.truncate(2**26 + 1)
    for name, reason in (
        ("absent.png", "No such file"),
        (".", "Is a directory"),
        ("huge.png", "more than 67108864 bytes"),
        ("a\0b", "null byte"),
    ):
        with pytest.raises(UsageError, match=reason):
            read_image(tmp_path / name)
    with pytest.raises(UsageError, match="not a regular file"):
        read_image(Path("/dev/zero"))
