"""Decode the text of an answer token by token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product

from transformers import PreTrainedTokenizerBase

# The text of bytes that are no whole character.
_INCOMPLETE = "\ufffd"
_CHARACTER_BYTES = 4
_CONTEXT_TOKENS = 8


class Detokenizer:
    """Decodes token ids one by one; a character is returned only with all of its bytes.

    Special tokens are left out, except `kept_ids`, which mark the parts of an answer. The text
    continues `context`, the tokens of a prompt: SentencePiece drops the blank of the first token it
    decodes, as if encoding had added it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kept_ids: Collection[int] = (),
        context: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._left_out: set[int] | None = None
        if kept_ids:
            added = tokenizer.added_tokens_decoder.items()
            self._left_out = {number for number, token in added if token.special} - {*kept_ids}
        # Only from `_start` on is decoded again, so that a long answer costs no more per token.
        # The tokens up to `_said` were written; they stay as the context of those that follow.
        self._ids = list(context[-_CONTEXT_TOKENS:])
        self._start, self._said = self._whole_characters()

    def add(self, token: int) -> str:
        """Take a token; return the completed text, often none."""
        self._ids.append(token)
        return self._complete(final=False)

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._complete(final=True)

    # As in vLLM's incremental detokenization. The tokens A, e4, bd, a0 (你 has three bytes):
    #
    #     token   text from `_start` on   returned
    #     A       A                       A
    #     e4, bd  A\ufffd                 nothing: the last character isn't whole
    #     a0      A你                     你; `_start` is now behind A
    def _complete(self, *, final: bool) -> str:
        before = self._decode(self._ids[self._start : self._said])
        text = self._decode(self._ids[self._start :])
        if len(text) <= len(before) or (text.endswith(_INCOMPLETE) and not final):
            return ""
        self._start, self._said = self._said, len(self._ids)
        return text[len(before) :]

    def _whole_characters(self) -> tuple[int, int]:
        """Return the range of the context without a part of a character at its edges."""
        end = len(self._ids)
        for start, stop in product(range(_CHARACTER_BYTES), range(end, end - _CHARACTER_BYTES, -1)):
            text = self._decode(self._ids[start:stop])
            if text == text.strip(_INCOMPLETE):
                return start, stop
        return end, end

    def _decode(self, ids: list[int]) -> str:
        if self._left_out is None:
            return str(self._tokenizer.decode(ids, skip_special_tokens=True))
        ids = [number for number in ids if number not in self._left_out]
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))
