"""Requests to the engine: their sampling parameters and their results."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from duoka.checkpoint.sampling_params import Sampling
from duoka.errors import UsageError
from duoka.models.text.reasoning import ReasoningBudget

from .grammar import Grammar

Finish = Literal["stop", "length", "cancelled"]
_LARGEST_BIAS = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(Sampling):
    """The parameters of sampling, and the ends of an answer.

    Parameters
    ----------
    temperature : float
        Divides the logits. At most 0.0001 is greedy: the most likely token is taken.
    top_p : float
        Sample among the smallest set of most likely tokens with this total probability.
    top_k : int
        Sample among this many most likely tokens; 0 for no limit.
    max_new_tokens : int, optional
        Maximum number of generated tokens; None for the limit of the engine or of the context.
    seed : int, optional
        An answer with a seed doesn't depend on the other requests of a step, except for rounding
        differences that decide between nearly equal tokens. Without a seed, each answer gets a
        random one.
    min_p : float
        Exclude tokens whose probability is below `min_p` times that of the likeliest token.
    repetition_penalty : float
        The logit of each token that is in the prompt or the answer is divided by it if positive,
        and multiplied by it otherwise (Keskar et al., 2019).
    presence_penalty : float
        Subtracted from the logit of a token that is in the answer.
    frequency_penalty : float
        Subtracted from the logit of a token for each time that it is in the answer.
    logit_bias : mapping of int to float
        Added to the logits, by token id.
    stop : tuple of str
        Texts that end the answer; they are removed from it.
    stop_ids : tuple of int
        Further stop tokens.
    forced_ids : tuple of int
        The tokens with which the answer begins, whatever the model would generate. Random numbers
        and penalties are those of an answer to a prompt that ends with them.
    min_new_tokens : int
        Tokens to generate before a stop token may be sampled, unless a grammar allows only that.
    grammar : Grammar, optional
        The grammar of the answer. The answer matches it if `finish` is "stop" and no text of
        `stop` ended the answer.
    reasoning : ReasoningBudget, optional
        The limit of the answer's reasoning.
    logprobs : int, optional
        Return the log-probability of each token and of this many likeliest tokens, from the logits
        before penalties, biases, temperature and all other parameters. None returns none.
    """

    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    forced_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    grammar: Grammar | None = None
    reasoning: ReasoningBudget | None = None
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
        """See `Sampling.recommended`; repetition penalty and min_p apply even without sampling."""
        config = generation_config or {}
        for name, largest in (("repetition_penalty", math.inf), ("min_p", 1)):
            value = config.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                chosen = {name: float(value), **chosen} if 0 < value <= largest else chosen
        return cls(**{**asdict(Sampling.recommended(generation_config)), **chosen})

    @property
    def has_penalties(self) -> bool:
        """True if a penalty is set, so that logits depend on earlier tokens."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    def split(self, n: int) -> list[SamplingParams]:
        """Return the parameters of n answers to a prompt, with seeds derived from `seed`.

        The first answer keeps the seed. If `seed` is None, all stay without a seed; each then gets
        a random one.
        """
        if n < 1:
            raise UsageError(f"n is {n}; it must be at least 1", hint="use 1 for one answer")
        if self.seed is None:
            return [self] * n
        seeds = [random.Random(f"{self.seed}/{number}").getrandbits(63) for number in range(1, n)]
        return [self, *(replace(self, seed=seed) for seed in seeds)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """A sampled token, with its log-probability and the likeliest tokens if requested."""

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


Outcome = TokenChoice | Exception | None
"""The outcome of a chunk: the next token; None if the chunk ends within its prompt; or an error."""


class TextPiece(NamedTuple):
    """A piece of an answer's text, with the tokens generated since the previous piece."""

    text: str
    tokens: tuple[TokenChoice, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished answer.

    Parameters
    ----------
    text : str
        The generated text. For a chat or question without a grammar, white space is stripped from
        both ends.
    tokens : tuple of TokenChoice
        The generated tokens, without the stop token that ended the answer.
    prompt_tokens, shared_tokens : int
        The number of the prompt's tokens, and how many of them were in the KV cache already.
    finish : {"stop", "length", "cancelled"}
        The reason for the end: a stop token, a stop text or the end of the grammar ("stop"), the
        limit of tokens ("length"), or `Stream.cancel` ("cancelled"). Unless "stop", the answer may
        not match its grammar.
    stop_text : str, optional
        The text of `stop` that ended the answer; None if no such text did.
    asked_at, first_token_at, ended_at : float
        Times in seconds of `time.monotonic`. `first_token_at` is None without a token.
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
