"""Runtime: answers from a loaded model, whole or as a stream, and conversations.

It stands on transformers' `generate`, which also works without it. It knows nothing of planning,
loading or terminals; of a plan it takes the workload, whose limits it keeps.
"""

from duoka.checkpoint.sampling_params import Sampling

from .conversation import Conversation
from .generate import Answer, Generator
from .stream import Stream

__all__ = ["Answer", "Conversation", "Generator", "Sampling", "Stream"]
