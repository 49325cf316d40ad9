"""API: the front doors, behind the names of `duoka` itself.

- `plan`: a model and GPUs → a plan, or several copies' plans; torch only where it must be traced
- `load`: a plan → the model on its devices; `dispatch` for a model that is there
- `check`: model code → every fault that it would have on several devices
"""
