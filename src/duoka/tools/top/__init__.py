"""Top: memory of every GPU by owner and kind, beside the plan's forecast, and activity.

Reads the driver and the reports of duoka's processes, without importing torch.

- `snapshot`: the state of all GPUs at a moment, and the time until memory runs out
- `show`: a snapshot for people
- `record`: snapshots as rows of a CSV file, and for Prometheus
- `plot`: a recorded file as a picture
"""
