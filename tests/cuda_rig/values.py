"""Numbers on the rig's GPUs, where kernels compute nothing.

Within `values()` every operation runs on the device as always, with all that PyTorch does around
it, and then once more on the CPU, over the very bytes of the device's memory, which the CPU can
read and write here. The device allocates nothing more for it.

While a CUDA graph is captured nothing is computed, and what operations return is poisoned: NaN, or
integers that are no index. Each replay within `values()` computes them (captured.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from cuda_rig import captured
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_map

SMALL = 2**15
_ATEN = torch.ops.aten
_INDEXING = (_ATEN.index, _ATEN.index_put, _ATEN.index_put_)
# What the CPU would draw differently: it stays zero. Empty tensors have no numbers at all.
_DRAWN = ("random", "normal_", "uniform_", "dropout", "bernoulli", "exponential")
_LEFT_ALONE = ("empty", *_DRAWN)
_COPIES = (_ATEN.copy_, _ATEN._to_copy)
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
        _hear_of_replays()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_captured = captured.capture_id(each.device for each in _on_device((args, kwargs))) > 0
        if func is _ATEN.convolution.default and args[0].is_cuda:
            result = _like(func(*tree_map(_on_meta, args)), args[0])
        elif is_captured:
            # A mask's places and a result's length stay unknown: CUDA refuses to wait for them.
            if func.overloadpacket is _ATEN.prod:
                result = _like(func(*tree_map(_on_meta, args), **kwargs), args[0])
            else:
                result = func(*args, **kwargs)
        elif func.overloadpacket in _INDEXING:
            args = args[0], [*_columns(args[1])], *args[2:]
            result = func(*args, **kwargs)
        elif _is_hosts(func) and list(_on_device(args)):
            return _from_host(func, args, kwargs)
        else:
            result = func(*args, **kwargs)
        if not func.is_view:
            self._compute(func, args, kwargs, list(_tensors(result)))
        return result

    def _compute(self, func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
        """Compute results on the CPU, or let the replays of the graph that is captured do so."""
        tensors = (*_tensors((args, kwargs)), *results)
        is_small = all(each.numel() <= self._most and not each.is_meta for each in tensors)
        devices = [each.device for each in _on_device(tensors)]
        if not is_small or not results or not devices:
            return
        is_computed = not any(part in str(func) for part in _LEFT_ALONE)
        capturing = [device for device in set(devices) if captured.capture_id([device])]
        if capturing:
            _poison_new(results, _tensors((args, kwargs)))
            keep = partial(_captured, func.overloadpacket in _COPIES)
            inputs, outputs = tree_map(keep, ((args, kwargs), results))
            if is_computed:
                captured.record(capturing[0], partial(_evaluate, func, *inputs, outputs))
            elif any(part in str(func) for part in _DRAWN):
                captured.record(capturing[0], partial(torch._foreach_zero_, outputs))
        elif is_computed:
            host_args, host_kwargs = tree_map(_on_host, (args, kwargs))
            _evaluate(func, host_args, host_kwargs, [_on_host(result) for result in results])


def _evaluate(func: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> None:
    """Call an operator on CPU tensors, and write what it returns into `results`."""
    try:
        computed = _tensors(_call(func, args, kwargs))
    except (RuntimeError, NotImplementedError, TypeError):
        return  # no such kernel on the CPU
    for result, value in zip(results, computed, strict=False):
        if result.shape == value.shape and result.numel():
            result.copy_(value)
            _rig().rig_wrote(result.data_ptr(), result.numel() * result.itemsize)


def _poison_new(results: list[torch.Tensor], inputs: Iterator[torch.Tensor]) -> None:
    """Poison the results that share no memory with an input."""
    known = {each.untyped_storage().data_ptr() for each in inputs}
    for result in results:
        is_new = result.untyped_storage().data_ptr() not in known
        if is_new and result.is_cuda and result.numel():
            captured.poison(memory_of(result))
            _rig().rig_wrote(result.data_ptr(), result.numel() * result.itemsize)


def _captured(is_copy: bool, value: Any) -> Any:
    """Return what a graph keeps of an argument: addresses, and a kernel's numbers by value."""
    if isinstance(value, torch.Tensor) and not value.is_cuda:
        return memory_of(value) if value.is_pinned() and (value.dim() or is_copy) else value.clone()
    return _on_host(value)


@cache
def _hear_of_replays() -> None:
    """Let a replay compute where its thread is within `values()`, from now on."""
    launch = torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        if any(isinstance(mode, values) for mode in _get_current_dispatch_mode_stack()):
            captured.replay(partial(launch, graph))
        else:
            launch(graph)

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]


@cache
def _rig() -> ctypes.CDLL:
    rig = ctypes.CDLL(None)
    rig.rig_wrote.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return rig


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
