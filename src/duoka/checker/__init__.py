"""Checker: a model's own code, run on a placement's virtual GPUs before a GPU is touched.

- `prove`: proof that a plan runs and fits; it stops at the first failure
- `run`: one run that continues after each fault, and its report (`check_subject`)
- `subject`: the checked model with its device map; `stage_splits`: maps for models that can't be
  planned
- `execute`: a call, prefill and decode steps, or loss and backward; `entry_hooks`: entries into
  placed modules; `snapshot`: moves the model to virtual GPUs and restores it
- `interceptor`: moves tensors of mixed devices, so that the run continues; `mixed_call`: such a
  call and its fault; `gradients` and `hardcoded`: faults and warnings of other kinds
- `observer`: peak memory, transfers and synchronizations
- `source_map`, `expressions`, `report_names`: the source lines, operands, modules and devices that
  a report names
- `compute`: the results of a subject in real numbers
- `fix`: source changes that fix the faults
"""
