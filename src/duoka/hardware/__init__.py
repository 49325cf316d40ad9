"""Hardware: the GPUs that are there, declared or in the catalogue, and what they can do.

- `device`, `links`, `fleet`: one device, the ways between two, and all that may be used
- `parse`: fleets as people write them
- `detect`, `nvml`, `cuda_driver`: this machine's GPUs, as the driver and CUDA number them
- `catalogue`: what is publicly known of common GPUs (`gpus.toml`)
- `gpu_generation`: what of memory differs from one generation of GPUs to the next
- `calibration`: what was measured on GPUs, kept on disk
- `host`: the memory that the processor may use
"""
