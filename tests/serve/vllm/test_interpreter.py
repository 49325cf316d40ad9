"""The Python that has vLLM, or hasn't."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from vllm_python import write_program, write_python

from duoka.errors import MachineError, UsageError
from duoka.serve.vllm import interpreter
from duoka.serve.vllm.interpreter import find_vllm

pytestmark = pytest.mark.process


def test_the_version_is_told(tmp_path: Path) -> None:
    assert find_vllm(write_python(tmp_path, version="0.32.9"))[1] == "0.32.9"


def test_links_stay_as_they_are(tmp_path: Path) -> None:
    """A virtual environment is told by the link."""
    write_python(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "python")
    assert find_vllm(link)[0] == link


def test_one_without_vllm_is_told_how_to_install_it() -> None:
    with pytest.raises(MachineError, match="No module named 'vllm'") as error:
        find_vllm(Path(sys.executable))
    assert error.value.hint is not None
    assert f"{sys.executable} -m pip install" in error.value.hint


def test_a_vllm_that_cant_be_imported_is_told_with_the_reason(tmp_path: Path) -> None:
    python = write_python(tmp_path)
    package = tmp_path / "packages" / "vllm" / "__init__.py"
    package.write_text("raise ImportError('libcudart.so.13: cannot open shared object file')\n")
    with pytest.raises(MachineError, match="ImportError: libcudart"):
        find_vllm(python)


def test_a_vllm_beside_the_user_isnt_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python looks for modules where it is called, unless it is told not to."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('of the working directory')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MachineError, match="No module named 'vllm'"):
        find_vllm(Path(sys.executable))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("echo 'Unknown option: -P' >&2; exit 2", "Unknown option: -P"),
        ("exit 4", "exit status 4"),
        ("true", "can't import vllm"),
    ],
)
def test_what_is_no_such_python_is_told(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(MachineError, match=expected):
        find_vllm(write_program(tmp_path / "python", text + "\n"))


def test_what_isnt_there_or_no_program_is_told(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "file", tmp_path / "nothing"):
        (tmp_path / "file").touch()
        with pytest.raises(UsageError, match="no program that can be run"):
            find_vllm(path)
    broken = write_program(tmp_path / "broken", "")
    broken.write_bytes(b"\x7fELF" + b"\0" * 40)
    with pytest.raises(MachineError, match="Exec format error"):
        find_vllm(broken)


def test_one_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_PROBE_SECONDS", 0.5)
    with pytest.raises(MachineError, match=r"timed out after 0\.5 seconds"):
        find_vllm(write_program(tmp_path / "python", "exec sleep 60\n"))
