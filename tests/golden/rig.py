"""Pairs on PyTorch's CUDA build without a GPU (tests/cuda_rig): forecast and measured, launches.

`rig_pairs` makes them, run by the Python of .venv-cuda with the rig before CUDA's libraries.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
_OWN = TESTS.parent / ".venv-cuda" / "bin" / "python"


def write(made: Path) -> None:
    """Run what is to be counted."""
    python = os.environ.get("DUOKA_RIG_PYTHON", str(_OWN))
    build = [python, str(TESTS / "cuda_rig" / "build.py")]
    library = subprocess.run(build, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    environment = {
        **os.environ,
        "LD_PRELOAD": library,
        "LD_LIBRARY_PATH": str(Path(library).parent),
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)]),
    }
    for name in ("CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG"):
        environment.pop(name, None)
    target = made / "pairs.txt"
    subprocess.run([python, "-m", "golden.rig_pairs", str(target)], env=environment, check=True)
