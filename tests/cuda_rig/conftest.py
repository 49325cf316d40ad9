"""Tests on PyTorch's CUDA build without a GPU. Each has GPUs of its own, in a process of its own.

``@pytest.mark.cuda_rig(gpus="24GiB,12GiB", capability="7.5")``: the keywords are the rig's
settings (README.md). `make cuda` runs these tests; elsewhere they are skipped.
"""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_rig.values import values

from duoka.base.quiet import quiet_libraries
from duoka.engine import Engine
from duoka.errors import VirtualDeviceError
from duoka.virtual.apart import in_fork

with quiet_libraries():  # by itself it starts CUDA where torchao is installed
    import transformers.modeling_utils  # noqa: F401

_IS_RIG = hasattr(ctypes.CDLL(None), "rig_restart")


@pytest.fixture
def processes_have_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In started processes too, code that looks at masks and positions sees them."""
    (tmp_path / "sitecustomize.py").write_text("import values; values.values().__enter__()")
    here = Path(__file__).parent
    paths = [tmp_path, here, here.parent, os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))


def _compute_in_engine(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    """Compute with numbers in the engine's thread, too, in which it runs steps."""
    work = Engine._work

    def compute(self: Engine, *arguments: Any) -> None:
        with values(**settings):
            work(self, *arguments)

    monkeypatch.setattr(Engine, "_work", compute)


@pytest.fixture
def engine_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    _compute_in_engine(monkeypatch, most=None)


@pytest.fixture
def engine_computes_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only small tensors, which steer a program."""
    _compute_in_engine(monkeypatch)


@pytest.fixture
def expandable_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the process had been started so: PyTorch reads the variable once."""
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    yield
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not _IS_RIG and item.get_closest_marker("cuda_rig"):
            item.add_marker(pytest.mark.skip(reason="needs the CUDA rig: make cuda"))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test in a fork; CUDA hasn't started in this process, and never does."""
    markers = list(pyfuncitem.iter_markers("cuda_rig"))  # the closest first
    if not markers:
        return None
    settings = {
        name: value for marker in reversed(markers) for name, value in marker.kwargs.items()
    }
    assert not torch.cuda.is_initialized()
    try:
        kind, text = in_fork(partial(_run, pyfuncitem, settings))
    except VirtualDeviceError as error:
        kind, text = "failed", str(error)
    if kind == "skipped":
        pytest.skip(text)
    if kind == "failed":
        pytest.fail(text, pytrace=False)
    return True


def _run(item: pytest.Function, settings: dict[str, Any]) -> tuple[str, str]:
    for name in [name for name in os.environ if name.startswith("RIG_")]:
        del os.environ[name]
    for name, value in settings.items():
        os.environ[f"RIG_{name.upper()}"] = str(value)
    os.environ.setdefault("DUOKA_ATTENTION", "flash")  # kernels compute nothing to compare
    gc.unfreeze()  # a repair looks for the functions that hold code
    assert ctypes.CDLL(None).rig_restart() == 0
    outcome = "passed", ""
    try:
        item.obj(**{name: item.funcargs[name] for name in item._fixtureinfo.argnames})
    except pytest.skip.Exception as skipped:
        outcome = "skipped", str(skipped)
    except BaseException:
        outcome = "failed", str(item.repr_failure(pytest.ExceptionInfo.from_current()))
    return outcome
