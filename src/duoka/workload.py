"""What a model will be asked to do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from .errors import UsageError

Dtype = Literal["auto", "float32", "float16", "bfloat16"]
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


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
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least 1")
        chunk = self.prefill_chunk_tokens
        if isinstance(chunk, str) and chunk != "auto":
            raise UsageError(
                f"prefill_chunk_tokens is {chunk!r}", hint='give a number, None or "auto"'
            )
        if isinstance(chunk, int) and chunk < 1:
            raise UsageError(f"prefill_chunk_tokens is {chunk}; it must be at least 1")
        if self.dtype not in get_args(Dtype):
            raise UsageError(
                f"dtype {self.dtype!r} is unknown", hint=f"known are {', '.join(get_args(Dtype))}"
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
