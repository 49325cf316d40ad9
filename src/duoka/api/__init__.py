"""Implementation of the functions that `duoka` exports.

- `plan`: a model and GPUs → a plan, or plans of replicas; imports torch only to trace
- `load`: a plan → the model on its devices; `dispatch` for an existing model
- `check`: model code → all faults on several devices
"""
