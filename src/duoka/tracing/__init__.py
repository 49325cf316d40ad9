"""Tracing: a model, run without data on one virtual GPU, becomes a profile."""

from .stepping import Stepper
from .trace import Subject, trace, trace_call

__all__ = ["Stepper", "Subject", "trace", "trace_call"]
