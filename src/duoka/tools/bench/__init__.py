"""Bench: what only running can tell: how fast this machine's GPUs are, what quantization costs.

Virtual GPUs go through the same code; what calibration measures on them says how fast the processor
is, and is kept nowhere.
"""
