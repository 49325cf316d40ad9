"""Every wrong input that ``wrong_inputs.md`` lists is answered with just what it says there."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from duoka.cli.errors import DEFECT

from .wrong_inputs import Row, look, prepare, rows


@pytest.fixture(scope="module", autouse=True)
def place(
    tiny: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    here = tmp_path_factory.mktemp("wrong")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        patch.setattr(os, "environ", {**environment, "HF_HUB_OFFLINE": "1"})
        del os.environ["CUBLAS_WORKSPACE_CONFIG"]  # the table is of GPUs with workspaces
        shutil.copytree(tiny, "tiny")
        prepare()
        yield


def without_versions(row: Row) -> Row:
    return replace(row, message=re.sub(r"(transformers) [\w.]+", r"\1 …", row.message))


# What would fit instead takes a search, and training a profile of its own.
SLOW = ("--gpus virtual:1MiB --context 96", "--offload --train lora", "--batch 512")


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=pytest.mark.slow if row.command.endswith(SLOW) else ())
        for row in rows()
    ],
    ids=lambda row: row.command,
)
def test_what_the_user_sees(row: Row) -> None:
    seen, out, err = look(row.command)
    assert without_versions(seen) == without_versions(row)
    assert out == ""
    assert "Traceback" not in err
    assert row.message
    assert 0 < row.code < DEFECT


def test_there_are_enough_of_them() -> None:
    listed = rows()
    assert len(listed) >= 30
    assert {row.command.split()[1] for row in listed} >= {
        "plan",
        "check",
        "generate",
        "chat",
        "demo",
    }
    assert sum(bool(row.hint) for row in listed) >= len(listed) - 5
