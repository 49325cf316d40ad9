"""Structured output: answers constrained by a JSON schema, regular expression or Lark grammar.

Only this module calls llguidance. A matcher follows the tokens of an answer and returns a bit mask
of the tokens that may come next: one bit per token of the vocabulary, the lowest bit first. Special
tokens are never allowed, except stop tokens when the text is complete. The module uses no tensors.
"""

from __future__ import annotations

import codecs
import json
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from transformers import PreTrainedTokenizerBase

from duoka.base.serialization import parse_json_object
from duoka.errors import DuokaError, UsageError
from duoka.models.text.call_grammars import JSON_OPTIONS

Kind = Literal["json_schema", "regex", "lark"]
# The costliest known grammar of this length takes a second and 200 MB to compile. References need
# stack depth: llguidance crashes the process at about 1,500 of them.
_MOST = {"characters": 2**15, "references or rules": 500}
# Matches each reference of a JSON schema, and each rule and nested grammar of Lark, to count them
# without parsing. Rules begin lines; a JSON schema within Lark may have any number of colons.
_LINK = re.compile(r'"\$ref"|%lark|^[?! \t]*\w', re.MULTILINE)
# Limits of llguidance's compiler; a lexer state takes 2 KB.
_LIMITS = LLParserLimits(max_lexer_states=50_000, max_grammar_size=100_000, verbose_errors=False)
_NUM_COMPILED = 16


