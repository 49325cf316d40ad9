"""Tuner: training by plan, over all GPUs.

- `learning_rate`: how the learning rate goes from step to step
- `checkpoints`, `optimizer_states`: a run saved, and resumed on other GPUs
- `result`: adapters and merged checkpoints, as others load them
"""
