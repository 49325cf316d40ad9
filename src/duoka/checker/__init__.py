"""Checker: a model's own code, run on a placement's virtual GPUs before a GPU is touched.

- `prove`: whether a plan runs and fits; it stops at the first thing that doesn't
- `run`: one run that goes on after each fault, and its report (`check_subject`)
- `subject`: what is checked, a model where a map puts it; `stage_splits`: maps for what can't be
  planned
- `execute`: a call, prompt and decode steps, or loss and backward; `entry_hooks`: arguments that
  come to a placed module; `snapshot`: the model on virtual GPUs, and afterwards as it was
- `interceptor`: moves what mixes devices, so that the run goes on; `mixed_call`: such a call, and
  its fault; `gradients` and `hardcoded`: faults and warnings of other kinds
- `observer`: peaks, transfers and waiting
- `source_map`, `expressions`, `report_names`: what a report calls lines, operands, modules and
  devices
- `compute`: what a subject computes in real numbers
- `fix`: changes of the source that cure the faults
"""
