"""Run this Python on the CUDA rig: `RIG_GPUS=24GiB,12GiB python tests/cuda_rig/run.py script.py`.

Whatever follows is what `python` would be given, ``-m pytest`` for instance. README.md lists the
settings.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "cuda-rig"
LIBRARY = FOLDER / "librig.so"


def environment(**settings: str) -> dict[str, str]:
    """This process's environment with the rig put before CUDA's libraries, and settings."""
    found = {**os.environ, **settings}
    for variable, path in (("LD_PRELOAD", LIBRARY), ("LD_LIBRARY_PATH", FOLDER)):
        before = found.get(variable, "")
        if str(path) not in before.split(":"):
            found[variable] = f"{path}:{before}".rstrip(":")
    return found


def is_loaded() -> bool:
    """Whether this process runs on the rig."""
    return hasattr(ctypes.CDLL(None), "rig_restart")


def main() -> None:
    if not LIBRARY.exists():
        sys.exit(f"the CUDA rig isn't built for {sys.executable}: run `make cuda` first")
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], environment())


if __name__ == "__main__":
    main()
