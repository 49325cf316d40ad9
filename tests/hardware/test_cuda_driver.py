"""What the CUDA driver shows this process, asked through ctypes as of the real library."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from duoka.errors import FleetError
from duoka.hardware import cuda_driver

FIRST = "8932f937-d72c-4106-c12f-20bd9faed9f6"
SECOND = "00000000-0000-0000-0000-0000000000ff"
TEXTS = {  # of the driver, as in cuda.h
    101: b"invalid device ordinal",
    802: b"system not yet initialized",
    999: b"unknown error",
}


def driver(*uuids: str, **results: int) -> Any:
    """A library of C functions that see these GPUs; `results` are those of some functions."""
    int_pointer = ctypes.POINTER(ctypes.c_int)
    octets_pointer = ctypes.POINTER(ctypes.c_ubyte * 16)
    text_pointer = ctypes.POINTER(ctypes.c_char_p)

    started = []

    def init(flags: int) -> int:
        started.append(flags)
        return results.get("cuInit", 0)

    def count(pointer: Any) -> int:
        pointer[0] = len(uuids)
        return results.get("cuDeviceGetCount", 0) if started else 3

    def get(pointer: Any, ordinal: int) -> int:
        pointer[0] = 70 + ordinal  # a handle need not be the ordinal
        return results.get("cuDeviceGet", 0)

    def uuid(pointer: Any, device: int) -> int:
        octets = bytes.fromhex(uuids[device - 70].replace("-", ""))
        ctypes.memmove(pointer, octets, 16)
        return results.get("cuDeviceGetUuid_v2", 0)

    def error_string(result: int, pointer: Any) -> int:
        pointer[0] = TEXTS.get(result)
        return 0 if result in TEXTS else 1

    c = ctypes.CFUNCTYPE
    return SimpleNamespace(
        cuInit=c(ctypes.c_int, ctypes.c_uint)(init),
        cuDeviceGetCount=c(ctypes.c_int, int_pointer)(count),
        cuDeviceGet=c(ctypes.c_int, int_pointer, ctypes.c_int)(get),
        cuDeviceGetUuid_v2=c(ctypes.c_int, octets_pointer, ctypes.c_int)(uuid),
        cuGetErrorString=c(ctypes.c_int, ctypes.c_int, text_pointer)(error_string),
    )


def test_gpus_are_seen_in_the_drivers_order() -> None:
    assert cuda_driver.visible_uuids(driver(SECOND, FIRST)) == (SECOND, FIRST)
    assert cuda_driver.visible_uuids(driver()) == ()
    assert cuda_driver.visible_uuids(driver(FIRST, cuInit=100)) == ()  # no device is no error


@pytest.mark.parametrize(
    ("function", "result", "message", "hint"),
    [
        ("cuInit", 999, "while starting: unknown error", "nvidia-smi"),
        ("cuInit", 802, "not yet initialized", "nvidia-fabricmanager"),
        ("cuInit", 34, "CUresult 34", "LD_LIBRARY_PATH"),
        ("cuInit", 101, "invalid device ordinal", "CUDA_VISIBLE_DEVICES lists no GPU twice"),
        ("cuInit", 7777, "an unknown error .CUresult 7777", "restart"),
        ("cuDeviceGetCount", 999, "while counting", "nvidia-smi"),
        ("cuDeviceGet", 101, "while opening cuda:0", "restart"),
        ("cuDeviceGetUuid_v2", 46, "while identifying cuda:0", "restart"),
    ],
)
def test_a_driver_that_fails(function: str, result: int, message: str, hint: str) -> None:
    with pytest.raises(FleetError, match=message) as caught:
        cuda_driver.visible_uuids(driver(FIRST, **{function: result}))
    assert hint in str(caught.value.hint)


# ── a process of its own asks ──


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A driver that hasn't started in this process, and tells when it does."""
    found = driver(FIRST)
    monkeypatch.setattr(cuda_driver, "_load", lambda: found)
    return found


def starts(library: Any) -> bool:
    """Whether CUDA has started in this process."""
    count = ctypes.c_int()
    return bool(library.cuDeviceGetCount(ctypes.byref(count)) == 0)


def child(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(cuda_driver, "_CHILD", program)


def test_cuda_is_not_started_here(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, f"print('[\"{SECOND}\"]')")
    assert cuda_driver.visible_uuids() == (SECOND,)
    assert not starts(library)


def test_where_cuda_has_started_it_is_asked_itself(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(monkeypatch, "raise SystemExit('this process knows')")
    library.cuInit(0)
    assert cuda_driver.visible_uuids() == (FIRST,)


@pytest.mark.parametrize("program", ["raise SystemExit(1)", "print('hello')", "", "import no.such"])
def test_where_no_other_process_can_ask_this_one_does(
    program: str, library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(monkeypatch, program)
    assert cuda_driver.visible_uuids() == (FIRST,)


@pytest.mark.usefixtures("library")
def test_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, "import time; time.sleep(60)")
    monkeypatch.setattr(cuda_driver, "_MOST_SECONDS", 0.3)
    with pytest.raises(FleetError, match="doesn't start within 0 seconds"):
        cuda_driver.visible_uuids()


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_forked_child_can_use_cuda_after_asking(tmp_path: Path) -> None:
    library = tmp_path / "libcuda.so.1"
    source = Path(__file__).parents[1] / "data" / "nvml" / "driver.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-w", "-o", library, source], check=True)
    code = """if True:
        import ctypes
        from duoka.hardware.cuda_driver import visible_uuids
        print(len(visible_uuids()))
        print(ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())))
    """
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    command = [sys.executable, "-c", code]
    told = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert told.stdout.split() == ["2", "3"]  # two GPUs, and CUDA is not initialised


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-that-isnt-there.so.1")
    with pytest.raises(FleetError, match="was not found") as caught:
        cuda_driver.visible_uuids()
    assert "NVIDIA_DRIVER_CAPABILITIES" in str(caught.value.hint)


def test_the_restriction_is_fit_to_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cuda_driver.VARIABLE, raising=False)
    assert cuda_driver.restriction() is None
    monkeypatch.setenv(cuda_driver.VARIABLE, "")
    assert cuda_driver.restriction() == ""
    monkeypatch.setenv(cuda_driver.VARIABLE, "0,\x1b[31m1" + "," * 5000)
    assert cuda_driver.restriction() == "0,[31m1" + "," * 193


@pytest.mark.gpu
def test_torch_sees_the_same_gpus() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    assert list(cuda_driver.visible_uuids()) == seen


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, ""),
        ("", ""),
        ("0,1", ""),
        ("2,3", "2 is cuda:0, 3 is cuda:1"),
        (" 1 , 0 ", "1 is cuda:0, 0 is cuda:1"),
        ("GPU-8932f937,2", ""),
        ("-1", ""),
        ("9" * 5000, ""),
    ],
)
def test_numbers_that_are_others_are_told(
    value: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cuda_driver.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(cuda_driver.VARIABLE, value)
    text = cuda_driver.describe_renumbered()
    assert told in text
    assert bool(text) == bool(told)
