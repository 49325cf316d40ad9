"""The questions and answers that the demo's model learns."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One question and its answer.

    Parameters
    ----------
    question, answer : str
    ask : bool
        Whether the demo asks it in the end.
    """

    question: str
    answer: str
    ask: bool = False


def load_pairs() -> tuple[Pair, ...]:
    """Read ``questions.toml``."""
    text = resources.files(__package__).joinpath("questions.toml").read_text(encoding="utf-8")
    return tuple(Pair(**entry) for entry in tomllib.loads(text)["pair"])
