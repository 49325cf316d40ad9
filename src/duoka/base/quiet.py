"""Quiet imports: no log messages of other libraries, and no CUDA initialisation by them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any
from unittest import mock

# transformers imports torchao if installed, which logs about kernels for other hardware, and makes
# torch and bitsandbytes log.
_NOISY_LOGGERS = ("torchao", "torch.utils._pytree", "bitsandbytes")
_QUERYING_PACKAGES = ("torchao.", "bitsandbytes.")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Within a scope, let some libraries log errors only, and not initialize CUDA at import."""
    # torch then looks for GPUs by NVML. Initializing CUDA would keep forked processes from it.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    loggers = [logging.getLogger(name) for name in _NOISY_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    curious = _ImportPatch()
    sys.meta_path.insert(0, curious)
    try:
        yield
    finally:
        sys.meta_path.remove(curious)
        curious.forget()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# Import hooks are called before a module is executed. This finder never finds a module: it patches
# torch when the import of torchao or bitsandbytes begins, until the end of the scope.
class _ImportPatch(MetaPathFinder):
    """Patches torch's query of a GPU's capability while libraries are imported.

    torch would query the GPU, which initializes CUDA in a process that may only plan, or fork
    later. Until CUDA is initialized, the patched query returns the capability of a T4, which Triton
    and bitsandbytes support.

    Functions that bitsandbytes compiles stay as they are: duoka calls its kernels, not these, and
    `torch.compile` imports the compiler at once, which takes seconds.
    """

    def __init__(self) -> None:
        self._answers = ExitStack()
        self._is_answering = False

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> None:
        """Find nothing; patch torch when one of the libraries is imported."""
        torch: Any = sys.modules.get("torch")
        if not name.startswith(_QUERYING_PACKAGES) or self._is_answering or torch is None:
            return
        self._is_answering = True
        triton = import_module("torch.utils._triton")
        for module, function, answer, has_started in (
            (torch.cuda, "get_device_capability", lambda *_: (7, 5), torch.cuda.is_initialized),
            (triton, "has_triton", triton.has_triton_package, torch.cuda.is_initialized),
            (torch, "compile", lambda function, **_: function, bool),
        ):
            answering = _answering(getattr(module, function), answer, has_started)
            self._answers.enter_context(mock.patch.object(module, function, answering))

    def forget(self) -> None:
        """Restore torch's functions."""
        self._answers.close()


def _answering(
    real: Callable[..., Any], answer: Callable[..., Any], has_started: Callable[[], bool]
) -> Callable[..., Any]:
    """Wrap `real` to be `answer` for those libraries until `has_started` returns True."""

    def function(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith(_QUERYING_PACKAGES) and not has_started():
            return answer(*args, **kwargs)
        return real(*args, **kwargs)

    return function
