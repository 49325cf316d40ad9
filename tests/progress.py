"""What commands say of their progress, which no answer depends on."""

from __future__ import annotations

import re

PROGRESS = re.compile(
    r"^(reading the checkpoint|importing torch|planning"
    r"|.*; searching suggestions|found: .*"
    r"|tracing \S+( in training)?( with [\w ]+)? \(once; later plans use the cached profile\)"
    r"|running the model on virtual GPUs|proving the plan on virtual GPUs|reading the weights"
    r"|repairing, and proving it)\n",
    re.MULTILINE,
)


def without_progress(stderr: str) -> str:
    """What stands on the standard error beside what is being done."""
    return PROGRESS.sub("", stderr)
