"""Requests to the engine: sampling parameters, and the events of an answer."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from duoka.checkpoint.sampling_params import Sampling
from duoka.errors import UsageError

from .grammar import Grammar

Finish = Literal["stop", "length", "cancelled"]
_LARGEST_BIAS = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(Sampling):
    """The parameters of sampling, and the ends of an answer.

    Parameters
    ----------
    temperature, top_p, top_k, max_new_tokens, seed
        See `Sampling`. An answer with a seed doesn't depend on others that are made at the same
        time, but for what rounding does where two tokens are as good as equal; without one it gets
        a seed of its own.
    min_p : float
        Leave tokens out that are less likely than this share of the likeliest one.
    repetition_penalty : float
        Logits of tokens that are in the prompt or the answer are divided by it where they are
        positive, and multiplied where not (Keskar et al., 2019).
    presence_penalty, frequency_penalty : float
        What is subtracted from a token's logit once it is in the answer, and for each time it is
        there.
    logit_bias : mapping of int to float
        What is added to logits, by token.
    stop : tuple of str
        Texts that end the answer, which doesn't have them.
    min_new_tokens : int
        Tokens before which no stop token is chosen, unless a grammar allows nothing else.
    grammar : Grammar, optional
        The grammar of the answer; it fits if it ends with "stop", and not by a text of `stop`.
    logprobs : int, optional
        Return the log-probability of each token, and of this many of the likeliest tokens, before
        all other parameters apply.
    """

    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    min_new_tokens: int = 0
    grammar: Grammar | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        Sampling.__post_init__(self)
        biases = all(abs(bias) <= _LARGEST_BIAS for bias in self.logit_bias.values())
        for name, fits, limits in (
            ("min_p", 0 <= self.min_p <= 1, "it must be from 0 to 1"),
            (
                "repetition_penalty",
                0 < self.repetition_penalty < math.inf,
                "it must be above 0 (1: no penalty)",
            ),
            ("presence_penalty", abs(self.presence_penalty) <= 2, "it must be from -2 to 2"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 2, "it must be from -2 to 2"),
            ("logit_bias", biases, f"each must be from -{_LARGEST_BIAS} to {_LARGEST_BIAS}"),
            ("stop", all(self.stop), "a stop string can't be empty"),
            ("min_new_tokens", self.min_new_tokens >= 0, "it must be 0 or more"),
            ("grammar", isinstance(self.grammar, Grammar | None), "it must be a Grammar"),
            (
                "logprobs",
                self.logprobs is None or 0 <= self.logprobs <= 20,
                "it must be from 0 to 20",
            ),
        ):
            if not fits:
                raise UsageError(
                    f"{name} is {getattr(self, name)}; {limits}", hint="omit it for none"
                )

    @classmethod
    def recommended(
        cls, generation_config: Mapping[str, Any] | None, **chosen: Any
    ) -> SamplingParams:
        """See `Sampling.recommended`; a repetition penalty counts without sampling, too."""
        config = generation_config or {}
        for name, largest in (("repetition_penalty", math.inf), ("min_p", 1)):
            value = config.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                chosen = {name: float(value), **chosen} if 0 < value <= largest else chosen
        return cls(**{**asdict(Sampling.recommended(generation_config)), **chosen})

    @property
    def has_penalties(self) -> bool:
        """Return True if logits depend on earlier tokens."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    def split(self, n: int) -> list[SamplingParams]:
        """Return the parameters of n answers to a prompt, with seeds derived from this seed.

        The first keeps the seed. Without a seed none has one, and the answers differ anyway.
        """
        if n < 1:
            raise UsageError(f"n is {n}; it must be at least 1", hint="use 1 for one answer")
        if self.seed is None:
            return [self] * n
        seeds = [random.Random(f"{self.seed}/{number}").getrandbits(63) for number in range(1, n)]
        return [self, *(replace(self, seed=seed) for seed in seeds)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """A token of an answer, with its log-probability and the likeliest tokens, if wanted."""

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


Outcome = TokenChoice | Exception | None
"""The next token after a chunk; None within a prompt; or the reason why it can't be computed."""


class TextPiece(NamedTuple):
    """A piece of an answer's text, with the tokens since the last piece."""

    text: str
    tokens: tuple[TokenChoice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished answer.

    Parameters
    ----------
    text : str
        All that was streamed; of a chat or question without the white space at both ends, unless a
        grammar has matched it.
    tokens : tuple of TokenChoice
        All of it; the token that ended it isn't there.
    prompt_tokens, shared_tokens : int
        Of the prompt, and those of them that were in the cache already.
    finish : {"stop", "length", "cancelled"}
        Whether the model or what was asked ended it, a limit, or who asked. What a limit ends may
        be within its grammar.
    stop_text : str, optional
        Which of the texts to stop at has ended it, where one has.
    asked_at, first_token_at, ended_at : float
        When, in seconds of `time.monotonic`; no first token where there is none.
    """

    text: str
    tokens: tuple[TokenChoice, ...]
    prompt_tokens: int
    shared_tokens: int
    finish: Finish
    stop_text: str | None = None
    asked_at: float = field(default=0.0, compare=False)
    first_token_at: float | None = field(default=None, compare=False)
    ended_at: float = field(default=0.0, compare=False)
