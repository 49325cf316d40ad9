"""Families by turn: each commit tests the common families and a sixth of the others.

Part k has the names at positions k, k + 6, k + 12, … of the sorted list, so six parts cover all.
The commit's hash selects the part, so a commit always runs the same one. DUOKA_TURN=k selects
another part, DUOKA_TURN=all (`make nightly`) all of them.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

PARTS = 6
VARIABLE = "DUOKA_TURN"


def commit_turn(directory: Path) -> str:
    """Return the part that the commit of a checkout selects; "0" outside a checkout."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "0"
    return str(int(done.stdout, 16) % PARTS)


def in_turn(names: Iterable[str], turn: str | None = None) -> frozenset[str]:
    """Return the names whose turn it is."""
    turn = turn or os.environ[VARIABLE]
    names = sorted(names)
    return frozenset(names if turn == "all" else names[int(turn) % PARTS :: PARTS])
