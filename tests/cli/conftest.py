"""A tiny checkpoint, a cache of its own, and ways to run the program."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from checkpoints import write_random

from duoka.cli.main import run
from duoka.tools.demo.checkpoint import CONFIG

# Whoever runs the tests in the background has them ignore Ctrl-C, and programs inherit that.
MAIN = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from duoka.cli import main; main()"
)
PROGRAM = (sys.executable, "-c", MAIN)
GPUS = ("--gpus", "virtual:2x64MiB")
SIZES = ("--context", "96", "--new-tokens", "32")
TINY = {
    **CONFIG,
    "hidden_size": 64,
    "padded_vocab_size": 1536,
    "ffn_hidden_size": 96,
    "num_layers": 3,
    "num_attention_heads": 4,
    "kv_channels": 16,
}

Program = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights; its answers are noise, and the same each time."""
    return write_random(tmp_path_factory.mktemp("tiny-chatglm3"), TINY, seed=3)


@pytest.fixture(scope="session")
def environment(own_cache: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR",)}
    return {
        **kept,
        "DUOKA_CACHE": str(own_cache),
        "TERM": "xterm",
        "COLUMNS": "80",
        "PYTHONUTF8": "1",
    }


@pytest.fixture(scope="session")
def program(environment: dict[str, str]) -> Program:
    """Run duoka in this process, as if its streams were pipes."""

    def run_here(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        given = [str(argument) for argument in arguments]
        with (
            pytest.MonkeyPatch.context() as patch,
            redirect_stdout(io.StringIO()) as out,
            redirect_stderr(io.StringIO()) as err,
        ):
            patch.setattr(sys, "stdin", io.StringIO(stdin))
            patch.setattr(os, "environ", environment)
            code = run(given)
        return subprocess.CompletedProcess(given, code, out.getvalue(), err.getvalue())

    return run_here


@pytest.fixture(scope="session")
def process(environment: dict[str, str]) -> Program:
    """Run duoka in a process of its own, which takes seconds to start."""

    def run_there(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PROGRAM, *map(str, arguments)],
            input=stdin,
            capture_output=True,
            text=True,
            encoding="utf-8",
            env=environment,
            timeout=1200,
            check=False,
        )

    return run_there
