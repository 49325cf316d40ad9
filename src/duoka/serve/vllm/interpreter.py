"""Interpreter: the Python that vLLM is installed for.

It is another one than duoka's: vLLM pins versions of torch and transformers that duoka doesn't
have. Nothing of it is imported here; it is asked, as a program.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from duoka.errors import MachineError, UsageError

_PROBE_SECONDS = 300.0
_MOST_SHOWN = 300
_PROBE = 'import importlib.metadata, vllm; print(importlib.metadata.version("vllm"))'
# For duoka's Python, not for another one; and what a plan says is said anew.
_NOT_HANDED_ON = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VLLM_PP_LAYER_PARTITION")


def find_vllm(python: Path) -> tuple[Path, str]:
    """Ask a Python for its vLLM: the program's path, and the version.

    Raises
    ------
    UsageError
        If there is no such program.
    MachineError
        If vLLM can't be imported by it.
    """
    program = shutil.which(os.fspath(python))
    if program is None:
        raise UsageError(
            f"{os.fspath(python)!r} is no program that can be run",
            hint="name the python of the environment that has vLLM: --engine-python "
            "/opt/vllm/bin/python",
        )
    path = Path(program).absolute()  # links stay, since a virtual environment is told by them
    try:
        answer = subprocess.run(
            [os.fspath(path), "-P", "-c", _PROBE],
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            check=True,
        )
        version = answer.stdout.split()[-1]  # libraries may have printed before
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise MachineError(
            f"{os.fspath(path)!r} can't import vllm: {said.strip().splitlines()[-1][:_MOST_SHOWN]}",
            hint=f"install it there: {path} -m pip install 'vllm>=0.33,<0.34'; it needs Python "
            "3.11 or newer",
        ) from error
    return path, version


def clean_environment() -> dict[str, str]:
    """The environment of this program, without what is for its own Python."""
    return {name: value for name, value in os.environ.items() if name not in _NOT_HANDED_ON}
