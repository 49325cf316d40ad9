"""Forecast: bytes and seconds from a profile and a workload, without torch and without plans.

- `workload`: batch, context and cache of inference, or a batch to train on
- `profile`, `profile_cache`, `tensor_names`: allocations, costs and tensors of a model by block
- `hosting`: profiles with the experts of some blocks in host memory
- `flash_splits`: memory of flash attention over few queries
- `alloc_events`, `alloc_program`: the allocations of a workload; compiled allocations of a stage
- `optimizer_memory`: states and temporaries of optimizers
- `allocator`, `device_memory`: CUDA's caching allocator; a device's memory, in Python and in C
- `serving`: the sizes of steps over a paged cache, as a finite set
- `replay`, `replay_serving`, `replay_training`: passes of a stage on that memory, by schedule
- `stage_bytes`: the bytes of a stage at its peak
- `latency`, `serving_speed`: seconds of stages, and tokens per second of requests
- `stages`, `training_bounds`: the chain of blocks to cut, and lower bounds of its stages' bytes
- `costs`: bytes and seconds of stages, for the search
- `forecast`: bytes and seconds of a placement
"""
