"""Errors in a form for other processes."""

from __future__ import annotations

import pickle


def make_portable(error: Exception) -> Exception:
    """Return the error, or its text as a RuntimeError where pickle can't send its class."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does with what it is made of
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
