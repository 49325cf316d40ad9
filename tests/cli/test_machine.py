"""What the machine refuses is no defect of duoka, and a defect says what duoka runs on."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from duoka import __version__
from duoka.base import requirements
from duoka.cli import errors, machine
from duoka.errors import MachineError
from duoka.forecast.device_memory import PlainMemory


@pytest.mark.parametrize(
    ("error", "told", "hint"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/p"), "/x/p: No space left", "space"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/x"), "/x: Disk quota", "quota"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "/x: Permission", "permission"),
        (OSError(errno.EROFS, "Read-only file system", "/x"), "Read-only", "writable path"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files", "ulimit"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error", "disk"),
        (MemoryError(), "this machine", "--context"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"), "memory", "--batch"),
        (ModuleNotFoundError("No module named 'peft'", name="peft"), "'peft'", "install peft"),
        (
            ImportError("cannot import name 'x' from 'transformers'", name="transformers"),
            "x",
            "pip",
        ),
        (OSError("libcudart.so.12: cannot open shared object file"), "libcudart", "torch"),
    ],
)
def test_what_the_machine_refuses(error: Exception, told: str, hint: str) -> None:
    found = machine.explain(error)
    assert isinstance(found, MachineError)
    assert told in str(found)
    assert hint in (found.hint or "")


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file", "x"),
        RuntimeError("shapes differ"),
        ModuleNotFoundError("No module named 'duoka.x'", name="duoka.x"),
        RecursionError(),
        OSError("something else"),
    ],
)
def test_a_defect_is_not_blamed_on_the_machine(error: Exception) -> None:
    assert machine.explain(error) is None


def test_a_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "gone"
    place.mkdir()
    monkeypatch.chdir(place)
    place.rmdir()
    found = machine.explain(FileNotFoundError(errno.ENOENT, "No such file or directory"))
    assert found is not None
    assert "directory" in str(found)


def test_versions_that_do_not_fit_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requirements.unmet_requirements() == []
    real = importlib.metadata.version
    old = {"transformers": "4.30.2"}
    monkeypatch.setattr(requirements, "version", lambda name: old.get(name) or real(name))
    (told,) = requirements.unmet_requirements()
    assert told.startswith("transformers 4.30.2 is installed, duoka needs ")
    found = machine.explain(AttributeError("module 'transformers' has no attribute 'x'"))
    assert found is not None
    assert "4.30.2" in str(found)
    assert "has no attribute" in str(found)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def without_torch(name: str) -> str:
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(requirements, "version", without_torch)
    found = machine.explain(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert found is not None
    assert "torch is not installed" in str(found)


def test_a_defect_tells_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert errors.report(KeyError("oops"), debug=False) == errors.DEFECT
    told = capsys.readouterr().err
    assert f"duoka {__version__}, torch {torch.__version__}, transformers " in told
    assert f"Python {sys.version.split()[0]}" in told
    assert os.uname().sysname in told


@pytest.mark.parametrize(
    ("compiled", "told"), [(None, "memory in Python"), (PlainMemory, "memory compiled")]
)
def test_a_defect_tells_whether_the_memory_is_compiled(
    monkeypatch: pytest.MonkeyPatch, compiled: object, told: str
) -> None:
    monkeypatch.setattr(machine, "CompiledMemory", compiled)
    assert told in machine.versions().split(", ")


def test_a_traceback_without_end_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    def deeper() -> None:
        deeper()

    with pytest.raises(RecursionError) as caught:
        deeper()
    assert errors.report(caught.value, debug=False) == errors.DEFECT
    told = capsys.readouterr().err
    assert "RecursionError" in told
    assert len(told) < 20_000


def test_errors_that_cannot_be_told_keep_their_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        encoding = "utf-8"

        def write(self, text: str) -> int:
            raise OSError(errno.EIO, "Input/output error")

        def flush(self) -> None:
            raise OSError(errno.EIO, "Input/output error")

        def isatty(self) -> bool:
            return False

    monkeypatch.setattr(sys, "stderr", Gone())
    assert errors.report(MachineError("x"), debug=False) == MachineError.exit_code
    assert errors.report(KeyError("x"), debug=False) == errors.DEFECT
    assert errors.report(KeyboardInterrupt(), debug=False) == 128 + signal.SIGINT
