"""Quiet: what other libraries do on their import: no words to the user, no look at the GPUs."""

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

# transformers imports torchao where that is installed, which tells of kernels for hardware that
# isn't here, and makes torch and bitsandbytes do so.
_TALKATIVE = ("torchao", "torch.utils._pytree", "bitsandbytes")
_CURIOUS = ("torchao.", "bitsandbytes.")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """A scope in which these libraries tell errors only, and don't start CUDA."""
    # Whether there is a GPU torch then asks NVML; asked of CUDA, no later fork could use it.
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


class _Answers(MetaPathFinder):
    """Answers libraries that ask on their import what the GPU can, to offer kernels for it.

    torch would look that up on the GPU, which starts CUDA in a process that may only want to plan,
    or to fork later. Until CUDA has started they hear of a T4, which Triton and bitsandbytes serve.
    """

    def __init__(self) -> None:
        self._answers = ExitStack()
        self._is_answering = False

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> None:
        """Find nothing, and see what is imported."""
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
        """Let the functions be torch's own again."""
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
