"""Offloading: weights that stay in the host's memory, and come to a GPU whenever they are used.

The streamed modules of a GPU take turns in two buffers there: while a module computes, the weights
of the next one are copied into the other buffer, on a stream of their own where the device has
streams.

    buffer 0:  copy A │ compute A │ copy C      │ compute C
    buffer 1:         │ copy B    │ compute B   │ copy D

For the time of its call a module's parameters and buffers are views of a buffer; before and after
they are the host's own, so a state dict is what it was. A copy in a buffer is used again only while
the host's tensors are the same objects at the same versions. A buffer of the module that the call
writes to (no parameter) is copied back to the host. Copies come out of memory that the driver has
pinned; without streams, they are made when a module is called.

Streamed weights can't be trained: by the time of backward, another module's weights are in their
place. Training is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from mmap import PAGESIZE
from typing import Any

import torch
from torch import Tensor, nn

from duoka.errors import ModelError, UsageError
from duoka.forecast.allocator import rounded_bytes
from duoka.forecast.profile import NUM_BUFFERS, buffer_bytes

from .arguments import mapped
from .classes import AROUND, update_class
from .place_tensors import as_parameter

Version = tuple[int, int, int]
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class Streamer:
    """The streamed modules of a device, in the order of their calls, and their buffers.

    Parameters
    ----------
    device : torch.device
    modules : sequence of nn.Module
        With tensors on the host; or on meta, where nothing is copied.

    Raises
    ------
    ModelError
        If a weight is of a kind that can't be a view of a buffer.
    """

    def __init__(self, device: torch.device, modules: Sequence[nn.Module]) -> None:
        self._device = device
        self._units = [_Unit(module) for module in modules]
        self._lock = threading.RLock()
        self._running: list[int] = []
        self._begin()

    def _begin(self) -> None:
        """Allocate the buffers."""
        for unit in self._units:
            unit.find_tensors()
        buffers = [
            torch.zeros(size, dtype=torch.uint8, device=self._device)
            for size in buffer_bytes([unit.num_bytes for unit in self._units])
        ]
        for index, unit in enumerate(self._units):
            unit.make_views(buffers[index % NUM_BUFFERS])
        self._contents: list[tuple[int, list[Version]] | None] = [None] * len(buffers)
        self._pinned = Pinned(self._device, [host for unit in self._units for host in unit.hosts()])
        self._lane: Lane | None = Lane(self._device, len(buffers))

    def __getstate__(self) -> tuple[torch.device, list[_Unit]]:
        return self._device, self._units

    def __setstate__(self, state: tuple[torch.device, list[_Unit]]) -> None:
        self._device, self._units = state
        self._lock = threading.RLock()
        self._running = []
        # A copy allocates buffers when it is called: its modules aren't complete yet.
        self._lane = None

    def install(self) -> None:
        """Let the modules' weights come when they are called."""
        for index, unit in enumerate(self._units):
            unit.module.__dict__[AROUND] = partial(self.run, index)
            update_class(unit.module)

    def remove(self) -> None:
        """Undo `install`; the weights stay on the host."""
        for unit in self._units:
            del unit.module.__dict__[AROUND]
            update_class(unit.module)
        if self._lane is not None:
            self._pinned.release()
        self._lane = None

    def run(self, index: int, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a module with its weights on the device."""
        unit = self._units[index]
        with_gradients = torch.is_grad_enabled()
        if with_gradients and unit.module.training:
            raise _untrainable()
        # Other threads wait for their turn: the buffers are for one call at a time.
        with self._lock:
            if index in self._running:
                return call(*args, **kwargs)
            output = self._run(index, unit, call, args, kwargs)
        return mapped(output, _without_backward) if with_gradients else output

    def _run(
        self, index: int, unit: _Unit, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if self._lane is None:
            self._begin()
        lane, buffer = self._lane, index % NUM_BUFFERS
        assert lane is not None
        if any(running % NUM_BUFFERS == buffer for running in self._running):
            raise ModelError(
                "an offloaded module calls another one",
                hint="offload only modules that run one after another",
            )
        # Of A, B, C, … in two buffers: when B is called, its weights are in buffer 1 already, or
        # are copied now; C's copy into buffer 0 waits on the device for the work of A.
        self._running.append(index)
        try:
            self._fetch(lane, index)
            lane.wait(buffer)
            following = (index + 1) % len(self._units)
            if all((running - following) % NUM_BUFFERS for running in self._running):
                self._fetch(lane, following)
            with unit.on_device():
                return call(*args, **kwargs)
        finally:
            self._running.remove(index)
            lane.release(buffer)

    def _fetch(self, lane: Lane, index: int) -> None:
        """Copy the weights of a module into its buffer, unless they are there."""
        buffer, unit = index % NUM_BUFFERS, self._units[index]
        contents = index, unit.versions()
        if self._contents[buffer] != contents:
            self._contents[buffer] = None  # an interrupt may leave half of them there
            with torch.no_grad():
                lane.copy(buffer, unit.pairs())
            self._contents[buffer] = contents


class _Unit:
    """A module whose weights come and go together."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __getstate__(self) -> dict[str, nn.Module]:
        return {"module": self.module}

    def find_tensors(self) -> None:
        """Find the module's tensors, and how many bytes they take on a device."""
        modules = list(self.module.modules())
        tables: list[dict[str, Any]] = [*(module._parameters for module in modules)]
        tables += [module._buffers for module in modules]
        self._slots = [(t, key) for t in tables for key, value in t.items() if value is not None]
        for (_, key), host in zip(self._slots, self.tensors(), strict=True):
            if type(host.data) is not Tensor:
                raise ModelError(
                    f"weights of type {type(host.data).__name__} can't be offloaded: {key}",
                    hint="use either offload or quantization",
                )
        self.num_bytes = sum(rounded_bytes(host.nbytes) for host in self.hosts())

    def tensors(self) -> list[Tensor]:
        """Return the tensors that the module has now, in the order of its slots."""
        return [table[key] for table, key in self._slots]

    def hosts(self) -> list[Tensor]:
        """Return the host's tensors, each once."""
        return list({id(host): host for host in self.tensors()}.values())

    def make_views(self, buffer: Tensor) -> None:
        """Make the views, with sizes rounded as by the allocator."""
        views: dict[int, Tensor] = {}
        offset = 0
        for host in self.hosts():
            view = buffer[offset : offset + host.nbytes].view(host.dtype).view(host.shape)
            if isinstance(host, nn.Parameter):
                view = as_parameter(view, host, requires_grad=False)
            views[id(host)] = view
            offset += rounded_bytes(host.nbytes)
        self._views = [views[id(host)] for host in self.tensors()]

    def versions(self) -> list[Version]:
        """Return numbers that change when a tensor of the host is written to or replaced."""
        # A tensor of inference mode has no version: nobody can change it outside.
        return [
            (id(host), 0 if host.is_inference() else host._version, host.data_ptr())
            for host in self.hosts()
        ]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """List the views with the host's tensors to copy into them."""
        pairs = zip(self._views, self.tensors(), strict=True)
        return [(view, host) for view, host in pairs if not host.is_meta]

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Let the module hold the views, inside the scope."""
        hosts = self.tensors()
        versions = [
            None if isinstance(view, nn.Parameter) else view._version for view in self._views
        ]
        self._fill(self._views)
        try:
            yield
        finally:
            self._fill(hosts, where=self._views)
        for view, host, version in zip(self._views, hosts, versions, strict=True):
            if version is not None and version != view._version and not host.is_meta:
                with torch.no_grad():
                    host.copy_(view)

    def _fill(self, tensors: Sequence[Tensor], where: Sequence[Tensor] | None = None) -> None:
        """Put tensors into the slots, or into those that still hold the tensors `where`."""
        for at, (table, key) in enumerate(self._slots):
            if where is None or table.get(key) is where[at]:
                table[key] = tensors[at]


def _without_backward(tensor: Tensor) -> Tensor:
    """Return the same tensor, with a backward pass that raises."""
    guard: Any = _NoBackward
    guarded: Tensor = guard.apply(tensor) if tensor.requires_grad else tensor
    return guarded


class _NoBackward(torch.autograd.Function):
    """The identity; its backward pass raises."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        # Not a view, which the caller's code couldn't change in place.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise _untrainable()


def _untrainable() -> UsageError:
    return UsageError(
        "a model with offloaded weights can't be trained",
        hint="plan without offload, or use evaluation mode: model.eval()",
    )


# Two events for each buffer b order the copying and the computing stream; the host doesn't wait:
#     released[b]   recorded behind the work on b; the next copy into b waits for it
#     copied[b]     recorded behind the copy into b; the next work on b waits for it
# So the weights of C are copied into buffer 0 while B computes in buffer 1, but not before A, whose
# weights were in buffer 0, has finished.
class Lane:
    """Copies into a few buffers on a device, in order with the work on the buffers.

    Work issued on the device before, such as the allocation of the buffers, precedes any copy.
    """

    def __init__(self, device: torch.device, num_buffers: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: dict[int, Any] = {}
        self._released: dict[int, Any] = {}
        for buffer in range(num_buffers):
            self.release(buffer)

    def copy(self, buffer: int, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy into views of a buffer, once nothing reads from it any more."""
        if self._stream is None:
            for view, host in pairs:
                view.copy_(host)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._released[buffer])
            for view, host in pairs:
                view.copy_(host, non_blocking=True)
            self._copied[buffer] = self._stream.record_event()

    def wait(self, buffer: int) -> None:
        """Let the device's further work wait for the copy into a buffer."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied[buffer])

    def release(self, buffer: int) -> None:
        """Let the next copy into a buffer wait for the device's work so far."""
        if self._stream is not None:
            self._released[buffer] = torch.cuda.current_stream(self._device).record_event()


class Pinned:
    """The host's tensors of a device, pinned in place, without a copy.

    torch allocates pinned memory in powers of two, up to twice the bytes that are needed. Where the
    driver refuses, copies are slower and give the same.
    """

    def __init__(self, device: torch.device, tensors: Sequence[Tensor]) -> None:
        self._addresses: list[int] = []
        self._tensors: list[Tensor] = []  # held, since memory must not be freed while pinned
        if device.type != "cuda":
            return
        self._tensors = [
            tensor.detach()
            for tensor in tensors
            if tensor.device.type == "cpu" and tensor.nbytes and not tensor.is_pinned()
        ]
        driver: Any = torch.cuda.cudart()
        for start, stop in _pages(self._tensors):
            if int(driver.cudaHostRegister(start, stop - start, _PORTABLE)) == 0:
                self._addresses.append(start)
            else:
                # CUDA keeps an error until a kernel is started, which then fails: here, not there.
                with suppress(RuntimeError):
                    torch.ones(1, device=device)

    def release(self) -> None:
        """Unpin."""
        addresses, self._addresses = self._addresses, []
        for address in addresses:
            driver: Any = torch.cuda.cudart()
            driver.cudaHostUnregister(address)
        self._tensors = []

    def __del__(self) -> None:
        self.release()


def _pages(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return the ranges of whole pages in which tensors lie: a page can be pinned only once."""
    ranges: list[tuple[int, int]] = []
    for address, size in sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors):
        start, stop = address // PAGESIZE * PAGESIZE, -(-(address + size) // PAGESIZE) * PAGESIZE
        if ranges and start < ranges[-1][1]:
            start, last = ranges.pop()
            stop = max(stop, last)
        ranges.append((start, stop))
    return ranges
