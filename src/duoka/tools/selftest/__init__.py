"""Self-test of this machine's GPUs: numbers, memory and speed of duoka's parts on them.

Each part runs in a process of its own; a part that fails, crashes or hangs becomes a finding.

- `run`: the parts, for one GPU of each kind and for all GPUs, and the report of a self-test
- `kernels`: attention, CUDA graphs and memory bandwidth of each GPU
- `workloads`: the engine, and a step of fine-tuning, beside their forecasts
- `checkpoint`: a checkpoint of random weights that fits on the GPUs
- `part`: the process of a part (`__main__`)
"""

from .run import run_selftest as selftest
from .run import to_report

__all__ = ["selftest", "to_report"]
