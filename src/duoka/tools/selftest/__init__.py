"""Self-test of this machine's GPUs: numbers, memory and speed of duoka's parts on them.

Each part runs in a process of its own; a part that fails, crashes or hangs becomes a finding.

- `run`: the parts, for each GPU and for all GPUs
- `parts`: attention, CUDA graphs, engine and fine-tuning, in the process of a part
- `checkpoint`: a checkpoint of random weights that fits on the GPUs
"""
