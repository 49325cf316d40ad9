"""Images of rows: opened to encode the rows, and kept as references to open them again in training.

A reference is a header, and the path of a file or, for an image inside the data, its bytes. The
header has width and height, the SHA-256 of the image's bytes, and whether a path follows.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL.Image import Image

from duoka.base.images import decode_data_url, decode_image, read_content
from duoka.errors import TrainingError, UsageError

Reference = bytes | memoryview
References = tuple[tuple[Reference, ...], ...]
"""The references of each sample's images; empty if no sample has any."""
_HEADER = struct.Struct("<II32s?")
_VALUES = ("bytes", "url", "path", "image", "image_url")
_IMAGES = ("images", "image")
_PART_KEYS = ("image_url", "image", "url", "path", "bytes")
_CHATS = ("messages", "conversations", "conversation", "prompt", "completion")
PLACEHOLDER = "<image>"
_PLACE_PART = {"type": "text", "text": PLACEHOLDER}
_KNOWN = "images are files, data: URLs or bytes"


Split = tuple[dict[str, Any], list[Any] | None]
"""Fields without images, and the images as written there; None without a place for any."""


def split_row(row: Mapping[str, Any]) -> Split:
    """Split a row into its texts, with placeholders, and its images."""
    texts, images = _split_fields(row)
    for key in _CHATS:
        if isinstance(items := texts.get(key), list | tuple):
            pairs = [_split_message(item) for item in items]
            texts[key] = [item for item, _ in pairs]
            of_messages = [image for _, stated in pairs for image in stated or ()]
            if images and of_messages:
                raise UsageError("both the row and its messages have images; name them once")
            if any(stated is not None for _, stated in pairs):
                images = of_messages or images or []
    return texts, images


def _split_fields(fields: Mapping[str, Any]) -> Split:
    """Split the fields of a row or a message."""
    texts = {key: value for key, value in fields.items() if key not in _IMAGES}
    values = [fields[key] for key in _IMAGES if fields.get(key)]
    lists = (value if isinstance(value, list | tuple) else [value] for value in values)
    return texts, [it for images in lists for it in images] if len(texts) < len(fields) else None


def _split_message(message: Any) -> tuple[Any, list[Any] | None]:
    """Split a message into its texts, with placeholders, and its images."""
    if not isinstance(message, Mapping):
        return message, None
    texts, images = _split_fields(message)
    key = next((key for key in ("content", "value", "human", "user") if key in texts), "")
    content = texts.get(key)
    if isinstance(content, str) and PLACEHOLDER not in content:
        texts[key] = PLACEHOLDER * len(images or ()) + content
    elif isinstance(content, list):
        in_parts = [_image_of(part) for part in content]
        pairs = zip(content, in_parts, strict=True)
        texts[key] = [_PLACE_PART if stated is not None else part for part, stated in pairs]
        if any(stated is not None for stated in in_parts):
            images = [*(images or ()), *(it for stated in in_parts for it in stated or ())]
    return texts, images


def _image_of(part: Any) -> list[Any] | None:
    """Return the image in a part of a content, if it is stated there; None for another part."""
    fields = part if isinstance(part, Mapping) else {}
    is_image = "image" in str(fields.get("type"))
    names = (*_PART_KEYS, "value") if is_image else _PART_KEYS
    stated = [fields[name] for name in names if fields.get(name) is not None]
    return stated[:1] if stated or is_image else None


def read_data_image(value: Any, directory: Path) -> tuple[bytes, Image]:
    """Read an image as written in a row; return its reference and the image.

    The value is a path, relative to `directory` or to the working directory, a data: URL, or bytes;
    or a mapping with one of these, as in OpenAI's ``image_url`` and the image feature of Hugging
    Face's datasets.
    """
    while isinstance(value, Mapping):
        stated = [value[key] for key in _VALUES if value.get(key) is not None]
        value = stated[0] if stated else None
    if isinstance(value, str):
        value = decode_data_url(value) or value.removeprefix("file://")
    if isinstance(value, bytes):
        content, image = value, decode_image(value, "in the row")
        stored = content
    elif isinstance(value, str):
        if "://" in value[:16]:
            raise UsageError(
                f"an image is at {value[:60]!r}, and training downloads none; {_KNOWN}"
            )
        places = [Path.cwd() / directory / value, Path.cwd() / value]
        path = next((place for place in places if place.exists()), places[0])
        content = read_content(path)
        image, stored = decode_image(content, value), os.fsencode(path)
    else:
        raise UsageError(f"an image is of type {type(value).__name__}; {_KNOWN}")
    header = _HEADER.pack(*image.size, sha256(content).digest(), stored is not content)
    return header + stored, image


def open_image(reference: Reference) -> Image:
    """Open the image of a reference; raise TrainingError if its file has changed."""
    *_, digest, is_file = _HEADER.unpack_from(reference)
    content = bytes(reference[_HEADER.size :])
    source = os.fsdecode(content) if is_file else "in the data"
    content = read_content(Path(source)) if is_file else content
    if sha256(content).digest() != digest:
        raise TrainingError(
            f"the image {source!r} has changed since the run began",
            hint="restore the file and resume, or start a new run",
        )
    return decode_image(content, source)


def image_size(reference: Reference) -> tuple[int, int]:
    """Return the width and height of the image of a reference."""
    width, height, *_ = _HEADER.unpack_from(reference)
    return width, height


def image_digests(images: References) -> bytes:
    """Return what identifies the images of samples, wherever their files are."""
    return b"".join(bytes(it[: _HEADER.size - 1]) for of_sample in images for it in of_sample)


def pack_images(images: References) -> dict[str, npt.NDArray[Any]]:
    """Return the references of samples as arrays, to be saved."""
    flat = [reference for of_sample in images for reference in of_sample]
    return {
        "images": np.frombuffer(bytearray().join(flat), np.uint8),
        "image_ends": np.cumsum([0, *map(len, flat)]),
        "num_images": np.array([*map(len, images)]),
    }


def unpack_images(
    images: npt.NDArray[np.uint8], image_ends: Sequence[int], num_images: Sequence[int]
) -> References:
    """Return the references in arrays of `pack_images`, without copying them."""
    pieces = (memoryview(images.data)[start:stop] for start, stop in pairwise(image_ends))
    return tuple(tuple(islice(pieces, number)) for number in num_images)
