"""Generate docs/cli.md from the program itself: commands, options, exit codes, environment.

`make reference` writes the page; `tests/test_readme.py` compares it with the program.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import typer

import duoka
from duoka.cli.main import _EPILOG, app

PAGE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
HEAD = """\
# Command-line reference

This page is generated from the program by `make reference`. The guides show how to use the
commands: [plans](plans.md), [running](run.md), [checking](check.md), [serving](serving.md),
[fine-tuning](fine-tuning.md), [measuring](measuring.md), [GPUs](gpus.md).

Answers go to standard output, messages and progress to standard error. Every command has `--help`;
`duoka --version` prints the version.
"""
ERRORS = """\
An error is one message (what is wrong, the value, the limit with its unit) and a `hint:` with the
remedy. A traceback appears only for a defect of duoka (exit code 70; please report it) and with
`--debug`. In messages `***` replaces tokens, passwords and the values of `HF_TOKEN`,
`HUGGING_FACE_HUB_TOKEN` and `MODELSCOPE_API_TOKEN`; control characters from models and checkpoints
are escaped.

SIGINT (Ctrl-C), SIGTERM and SIGHUP end the program: it prints `stopped`, restores the terminal,
and leaves every file either complete or unchanged. A second Ctrl-C within two seconds is ignored, a
later one aborts the cleanup. In `duoka chat` Ctrl-C stops the answer only. `duoka serve` restarts
its engine after a GPU failure (exit code 16 of other commands).
"""

# Every environment variable that duoka reads.
VARIABLES = {
    "DUOKA_CACHE": "directory for cached profiles and calibrations; by default duoka in the user's "
    "cache directory",
    "XDG_CACHE_HOME": "the user's cache directory; by default ~/.cache",
    "DUOKA_API_KEY": "API key of duoka serve, in place of --api-key-file",
    "DUOKA_GPUS": "on a Ray node: GPUs for duoka serve --on ray, in the form of --gpus",
    "RAY_ADDRESS": "address of the Ray cluster for duoka serve --on ray",
    "CUDA_VISIBLE_DEVICES": "GPUs that CUDA shows to the process, in this order",
    "CUBLAS_WORKSPACE_CONFIG": "size of cuBLAS's workspace, which the forecast includes",
    "DUOKA_ATTENTION": "gather: the engine gathers keys and values of a paged KV cache before "
    "attention; flash: it reads 16-bit pages in place, and uses CUDA graphs, without comparing "
    "either with other kernels on the GPU first. By "
    "default in place, if the test succeeds",
    "PYTORCH_ALLOC_CONF": "settings of PyTorch's allocator; the forecast follows "
    "expandable_segments, and settings that it can't model are refused",
    "PYTORCH_CUDA_ALLOC_CONF": "older name of PYTORCH_ALLOC_CONF; PyTorch prefers it",
    "OMP_NUM_THREADS": "CPU threads of each worker process",
    "GLOO_SOCKET_IFNAME": "network interface between worker processes",
    "HF_TOKEN": "token for the Hub, read by huggingface_hub; masked in messages",
    "HUGGING_FACE_HUB_TOKEN": "older name of HF_TOKEN",
    "HF_ENDPOINT": "URL of the Hub, read by huggingface_hub",
    "HF_HOME": "directory of huggingface_hub's cache",
    "HF_HUB_CACHE": "directory of downloaded repositories, read by huggingface_hub",
    "HF_HUB_OFFLINE": "1 forbids requests to the Hub and to ModelScope",
    "MODELSCOPE_API_TOKEN": "token for ModelScope, read by its client; masked in messages",
    "MODELSCOPE_ENDPOINT": "URL of ModelScope, read by its client; by default modelscope.cn",
    "MODELSCOPE_CACHE": "directory of downloaded repositories of ModelScope, read by its client",
    "NO_COLOR": "disables colors",
    "FORCE_COLOR": "enables colors where the output is not a terminal",
    "RANK": "set by torchrun: number of the process",
    "WORLD_SIZE": "set by torchrun: number of processes",
    "LOCAL_WORLD_SIZE": "set by torchrun: number of processes on this machine",
    "TORCHELASTIC_RESTART_COUNT": "set by torchrun: how often the processes were restarted",
}


def page() -> str:
    """Build the whole page."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    sections = {
        "Commands": _table(
            ["command", "purpose"],
            [
                [f"`duoka {name}{_arguments(it)}`", _cell(it.get_short_help_str(200))]
                for name, it in commands.items()
            ],
        ),
        "Options": _table(["option", "commands", "meaning"], _options(commands)),
        "Exit codes": _table(["code", "meaning"], _exit_codes()) + "\n\n" + ERRORS.rstrip(),
        "Environment variables": _table(
            ["variable", "meaning"], [[f"`{name}`", text] for name, text in VARIABLES.items()]
        ),
    }
    return HEAD + "".join(f"\n## {title}\n\n{text}\n" for title, text in sections.items())


def _arguments(command: Any) -> str:
    names = [option.metavar for option in command.params if not option.opts[0].startswith("-")]
    return "".join(f" {name}" for name in names)


def _options(commands: dict[str, Any]) -> list[list[str]]:
    """One row per option and help text, with the commands that share it."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, command in commands.items():
        for option in command.params:
            if option.opts[0].startswith("-") and not option.hidden:
                value = "" if option.is_flag else f" {option.metavar}"
                words = _cell(", ".join(f"`{word}{value}`" for word in option.opts))
                rows.setdefault((words, _cell(option.help)), []).append(name)
    return [
        [words, "all" if len(names) == len(commands) else ", ".join(names), text]
        for (words, text), names in sorted(rows.items())
    ]


def _exit_codes() -> list[list[str]]:
    """The codes of the program's own help, explained by the docstring of their error class."""
    errors = [cls for cls in vars(duoka.errors).values() if getattr(cls, "exit_code", 1) != 1]
    meanings = {str(cls.exit_code): inspect.getdoc(cls).partition("\n")[0] for cls in errors}
    text = re.sub(r"\s+", " ", _EPILOG).partition("Exit codes: ")[2].rstrip(".")
    entries = [re.match(r"(\d+(?:, \d+)*) (.*)", part).groups() for part in text.split("; ")]
    return [[code, meanings.get(code, words)] for code, words in entries]


def _cell(text: str) -> str:
    """Text for one cell of a table."""
    return re.sub(r"\s+", " ", text or "").replace("|", "\\|").strip()


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
