"""Bench: what only running can tell.

Virtual GPUs go through the same code; what calibration measures on them says how fast the processor
is, and is kept nowhere.

- `calibrate`: how fast this machine's GPUs are
- `deployments`: the ways to run a model, forecast, and the best of them; `measure`: each of them
  run in processes of its own (`__main__`)
- `quality`: what quantization costs, as a perplexity on a text
"""
