"""Calling a model: as transformers' `generate` does, as training does, and over a paged cache.

- `chunk`: new tokens of one sequence, the unit that steps are made of
- `generate`: what `generate` knows of a model before its first call
- `stepper`: calls without values, for tracing and proving; `learner`: steps of training
- `cached_model`: chunks of many sequences, each over a cache of its own
- `paged_model`, `paged_attention`: chunks of many sequences in one call, over a paged cache
- `encode_images`: images to features, some at a time, before their prompt is read
"""
