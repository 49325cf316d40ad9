"""Download the images of requests from http and https URLs, within limits."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace

from duoka.errors import UsageError

from .errors import HttpError
from .limits import MOST_BODY_BYTES, RequestMemory
from .messages import Prompt

# Limits for the images of one request: their number, their bytes in total (as many as fit in a body
# in base64), and the seconds to download all of them.
_MOST_IMAGES, _MOST_BYTES, _MOST_SECONDS = 16, MOST_BODY_BYTES * 3 // 4, 20.0


class RemoteImages:
    """Replaces http(s) URLs of images in prompts by data URLs.

    Parameters
    ----------
    memory : RequestMemory
    """

    def __init__(self, memory: RequestMemory) -> None:
        self._memory = memory

    @asynccontextmanager
    async def put_into(self, prompt: Prompt) -> AsyncGenerator[Prompt, None]:
        """Yield the prompt with downloaded images; count their bytes in the memory of requests.

        Raises
        ------
        HttpError
            If an image can't be downloaded within the limits.
        """
        turns = prompt.messages or ()
        addresses = dict.fromkeys(url for turn in turns for url in turn.images if is_address(url))
        if not addresses:
            yield prompt
            return
        images = await self._fetch(addresses, prompt.field)
        with self._memory.hold() as add:
            add(sum(map(len, images.values())))
            messages = [
                replace(turn, images=tuple(images.get(url, url) for url in turn.images))
                for turn in turns
            ]
            yield replace(prompt, messages=messages)

    async def _fetch(self, addresses: Collection[str], field: str) -> dict[str, str]:
        """Download images; return their data URLs by address. `field` is for error messages."""
        from duoka.base.web import fetch

        if len(addresses) > _MOST_IMAGES:
            text = f"{len(addresses)} image URLs in a request; the limit is {_MOST_IMAGES}"
            raise HttpError(400, text, param=field)
        images, remaining_bytes = {}, _MOST_BYTES
        time = asyncio.get_running_loop().time
        deadline = time() + _MOST_SECONDS
        try:
            with self._memory.hold() as add:
                add(_MOST_BYTES)  # reserved until all images are downloaded
                for address in addresses:
                    content = await fetch(
                        address,
                        most_bytes=remaining_bytes,
                        public_only=True,
                        most_seconds=max(0.1, deadline - time()),
                    )
                    remaining_bytes -= len(content)
                    images[address] = f"data:image/any;base64,{base64.b64encode(content).decode()}"
        except UsageError as error:
            raise HttpError(400, str(error), param=field) from error
        return images


def is_address(url: str) -> bool:
    """Return True if a URL is an http or https URL, not a data URL."""
    return url.lower().startswith(("http://", "https://"))
