"""A stream of text from a model that generates in another thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Container
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

# What a tokenizer writes for bytes that are no whole character yet.
_INCOMPLETE = "\ufffd"


class Detokenizer:
    """Text from token ids that come one by one; a character only with all of its bytes.

    Special tokens are left out, but for those of `kept_ids`: an answer's parts may be told by them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, kept_ids: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._left_out: set[int] | None = None
        if kept_ids:
            added = tokenizer.added_tokens_decoder.items()
            self._left_out = {number for number, token in added if token.special} - {*kept_ids}
        self._ids: list[int] = []
        # Only from `_start` on is decoded again, so that a long answer costs no more per token.
        # The tokens up to `_said` were written; they stay as the context of those that follow.
        self._start = 0
        self._said = 0

    def add(self, token: int) -> str:
        """Take one token; return the text that is complete now, often none."""
        self._ids.append(token)
        return self._complete(final=False)

    def finish(self) -> str:
        """Return what was held back."""
        return self._complete(final=True)

    def _complete(self, *, final: bool) -> str:
        before = self._decode(self._ids[self._start : self._said])
        text = self._decode(self._ids[self._start :])
        if len(text) <= len(before) or (text.endswith(_INCOMPLETE) and not final):
            return ""
        self._start, self._said = self._said, len(self._ids)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        if self._left_out is None:
            return str(self._tokenizer.decode(ids, skip_special_tokens=True))
        ids = [number for number in ids if number not in self._left_out]
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))


class Stop(StoppingCriteria):
    """Ends generation at the next token once `event` is set."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """See `StoppingCriteria`: one flag for each sequence."""
        rows = input_ids.shape[0]
        return torch.full((rows,), self.event.is_set(), dtype=torch.bool, device=input_ids.device)


class Stream:
    """An iterator over the pieces of an answer while it is generated.

    Use it as a context manager: leaving the block, by Ctrl-C too, ends the generation. `run` is
    called in a thread with a streamer and a stopping criterion, both for `generate`; `num_tokens`
    are those of the answer so far.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Container[int],
        run: Callable[[BaseStreamer, Stop], object],
    ) -> None:
        self.num_tokens = 0
        self._stop_ids = stop_ids
        self._stop = Stop()
        # Items: a token; an exception that the thread raised; None at the end.
        self._queue: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
        self._text = Detokenizer(tokenizer)
        self._ended = False
        # The thread doesn't hold this object: when nobody does any more, because Ctrl-C came
        # before the `with` was entered, the generation ends.
        self._thread = threading.Thread(
            target=_generate,
            args=(run, self._queue, self._stop),
            name="duoka-generate",
            daemon=True,
        )
        self._thread.start()

    def __del__(self) -> None:
        self._stop.event.set()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        """The next piece of text, never empty.

        Raises
        ------
        BaseException
            Whatever the generating thread raised.
        """
        while not self._ended:
            item = self._queue.get()
            if isinstance(item, BaseException):
                self._ended = True
                raise item
            piece = self._text.finish() if item is None else self._token(item)
            self._ended = item is None
            if piece:
                return piece
        raise StopIteration

    def cancel(self) -> None:
        """End the generation and wait until it has ended."""
        self._stop.event.set()
        self._thread.join()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()

    def _token(self, token: int) -> str:
        if token in self._stop_ids:
            return ""
        self.num_tokens += 1
        return self._text.add(token)


def _generate(
    run: Callable[[BaseStreamer, Stop], object],
    tokens: queue.SimpleQueue[int | BaseException | None],
    stop: Stop,
) -> None:
    try:
        run(_Tokens(tokens), stop)
    except BaseException as error:
        tokens.put(error)
    else:
        tokens.put(None)


class _Tokens(BaseStreamer):
    """Hands the tokens of one sequence on, without its prompt."""

    def __init__(self, tokens: queue.SimpleQueue[int | BaseException | None]) -> None:
        self._tokens = tokens
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """Take what `generate` gives: the prompt first, then new tokens."""
        if self._prompt_seen:
            for token in value.flatten().tolist():
                self._tokens.put(token)
        self._prompt_seen = True

    def end(self) -> None:
        """Do nothing: the thread tells its end, by errors too."""
