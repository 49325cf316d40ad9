"""What commands print: those of README.md, ``--help`` of each, and recorded machines."""

from __future__ import annotations

import os
import re
import shutil
import sys
from importlib import import_module
from pathlib import Path
from unittest import mock

import chatglm_files
import pytest
import typer
from doctoring import machine
from test_readme import commands, outcome

from duoka.cli.main import app

from . import records
from .programs import duoka as run

MACHINES = ("busy", "eight-3090", "fastest-first", "fell-off", "hgx-h100", "mesh-v100", "mig",
            "no-driver", "old-driver", "two-4090", "unified-gb10")  # fmt: skip


def write(made: Path) -> None:
    """Run the commands."""
    names = list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    helps = ["duoka --help", *(f"duoka {name} --help" for name in names)]
    wanted = filter(records.is_wanted, helps)
    records.write(made / "help.txt", {name: shown(*name.split()[1:]) for name in wanted})
    records.write(made / "readme.txt", readme())
    records.write(made / "machines.txt", machines())


def shown(*words: str) -> str:
    """What a command prints, and how it ends."""
    done = run(*words)
    return records.normalised(f"exit {done.code}\n{done.out}{done.err}")


def readme() -> dict[str, str]:
    """The commands of README.md, where its reader has two published checkpoints."""
    root = Path.cwd() / "readme"
    (root / "files").mkdir(parents=True)
    chatglm_files.write_all(root / "files")
    for name, index in (
        ("chatglm3-6b", "pytorch_model.bin.index.json"),
        ("glm-4-9b-chat", "model.safetensors.index.json"),
    ):
        (root / name).mkdir()
        shutil.copy(root / "files/configs" / f"{name}.json", root / name / "config.json")
        shutil.copy(root / "files/indices" / f"{name}.{index}", root / name / index)
    texts = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        patch.delenv("CUBLAS_WORKSPACE_CONFIG")  # as people have it
        for command in commands("README.md"):
            name = re.sub(r"\s+", " ", command.arguments[-1]).strip()
            if records.is_wanted(name):
                code, printed = outcome(command)
                texts[name] = records.normalised(f"exit {code}\n{printed}")
    return texts


def machines() -> dict[str, str]:
    """What `duoka gpus` and `duoka doctor` say of recorded machines."""
    texts = {}
    diagnose = import_module("duoka.tools.doctor.diagnose")
    for name in MACHINES:
        with pytest.MonkeyPatch.context() as patch, mock.patch.object(diagnose, "_HOST_CHECKS", ()):
            machine(patch, name)
            for words in (["gpus"], ["gpus", "--json"], ["doctor"], ["doctor", "--json"]):
                record = f"{name}: {' '.join(words)}"
                if records.is_wanted(record):
                    text = shown(*words)
                    texts[record] = (
                        records.shortened(text) if words == ["doctor", "--json"] else text
                    )
    return texts
