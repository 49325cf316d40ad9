"""Tracing: run a model without data on a virtual GPU, and derive its profile.

- `get_profile`: a profile from the cache, or traced and then cached
- `trace_generation`, `trace_serving`, `trace_training`: the schedules of steps to record
- `tracer`: runs a schedule, and fits the rules of a profile
- `blocks`: modules that must stay on one device, and explicit moves in model code
- `boundaries`: observed and replaced module calls, and explicit moves
- `probe_sizes`: the sizes of the steps to record
- `record`, `memo`, `recorded`: the allocation traces of a step; identical blocks run once
- `op_costs`: FLOPs, memory traffic and launches of one operator
- `fit`: traces recorded at several sizes → rules
- `assemble`: blocks and their costs → a profile
- `published_names`: a model's tensors by native name and by name in the checkpoint
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
