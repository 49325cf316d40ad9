"""Interpreter: the Python that vLLM is installed for.

It is another one than duoka's: vLLM pins versions of torch and transformers that duoka doesn't
have. Nothing of it is imported here; it is asked, as a program.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from duoka.errors import MachineError, UsageError

TRIED = SpecifierSet(">=0.33,<0.34")
"""The versions of vLLM whose options and metrics this was written for."""
_INSTALL = "'vllm>=0.33,<0.34'"
_PROBE_SECONDS = 300.0
_MOST_SHOWN = 300
_PROBE = """\
import importlib.metadata, json
import vllm
print(json.dumps(importlib.metadata.version("vllm")))
"""
_WHICH = "name the python of the environment that has vLLM: --engine-python /opt/vllm/bin/python"
# For duoka's Python, not for another one; and what a plan says is said anew.
_NOT_HANDED_ON = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VLLM_PP_LAYER_PARTITION")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python that has vLLM, and that one's version."""

    python: Path
    vllm_version: str

    @property
    def is_tried(self) -> bool:
        """Whether the version is one of those that were tried."""
        try:
            return TRIED.contains(Version(self.vllm_version), prereleases=True)
        except InvalidVersion:
            return False


def find_vllm(python: Path) -> Interpreter:
    """Ask a Python for its vLLM.

    Raises
    ------
    UsageError
        If there is no such program.
    MachineError
        If vLLM can't be imported by it.
    """
    path = _program(python)
    command = [os.fspath(path), "-P", "-c", _PROBE]
    try:
        answer = subprocess.run(
            command,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MachineError(
            f"{os.fspath(path)!r} doesn't import vllm within {_PROBE_SECONDS:.0f} s",
            hint="does it from the shell? " + f'{path} -c "import vllm"',
        ) from error
    except OSError as error:
        raise UsageError(
            f"{os.fspath(path)!r} can't be run: {error.strerror}", hint=_WHICH
        ) from error
    version = _last_text(answer.stdout)
    if answer.returncode or version is None:
        lines = [line for line in answer.stderr.splitlines() if line.strip()]
        reason = lines[-1].strip()[:_MOST_SHOWN] if lines else f"exit code {answer.returncode}"
        raise MachineError(
            f"{os.fspath(path)!r} can't import vllm: {reason}",
            hint=f"install it there: {path} -m pip install {_INSTALL}; it needs Python 3.11 or "
            "newer",
        )
    return Interpreter(python=path, vllm_version=version)


def clean_environment() -> dict[str, str]:
    """The environment of this program, without what is for its own Python."""
    return {name: value for name, value in os.environ.items() if name not in _NOT_HANDED_ON}


def _program(python: Path) -> Path:
    """The path of a program; links stay, since a virtual environment is told by them."""
    program = shutil.which(os.fspath(python))
    if program is None:
        state = "is no program that can be run" if python.exists() else "isn't there"
        raise UsageError(f"{os.fspath(python)!r} {state}", hint=_WHICH)
    return Path(program).absolute()


def _last_text(output: str) -> str | None:
    """The text that was printed last, as JSON; libraries may have printed before."""
    lines = output.strip().splitlines()
    try:
        value = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return value if isinstance(value, str) and value.isprintable() and len(value) < 64 else None
