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
_TALKATIVE = ("torchao", "torch.utils._pytree", "bitsandbytes")
_CURIOUS = ("torchao.", "bitsandbytes.")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Let these libraries log errors only, and not initialise CUDA, within a scope."""
    # torch then looks for GPUs by NVML; by CUDA, no later fork could use CUDA.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    curious = _Answers()
    sys.meta_path.insert(0, curious)
    try:
        yield
    finally:
        sys.meta_path.remove(curious)
        curious.forget()
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# Import hooks run before a module is executed. Finding none of the modules itself, the finder gets
# to know that torchao or bitsandbytes begins its import, and patches torch for as long as the scope
# lasts.
class _Answers(MetaPathFinder):
    """Answers queries of a GPU's capability by libraries during their import.

    torch would query the GPU, which initialises CUDA in a process that may only plan, or fork
    later. Until CUDA is initialised the answer is that of a T4, supported by Triton and
    bitsandbytes.
    """

    def __init__(self) -> None:
        self._answers = ExitStack()
        self._is_answering = False

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> None:
        """Find nothing; patch torch when one of the libraries is imported."""
        torch: Any = sys.modules.get("torch")
        if not name.startswith(_CURIOUS) or self._is_answering or torch is None:
            return
        self._is_answering = True
        triton = import_module("torch.utils._triton")
        for module, function, answer in (
            (torch.cuda, "get_device_capability", (7, 5)),
            (triton, "has_triton", triton.has_triton_package()),
        ):
            real = getattr(module, function)
            answering = _answering(real, answer, torch.cuda.is_initialized)
            self._answers.enter_context(mock.patch.object(module, function, answering))

    def forget(self) -> None:
        """Restore torch's functions."""
        self._answers.close()


def _answering(
    real: Callable[..., Any], answer: Any, has_started: Callable[[], bool]
) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        asking = sys._getframe(1).f_globals.get("__name__", "")
        if asking.startswith(_CURIOUS) and not has_started():
            return answer
        return real(*args, **kwargs)

    return function
