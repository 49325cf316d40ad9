"""Errors caused by the machine (disk, memory, permissions, libraries), and version lists."""

from __future__ import annotations

import errno
import platform
import sys

from duoka.base.requirements import installed_version, unmet_requirements
from duoka.checkpoint.tokenizer_files import missing_module
from duoka.errors import MachineError
from duoka.forecast.device_memory import CompiledMemory

_PACKAGES = ("duoka", "torch", "transformers")

# Hints for the errors of an OSError that are limits of the machine. An OSError with another number
# counts as a defect of duoka unless it names a file.
_HINTS = {
    errno.ENOSPC: "free some space, or choose another path",
    errno.EDQUOT: "free some of your quota, or choose another path",
    errno.EACCES: "get the permission, or choose another path",
    errno.EPERM: "get the permission, or choose another path",
    errno.EROFS: "choose a writable path",
    errno.EIO: "the disk or the terminal doesn't respond",
    errno.EMFILE: "allow more open files: ulimit -n 4096",
    errno.ENFILE: "end other programs that have files open",
    errno.ENOMEM: "end other programs, or use a machine with more memory",
    errno.EAGAIN: "end other programs: the limit of processes or threads is reached",
    errno.EFBIG: "allow larger files: ulimit -f unlimited",
}


def versions() -> str:
    """Return the versions of duoka, its libraries and Python as text for a defect report."""
    # `__version__` of an imported package includes its build, such as torch's CUDA version.
    builds = {name: getattr(sys.modules.get(name), "__version__", None) for name in _PACKAGES}
    parts = [
        f"{name} {build or installed_version(name) or 'not installed'}"
        for name, build in builds.items()
    ]
    parts += ["memory in Python" if CompiledMemory is None else "memory compiled"]
    parts += [f"Python {platform.python_version()}", platform.platform()]
    return ", ".join(parts)


def explain(error: BaseException) -> MachineError | None:
    """Return a MachineError if the machine caused an unexpected error; None for a defect."""
    # torch's CPU allocator raises a plain RuntimeError, which only its name identifies.
    is_torch = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    if isinstance(error, MemoryError) or is_torch:
        return MachineError(
            "this machine has run out of memory",
            hint="end other programs, or plan a smaller workload: --context, --batch, --dtype",
        )
    if isinstance(error, ImportError):
        return _import_failure(error)
    wrong = unmet_requirements()
    if wrong:
        return MachineError(
            f"{'; '.join(wrong)}; this may be the cause of: {_format_error(error)}",
            hint="install the versions that duoka needs: pip install --upgrade duoka",
        )
    if isinstance(error, OSError):
        return _os_failure(error)
    return None


def _import_failure(error: ImportError) -> MachineError | None:
    """Describe a missing library or a wrong version; None if duoka itself can't be imported."""
    library = (error.name or "").partition(".")[0]
    if library == "duoka":
        return None  # a module of duoka is missing or broken: a defect
    wrong = unmet_requirements()
    problem = "; ".join(wrong) or _format_error(error)
    hint = "install what duoka needs: pip install --upgrade duoka"
    if isinstance(error, ModuleNotFoundError) and not wrong:
        hint = missing_module(library)
    return MachineError(f"a library can't be imported: {problem}", hint=hint)


def _os_failure(error: OSError) -> MachineError | None:
    """Describe an OSError of the machine or of a file; None if it is neither (a defect)."""
    if error.errno == errno.ENOENT and error.filename is None:
        return MachineError(
            "a directory is gone", hint="if it is the working directory, cd to another one"
        )
    if error.errno is None and ".so" in str(error):
        # The loader of shared libraries raises OSError without an error number or file name.
        return MachineError(
            f"a library can't be loaded: {_format_error(error)}",
            hint="install torch again, in a build for this machine",
        )
    has_place = error.filename is not None and error.errno != errno.ENOENT
    if error.errno not in _HINTS and not has_place:
        return None
    where = f"{error.filename}: " if error.filename is not None else ""
    return MachineError(f"{where}{error.strerror}", hint=_HINTS.get(error.errno or 0))


def _format_error(error: BaseException) -> str:
    """Format an error as one line: its class and its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
