"""C stubs for what PyTorch's CUDA libraries import and the rig doesn't define.

A stub of a computing library (cuBLAS, cuDNN, …) says success and counts as a kernel; one of the
runtime, the driver or NVML says that it isn't supported.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

_COMPUTES = re.compile(r"(cublas|cudnn|cusparse|cusparseLt|cusolver|cufft|curand|nccl)[A-Za-z_]")
# What makes, sets, gets or destroys an object starts no kernel.
_STARTS_NONE = re.compile(r"Create|Set|Get|Destroy|Descriptor|bufferSize")
_SYSTEM = re.compile(r"(cuda[A-Z]|__cuda|cu[A-Z]|nvml)")
# Libraries that the wheels bring and that work without a GPU.
_LEFT_ALONE = re.compile(r"cuFile|nvrtc|cupti")
_NOT_SUPPORTED = {"nvml": 3}  # of NVML; that of the runtime and the driver is 801


def symbols(path: Path, *options: str) -> set[str]:
    """The names that ``nm`` lists of a binary, without their versions."""
    text = subprocess.run(
        ["nm", *options, str(path)], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[-1].split("@")[0] for line in text.splitlines() if line.strip()}


def write_stubs(objects: Iterable[Path], libraries: Iterable[Path]) -> str:
    """The C code of all stubs that libraries need beside these objects."""
    defined = set().union(*(symbols(path, "--defined-only") for path in objects))
    wanted = set().union(*(symbols(path, "-D", "--undefined-only") for path in libraries))
    lines = ["void rig_stub(const char *name, int starts_kernels);"]
    lines += (line for name in sorted(wanted - defined) for line in _stub(name))
    return "\n".join(lines) + "\n"


def _stub(name: str) -> Iterator[str]:
    if _LEFT_ALONE.match(name):
        return
    if _COMPUTES.match(name):
        starts_kernels, status = int(not _STARTS_NONE.search(name)), 0
    elif _SYSTEM.match(name):
        starts_kernels, status = 0, _NOT_SUPPORTED.get(name[:4], 801)
    else:
        return
    yield f"int {name}(void);"
    yield f'int {name}(void) {{ rig_stub("{name}", {starts_kernels}); return {status}; }}'
