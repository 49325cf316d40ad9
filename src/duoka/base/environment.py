"""Table of all environment variables that duoka reads; docs/cli.md is generated from it."""

from __future__ import annotations

VARIABLES = {
    "DUOKA_CACHE": "directory for cached profiles and calibrations; by default duoka in the user's "
    "cache directory",
    "XDG_CACHE_HOME": "the user's cache directory; by default ~/.cache",
    "DUOKA_API_KEY": "API key of duoka serve, in place of --api-key-file",
    "DUOKA_GPUS": "on a Ray node: GPUs for duoka serve --on ray, in the form of --gpus",
    "RAY_ADDRESS": "address of the Ray cluster for duoka serve --on ray",
    "CUDA_VISIBLE_DEVICES": "GPUs that CUDA shows to the process, in this order",
    "CUBLAS_WORKSPACE_CONFIG": "size of cuBLAS's workspace, which the forecast includes",
    "DUOKA_ATTENTION": "gather: the engine gathers keys and values of a paged KV cache before "
    "attention; flash: it reads 16-bit pages in place without testing that on the GPU first. By "
    "default in place, if the test succeeds",
    "PYTORCH_ALLOC_CONF": "settings of PyTorch's allocator; the forecast follows "
    "expandable_segments, and settings that it can't model are refused",
    "PYTORCH_CUDA_ALLOC_CONF": "older name of PYTORCH_ALLOC_CONF; PyTorch prefers it",
    "OMP_NUM_THREADS": "CPU threads of each worker process",
    "GLOO_SOCKET_IFNAME": "network interface between worker processes",
    "HF_TOKEN": "token for the Hub, read by huggingface_hub; masked in messages",
    "HUGGING_FACE_HUB_TOKEN": "older name of HF_TOKEN",
    "HF_ENDPOINT": "URL of the Hub, read by huggingface_hub",
    "HF_HOME": "directory of huggingface_hub's cache",
    "HF_HUB_CACHE": "directory of downloaded repositories, read by huggingface_hub",
    "HF_HUB_OFFLINE": "1 forbids requests to the Hub",
    "NO_COLOR": "disables colors",
    "FORCE_COLOR": "enables colors where the output is not a terminal",
    "RANK": "set by torchrun: number of the process",
    "WORLD_SIZE": "set by torchrun: number of processes",
    "LOCAL_WORLD_SIZE": "set by torchrun: number of processes on this machine",
    "TORCHELASTIC_RESTART_COUNT": "set by torchrun: how often the processes were restarted",
}