@dataclass(frozen=True, slots=True)
class Grammar:
    """The grammar of an answer; create it with `json_schema`, `json_object`, `regex` or `lark`.

    `special_ids` are the special tokens that it may name, none by default.

    Raises
    ------
    UsageError
        If llguidance rejects the grammar, or the grammar exceeds the limits.
    """

    kind: Kind
    text: str
    special_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        num_links = 0 if self.kind == "regex" else len(_LINK.findall(self.text))
        counts = {"characters": len(self.text), "references or rules": num_links}
        for what, number in counts.items():
            if number > _MOST[what]:
                raise UsageError(
                    f"the {self.kind} has {number} {what}; at most {_MOST[what]} are compiled",
                    hint="simplify it, and describe the rest in the prompt",
                )
        is_error, problems = LLMatcher.validate_grammar_with_warnings(self.source, limits=_LIMITS)
        if is_error:
            raise self.refusal(problems[0])

    @classmethod
    def json_schema(cls, schema: str | Mapping[str, Any]) -> Grammar:
        """Return the grammar of a JSON schema; llguidance supports most keywords."""
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema)
            # Parse it to refuse anything but one JSON object without duplicate keys.
            content = parse_json_object(text, "it")
            text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        except (DuokaError, TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"the json_schema is not a JSON object: {str(error)[:300]}",
                hint='{"type": "object", "properties": …}',
            ) from error
        return cls("json_schema", text)

    @classmethod
    def json_object(cls) -> Grammar:
        """Return the grammar of any JSON object."""
        return cls("json_schema", '{"type":"object"}')

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of a regular expression (Rust syntax) for the whole text."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Return the grammar with the start rule `start`, in llguidance's variant of Lark."""
        return cls("lark", grammar)

    @classmethod
    def from_response_format(cls, value: object) -> Grammar | None:
        """Return the grammar of a `response_format` of OpenAI's API; None for type "text".

        The types "regex" and "lark" are extensions of duoka.
        """
        form = value if isinstance(value, Mapping) else {}
        kind = form.get("type")
        if form == {"type": "text"}:
            return None
        if form == {"type": "json_object"}:
            return cls.json_object()
        content = form.get(kind) if form.keys() == {"type", kind} else None
        if kind == "json_schema" and isinstance(content, Mapping) and "schema" in content:
            return cls.json_schema(content["schema"])
        if kind in ("regex", "lark") and isinstance(content, str):
            return cls(kind, content)
        raise UsageError(
            f"response_format is {str(value)[:80]}, which is unknown",
            hint='write {"type": "json_object"}, {"type": "json_schema", "json_schema": {"schema": '
            '…}}, {"type": "regex", "regex": "…"} or {"type": "lark", "lark": "…"}',
        )

    @property
    def source(self) -> str:
        """The grammar in llguidance's format."""
        options = (JSON_OPTIONS,) if self.kind == "json_schema" else ()
        convert = getattr(LLMatcher, f"grammar_from_{self.kind}")
        try:
            return str(convert(self.text, *options))
        except ValueError as error:
            raise self.refusal(str(error)) from None

    def refusal(self, problem: str) -> UsageError:
        """Return a UsageError for an error message of llguidance."""
        lines = [line for line in problem.splitlines() if line]
        reason = next((line for line in lines if line.startswith("error:")), lines[0])
        return UsageError(
            f"the {self.kind} {self.text[:60]!r} can't be compiled: {reason[:200]}",
            hint="supported features: https://github.com/guidance-ai/llguidance",
        )


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer as an `LLTokenizer` of llguidance, with bit masks of its tokens.

    `text_bits` marks the tokens that stand for text, `stop_bits` the stop tokens.
    """

    tokenizer: Any
    text_bits: int
    stop_bits: int

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, stop_ids: Iterable[int], size: int | None
    ) -> Vocabulary:
        """Read a tokenizer; raise UsageError if the bytes of its tokens are unknown.

        Only tokens below `size`, the number of embeddings, count as text; None for all.
        """
        stops = [token for token in stop_ids if token < len(tokenizer)]
        try:
            backend: Any = tokenizer
            content = json.loads(backend.backend_tokenizer.to_str())
            text = json.dumps({**content, "truncation": None, "padding": None})
            # llguidance requires an end token: without stop tokens, sacrifice the last token.
            ends = stops or [len(tokenizer) - 1]
            tokens = LLTokenizer(text, eos_token=ends)
        except (AttributeError, ValueError) as error:
            raise UsageError(
                f"answers of a {type(tokenizer).__name__} can't be constrained by a grammar: the "
                "bytes of its tokens are unknown",
                hint="use a byte-level tokenizer, or SentencePiece with byte fallback",
            ) from error
        texts = [
            token
            for token in range(min(size or len(tokenizer), len(tokenizer)))
            if not tokens.is_special_token(token)
            and tokens.decode_bytes([token]) != f"<[{token}]>".encode()  # a token without text
        ]
        text_bits, stop_bits = token_bits(set(texts).difference(ends)), token_bits(stops)
        return cls(tokens, int.from_bytes(text_bits, "little"), int.from_bytes(stop_bits, "little"))


# Masks for the regex ab|ac, over the tokens a, b, c, ab, </s> with the bits 0 … 4:
#
#     text    allowed                                         mask
#     ""      a, ab                                           0b01001
#     "a"     b, c                                            0b00110
#     "ab"    complete: the answer ends without a stop token
#
# A mask depends on the token before it. So the engine's thread computes the mask when that token
# arrives, and sends it with the row (`Sequence.row`) to the process that samples.
class GrammarMatcher:
    """The state of one answer in its grammar.

    `allowed` is the bit mask of the tokens that may come next.
    """

    def __init__(self, grammar: Grammar, matcher: Any, vocabulary: Vocabulary) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._vocabulary = vocabulary
        self.allowed = self._compute_allowed()

    @property
    def is_complete(self) -> bool:
        """True if the answer matches the grammar and no token can follow."""
        return bool(self._matcher.is_stopped())

    def advance(self, token: int) -> None:
        """Add the next token of the answer; raise UsageError if no token can follow.

        That is so if a limit of llguidance is exceeded, or no text token satisfies the grammar.
        """
        self._matcher.consume_token(token)
        self.allowed = self._compute_allowed()

    def _compute_allowed(self) -> bytes:
        """Compute the mask of the allowed tokens; raise UsageError if no token can follow."""
        # llguidance keeps an error as the matcher's state, in which it computes no mask.
        mask = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()
        is_end = self._matcher.is_accepting()
        # A grammar can name special tokens, but most are reserved for the chat template.
        usable = self._vocabulary.text_bits | (self._vocabulary.stop_bits if is_end else 0)
        usable |= int.from_bytes(token_bits(self._grammar.special_ids), "little")
        allowed = int.from_bytes(mask, "little") & usable
        if self._matcher.is_error() or not (allowed or self.is_complete):
            problem = self._matcher.get_error() or "no text token satisfies it"
            raise UsageError(
                f"the answer can't continue under its {self._grammar.kind}: "
                f"{problem.splitlines()[0][:200]}",
                hint="use a simpler one",
            )
        return allowed.to_bytes(len(mask), "little")


class BytesDetokenizer:
    """Decodes the text of an answer with a grammar from its tokens' bytes; see `Detokenizer`."""

    def __init__(self, vocabulary: Vocabulary, grammar: Grammar) -> None:
        self._tokenizer, self._special_ids = vocabulary.tokenizer, grammar.special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Add a token; return the new text, without an incomplete character at its end."""
        is_text = token in self._special_ids or not self._tokenizer.is_special_token(token)
        return self._decoder.decode(self._tokenizer.decode_bytes([token]) if is_text else b"")

    def finish(self) -> str:
        """Return the rest of the text."""
        return self._decoder.decode(b"", final=True)


class GrammarCompiler:
    """Compiles grammars for a tokenizer, which is read at the first grammar; thread-safe."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], size: int | None
    ) -> None:
        self._vocabulary = lru_cache(1)(lambda: Vocabulary.of(tokenizer, stop_ids, size))
        self._compiled = lru_cache(_NUM_COMPILED)(self._compile)
        # A thread that needs a grammar while another compiles it waits for the cached result.
        self._lock = threading.Lock()

    def start(self, grammar: Grammar) -> tuple[GrammarMatcher, BytesDetokenizer]:
        """Return a matcher and a detokenizer for a new answer.

        Raises UsageError if the grammar or the tokenizer can't be used.
        """
        with self._lock:
            matcher = self._compiled(grammar).deep_copy()
            vocabulary = self._vocabulary()
        return GrammarMatcher(grammar, matcher, vocabulary), BytesDetokenizer(vocabulary, grammar)

    def _compile(self, grammar: Grammar) -> Any:
        """Return an `LLMatcher` at the start of a grammar, to be copied for each answer."""
        tokenizer = self._vocabulary().tokenizer
        matcher = LLMatcher(tokenizer, grammar.source, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise grammar.refusal(matcher.get_error())
        return matcher


def token_bits(tokens: Iterable[int]) -> bytes:
    """Return a bit mask in which the bits of these token ids are set, lowest bit first."""
    content = bytearray()
    for token in sorted(tokens):
        content.extend(bytes(token // 8 + 1 - len(content)))
        content[token // 8] |= 1 << token % 8
    return bytes(content)
