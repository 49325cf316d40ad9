"""Stages: each process runs its part of a model's own, unchanged `forward`, and of its backward.

A stage is a run of blocks on one device, in the order of calls; a placement that comes back to a
device (a head tied to the embedding) has several stages there. Every process has the whole model,
whose other stages' parameters are on the meta device, and calls its `forward` with all inputs.
Blocks of other stages don't run: they return placeholders. Where a block of its own is called, what
comes from another stage takes the placeholders' place; where the last tensor that others need has
been sent, `forward` is left. Code around the blocks thus runs in every process, on real tensors
wherever it needs only the inputs and the process's own blocks.

- `route`: which tensors cross between stages, found in one run without data
- `placeholder`: tensors that another stage has
- `interceptor`: the calls of blocks, and who decides what they do
- `micro_batch`: forward and backward of one micro-batch through one stage
- `schedule`: in which order devices take forward and backward passes: 1F1B, GPipe, sequential
- `channels`: how tensors reach other stages: within a process, or by torch.distributed;
  `shared_memory`: through memory that the processes of one machine see
- `rendezvous`: the store at which worker processes find each other
- `execute`: all stages in one process, or those of this one
"""
