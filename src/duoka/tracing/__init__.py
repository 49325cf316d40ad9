"""Tracing: a model, run without data on one virtual GPU, becomes a profile."""

from .learning import Learner
from .stepping import Stepper
from .trace import Irregular, Subject, trace, trace_call, trace_workload
from .training import profile_training

__all__ = [
    "Irregular",
    "Learner",
    "Stepper",
    "Subject",
    "profile_training",
    "trace",
    "trace_call",
    "trace_workload",
]
