"""Tracing: a model, run without data on one virtual GPU, becomes a profile."""

from .stepping import Stepper
from .trace import trace

__all__ = ["Stepper", "trace"]
