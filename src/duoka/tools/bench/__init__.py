"""Bench: measurements by running.

Virtual GPUs go through the same code; a calibration on them measures the processor, and isn't kept.

- `calibrate`: speeds of this machine's GPUs
- `deployments`: the ways to run a model, forecast, and the best of them; `measure`: each of them
  run in processes of its own (`__main__`)
- `quality`: what quantization costs, as a perplexity on a text
"""
