"""Stages: each process runs its part of a model's own, unchanged `forward`, and of its backward.

A stage is a run of blocks on one device, in the order of calls; a placement that comes back to a
device (a head tied to the embedding) has several stages there. Every process has the whole model,
with the parameters of other stages on the meta device, and calls `forward` with all inputs. Blocks
of other stages don't run: they return placeholders. When a block of the process's own stage is
called, tensors received from other stages replace the placeholders among its arguments. When the
last tensor for other stages has been sent, the process leaves `forward`. So code around the blocks
runs in every process, on real tensors if it needs only the inputs and the process's own blocks.

- `route`: which tensors cross between stages, found in one run without data
- `placeholder`: stand-ins for tensors of another stage
- `interceptor`: hands the calls of blocks to a decider, which runs them or not
- `micro_batch`: forward and backward of one micro-batch through one stage
- `schedule`: the order of forward and backward passes: 1F1B, GPipe, sequential
- `channels`: sends tensors to other stages, within a process or by torch.distributed;
  `shared_memory`: through memory that all processes of one machine map
- `rendezvous`: the store at which worker processes find each other
- `execute`: runs micro-batches through the stages of this process, all or some
"""
