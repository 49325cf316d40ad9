"""Sums of gradients over the replicas of a model, computed in buckets while backward still runs.

torch's DistributedDataParallel does this for whole models: each replica has one process, or equal
processes. Replicas of a run may be split differently over GPUs, and micro-batches are pipelined
through them. DistributedDataParallel also keeps its buckets on the GPU, as large as all gradients.
Buckets here are in host memory, and gloo sums them there; the GPU needs nothing beside gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from queue import SimpleQueue
from threading import Thread
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from duoka.base.units import MIB
from duoka.runtime import devices

from .layout import Layout

Group = dist.ProcessGroup | None
Parameters = Mapping[str, nn.Parameter]
_Missing = list[tuple[nn.Parameter, Tensor]]
_BUCKET_BYTES = 25 * MIB  # DistributedDataParallel's default


class _GradientBucket(NamedTuple):
    """Parameters of one dtype, and the process group of their owners."""

    group: Group
    parameters: list[nn.Parameter]


# Two replicas of a model with layers 0 and 1, the first on one GPU, the second on two:
#
#   rank 0: layers 0 and 1      rank 1: layer 0      rank 2: layer 1
#
# Gradients of layer 0 are summed over ranks {0, 1}, those of layer 1 over {0, 2}: each set of
# owners has a process group. Buckets are filled with parameters in reverse model order, in which
# backward makes gradients. In the last backward pass of a step, a hook of each parameter notices
# its final gradient; with its last gradient a bucket goes to a thread of its own:
#
#   main thread   backward of layer 1 │ backward of layer 0           │ `finish`: wait
#   thread                            │ copy layer 1, sum, copy back  │ copy 0, sum, copy back
#
# The thread reduces one bucket at a time, in one buffer on the host, pinned for CUDA. All processes
# take buckets in the same order: that of their last parameters. So no two processes wait for each
# other in different groups.
#
# A bucket ends with a count for each parameter: 1 if this rank has a gradient, 0 if not. A summed
# count of 0 means that no replica has a gradient: `grad` stays None, and the optimizer skips the
# parameter as on one GPU.
class GradientSum:
    """All-reduces the gradients of each parameter over the replicas.

    Replicas may be split differently over GPUs, so parameters differ in the ranks that own them.

    Parameters
    ----------
    layout : Layout
    names : iterable of str
        The trained parameters of the whole model, in model order.
    parameters : mapping of str to Parameter
        The trained parameters of this process, all on one device.
    """

    def __init__(self, layout: Layout, names: Iterable[str], parameters: Parameters) -> None:
        # The parameters without a final gradient; None before the last backward pass.
        self._awaited: set[Tensor] | None = None
        self._buckets: list[_GradientBucket] = []
        self._unbegun: list[_GradientBucket] = []
        self._begun: SimpleQueue[tuple[_GradientBucket, torch.cuda.Event | None]] = SimpleQueue()
        self._ended: SimpleQueue[_Missing | Exception] = SimpleQueue()
        if len(layout.plans) == 1:
            return
        # torch.distributed requires every process to create every group, in the same order.
        owners = {name: layout.owners(name) for name in names}
        groups = {ranks: dist.new_group(ranks) for ranks in dict.fromkeys(owners.values())}
        own_names = [name for name in reversed(owners) if name in parameters]
        self._buckets = _fill_buckets((groups[owners[n]], parameters[n]) for n in own_names)
        self._unbegun = [*self._buckets]
        if not self._buckets:
            return
        self._device = self._buckets[0].parameters[0].device
        # A bucket needs a gradient and a count for each parameter.
        sizes = [sum(p.nbytes + p.itemsize for p in bucket.parameters) for bucket in self._buckets]
        self._buffer = devices.empty_host([max(sizes)], torch.uint8, self._device)
        for parameter in parameters.values():
            parameter.register_post_accumulate_grad_hook(self._note_gradient)
        # A daemon, not joined at exit: a sum may wait forever for a process that has failed.
        Thread(target=self._run, daemon=True).start()

    def begin_last_backward(self) -> None:
        """Note that the next backward pass is the last one of this process in the step."""
        self._awaited = {parameter for bucket in self._buckets for parameter in bucket.parameters}

    def _note_gradient(self, parameter: Tensor) -> None:
        """Begin to reduce the next buckets if their gradients are final; a hook of parameters."""
        if self._awaited is None:
            return
        self._awaited.remove(parameter)  # KeyError if backward accumulates a gradient twice
        self._begin_final(self._awaited)

    def _begin_final(self, awaited: set[Tensor]) -> None:
        """Begin to reduce the next buckets whose gradients are final, beside the device's work."""
        while self._unbegun and awaited.isdisjoint(reversed(self._unbegun[0].parameters)):
            self._begun.put((self._unbegun.pop(0), devices.record_event(self._device)))

    def finish(self) -> None:
        """Replace gradients by their sums over the replicas; a missing gradient counts as zero.

        Reduces the remaining buckets, and waits for all. A parameter whose `grad` is None in all
        replicas keeps None.
        """
        self._awaited = None
        self._begin_final(set())
        for _ in self._buckets:
            result = self._ended.get()
            if isinstance(result, Exception):
                raise result
            for parameter, total in result:
                parameter.grad = devices.send(total, self._device)
        self._unbegun = [*self._buckets]

    def _run(self) -> None:
        """Reduce buckets in the order in which they are begun."""
        devices.enter_copy_thread(self._device)
        while True:
            bucket, event = self._begun.get()
            try:
                devices.wait(event)
                self._ended.put(self._reduce(bucket))
            except Exception as error:  # a lost GPU or process: `finish` raises it
                self._ended.put(error)

    def _reduce(self, bucket: _GradientBucket) -> _Missing:
        """Sum a bucket's final gradients over its owners; return sums of gradients missing here."""
        parameters = bucket.parameters
        sizes = [*(parameter.numel() for parameter in parameters), len(parameters)]
        flat = self._buffer[: sum(sizes) * parameters[0].itemsize].view(parameters[0].dtype)
        *parts, counts = flat.split(sizes)
        slots = [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
        for index, (slot, parameter) in enumerate(zip(slots, parameters, strict=True)):
            counts[index] = parameter.grad is not None
            gradient = torch.zeros(()) if parameter.grad is None else parameter.grad
            slot.copy_(gradient, non_blocking=True)
        devices.wait(devices.record_event(self._device))
        total = flat.float()  # the buffer itself if it is float32
        dist.all_reduce(total, group=bucket.group)
        flat.copy_(total)
        missing: _Missing = []
        for count, slot, parameter in zip(counts.tolist(), slots, parameters, strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(slot, non_blocking=True)
            elif count:
                missing.append((parameter, slot.clone()))
        devices.wait(devices.record_event(self._device))
        return missing


def _fill_buckets(parameters: Iterable[tuple[Group, nn.Parameter]]) -> list[_GradientBucket]:
    """Fill buckets with parameters; return them in the order of their last parameters."""
    num_bytes = Counter[tuple[Group, torch.dtype]]()
    buckets: dict[tuple[Group, torch.dtype, int], list[nn.Parameter]] = {}
    for group, parameter in parameters:
        kind = group, parameter.dtype
        num_bytes[kind] += parameter.nbytes
        key = *kind, num_bytes[kind] // _BUCKET_BYTES
        buckets[key] = [*buckets.pop(key, []), parameter]
    return [_GradientBucket(group, bucket) for (group, *_), bucket in buckets.items()]
