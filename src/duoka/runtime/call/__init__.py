"""Calling a model: as transformers' `generate` does, as training does, and over a paged cache.

- `chunk`: new tokens of one sequence, the unit that steps are made of
- `generate`: the base of callers that imitate `generate`
- `stepper`: calls without values, for tracing and checking; `learner`: training steps
- `cached_model`: chunks of many sequences, each over a cache of its own
- `paged_model`, `paged_step`, `paged_cache`, `paged_attention`: chunks of many sequences in one
  call, over a paged cache; `try_attention`: compares its kernel on a GPU with the CPU;
  `step_graphs`: CUDA graphs of decode steps; `latents`: latent attention (MLA)
- `encode_images`: encodes images to features, some at a time, before their prompt is read
"""
