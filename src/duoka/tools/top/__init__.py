"""Top: memory of every GPU by owner and kind, beside the plan's forecast, and activity.

Reads the driver and the reports of duoka's processes, without importing torch.

- `snapshot`: the state of all GPUs at a moment
- `show`: a snapshot for people
"""
