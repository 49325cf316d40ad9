"""Ray warns of itself while it is imported; without it these tests are left out."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]

if find_spec("ray"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import ray.serve  # noqa: F401
