"""Reads prompts for a model within the limits of its plan; no weights are needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from PIL.Image import Image
from PIL.Image import new as new_image
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from duoka.base.units import format_count
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import UsageError
from duoka.forecast.workload import Workload
from duoka.models.from_checkpoint import chat_format_of, tokenizer_of
from duoka.models.text.image_prompts import ImagePrompt
from duoka.models.text.messages import ChatMessage
from duoka.models.text.prompts import ChatFormat
from duoka.models.text.tokenizer import encode


class PromptTooLong(UsageError):
    """Raised for a prompt longer than the plan has memory for."""


def refuse_long(prompt_tokens: int, limit: int, *, new_tokens: int = 0) -> None:
    """Raise PromptTooLong if a prompt, plus the new tokens, has more tokens than a limit."""
    if prompt_tokens + new_tokens > limit:
        text, hint = f"the prompt has {prompt_tokens} tokens", "plan with a larger --context"
        if not new_tokens:
            raise PromptTooLong(f"{text}; the plan has memory for {limit}", hint=hint)
        raise PromptTooLong(
            f"{text} and {new_tokens} new tokens are requested; the plan has memory for {limit} "
            "in total",
            hint=f"request fewer new tokens, or {hint}",
        )


class PromptReader:
    """A checkpoint's tokenizer and prompt format, within the limits of a workload."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat: ChatFormat, workload: Workload
    ) -> None:
        self.tokenizer = tokenizer
        self.chat = chat
        self.workload = workload

    @classmethod
    def open(cls, checkpoint: Checkpoint, workload: Workload) -> PromptReader:
        """Make the reader of a checkpoint whose tokenizer is on this machine."""
        tokenizer = tokenizer_of(checkpoint)
        return cls(tokenizer, chat_format_of(checkpoint, tokenizer), workload)

    def prompt(
        self, question: str, *, system: str | None = None, images: Sequence[Image] = ()
    ) -> list[int]:
        """Return the token ids of a single question; with images an `ImagePrompt`."""
        messages = [ChatMessage(role="system", content=system)] if system else []
        user = ChatMessage(role="user", content=question, images=tuple(images))
        return self.chat.prompt([*messages, user])

    def plain(self, text: str) -> list[int]:
        """Return the token ids of a text to continue; special tokens in it are plain text."""
        return encode(self.tokenizer, text, splits=True, adds=True)

    def check_images(self, images: Sequence[Image]) -> None:
        """Raise UsageError for more or larger images in a prompt than planned."""
        planned, reader = self.workload, self.chat.images
        if not images:
            return
        if reader is None:
            raise UsageError("this model takes no images", hint="omit the images")
        if len(images) > planned.images:
            raise UsageError(
                f"{format_count(len(images), 'image')} in a prompt; the plan has memory for "
                f"{planned.images}",
                hint="plan with a larger --images, and with their --image-size",
            )
        height, width = planned.image_size
        most = reader.pixel_count(new_image("RGB", (width, height)))
        for image in images:
            if reader.pixel_count(image) > most:
                raise UsageError(
                    f"an image of {image.width}x{image.height}; the plan has memory for images of "
                    f"{width}x{height}",
                    hint="reduce its size, or plan with a larger --image-size",
                )

    def check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raise UsageError for prompts that are empty, too long, or have too many images."""
        for prompt in prompts:
            if not prompt:
                raise UsageError("a prompt is empty")
            images = prompt.num_images if isinstance(prompt, ImagePrompt) else 0
            if images > self.workload.images:
                raise UsageError(
                    f"{images} images in a prompt; the plan has memory for {self.workload.images}",
                    hint="plan with a larger --images",
                )
            refuse_long(len(prompt), self.workload.prompt_tokens)


def num_embeddings(model: PreTrainedModel) -> int | None:
    """Return the rows of a model's input embedding; None if its module doesn't state them."""
    # The module's own number: its weight may be elsewhere, in the host's memory.
    return getattr(model.get_input_embeddings(), "num_embeddings", None)


def refuse_beyond(tokens: Iterable[int], rows: int | None) -> None:
    """Raise UsageError for a token id outside an embedding of `rows` rows, None for unknown."""
    for token in tokens:
        if token < 0 or (rows is not None and token >= rows):
            known = "from 0 on" if rows is None else f"0 to {rows - 1}"
            raise UsageError(
                f"token {token} is invalid; the token ids of this model are {known}",
                hint="use the tokenizer of this model",
            )
