"""A conversation: what was said, within the context that was planned."""

from __future__ import annotations

from collections.abc import Generator as Pieces
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from PIL.Image import Image

from duoka.checkpoint.sampling_params import Sampling
from duoka.errors import UsageError
from duoka.forecast.workload import Workload
from duoka.models.text.image_prompts import images_of
from duoka.models.text.messages import Message
from duoka.models.text.prompts import ChatFormat


class Answerer(Protocol):
    """Who answers the prompts of a conversation: a `Generator`, or one with an engine."""

    chat: ChatFormat
    workload: Workload

    def check_images(self, images: Sequence[Image]) -> None:
        """Refuse images of one prompt that no memory was planned for."""

    def stream(
        self, prompt: Sequence[int], sampling: Sampling | None = None
    ) -> AbstractContextManager[Iterator[str]]:
        """Start an answer, which ends at the latest with the scope; its pieces."""


class Conversation:
    """Questions and answers with one model, each with those before it as its context.

    When the history no longer fits the planned prompt, or has more images than were planned, the
    oldest rounds are left out of it, as many as `num_forgotten`; a system's message, told before
    the first question, stays.
    """

    def __init__(
        self, answerer: Answerer, sampling: Sampling | None = None, *, system: str | None = None
    ) -> None:
        self._answerer = answerer
        self._sampling = sampling
        self._system = [Message(role="system", content=system)] if system else []
        self._rounds: list[tuple[Message, Message]] = []
        self._shown: list[Image] = []
        self.num_forgotten = 0

    @property
    def messages(self) -> tuple[Message, ...]:
        """Everything that the model would be told before the next question."""
        return (*self._system, *(message for round_ in self._rounds for message in round_))

    def clear(self) -> None:
        """Forget everything but the system's message."""
        self._rounds.clear()
        self._shown.clear()
        self.num_forgotten = 0

    def show(self, *images: Image) -> None:
        """Show images with the next question.

        Raises
        ------
        UsageError
            If the model takes none, or no memory was planned for so many, or for so large ones;
            none of them is shown then.
        """
        self._answerer.check_images([*self._shown, *images])
        self._shown += images

    def ask(self, question: str) -> Pieces[str, None, None]:
        """Ask; the answer comes in pieces.

        When the caller stops in the middle (an exception, Ctrl-C, `close`), the generation ends
        and what was said so far becomes the answer in the history.

        Raises
        ------
        UsageError
            If the question alone is longer than the planned prompt.
        """
        message = Message(role="user", content=question, images=tuple(self._shown))
        prompt = self._prompt(message)
        answer = said = ""
        with self._answerer.stream(prompt, self._sampling) as pieces:
            try:
                for piece in pieces:
                    # Models of the ChatGLM family begin with an empty line of metadata.
                    shown = piece if said else piece.lstrip()
                    answer, said = answer + piece, said + shown
                    if shown:
                        yield shown
            finally:
                if said:
                    self._rounds.append((message, self._answerer.chat.parse(answer)))
                    self._shown.clear()

    def _prompt(self, message: Message) -> list[int]:
        """The ids of the history and a question; forgets rounds until they fit."""
        workload = self._answerer.workload
        limit = workload.prompt_tokens
        while self._rounds and len(images_of([*self.messages, message])) > workload.images:
            self._forget()
        while True:
            prompt = self._answerer.chat.prompt([*self.messages, message])
            if len(prompt) <= limit:
                return prompt
            if not self._rounds:
                raise UsageError(
                    f"the question has {len(prompt)} tokens; the plan has memory for {limit}",
                    hint="ask something shorter, or plan with a larger --context",
                )
            self._forget()

    def _forget(self) -> None:
        """Leave out the oldest round."""
        del self._rounds[0]
        self.num_forgotten += 1
