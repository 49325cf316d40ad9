"""The check: a model's own code, run on a placement's virtual GPUs before a GPU is touched.

`prove` asks whether a plan runs and fits, and stops at the first thing that doesn't.
`check_subject` goes on after each fault, so that one run reports them all, with the lines of code
that they stand in.
"""

from .compute import Numbers, compute, is_computable
from .prove import Measured, prove
from .run import check_subject
from .subject import Subject, complete, device_name, device_of, read_entries

__all__ = [
    "Measured",
    "Numbers",
    "Subject",
    "check_subject",
    "complete",
    "compute",
    "device_name",
    "device_of",
    "is_computable",
    "prove",
    "read_entries",
]
