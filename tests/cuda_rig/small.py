"""Real numbers on the rig, from the CPU.

The rig's kernels compute nothing, so `generate` would never see that it is done, and a mask of ones
would read as zeros. Within `values()` every operation runs as always, on the device; where all its
tensors are small it then runs again on the CPU, over the very same bytes, which the CPU can read
and write on the rig. Nothing more is allocated on the device.

Within ``values(most=None)`` all tensors have numbers: a small model then computes what it should,
slowly, through CUDA's dispatch (RIG_COPY_LIMIT must be larger than its weights). The mode belongs
to a thread: backward, which CUDA runs in threads of its own, computes nothing. Neither has what is
random: that stays zero.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

MOST = 1 << 15  # numbers in a small tensor
_WITHOUT = ("random", "empty", "normal_", "uniform_", "dropout")


def cpu_view(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of one on the rig."""
    if not tensor.is_cuda:
        return tensor
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    length = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_char * (length * tensor.itemsize)).from_address(tensor.data_ptr())
    flat = torch.frombuffer(memory, dtype=tensor.dtype)
    return flat.as_strided(tensor.shape, tensor.stride())


class values(TorchDispatchMode):  # noqa: N801  (a scope, as `contextlib`'s are)
    """A scope in which tensors of up to so many numbers have them."""

    def __init__(self, most: int | None = MOST) -> None:
        super().__init__()
        self._most = most
        self._wrote = ctypes.CDLL(None).rig_wrote
        self._wrote.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view or any(name in str(func) for name in _WITHOUT):
            return result
        outputs = _tensors(result)
        if not any(output.is_cuda for output in outputs):
            return result
        if not all(map(self._is_small, (*outputs, *_tensors((args, kwargs))))):
            return result
        try:
            numbers = _tensors(_on_cpu(func, tree_map(_to_cpu, args), tree_map(_to_cpu, kwargs)))
        except (RuntimeError, NotImplementedError, TypeError):
            return result  # the CPU doesn't have it, or not so
        for output, number in zip(outputs, numbers, strict=False):
            self._write(output, number)
        return result

    def _is_small(self, tensor: Tensor) -> bool:
        return not tensor.is_meta and (self._most is None or tensor.numel() <= self._most)

    def _write(self, output: Tensor, number: Tensor) -> None:
        like = output.shape == number.shape and output.dtype == number.dtype
        if output.is_cuda and like and output.numel():
            cpu_view(output).copy_(number)
            self._wrote(output.data_ptr(), output.numel() * output.itemsize)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _to_cpu(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return cpu_view(leaf)
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def _on_cpu(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The same on CPU tensors; attention by the one function that every kernel stands for."""
    name = func.overloadpacket.__name__  # type: ignore[attr-defined]
    if not name.startswith("_scaled_dot_product"):
        return func(*args, **kwargs)
    query, key, value = args[:3]
    names = ["dropout_p", "is_causal"]
    if "efficient" in name or "cudnn" in name:
        names = ["attn_bias", "compute_log_sumexp", *names]
    options = {**dict(zip(names, args[3:], strict=False)), **kwargs}
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=options.get("attn_bias"),
        is_causal=options.get("is_causal", False),
        scale=options.get("scale"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
