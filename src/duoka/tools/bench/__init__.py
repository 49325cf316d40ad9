"""Bench: what only running can tell.

Virtual GPUs go through the same code; what calibration measures on them says how fast the processor
is, and is kept nowhere.

- `calibrate`: how fast this machine's GPUs are
- `quality`: what quantization costs, as a perplexity on a text
"""
