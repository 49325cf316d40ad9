"""Tuner: training by plan, over all GPUs.

- `checkpoints`, `optimizer_states`: a run saved, and resumed on other GPUs
"""
