"""Hardware: the GPUs that are there, declared or in the catalogue, and what they can do."""
