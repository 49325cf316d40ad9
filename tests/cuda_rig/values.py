"""Numbers on the rig's GPUs, where kernels compute nothing.

Within `values()` every operation runs on the device as always, with all that PyTorch does around
it, and then once more on the CPU, over the very bytes of the device's memory, which the CPU can
read and write here. The device allocates nothing more for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

SMALL = 2**15
_ATEN = torch.ops.aten
_INDEXING = (_ATEN.index, _ATEN.index_put, _ATEN.index_put_)
# What the CPU would draw differently, or has nothing to add to.
_LEFT_ALONE = ("empty", "random", "normal_", "uniform_", "dropout", "bernoulli", "exponential")
_ATTENTION = "_scaled_dot_product"


class values(TorchDispatchMode):  # noqa: N801  (used as a scope, like torch.no_grad)
    """A scope in which operations on tensors of up to `most` elements compute; None for all.

    Small tensors alone are enough for what steers a program: token IDs, masks, lengths. With all, a
    small model computes what it should, through CUDA's dispatch (RIG_COPY_LIMIT must admit its
    weights). The scope is this thread's: backward's threads compute nothing.
    """

    def __init__(self, most: int | None = SMALL) -> None:
        super().__init__()
        self._most = 2**62 if most is None else most
        self._wrote = ctypes.CDLL(None).rig_wrote
        self._wrote.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in _INDEXING:
            args = args[0], [*_columns(args[1])], *args[2:]
        elif func is _ATEN.convolution.default:
            return _like(func(*tree_map(_on_meta, args)), args[0])
        elif _is_hosts(func) and list(_on_device(args)):
            return _from_host(func, args, kwargs)
        result = func(*args, **kwargs)
        if not func.is_view and not any(part in str(func) for part in _LEFT_ALONE):
            self._compute(func, args, kwargs, list(_tensors(result)))
        return result

    def _compute(self, func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
        tensors = (*_tensors((args, kwargs)), *results)
        is_small = all(each.numel() <= self._most and not each.is_meta for each in tensors)
        if not is_small or not results or not any(each.is_cuda for each in tensors):
            return
        host_args, host_kwargs = tree_map(_on_host, (args, kwargs))
        try:
            computed = _tensors(_call(func, host_args, host_kwargs))
        except (RuntimeError, NotImplementedError, TypeError):
            return  # no such kernel on the CPU
        for result, value in zip(results, computed, strict=False):
            if result.shape == value.shape and result.numel():
                _on_host(result).copy_(value)
                if result.is_cuda:
                    self._wrote(result.data_ptr(), result.numel() * result.itemsize)


def _is_hosts(func: Any) -> bool:
    """Whether it can't run here: its result's length are values, or it is compiled by nvrtc."""
    is_compiled = func.overloadpacket is _ATEN.prod
    return is_compiled or torch.Tag.dynamic_output_shape in func.tags


def _from_host(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator's results, computed on the CPU and copied."""
    device = next(_on_device(args)).device
    results = _call(func, *tree_map(_on_host, (args, kwargs)))
    return tree_map(lambda tensor: tensor.to(device), results)


def _columns(indices: Any) -> Iterator[Any]:
    """Indices with each mask as the places where it is true, which is how CUDA takes it, too."""
    for index in indices:
        if index is None or index.dtype != torch.bool or not index.is_cuda:
            yield index
        else:
            yield from memory_of(index).nonzero().to(index.device).unbind(1)


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor over the memory of one on the rig's GPUs."""
    if not tensor.numel():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    length = 1 + sum((size - 1) * stride for size, stride in steps)
    memory = (ctypes.c_char * (length * tensor.itemsize)).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return memory_of(value) if value.is_cuda else value
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _like(meta: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """What an operator would return, which is cuDNN's here: without its workspace."""
    shape = meta.shape, meta.stride()
    return torch.empty_strided(*shape, dtype=meta.dtype, device=tensor.device)


def _on_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    """The operator on CPU tensors; attention by the function that all its kernels stand for."""
    name = func.overloadpacket.__name__
    if not name.startswith(_ATTENTION):
        return func(*args, **kwargs)
    named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    named |= kwargs
    query, key = named["query"], named["key"]
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        named["value"],
        attn_mask=named.get("attn_bias"),
        is_causal=named.get("is_causal", False),
        scale=named.get("scale"),
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _on_device(tree: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in _tensors(tree) if tensor.is_cuda)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor))
