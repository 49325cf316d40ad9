"""Tracing: run a model without data on a virtual GPU, and derive its profile.

- `get_profile`: from the cache, or traced and kept there
- `trace_generation`, `trace_serving`, `trace_training`: schedules of steps that are recorded
- `tracer`: runs a schedule, and fits the rules of a profile
- `blocks`: what must stay whole, and where model code moves tensors by itself
- `boundaries`: calls of modules, observed or replaced, and explicit moves
- `probe_sizes`: the sizes of the steps that are recorded
- `record`, `memo`, `recorded`: the allocation traces of a step; blocks that are alike run once
- `op_costs`: what one operator computes, reads and writes
- `fit`: traces recorded at several sizes → rules
- `assemble`: blocks and what each costs → a profile
- `published_names`: a model's tensors under their own names and their checkpoint's
"""

from .assemble import TraceSpec
from .trace_generation import trace, trace_call, trace_workload
from .trace_serving import trace_serving
from .trace_training import profile_training
from .tracer import Irregular

__all__ = [
    "Irregular",
    "TraceSpec",
    "profile_training",
    "trace",
    "trace_call",
    "trace_serving",
    "trace_workload",
]
