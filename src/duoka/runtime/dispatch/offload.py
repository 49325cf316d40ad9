"""Offloading: weights that stay in the host's memory, and come to a GPU whenever they are used.

The modules of one GPU whose weights are streamed take turns in two buffers there: while one of
them computes, the next one's weights are copied into the other buffer, on a stream of their own
where the device has streams. For the time of its call a module's parameters and buffers are views
of a buffer; before and after they are the host's own, so a state dict is what it was.

A copy in a buffer is used again only while the host's tensors are the same objects at the same
versions. What a call writes into a buffer of its module (not a parameter) goes back to the host.
Copies come out of memory that the driver has pinned; without streams, when they are asked for.

Weights that are streamed can't be trained: by the time of backward, another module's are in their
place. That is refused, and never ignored.
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

Version = tuple[int, int, int]
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class Streamer:
    """The streamed modules of one device, in the order of their calls, and the buffers there.

    Their tensors are on the host, or on meta: then there is nothing to copy. ModelError is raised
    if a weight is of a kind that can't be a view of a buffer.
    """

    def __init__(self, device: torch.device, modules: Sequence[nn.Module]) -> None:
        self._device = device
        self._units = [_Unit(module) for module in modules]
        self._lock = threading.RLock()
        self._running: list[int] = []
        self._begin()

    def _begin(self) -> None:
        """Take the memory for the buffers."""
        for unit in self._units:
            unit.lay_out()
        buffers = [
            torch.zeros(size, dtype=torch.uint8, device=self._device)
            for size in buffer_bytes([unit.num_bytes for unit in self._units])
        ]
        for index, unit in enumerate(self._units):
            unit.lay_into(buffers[index % NUM_BUFFERS])
        self._contents: list[tuple[int, list[Version]] | None] = [None] * len(buffers)
        self._pinned = Pinned(self._device, [host for unit in self._units for host in unit.hosts()])
        self._lane: Lane | None = Lane(self._device, len(buffers))

    def __getstate__(self) -> tuple[torch.device, list[_Unit]]:
        return self._device, self._units

    def __setstate__(self, state: tuple[torch.device, list[_Unit]]) -> None:
        self._device, self._units = state
        self._lock = threading.RLock()
        self._running = []
        # A copy takes buffers of its own when it is called: its modules aren't whole yet.
        self._lane = None

    def install(self) -> None:
        """Let the modules' weights come when they are called."""
        for index, unit in enumerate(self._units):
            unit.module.__dict__[AROUND] = partial(self.run, index)
            update_class(unit.module)

    def remove(self) -> None:
        """Make the modules what they were; their weights stay on the host."""
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
        # Another thread that comes by waits for its turn: the buffers are for one call at a time.
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
                "a module whose weights are streamed calls another one",
                hint="offload only modules that run one after another",
            )
        self._running.append(index)
        try:
            self._fetch(lane, index)
            lane.wait(buffer)
            following = (index + 1) % len(self._units)
            if all((other - following) % NUM_BUFFERS for other in self._running):
                self._fetch(lane, following)
            with unit.on_device():
                return call(*args, **kwargs)
        finally:
            self._running.remove(index)
            lane.release(buffer)

    def _fetch(self, lane: Lane, index: int) -> None:
        buffer, unit = index % NUM_BUFFERS, self._units[index]
        now = index, unit.versions()
        if self._contents[buffer] != now:
            self._contents[buffer] = None  # an interrupt may leave half of it there
            with torch.no_grad():
                lane.copy(buffer, unit.pairs())
            self._contents[buffer] = now


class _Place:
    """One tensor of a module: the table and key that hold it, and its view in a buffer."""

    __slots__ = ("key", "table", "view")

    def __init__(self, table: dict[str, Any], key: str) -> None:
        self.table = table
        self.key = key
        self.view: Tensor | None = None

    @property
    def host(self) -> Tensor:
        """The host's tensor; somebody may have put another one there."""
        tensor: Tensor = self.table[self.key]
        return tensor


