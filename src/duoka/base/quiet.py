"""Quiet: other libraries' words about themselves, kept from the user while they are imported."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# transformers imports torchao where that is installed, which tells of kernels for hardware that
# isn't here, and makes torch and bitsandbytes do so.
_TALKATIVE = ("torchao", "torch.utils._pytree", "bitsandbytes")


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """A scope in which these libraries tell errors only."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
