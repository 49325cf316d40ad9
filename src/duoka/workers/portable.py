"""Errors in a form for sending to another process."""

from __future__ import annotations

import pickle


def make_portable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its text if the error can't be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # its class may raise any error
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
