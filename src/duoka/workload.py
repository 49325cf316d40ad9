"""What a model will be asked to do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from .errors import UsageError

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


# Far above what can be run; with more, bytes would no longer fit 64-bit integers.
MOST_BATCH = 2**16
MOST_TOKENS = 2**24
MOST_BATCH_TOKENS = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Inference over a batch of prompts.

    Parameters
    ----------
    batch : int
        Prompts that run together. More than one is forecast with padding, that is with an
        attention mask, because prompts differ in length.
    prompt_tokens, new_tokens : int
        Tokens of each prompt, and tokens generated after it.
    dtype : {"auto", "float32", "float16", "bfloat16"}
        Type of the weights; "auto" is the checkpoint's own.
    prefill_chunk_tokens : int, None or "auto"
        Prompt tokens that run in one step: a number, None for the whole prompt, or "auto" for
        the whole prompt where it fits and the largest chunk that fits where it doesn't.

    Raises
    ------
    UsageError
        If a number isn't positive or the dtype is unknown.

    Examples
    --------
    >>> Workload(prompt_tokens=1000, new_tokens=24).context_tokens
    1024
    """

    batch: int = 1
    prompt_tokens: int = 2048
    new_tokens: int = 256
    dtype: Dtype = "auto"
    prefill_chunk_tokens: int | None | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        for name in ("batch", "prompt_tokens", "new_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(
                    f"{name} is {getattr(self, name)}; it must be at least 1",
                    hint="write a number from 1 on, or leave it out",
                )
        self._refuse_too_many()
        chunk = self.prefill_chunk_tokens
        if isinstance(chunk, str) and chunk != "auto":
            raise UsageError(
                f"prefill_chunk_tokens is {chunk!r}", hint='give a number, None or "auto"'
            )
        if isinstance(chunk, int) and not 1 <= chunk <= MOST_TOKENS:
            raise UsageError(
                f"prefill_chunk_tokens is {chunk}; it must be from 1 to {MOST_TOKENS}",
                hint="leave it out, and the largest chunk that fits is taken",
            )
        if self.dtype not in get_args(Dtype):
            raise UsageError(
                f"dtype {self.dtype!r} is unknown", hint=f"known are {', '.join(get_args(Dtype))}"
            )

    def _refuse_too_many(self) -> None:
        for name, got, most in (
            ("batch", self.batch, MOST_BATCH),
            ("the context", self.context_tokens, MOST_TOKENS),
            ("batch times context", self.batch * self.context_tokens, MOST_BATCH_TOKENS),
        ):
            if got > most:
                raise UsageError(
                    f"{name} is {got}; duoka plans for at most {most}",
                    hint="plan for less: no GPUs of today hold that much",
                )

    @property
    def context_tokens(self) -> int:
        """Tokens of one sequence at the end: prompt and generated."""
        return self.prompt_tokens + self.new_tokens

    def resolved(self, *, dtype: Dtype) -> Workload:
        """The same workload with "auto" replaced by the checkpoint's dtype."""
        return replace(self, dtype=dtype) if self.dtype == "auto" else self

    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Prefill steps as (query tokens, past tokens), in order.

        Examples
        --------
        >>> Workload(prompt_tokens=10, prefill_chunk_tokens=4).chunks()
        ((4, 0), (4, 4), (2, 8))
        """
        size = self.prefill_chunk_tokens
        assert size != "auto", "resolve the chunk first"
        step = self.prompt_tokens if size is None else size
        return tuple(
            (min(step, self.prompt_tokens - past), past)
            for past in range(0, self.prompt_tokens, step)
        )
