"""Top: every GPU now: whose its memory is, beside the plan's forecast, and what it is doing.

It reads what the driver and duoka's processes say, and imports no torch.

- `snapshot`: all that is known at one moment, and for how long the memory will do
- `show`: that for people
- `record`: that into a file of rows, and for Prometheus
- `plot`: a recorded file as a picture
"""
