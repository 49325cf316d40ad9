"""Forecast: a profile and a workload become bytes and seconds. It knows neither torch nor plans.

- `workload`: what a model will be asked to do
- `profile`, `profile_cache`, `tensor_names`: what a model allocates and computes, block by block
- `flash_splits`: what flash attention takes for a moment over few queries
- `alloc_events`, `alloc_program`: the allocations of one workload; those of a stage, compiled
- `optimizer_memory`, `training_bounds`: optimizer states; lower bounds of training stages
- `allocator`, `device_memory`: CUDA's caching allocator; a device's memory, in Python and in C
- `serving`: the sizes of steps over a paged cache, and why no others need to be known
- `replay`, `replay_serving`, `replay_training`: a stage's steps, run through that memory
- `stage_bytes`: what comes of it
- `latency`, `serving_speed`: how long stages take, and how many requests they answer meanwhile
- `stages`, `costs`: the chain that is cut and its lower bounds; what the search asks of stages
- `forecast`: bytes and seconds of a placement
"""
