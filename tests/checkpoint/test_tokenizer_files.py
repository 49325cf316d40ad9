"""What is told of a tokenizer before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from duoka.checkpoint.checkpoint import Checkpoint
from duoka.checkpoint.tokenizer_files import refuse_unreadable
from duoka.errors import CheckpointError
from duoka.tools.demo.checkpoint import CONFIG, write_frame


@pytest.fixture
def chatglm(tmp_path: Path) -> Path:
    write_frame(tmp_path / "chatglm", CONFIG)
    return tmp_path / "chatglm"


def test_a_tokenizer_that_is_missing(chatglm: Path) -> None:
    refuse_unreadable(Checkpoint.open(chatglm))
    (chatglm / "tokenizer.model").unlink()
    for file in chatglm.glob("token*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer") as caught:
        refuse_unreadable(Checkpoint.open(chatglm))
    assert caught.value.hint


def test_nothing_of_it_imports_torch(chatglm: Path) -> None:
    script = (
        "import sys\n"
        "from duoka.checkpoint.checkpoint import Checkpoint\n"
        "from duoka.checkpoint.tokenizer_files import refuse_unreadable\n"
        f"refuse_unreadable(Checkpoint.open({str(chatglm)!r}))\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
