"""Sequences: requests in progress, from the queue to their end."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from dataclasses import replace
from itertools import count

from duoka.models.text.image_prompts import ImagePrompt

from .detokenizer import Detokenizer
from .generation_rules import GenerationRules
from .grammar import BytesDetokenizer, GrammarMatcher, token_bits
from .reasoning import ReasoningCounter
from .request import Completion, Finish, SamplingParams, TextPiece, TokenChoice
from .sampler import SamplingRow

Event = TextPiece | Completion | Exception
"""An event of a generation: a piece of its text; at the end, the completion or an error."""


_numbers = count()
_NO_RULES = GenerationRules()


# Example: a prompt of 5 tokens with 2 generated ones, of which the last is in a step:
#
#     tokens      p p p p p g g    num_tokens 7
#     computed    6                keys and values are in pages; is_decoding
#     scheduled   7                taken by steps; is_in_step, num_left 0
#
# A step may be scheduled for the token that the step in flight samples (`Scheduler.next_step`):
# `scheduled` is then 8.
class Sequence:
    """A request in progress: its prompt, the tokens generated so far, and its pages.

    `params` must have a seed and `max_new_tokens`. `computed` counts the tokens whose keys and
    values are in `pages`, `scheduled` the tokens that are in a step or computed: computed ≤
    scheduled ≤ num_tokens + 1. `shared_tokens` counts the prompt's tokens that were found in shared
    pages. `adapter` is as in `Chunk`.
    """

    def __init__(
        self,
        prompt: Tokens[int],
        params: SamplingParams,
        *,
        stop_ids: Tokens[int],
        detokenizer: Detokenizer | BytesDetokenizer,
        rules: GenerationRules = _NO_RULES,
        matcher: GrammarMatcher | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        assert params.seed is not None, "it is resolved"
        assert params.max_new_tokens is not None, "it is resolved"
        self.number = next(_numbers)
        self.prompt = list(prompt)
        self.images = prompt if isinstance(prompt, ImagePrompt) else None
        self.params = params
        self.adapter = 0
        self.max_new_tokens = params.max_new_tokens
        self.pages: list[int] = []
        self.computed = 0
        self.scheduled = 0
        self.is_preempted = False
        self.shared_tokens = 0
        self.is_cancelled = False
        self._seed = params.seed
        self._rules = rules
        self._matcher = matcher
        budget = params.reasoning
        self._reasoning = None if budget is None else ReasoningCounter(budget)
        # Rows are sent to another process in each step, which needs only what changes sampling.
        row_params = replace(params, grammar=None, reasoning=None)
        self._row_params = replace(row_params, stop=(), stop_ids=(), forced_ids=())
        self._stop_ids = stop_ids
        self._choices: list[TokenChoice] = []
        self._answer: list[int] = []
        self.tokens = list(prompt)  # and the generated tokens
        self._detokenizer = detokenizer
        self._on_event = on_event
        self._asked_at = time.monotonic()
        self._first_token_at: float | None = None
        self._text = ""
        self._stop_start = 0  # of what may contain a stop text
        self._stop_text: str | None = None  # the stop text that ended the generation
        self._has_ended = False
        self._num_sent = 0  # characters of `_text`
        self._num_sent_tokens = 0  # tokens of `_choices`

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far, prompt and generated."""
        return len(self.tokens)

    @property
    def num_left(self) -> int:
        """The number of tokens neither computed nor in a step; -1 if a step is ahead of them."""
        return self.num_tokens - self.scheduled

    @property
    def is_decoding(self) -> bool:
        """True while decoding: all tokens but the last are computed."""
        return self.num_tokens - self.computed == 1

    @property
    def is_in_step(self) -> bool:
        """True while a step in flight computes tokens of the sequence."""
        return self.scheduled > self.computed

    @property
    def can_run_ahead(self) -> bool:
        """True if the next token's `row` doesn't depend on the tokens before it."""
        depends = self.params.has_penalties or self._rules.reads_tokens
        is_limited = self._reasoning is not None and not self._reasoning.is_done
        return self._matcher is None and not depends and not is_limited

    @property
    def awaits_token(self) -> bool:
        """True if all tokens so far are in a step or computed, and the next isn't the last one."""
        is_last = len(self._answer) + 1 == self.max_new_tokens
        return self.is_in_step and self.num_left == 0 and not is_last

    def is_ready(self, *, ahead: bool) -> bool:
        """Return True if a decode step can take the sequence: its last token, or one `ahead`."""
        return (self.is_decoding and self.num_left > 0) or (ahead and self.awaits_token)

    def row(self, ahead: int = 0) -> SamplingRow:
        """Return the parameters for sampling the next token, or if `ahead` is 1 the one after."""
        params, place, rules = self._row_params, len(self._answer) + ahead, self._rules
        forced_ids, context = self.params.forced_ids, rules.context(self.prompt)
        banned = rules.banned(self.prompt, self._answer, self._stop_ids, place)
        if place < params.min_new_tokens:
            banned |= set(self._stop_ids)
        allowed = None if self._matcher is None else self._matcher.allowed
        is_last = place == self.max_new_tokens - 1 and self._matcher is None
        forced = rules.forced(self.prompt, place, is_last=is_last)
        if place < len(forced_ids):
            forced = forced_ids[place]
        elif forced is None and self._reasoning is not None:
            forced = self._reasoning.forced
        return SamplingRow(
            params=params,
            seed=self._seed,
            place=place - len(forced_ids),
            prompt=(*context, *forced_ids) if params.repetition_penalty != 1 else (),
            answer=self._answer[len(forced_ids) :] if params.has_penalties else (),
            banned=sorted(banned),
            allowed=allowed if forced is None else token_bits([forced]),
        )

    def add(self, choice: TokenChoice) -> Finish | None:
        """Add the next token; return the finish reason if the generation ends, otherwise None."""
        place, matcher = len(self._answer), self._matcher
        is_forced = place < len(self.params.forced_ids)
        can_end = place >= self.params.min_new_tokens or matcher is not None
        if not is_forced and choice.token in self._stop_ids and can_end:
            return "stop"
        if self._first_token_at is None:
            self._first_token_at = time.monotonic()
        self._choices.append(choice)
        self._answer.append(choice.token)
        self.tokens.append(choice.token)
        text = self._detokenizer.add(choice.token)
        self._text += text
        if self._reasoning is not None and not self._reasoning.is_done:
            self._reasoning.add(text)
        if is_forced:
            self._stop_start = len(self._text)
        elif self._cut_stop_text():
            return "stop"
        is_forced |= self._rules.forced(self.prompt, place, is_last=False) is not None
        if matcher is not None and not is_forced:
            matcher.advance(choice.token)
            if matcher.is_complete:
                return "stop"
        is_last = len(self._answer) == self.max_new_tokens
        self._send_text(self._count_sendable())
        return "length" if is_last else None

    def finish(self, reason: Finish) -> None:
        """Send the rest of the text and the completion; `reason` is why the generation ended."""
        if self._stop_text is None:
            self._text += self._detokenizer.finish()
            self._cut_stop_text()
        self._send_text(len(self._text))
        self._send_last(
            Completion(
                text=self._text,
                tokens=tuple(self._choices),
                prompt_tokens=len(self.prompt),
                shared_tokens=self.shared_tokens,
                finish=reason,
                stop_text=self._stop_text,
                asked_at=self._asked_at,
                first_token_at=self._first_token_at,
                ended_at=time.monotonic(),
            )
        )

    def fail(self, error: Exception) -> None:
        """Send the error with which the generation failed."""
        self._send_last(error)

    def _send_last(self, event: Completion | Exception) -> None:
        """Send the last event, once."""
        if self._has_ended:  # the callback of the last event has raised an error
            return
        self._has_ended = True
        if self._on_event is not None:
            self._on_event(event)

    def _cut_stop_text(self) -> bool:
        """Return True if the text contains a stop text; cut the text off before the first one."""
        starts = [(self._text.find(text, self._stop_start), text) for text in self.params.stop]
        matches = [(place, text) for place, text in starts if place >= 0]
        if matches:
            place, self._stop_text = min(matches)
            self._text = self._text[:place]
        return self._stop_text is not None

    def _count_sendable(self) -> int:
        """Count the characters to send now: all but a suffix that may begin a stop text."""
        # With the stop text "ENDE" and the text "…an EN", the last two characters are held back,
        # since they may become "ENDE". `num_held` is the longest suffix of the text that begins a
        # stop text.
        num_held = 0
        for stop in self.params.stop:
            for size in range(min(len(stop) - 1, len(self._text)), num_held, -1):
                if self._text.endswith(stop[:size]):
                    num_held = size
                    break
        return len(self._text) - num_held

    def _send_text(self, end: int) -> None:
        """Send the unsent text up to character `end`, with all unsent tokens."""
        if end > self._num_sent:
            tokens = tuple(self._choices[self._num_sent_tokens :])
            if self._on_event is not None:
                self._on_event(TextPiece(self._text[self._num_sent : end], tokens))
            self._num_sent, self._num_sent_tokens = end, len(self._choices)
