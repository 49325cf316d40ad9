"""Garbage collection in processes that answer for long."""

from __future__ import annotations

import gc


def freeze_objects() -> None:
    """Let garbage be looked for only among what is made from now on.

    What torch and transformers have made, some 400,000 objects, stays until the end; to look
    through all of it would stop every answer for some 0.2 s, again and again.
    """
    gc.collect()
    gc.freeze()
