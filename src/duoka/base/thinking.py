"""The choice of how a model thinks before its answer, for one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """The choice of how a model thinks before an answer; by default, the model decides.

    Parameters
    ----------
    is_on : bool, optional
        Whether the model shall think; None leaves the choice to its chat template.
    effort : str, optional
        The value of the template's variable `reasoning_effort`.
    budget_tokens : int, optional
        The most tokens of reasoning; its end is forced after them. 0 is the same as off.
    variables : mapping
        Further variables of the chat template.
    """

    is_on: bool | None = None
    effort: str | None = None
    budget_tokens: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_off(self) -> bool:
        """True if the model shall not think."""
        return self.is_on is False or self.budget_tokens == 0
