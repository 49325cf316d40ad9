"""Sampling parameters; very low temperatures count as greedy decoding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from duoka.errors import UsageError

# At or below this temperature decoding is greedy. Logits that differ by 0.001 would already differ
# e^10-fold in probability, and division by a much lower temperature overflows 32-bit floats.
GREEDY_TEMPERATURE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Parameters of sampling; UsageError for a value out of its range.

    A temperature of at most 0.0001 is greedy: the most likely token is taken. Otherwise tokens are
    sampled among the `top_k` most likely ones (0 for no limit) and the smallest set of most likely
    ones with total probability `top_p`. With `max_new_tokens` None only the context limits the
    length. The same seed gives the same generation.

    Examples
    --------
    >>> Sampling(temperature=1e-5).is_greedy
    True
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        longest, seed = self.max_new_tokens, self.seed
        is_hot = math.isfinite(self.temperature) and self.temperature >= 0
        for name, fits, limits in (
            ("temperature", is_hot, "it must be at least 0 (0: greedy decoding)"),
            ("top_p", 0 < self.top_p <= 1, "it must be above 0 and at most 1 (1: no limit)"),
            ("top_k", self.top_k >= 0, "it must be at least 0 (0: no limit)"),
            ("max_new_tokens", longest is None or longest >= 1, "it must be at least 1"),
            ("seed", seed is None or 0 <= seed < 2**63, "it must be from 0 to 2^63 - 1"),
        ):
            if not fits:
                hint = "omit it to use the checkpoint's recommended value"
                raise UsageError(f"{name} is {getattr(self, name)}; {limits}", hint=hint)

    @property
    def is_greedy(self) -> bool:
        """True if decoding takes the most likely token at every step."""
        return self.temperature <= GREEDY_TEMPERATURE

    @classmethod
    def recommended(cls, generation_config: Mapping[str, Any] | None, **chosen: Any) -> Sampling:
        """Return the chosen fields, and for the others the values of ``generation_config.json``.

        Recommended values out of range are ignored. A chosen value of None counts as not chosen.
        Without ``do_sample`` in the recommendation, the other fields keep their greedy defaults.
        """
        values = dict(generation_config or {})
        overrides = {name: value for name, value in chosen.items() if value is not None}
        if not values.get("do_sample"):
            return cls(**overrides)
        usable = {
            "temperature": _number(values.get("temperature", 1.0), 0, 100),
            "top_p": _number(values.get("top_p", 1.0), 1e-9, 1),
            "top_k": _number(values.get("top_k"), 0, 2**31),
        }
        defaults = {name: value for name, value in usable.items() if value is not None}
        if "top_k" in defaults:
            defaults["top_k"] = int(defaults["top_k"])
        return cls(**{**defaults, **overrides})


def _number(value: object, low: float, high: float) -> float | None:
    """Return a number within limits as a float; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if low <= value <= high else None