class _Unit:
    """A module whose weights come and go together."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __getstate__(self) -> tuple[nn.Module]:
        return (self.module,)

    def __setstate__(self, state: tuple[nn.Module]) -> None:
        (self.module,) = state

    def lay_out(self) -> None:
        """Find the tensors, and how many bytes they take on a device."""
        modules = list(self.module.modules())
        self._parameters = list(_places([module._parameters for module in modules]))
        self._buffers = list(_places([module._buffers for module in modules]))
        self._all = [*self._parameters, *self._buffers]
        self.num_bytes = sum(rounded_bytes(host.nbytes) for host in self.hosts())

    def hosts(self) -> list[Tensor]:
        """The host's tensors, each once."""
        return list({id(place.host): place.host for place in self._all}.values())

    def lay_into(self, buffer: Tensor) -> None:
        """Make the views, one after another, with the sizes that the allocator would give them."""
        views: dict[int, Tensor] = {}
        offset = 0
        for host in self.hosts():
            flat = buffer[offset : offset + host.nbytes]
            views[id(host)] = _like(host, flat.view(host.dtype).view(host.shape))
            offset += rounded_bytes(host.nbytes)
        for place in self._all:
            place.view = views[id(place.host)]

    def versions(self) -> list[Version]:
        """What tells the host's tensors from any others, and from themselves after a change."""
        # A tensor of inference mode has no version: nobody can change it outside.
        return [
            (id(host), 0 if host.is_inference() else host._version, host.data_ptr())
            for host in self.hosts()
        ]

    def pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Views with what belongs into them."""
        for place in self._all:
            if not place.host.is_meta:
                assert place.view is not None
                yield place.view, place.host

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Let the module hold the views, inside the scope."""
        hosts = [(place, place.host) for place in self._all]
        before = [place.view._version for place in self._buffers if place.view is not None]
        for place in self._all:
            place.table[place.key] = place.view
        try:
            yield
        finally:
            for place, host in hosts:
                if place.table.get(place.key) is place.view:
                    place.table[place.key] = host
        for place, version in zip(self._buffers, before, strict=True):
            assert place.view is not None
            if place.view._version != version and not place.host.is_meta:
                with torch.no_grad():
                    place.host.copy_(place.view)


def _places(tables: Sequence[dict[str, Any]]) -> Iterator[_Place]:
    for table in tables:
        for key, tensor in table.items():
            if tensor is None:
                continue
            if type(tensor.data) is not Tensor:
                raise ModelError(
                    f"weights of type {type(tensor.data).__name__} can't be streamed: {key}",
                    hint="offload, or quantize: not both",
                )
            yield _Place(table, key)


def _like(host: Tensor, view: Tensor) -> Tensor:
    """The view as a parameter, where the host's tensor is one."""
    if not isinstance(host, nn.Parameter):
        return view
    parameter = nn.Parameter(view, requires_grad=False)
    for mark, value in host.__dict__.items():
        parameter.__dict__.setdefault(mark, value)  # what is there already belongs to the data
    return parameter


def _without_backward(tensor: Tensor) -> Tensor:
    """The same tensor; a backward pass that comes to it is refused."""
    guard: Any = _NoBackward
    guarded: Tensor = guard.apply(tensor) if tensor.requires_grad else tensor
    return guarded


class _NoBackward(torch.autograd.Function):
    """Nothing, and an error in the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        # Not a view, which the caller's code couldn't change in place.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise _untrainable()


def _untrainable() -> UsageError:
    return UsageError(
        "a model whose weights lie in the host's memory can't be trained",
        hint="plan without offload, or compute in evaluation mode: model.eval()",
    )


class Lane:
    """Copies into a few buffers on one device.

    What was asked of the device so far, the making of the buffers for one, comes before any copy.
    """

    def __init__(self, device: torch.device, num_buffers: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: dict[int, Any] = {}
        self._released: dict[int, Any] = {}
        for buffer in range(num_buffers):
            self.release(buffer)

    def copy(self, buffer: int, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy into views of a buffer, once nothing that was asked for before reads from it."""
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
        """What is asked of the device from here on comes after the copy into a buffer."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied[buffer])

    def release(self, buffer: int) -> None:
        """What was asked of the device so far comes before the next copy into a buffer."""
        if self._stream is not None:
            self._released[buffer] = torch.cuda.current_stream(self._device).record_event()


class Pinned:
    """The host's tensors of one device, pinned where they are, without a copy.

    torch's own pinned memory is taken in powers of two, up to twice of what is needed. Where the
    driver refuses, copies are as right and slower.
    """

    def __init__(self, device: torch.device, tensors: Sequence[Tensor]) -> None:
        self._addresses: list[int] = []
        self._tensors: list[Tensor] = []  # held, since memory must not be given back while pinned
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
        """Unpin; also when the last one that needs it is gone."""
        addresses, self._addresses = self._addresses, []
        for address in addresses:
            driver: Any = torch.cuda.cudart()
            driver.cudaHostUnregister(address)
        self._tensors = []

    def __del__(self) -> None:
        self.release()


def _pages(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """The ranges of whole pages in which tensors lie: a page can be pinned only once."""
    ranges: list[tuple[int, int]] = []
    for address, size in sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors):
        start, stop = address // PAGESIZE * PAGESIZE, -(-(address + size) // PAGESIZE) * PAGESIZE
        if ranges and start < ranges[-1][1]:
            first, last = ranges.pop()
            start, stop = first, max(stop, last)
        ranges.append((start, stop))
    return ranges
