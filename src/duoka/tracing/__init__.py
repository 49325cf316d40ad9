"""Tracing: a model, run without data on one virtual GPU, becomes a profile."""

from .trace import Irregular, Subject, trace, trace_call, trace_workload
from .trace_training import profile_training

__all__ = [
    "Irregular",
    "Subject",
    "profile_training",
    "trace",
    "trace_call",
    "trace_workload",
]
