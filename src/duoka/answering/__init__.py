"""Answering: from a question about a model to its plan, or to what would fit instead.

A question may ask for the best placement, for one that a person wrote down as a map, or for the
largest context or batch. Whatever it is, `answer` answers it, and says what would fit where nothing
does; `answer_checkpoint` does so for a checkpoint, whose profiles somebody else has to give: this
room traces nothing.
"""

from .answer import Find, answer, answer_checkpoint
from .finding import attempt, find
from .mapped import OBJECTIVE as GIVEN
from .ways import ProfileFor
from .workloads import whole_prompt, workload_for

__all__ = [
    "GIVEN",
    "Find",
    "ProfileFor",
    "answer",
    "answer_checkpoint",
    "attempt",
    "find",
    "whole_prompt",
    "workload_for",
]
