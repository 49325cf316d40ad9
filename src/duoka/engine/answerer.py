"""An engine for one conversation, of which nothing is read twice."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

from PIL.Image import Image

from duoka.checkpoint.sampling_params import Sampling
from duoka.report.measured import Measured
from duoka.runtime.generate import PromptReader

from .engine import Engine
from .request import SamplingParams


class EngineAnswerer:
    """Answers one question after another; see `runtime.conversation.Answerer`.

    What was said before lies in the engine's pages, where it has them: of each prompt only the
    end is read.
    """

    def __init__(self, engine: Engine, reader: PromptReader) -> None:
        self.chat, self.workload = reader.chat, reader.workload
        self._engine = engine
        self._reader = reader
        self._context_tokens = 0
        # Of each answer: seconds to the first piece, and those after it with their tokens.
        self._waits: list[float] = []
        self._seconds, self._tokens = 0.0, 0

    def check_images(self, images: Sequence[Image]) -> None:
        """Refuse images of one prompt that no memory was planned for."""
        self._reader.check_images(images)

    @contextmanager
    def stream(
        self, prompt: Sequence[int], sampling: Sampling | None = None
    ) -> Iterator[Iterator[str]]:
        """Start an answer, which ends at the latest with the scope; its pieces."""
        params = sampling
        if not isinstance(params, SamplingParams):
            params = SamplingParams(**asdict(sampling or Sampling()))
        begin = time.perf_counter()
        stream = self._engine.submit(prompt, params)
        times: list[float] = []

        def timed() -> Iterator[str]:
            for piece in stream:
                times.append(time.perf_counter())
                yield piece

        try:
            yield timed()
        finally:
            stream.cancel()
            num_tokens = len(stream.result().tokens)
            self._context_tokens = max(self._context_tokens, len(prompt) + num_tokens)
            if times:
                self._waits.append(times[0] - begin)
                self._seconds += times[-1] - times[0]
                self._tokens += num_tokens - 1

    def measured(self) -> Measured:
        """What there is to say of it, when the engine has been closed."""
        return Measured(
            devices=tuple(self._engine.peaks()),
            context_tokens=self._context_tokens,
            first_token_seconds=sum(self._waits) / len(self._waits) if self._waits else None,
            tokens_per_second=self._tokens / self._seconds if self._seconds else None,
        )
