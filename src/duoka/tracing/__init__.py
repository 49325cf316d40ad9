"""Tracing: a model, run without data on one virtual GPU, becomes a profile.

- `get_profile`: from the cache, or traced and kept there
- `trace`, `trace_serving`, `trace_training`: a model → its profile, for one batch, many requests,
  and training
- `blocks`: what must stay whole, and where model code moves tensors by itself
- `probe_sizes`: the steps that are recorded
- `assemble`: blocks and what each costs → a profile
- `record`, `record_returns`, `record_training`: what one step allocates, frees and passes on
- `op_costs`: what one operator computes, reads and writes
- `fit`: recordings at several sizes → rules
- `published_names`: a model's tensors under their own names and their checkpoint's
"""

from .assemble import TraceSpec
from .trace import Irregular, trace, trace_call, trace_workload
from .trace_serving import trace_serving
from .trace_training import profile_training

__all__ = [
    "Irregular",
    "TraceSpec",
    "profile_training",
    "trace",
    "trace_call",
    "trace_serving",
    "trace_workload",
]
