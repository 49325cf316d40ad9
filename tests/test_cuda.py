"""What the CUDA driver shows this process, asked through ctypes as of the real library."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from duoka import cuda
from duoka.errors import FleetError

FIRST = "8932f937-d72c-4106-c12f-20bd9faed9f6"
SECOND = "00000000-0000-0000-0000-0000000000ff"


def driver(*uuids: str, **results: int) -> Any:
    """A library of C functions that see these GPUs; `results` are those of some functions."""
    int_pointer = ctypes.POINTER(ctypes.c_int)
    octets_pointer = ctypes.POINTER(ctypes.c_ubyte * 16)

    def count(pointer: Any) -> int:
        pointer[0] = len(uuids)
        return results.get("cuDeviceGetCount", 0)

    def get(pointer: Any, ordinal: int) -> int:
        pointer[0] = 70 + ordinal  # a handle need not be the ordinal
        return results.get("cuDeviceGet", 0)

    def uuid(pointer: Any, device: int) -> int:
        octets = bytes.fromhex(uuids[device - 70].replace("-", ""))
        ctypes.memmove(pointer, octets, 16)
        return results.get("cuDeviceGetUuid_v2", 0)

    c = ctypes.CFUNCTYPE
    return SimpleNamespace(
        cuInit=c(ctypes.c_int, ctypes.c_uint)(lambda flags: results.get("cuInit", 0)),
        cuDeviceGetCount=c(ctypes.c_int, int_pointer)(count),
        cuDeviceGet=c(ctypes.c_int, int_pointer, ctypes.c_int)(get),
        cuDeviceGetUuid_v2=c(ctypes.c_int, octets_pointer, ctypes.c_int)(uuid),
    )


def test_gpus_are_seen_in_the_drivers_order() -> None:
    assert cuda.visible_uuids(driver(SECOND, FIRST)) == (SECOND, FIRST)
    assert cuda.visible_uuids(driver()) == ()


def test_an_old_driver_has_the_first_version_only() -> None:
    library = driver(FIRST)
    library.cuDeviceGetUuid = library.cuDeviceGetUuid_v2
    del library.cuDeviceGetUuid_v2
    assert cuda.visible_uuids(library) == (FIRST,)


def test_no_device_is_no_error() -> None:
    assert cuda.visible_uuids(driver(FIRST, cuInit=100)) == ()


@pytest.mark.parametrize(
    ("function", "result", "message", "hint"),
    [
        ("cuInit", 999, "it doesn't start: an unknown error", "nvidia-smi"),
        ("cuInit", 803, "different versions", "restart"),
        ("cuInit", 802, "not ready", "nvidia-fabricmanager"),
        ("cuInit", 34, "stub", "LD_LIBRARY_PATH"),
        ("cuInit", 7777, "doesn't know .CUresult 7777", "restart"),
        ("cuDeviceGetCount", 999, "doesn't count", "nvidia-smi"),
        ("cuDeviceGet", 101, "doesn't give cuda:0", "restart"),
        ("cuDeviceGetUuid_v2", 46, "doesn't identify cuda:0", "nvidia-smi"),
    ],
)
def test_a_driver_that_fails(function: str, result: int, message: str, hint: str) -> None:
    with pytest.raises(FleetError, match=message) as caught:
        cuda.visible_uuids(driver(FIRST, **{function: result}))
    assert hint in str(caught.value.hint)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "LIBRARY", "libcuda-that-isnt-there.so.1")
    with pytest.raises(FleetError, match="is not here") as caught:
        cuda.visible_uuids()
    assert "NVIDIA_DRIVER_CAPABILITIES" in str(caught.value.hint)


def test_the_restriction_is_fit_to_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cuda.VARIABLE, raising=False)
    assert cuda.restriction() is None
    monkeypatch.setenv(cuda.VARIABLE, "")
    assert cuda.restriction() == ""
    monkeypatch.setenv(cuda.VARIABLE, "0,\x1b[31m1" + "," * 5000)
    assert cuda.restriction() == "0,[31m1" + "," * 193


@pytest.mark.gpu
def test_torch_sees_the_same_gpus() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    seen = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    assert list(cuda.visible_uuids()) == seen
