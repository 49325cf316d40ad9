"""Bench: measurements by running.

Virtual GPUs use the same code; a calibration of virtual GPUs measures the CPU, and is not saved.

- `calibrate`: speeds of this machine's GPUs and of its memory
- `deployments`: the deployments of a model with forecasts, and the recommended deployment
- `measure`: run a deployment, each replica in a process of its own (`__main__`)
- `quality`: the loss from quantization, as perplexity on a text
"""
