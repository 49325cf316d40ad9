"""CUDA: which GPUs this process may use, in CUDA's own order.

The driver is asked itself (``libcuda``, through ctypes), because only it knows what
CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER made of the machine: what is third here is torch's
``cuda:2``. Where CUDA hasn't started in this process it isn't started: a child that was forked
afterwards couldn't use it, and CUDA_VISIBLE_DEVICES could no longer be set. A short process of its
own asks instead. No GPU gets a context, and no memory is taken.
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
# Run isolated: it imports the standard library and this duoka, nothing else.
_CHILD = """
import sys
sys.path.append(sys.argv[1])
from duoka.hardware import cuda_driver
cuda_driver.tell()
"""
_RESTART = "restart the machine, or install the driver again"
# Numbers and meanings of cuda.h's CUresult.
_FAULTS = {
    2: ("no memory is left for it", "look with nvidia-smi at what runs"),
    34: (
        "its library is the stub that CUDA's toolkit brings for linking",
        "take its directory out of LD_LIBRARY_PATH, and install the NVIDIA driver",
    ),
    46: ("a GPU is busy or unavailable", "look with nvidia-smi at what runs, and at MIG"),
    101: ("a device is not valid", f"does {VARIABLE} name a GPU twice? If not, {_RESTART}"),
    802: (
        "the system is not ready yet",
        "on machines with NVSwitch the service nvidia-fabricmanager must run",
    ),
    803: ("the driver that runs and its library are of different versions", _RESTART),
    804: (
        "forward compatibility was asked for on hardware that doesn't have it",
        "take CUDA's compat directory out of LD_LIBRARY_PATH, or update the driver",
    ),
    999: ("an unknown error", f"look with nvidia-smi whether the GPUs are well; {_RESTART}"),
}


def visible_uuids(library: Any = None) -> tuple[str, ...]:
    """The identities of the GPUs that this process may use: the third is ``cuda:2``."""
    if library is not None:
        return _ask(library)
    library = _load()
    count = ctypes.c_int()
    if library.cuDeviceGetCount(ctypes.byref(count)) == _NOT_INITIALIZED:
        return _ask_elsewhere(library)
    return _ask(library)


def tell() -> None:
    """Write what another process wants to know to stdout; it started this one to ask."""
    library = _load()  # who started this has it: where this fails, that process asks
    try:
        answer: dict[str, object] = {"uuids": _ask(library)}
    except FleetError as error:
        answer = {"error": str(error), "hint": error.hint}
    sys.stdout.write(json.dumps(answer))


def _ask_elsewhere(library: Any) -> tuple[str, ...]:
    # A program that brings its own Python would start itself again.
    if not sys.executable or getattr(sys, "frozen", False):
        return _ask(library)
    path = str(Path(__file__).resolve().parents[2])
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD, path],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=_MOST_SECONDS,
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise FleetError(
            f"CUDA's driver doesn't start within {_MOST_SECONDS:.0f} seconds",
            hint=f"look with nvidia-smi whether the GPUs are well; {_RESTART}",
        ) from None
    except (OSError, subprocess.SubprocessError, ValueError):
        return _ask(library)  # no process can be started here, or not with this Python
    if "error" in answer:
        raise FleetError(answer["error"], hint=answer["hint"])
    return tuple(answer["uuids"])


def _ask(library: Any) -> tuple[str, ...]:
    result = library.cuInit(0)
    if result == _NO_DEVICE:
        return ()
    _check(result, "it doesn't start")
    count = ctypes.c_int()
    _check(library.cuDeviceGetCount(ctypes.byref(count)), "it doesn't count the GPUs")
    return tuple(_uuid(library, ordinal) for ordinal in range(count.value))


def restriction() -> str | None:
    """What CUDA_VISIBLE_DEVICES says, made fit to be shown; None when it isn't set."""
    value = os.environ.get(VARIABLE)
    return None if value is None else "".join(sign for sign in value if sign.isprintable())[:200]


def renumbered() -> list[int]:
    """Return the numbers that CUDA_VISIBLE_DEVICES lists, the n-th for ``cuda:n``.

    The list is empty where every GPU keeps its number.
    """
    texts = [text.strip() for text in os.environ.get(VARIABLE, "").split(",")]
    if not all(text.isascii() and text.isdecimal() and len(text) < 5 for text in texts):
        return []
    numbers = [int(text) for text in texts]
    return [] if numbers == [*range(len(numbers))] else numbers


def tell_renumbered() -> str:
    """Describe what CUDA_VISIBLE_DEVICES makes of its numbers; empty where that is nothing."""
    pairs = [f"{number} is cuda:{place}" for place, number in enumerate(renumbered())]
    return f"{VARIABLE}={restriction()}: {', '.join(pairs)} in this process" if pairs else ""


def _load() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError:
        raise FleetError(
            f"CUDA's driver library ({LIBRARY}) is not here",
            hint="it comes with the NVIDIA driver; in a container, "
            "NVIDIA_DRIVER_CAPABILITIES must name compute",
        ) from None


def _uuid(library: Any, ordinal: int) -> str:
    device = ctypes.c_int()
    _check(library.cuDeviceGet(ctypes.byref(device), ordinal), f"it doesn't give cuda:{ordinal}")
    # The second version tells apart the parts of a GPU in MIG mode; drivers before 470 lack it.
    ask = getattr(library, "cuDeviceGetUuid_v2", None) or library.cuDeviceGetUuid
    octets = (ctypes.c_ubyte * 16)()
    _check(ask(ctypes.byref(octets), device), f"it doesn't identify cuda:{ordinal}")
    digits = bytes(octets).hex()
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def _check(result: int, what: str) -> None:
    if result != _SUCCESS:
        reason, hint = _FAULTS.get(result, ("an error that duoka doesn't know", _RESTART))
        raise FleetError(f"CUDA's driver fails, {what}: {reason} (CUresult {result})", hint=hint)
