"""Tools: programs built on the public functions.

- `demo`: train a small model, then plan, prove, load and run it
- `top`: memory and activity of every GPU, with the memory of duoka's processes
- `bench`: measurements of GPUs, deployments and quantization
- `doctor`: problems of a machine, with advice
- `selftest`: numbers, memory and speed of duoka's parts on a machine's GPUs
"""
