"""The settings of a prompt: how the model thinks before its answer, and where the answer begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings:
    """The settings of a prompt; by default, the model decides whether it thinks.

    Parameters
    ----------
    is_thinking : bool, optional
        Whether the model shall think; None leaves the choice to its chat template.
    effort : str, optional
        The value of the template's variable `reasoning_effort`.
    budget_tokens : int, optional
        The most tokens of reasoning; its end is forced after them. 0 is the same as no thinking.
    variables : mapping
        Further variables of the chat template.
    continues : bool
        True if the answer continues the last message, which is the assistant's.
    """

    is_thinking: bool | None = None
    effort: str | None = None
    budget_tokens: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    continues: bool = False
