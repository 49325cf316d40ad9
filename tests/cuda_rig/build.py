"""Build the CUDA rig for the PyTorch of this Python, whose CUDA build it must be.

    python tests/cuda_rig/build.py    # prints the library to put into LD_PRELOAD

It needs a C and a C++ compiler and ``nm``; the headers come with PyTorch's packages.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

C = Path(__file__).with_name("c")
LIBRARY = Path(sys.prefix) / "cuda_rig" / "librig.so"
# Read by the loader under names that PyTorch, pynvml and Triton open themselves.
OTHER_NAMES = ("libcuda.so.1", "libnvidia-ml.so.1")

LEFT_TO_THE_REAL_ONE = re.compile(r"(cuFile|cupti|cudart|cudann)")
COMPUTING = re.compile(r"(cublas|cudnn|cusparse|cusolver|cufft|curand|nccl)[A-Z_a-z]")
SYSTEM = re.compile(r"(cuda|__cuda|cu|nvml)[A-Z]")
# Functions of the computing libraries that start no kernel.
BOOKKEEPING = re.compile(r"Create|Set|Get|Destroy|Descriptor|[bB]ufferSize")
NOT_SUPPORTED = 801  # cudaErrorNotSupported, CUDA_ERROR_NOT_SUPPORTED


def main() -> None:
    """Build what is older than its sources, and print where it lies."""
    site = Path(sysconfig.get_paths()["purelib"])
    sources = [path for path in C.rglob("*") if path.is_file()]
    newest = max(path.stat().st_mtime for path in (*sources, Path(__file__)))
    if not LIBRARY.exists() or LIBRARY.stat().st_mtime < newest:
        build(site)
    print(LIBRARY)


def build(site: Path) -> None:
    """Compile the rig for the packages that lie in `site`."""
    import torch

    headers = next(site.glob("nvidia/cu*/include/cuda_runtime_api.h"), None)
    if headers is None or torch.version.cuda is None:
        sys.exit(f"error: PyTorch {torch.__version__} is no CUDA build; hint: make cuda")
    LIBRARY.parent.mkdir(exist_ok=True)
    objects = LIBRARY.parent / "objects"
    objects.mkdir(exist_ok=True)
    flags = ["-O2", "-g", "-fPIC", f"-I{C / 'include'}", f"-I{headers.parent}"]
    compiled = [objects / f"{source.stem}.o" for source in sorted(C.glob("*.c"))]
    for target in compiled:
        source = C / f"{target.stem}.c"
        # C2x: parameters without a name. The headers are not ours to warn about.
        run("cc", "-std=gnu2x", "-D_GNU_SOURCE", "-Wall", *flags, "-c", source, "-o", target)
    stubs = objects / "stubs.c"
    stubs.write_text(stubs_for(compiled, importing_libraries(site)))
    run("cc", "-O2", "-fPIC", "-w", "-c", stubs, "-o", stubs.with_suffix(".o"))
    # Written aside first: a process may have the old one open.
    new = LIBRARY.with_suffix(".new")
    run("cc", "-shared", *compiled, stubs.with_suffix(".o"), "-o", new, "-ldl", "-lpthread")
    new.replace(LIBRARY)
    for name in OTHER_NAMES:
        link = LIBRARY.with_name(name)
        link.unlink(missing_ok=True)
        link.symlink_to(LIBRARY.name)
    blocks = LIBRARY.with_name("libtorch_blocks.so")
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    options = ["-std=c++20", abi, *flags, f"-I{site / 'torch/include'}", "-shared"]
    linked = [f"-L{site / 'torch/lib'}", "-lc10_cuda", "-lc10"]
    run("c++", *options, C / "torch_blocks.cpp", "-o", blocks, *linked, LIBRARY)


def importing_libraries(site: Path) -> list[Path]:
    """The libraries that import from CUDA's: PyTorch's, and those of quantization."""
    names = ("c10_cuda", "torch_cuda", "torch_cuda_linalg", "torch_python", "caffe2_nvrtc")
    found = [site / f"torch/lib/lib{name}.so" for name in names]
    found += site.glob("bitsandbytes/libbitsandbytes_cuda13*.so")
    return [path for path in found if path.exists()]


def stubs_for(defined_in: Iterable[Path], importing: Iterable[Path]) -> str:
    """C functions for all that is imported from CUDA's libraries and not defined here.

    One of a computing library says success and counts as a launch; one of the runtime, the driver
    or NVML says that it isn't supported.
    """
    defined = symbols("--defined-only", *defined_in)
    wanted = symbols("-D", "--undefined-only", *importing)
    lines = ["int rig_stub(const char *name, const void *handle, int computes);"]
    for name in sorted(wanted - defined):
        if LEFT_TO_THE_REAL_ONE.match(name):
            continue
        if COMPUTING.match(name):
            computes = int(BOOKKEEPING.search(name) is None)
            body = f'return rig_stub("{name}", handle, {computes});'
        elif SYSTEM.match(name):
            body = f'rig_stub("{name}", 0, 0); return {NOT_SUPPORTED};'
        else:
            continue
        lines.append(f"int {name}(const void *handle) {{ {body} }}")
    return "\n".join(lines) + "\n"


def symbols(*arguments: str | Path) -> set[str]:
    """The names that ``nm`` lists, without their versions."""
    lines = run("nm", *arguments).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if len(line.split()) > 1}


def run(*command: str | Path) -> str:
    """What a command prints; its own message and a stop where it fails."""
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    except FileNotFoundError:
        sys.exit(f"error: {command[0]} isn't here; hint: install a C and C++ compiler (g++)")
    except subprocess.CalledProcessError as error:
        sys.exit(f"error: {' '.join(map(str, command))}\n{error.stderr}")
    if done.stderr:
        print(done.stderr, file=sys.stderr, end="")
    return done.stdout


if __name__ == "__main__":
    main()
