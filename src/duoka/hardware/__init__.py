"""Hardware: GPUs, detected, declared or in the catalogue, with their budgets and speeds.

- `device`, `links`, `fleet`: a device, the link between two, and all usable devices
- `parse`: the forms of `--gpus`
- `detect`, `nvml`, `cuda_driver`: this machine's GPUs, in the driver's and in CUDA's order
- `catalogue`: published figures of common GPUs (`gpus.toml`)
- `gpu_generation`: memory needs by generation of GPUs
- `calibration`: measured figures, kept on disk
- `host`: host memory: available bytes, and the device for weights that stay there
"""
