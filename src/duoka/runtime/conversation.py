"""A conversation: what was said, within the context that was planned."""

from __future__ import annotations

from collections.abc import Generator as Pieces

from duoka.checkpoint.sampling_params import Sampling
from duoka.errors import UsageError
from duoka.models.text.messages import Message

from .generate import Generator


class Conversation:
    """Questions and answers with one model, each with those before it as its context.

    When the history no longer fits the planned prompt, the oldest rounds are left out of it, as
    many as `num_forgotten`; a system's message, told before the first question, stays.
    """

    def __init__(
        self, generator: Generator, sampling: Sampling | None = None, *, system: str | None = None
    ) -> None:
        self._generator = generator
        self._sampling = sampling
        self._system = [Message(role="system", content=system)] if system else []
        self._rounds: list[tuple[Message, Message]] = []
        self.num_forgotten = 0

    @property
    def messages(self) -> tuple[Message, ...]:
        """Everything that the model would be told before the next question."""
        return (*self._system, *(message for round_ in self._rounds for message in round_))

    def clear(self) -> None:
        """Forget everything but the system's message."""
        self._rounds.clear()
        self.num_forgotten = 0

    def ask(self, question: str) -> Pieces[str, None, None]:
        """Ask; the answer comes in pieces.

        When the caller stops in the middle (an exception, Ctrl-C, `close`), the generation ends
        and what was said so far becomes the answer in the history.

        Raises
        ------
        UsageError
            If the question alone is longer than the planned prompt.
        """
        message = Message(role="user", content=question)
        prompt = self._prompt(message)
        answer = said = ""
        with self._generator.stream(prompt, self._sampling) as pieces:
            try:
                for piece in pieces:
                    # Models of the ChatGLM family begin with an empty line of metadata.
                    shown = piece if said else piece.lstrip()
                    answer, said = answer + piece, said + shown
                    if shown:
                        yield shown
            finally:
                if said:
                    self._rounds.append((message, self._generator.chat.parse(answer)))

    def _prompt(self, message: Message) -> list[int]:
        """The ids of the history and a question; forgets rounds until they fit."""
        limit = self._generator.workload.prompt_tokens
        while True:
            prompt = self._generator.chat.prompt([*self.messages, message])
            if len(prompt) <= limit:
                return prompt
            if not self._rounds:
                raise UsageError(
                    f"the question has {len(prompt)} tokens; the plan has memory for {limit}",
                    hint="ask something shorter, or plan with a larger --context",
                )
            del self._rounds[0]
            self.num_forgotten += 1
