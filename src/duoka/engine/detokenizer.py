"""Incremental detokenization: the text of a generation, token by token."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product

from transformers import PreTrainedTokenizerBase

# Tokenizers decode the bytes of an incomplete character to this replacement character.
_INCOMPLETE = "\ufffd"
_CHARACTER_BYTES = 4
_CONTEXT_TOKENS = 8


class Detokenizer:
    """Decodes token ids one by one; returns a character only when all of its bytes are known.

    Special tokens are removed from the text, except `kept_ids`, which mark the parts of an answer.
    `context` are the tokens before the text, to be continued: SentencePiece removes the leading
    space of the first token that it decodes, which is right only at the beginning of a text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        kept_ids: Collection[int] = (),
        context: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._removed_ids: set[int] | None = None
        if kept_ids:
            added = tokenizer.added_tokens_decoder.items()
            self._removed_ids = {number for number, token in added if token.special} - {*kept_ids}
        # The text of `_ids[:_text_end]` has been returned. A call decodes only `_ids[_start:]`, so
        # its cost is constant; `_ids[_start:_text_end]` are the context of the new tokens.
        self._ids = list(context[-_CONTEXT_TOKENS:])
        self._start, self._text_end = self._trim_context()

    def add(self, token: int) -> str:
        """Add a token; return the new text, empty while the last character is incomplete."""
        self._ids.append(token)
        return self._take_text(final=False)

    def finish(self) -> str:
        """Return the rest of the text, with a replacement character for an incomplete one."""
        return self._take_text(final=True)

    # As in vLLM's incremental detokenization. Example: tokens A, e4, bd, a0 (你 has three bytes):
    #
    #     token   text from `_start` on   returned
    #     A       A                       A
    #     e4, bd  A\ufffd                 nothing: the last character is incomplete
    #     a0      A你                     你; `_start` is now behind A
    def _take_text(self, *, final: bool) -> str:
        """Return the text of the tokens not yet returned, if it ends with a complete character."""
        old_text = self._decode(self._ids[self._start : self._text_end])
        text = self._decode(self._ids[self._start :])
        if len(text) <= len(old_text) or (text.endswith(_INCOMPLETE) and not final):
            return ""
        self._start, self._text_end = self._text_end, len(self._ids)
        return text[len(old_text) :]

    def _trim_context(self) -> tuple[int, int]:
        """Return start and stop of the context without incomplete characters at both ends."""
        end = len(self._ids)
        for start, stop in product(range(_CHARACTER_BYTES), range(end, end - _CHARACTER_BYTES, -1)):
            text = self._decode(self._ids[start:stop])
            if text == text.strip(_INCOMPLETE):
                return start, stop
        return end, end

    def _decode(self, ids: list[int]) -> str:
        """Decode token ids without special tokens, except those that are kept."""
        if self._removed_ids is None:
            return str(self._tokenizer.decode(ids, skip_special_tokens=True))
        ids = [number for number in ids if number not in self._removed_ids]
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))
