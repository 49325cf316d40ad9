"""Tracing: a model, run without data on one virtual GPU, becomes a profile."""

from .stepping import Stepper
from .trace import Irregular, Subject, trace, trace_call, trace_workload

__all__ = ["Irregular", "Stepper", "Subject", "trace", "trace_call", "trace_workload"]
