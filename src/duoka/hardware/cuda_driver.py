"""CUDA driver: the GPUs visible to this process, in CUDA's own order.

The driver is queried directly (``libcuda``, through ctypes), because only the driver knows the
effect of CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER: its third GPU is torch's ``cuda:2``. If CUDA
isn't initialized in this process, a short child process makes the query. Initialization would keep
forked children from using CUDA, and later changes of CUDA_VISIBLE_DEVICES would have no effect. The
query creates no CUDA context and uses no GPU memory.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from duoka.errors import FleetError

LIBRARY = "libcuda.so.1"
VARIABLE = "CUDA_VISIBLE_DEVICES"
_SUCCESS, _NOT_INITIALIZED, _NO_DEVICE = 0, 3, 100
_MOST_SECONDS = 60.0
# Runs in isolated mode: imports the standard library and this copy of duoka only.
_CHILD = """
import sys
sys.path.append(sys.argv[1])
from duoka.hardware import cuda_driver
cuda_driver.report()
"""
_RESTART = "restart the machine, or reinstall the driver"
# Hints for values of cuda.h's CUresult, whose texts the driver has.
_HINTS = {
    34: "install the NVIDIA driver, and remove the CUDA toolkit's stubs from LD_LIBRARY_PATH",
    101: f"check that {VARIABLE} lists no GPU twice; otherwise {_RESTART}",
    802: "on machines with NVSwitch start the service nvidia-fabricmanager",
    804: "remove CUDA's compat directory from LD_LIBRARY_PATH, or update the driver",
}


def visible_uuids(library: Any = None) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs visible to this process: the third is ``cuda:2``."""
    if library is not None:
        return _query(library)
    library = _load()
    count = ctypes.c_int()
    if library.cuDeviceGetCount(ctypes.byref(count)) == _NOT_INITIALIZED:
        return _query_in_child(library)
    return _query(library)


def report() -> None:
    """Write the visible UUIDs to stdout as JSON; the child process runs this function."""
    sys.stdout.write(json.dumps(_query(_load())))  # if this fails, the parent queries itself


def _query_in_child(library: Any) -> tuple[str, ...]:
    """Query the visible UUIDs in a child process; in this process if no child can be started."""
    # In a frozen program, `sys.executable` is the program itself, not Python.
    if not sys.executable or getattr(sys, "frozen", False):
        return _query(library)
    path = str(Path(__file__).resolve().parents[2])
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD, path],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_MOST_SECONDS,
        )
        return tuple(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        raise FleetError(
            f"CUDA's driver doesn't start within {_MOST_SECONDS:.0f} seconds",
            hint=f"check the GPUs with nvidia-smi; {_RESTART}",
        ) from None
    except (OSError, subprocess.SubprocessError, ValueError):
        return _query(library)  # raises the driver's error, or works if only the child failed


def _query(library: Any) -> tuple[str, ...]:
    """Initialize CUDA in this process and return the visible UUIDs, in CUDA's order."""
    result = library.cuInit(0)
    if result == _NO_DEVICE:
        return ()
    _check(library, result, "while starting")
    count = ctypes.c_int()
    _check(library, library.cuDeviceGetCount(ctypes.byref(count)), "while counting the GPUs")
    return tuple(_uuid(library, ordinal) for ordinal in range(count.value))


def restriction() -> str | None:
    """Return CUDA_VISIBLE_DEVICES in printable characters, shortened; None if unset."""
    value = os.environ.get(VARIABLE)
    return None if value is None else "".join(sign for sign in value if sign.isprintable())[:200]


def renumbered() -> list[int]:
    """Return the numbers in CUDA_VISIBLE_DEVICES, the n-th for ``cuda:n``.

    Empty if every GPU keeps its number, or if the variable is unset or not a list of numbers.
    """
    texts = [text.strip() for text in os.environ.get(VARIABLE, "").split(",")]
    if not all(text.isascii() and text.isdecimal() and len(text) < 5 for text in texts):
        return []
    numbers = [int(text) for text in texts]
    return [] if numbers == [*range(len(numbers))] else numbers


def describe_renumbered() -> str:
    """Describe how CUDA_VISIBLE_DEVICES renumbers the GPUs; "" if it doesn't."""
    pairs = [f"{number} is cuda:{place}" for place, number in enumerate(renumbered())]
    return f"{VARIABLE}={restriction()}: {', '.join(pairs)} in this process" if pairs else ""


def _load() -> Any:
    """Load the driver's library; raise FleetError if it isn't installed."""
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        raise FleetError(
            f"CUDA's driver library ({LIBRARY}) was not found",
            hint="install the NVIDIA driver; in a container, add compute to "
            "NVIDIA_DRIVER_CAPABILITIES",
        ) from None


def _uuid(library: Any, ordinal: int) -> str:
    """Return the UUID of CUDA's device number `ordinal`, without NVML's prefix."""
    device = ctypes.c_int()
    result = library.cuDeviceGet(ctypes.byref(device), ordinal)
    _check(library, result, f"while opening cuda:{ordinal}")
    # `_v2` returns different UUIDs for the instances of a GPU in MIG mode; new in driver 470.
    get_uuid = getattr(library, "cuDeviceGetUuid_v2", None) or library.cuDeviceGetUuid
    octets = (ctypes.c_ubyte * 16)()
    result = get_uuid(ctypes.byref(octets), device)
    _check(library, result, f"while identifying cuda:{ordinal}")
    digits = bytes(octets).hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _check(library: Any, result: int, what: str) -> None:
    """Raise FleetError if a call of the driver failed; `what` says when."""
    if result != _SUCCESS:
        text = ctypes.c_char_p()
        library.cuGetErrorString(result, ctypes.byref(text))
        reason = (text.value or b"an unknown error").decode()
        hint = _HINTS.get(result, f"check the GPUs with nvidia-smi; {_RESTART}")
        raise FleetError(f"CUDA's driver fails {what}: {reason} (CUresult {result})", hint=hint)
