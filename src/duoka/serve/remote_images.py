"""Images that requests name by their address: fetched where that is allowed, within limits."""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from duoka.errors import UsageError

from .errors import HttpError
from .limits import MOST_BODY_BYTES, RequestMemory
from .messages import Prompt

# Of one request, together; as many bytes as a body has room for in base64.
_MOST_IMAGES, _MOST_BYTES, _MOST_SECONDS = 16, MOST_BODY_BYTES * 3 // 4, 20.0
_MOST_REQUESTS = 16
_ADDRESS = re.compile("https?://", re.IGNORECASE)


class RemoteImages:
    """Puts images into prompts, in the place of their addresses.

    Parameters
    ----------
    memory : RequestMemory
    """

    def __init__(self, memory: RequestMemory) -> None:
        self._memory = memory
        self._num_requests = 0

    @asynccontextmanager
    async def put_into(self, prompt: Prompt) -> AsyncGenerator[Prompt, None]:
        """The prompt with its images, as long as it is needed.

        Raises
        ------
        HttpError
            If one can't be fetched within the limits.
        """
        chat = prompt.messages or ()
        parts = [part for message in chat for part in _parts(message)]
        addresses = list(dict.fromkeys(filter(None, map(_address, parts))))
        if not addresses:
            yield prompt
            return
        self._memory.add(_MOST_BYTES)  # what there may be until all are there
        try:
            images = await self._fetch(addresses, prompt.field)
            num_bytes = sum(map(len, images.values()))
        finally:
            self._memory.add(-_MOST_BYTES)
        self._memory.add(num_bytes)
        try:
            yield replace(prompt, messages=[_with_images(message, images) for message in chat])
        finally:
            self._memory.add(-num_bytes)

    async def _fetch(self, addresses: list[str], field: str) -> dict[str, str]:
        """Data URLs by address."""
        from duoka.base.web import fetch

        if len(addresses) > _MOST_IMAGES:
            text = f"{len(addresses)} images are to be fetched; at most {_MOST_IMAGES} are"
            raise HttpError(400, text, param=field)
        if self._num_requests >= _MOST_REQUESTS:
            text = f"images of {_MOST_REQUESTS} requests are being fetched already"
            raise HttpError(429, text, code="queue_full", retry_after=5)
        self._num_requests += 1
        images, room = {}, _MOST_BYTES
        begin = asyncio.get_running_loop().time()
        try:
            for address in addresses:
                left = begin + _MOST_SECONDS - asyncio.get_running_loop().time()
                content = await fetch(
                    address, most_bytes=room, public_only=True, most_seconds=max(0.1, left)
                )
                room -= len(content)
                images[address] = f"data:image/any;base64,{base64.b64encode(content).decode()}"
        except UsageError as error:
            raise HttpError(400, str(error), param=field) from error
        finally:
            self._num_requests -= 1
        return images


def _address(part: object) -> str | None:
    """Where an image of a message's content is."""
    image = part.get("image_url") if isinstance(part, Mapping) else None
    url = image.get("url") if isinstance(image, Mapping) else None
    return url if isinstance(url, str) and _ADDRESS.match(url) else None


def _parts(message: Mapping[str, Any]) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else ()


def _with_images(message: Mapping[str, Any], images: Mapping[str, str]) -> Mapping[str, Any]:
    parts = [
        {**part, "image_url": {**part["image_url"], "url": images[address]}}
        if (address := _address(part)) is not None
        else part
        for part in _parts(message)
    ]
    return {**message, "content": parts} if parts else message
