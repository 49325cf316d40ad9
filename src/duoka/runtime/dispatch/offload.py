"""Offloading: weights stay in the host's memory, and are copied to a GPU whenever they are used.

The streamed modules of a GPU take turns in two buffers there: while a module computes, the weights
of the next module are copied into the other buffer, on a CUDA stream of their own on CUDA devices.

    buffer 0:  copy A │ compute A │ copy C      │ compute C
    buffer 1:         │ copy B    │ compute B   │ copy D

During its call a module's parameters and buffers are views of a GPU buffer; before and after they
are the host's tensors, so the state dict doesn't change. Weights that are in a GPU buffer already
are reused only if the host's tensors are the same objects at the same versions. A module's own
buffers (not parameters) are copied back to the host if the call writes to them. The host's tensors
are pinned for CUDA devices; on other devices copies are made when a module is called.

Streamed weights can't be trained: in backward another module's weights are in the same buffer.
Training is refused.
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
from duoka.models.quantization import on_host, parts

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
        With tensors on the host, or on meta, from where nothing is copied.

    Raises
    ------
    ModelError
        If a weight is of a tensor subclass, which can't be a view of a buffer.
    """

    def __init__(self, device: torch.device, modules: Sequence[nn.Module]) -> None:
        self._device = device
        self._units = [_StreamedModule(module) for module in modules]
        self._lock = threading.RLock()
        self._running: list[int] = []
        self._allocate()

    def _allocate(self) -> None:
        """Find the modules' tensors, allocate the buffers, and pin the host's memory."""
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

    def __getstate__(self) -> tuple[torch.device, list[_StreamedModule]]:
        return self._device, self._units

    def __setstate__(self, state: tuple[torch.device, list[_StreamedModule]]) -> None:
        self._device, self._units = state
        self._lock = threading.RLock()
        self._running = []
        # A copied streamer allocates buffers at its first call: its modules aren't complete yet.
        self._lane = None

    def install(self) -> None:
        """Make each module stream its weights when it is called."""
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
        """Call a module of this streamer, by its index, with its weights on the device."""
        unit = self._units[index]
        with_gradients = torch.is_grad_enabled()
        if with_gradients and unit.module.training:
            raise _untrainable()
        # Other threads wait here: the buffers serve one call at a time.
        with self._lock:
            if index in self._running:
                return call(*args, **kwargs)
            output = self._run(index, unit, call, args, kwargs)
        return mapped(output, _refuse_backward) if with_gradients else output

    def _run(
        self, index: int, unit: _StreamedModule, call: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Fetch the module's weights and those of the next module, then call the module."""
        if self._lane is None:
            self._allocate()
        lane, buffer = self._lane, index % NUM_BUFFERS
        assert lane is not None
        if any(running % NUM_BUFFERS == buffer for running in self._running):
            raise ModelError(
                "an offloaded module calls another one",
                hint="offload only modules that run one after another",
            )
        # Modules A, B, C, … in two buffers: when B is called, its weights are in buffer 1, or are
        # copied now. Then C's weights are copied into buffer 0, after A's work on the device.
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
        """Copy the weights of a module into its buffer, unless the buffer has them already."""
        buffer, unit = index % NUM_BUFFERS, self._units[index]
        contents = index, unit.versions()
        if self._contents[buffer] != contents:
            self._contents[buffer] = None  # an interrupt may leave the buffer half filled
            with torch.no_grad():
                lane.copy(buffer, unit.pairs())
            self._contents[buffer] = contents


class _StreamedModule:
    """A module whose weights are streamed together, and the views that replace them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __getstate__(self) -> dict[str, nn.Module]:
        return {"module": self.module}

    def find_tensors(self) -> None:
        """Find the module's tensors, and the bytes that they take in a buffer."""
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
        """Return the tensors that the module holds now, a shared one once for each place."""
        return [table[key] for table, key in self._slots]

    def hosts(self) -> list[Tensor]:
        """Return the tensors that the module holds now, each once."""
        return list({id(host): host for host in self.tensors()}.values())

    def make_views(self, buffer: Tensor) -> None:
        """Make a view of a buffer for each tensor, at offsets rounded as by the allocator."""
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
        """Return numbers that change if a tensor on the host is written to or replaced."""
        # A tensor made in inference mode has no version, and can't be changed outside of the mode.
        return [
            (id(host), 0 if host.is_inference() else host._version, host.data_ptr())
            for host in self.hosts()
        ]

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """List the views, each with the host's tensor to copy into it."""
        pairs = zip(self._views, self.tensors(), strict=True)
        return [(view, host) for view, host in pairs if not host.is_meta]

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Let the module hold the views inside the scope; then copy written buffers to the host."""
        hosts = self.tensors()
        versions = [
            None if isinstance(view, nn.Parameter) else view._version for view in self._views
        ]
        self._put(self._views)
        try:
            yield
        finally:
            self._put(hosts, replaced=self._views)
        for view, host, version in zip(self._views, hosts, versions, strict=True):
            if version is not None and version != view._version and not host.is_meta:
                with torch.no_grad():
                    host.copy_(view)

    def _put(self, tensors: Sequence[Tensor], replaced: Sequence[Tensor] | None = None) -> None:
        """Put tensors into the module; with `replaced`, only in place of these tensors."""
        for at, (table, key) in enumerate(self._slots):
            if replaced is None or table.get(key) is replaced[at]:
                table[key] = tensors[at]


def _refuse_backward(tensor: Tensor) -> Tensor:
    """Return a tensor whose backward pass raises; without gradient, the same tensor."""
    guard: Any = _NoBackward
    guarded: Tensor = guard.apply(tensor) if tensor.requires_grad else tensor
    return guarded


class _NoBackward(torch.autograd.Function):
    """The identity; its backward pass raises."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        # `detach`, since model code couldn't change a view in place that this function returns.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise _untrainable()


def _untrainable() -> UsageError:
    """Return the error for training a model with offloaded weights."""
    return UsageError(
        "a model with offloaded weights can't be trained",
        hint="plan without offload, or use evaluation mode: model.eval()",
    )


# Two events for each buffer b order the copying and the computing stream; the host doesn't wait:
#     released[b]   recorded after the work on b; the next copy into b waits for the event
#     copied[b]     recorded after the copy into b; the next work on b waits for the event
# So the weights of C are copied into buffer 0 while B computes in buffer 1, but not before A, whose
# weights were in buffer 0, has finished.
class Lane:
    """Copies into buffers on a device, ordered by events with the work that uses the buffers.

    Work that was issued on the device earlier, such as zeroing the buffers, precedes any copy.
    """

    def __init__(self, device: torch.device, num_buffers: int) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: dict[int, Any] = {}
        self._released: dict[int, Any] = {}
        for buffer in range(num_buffers):
            self.release(buffer)

    def copy(self, buffer: int, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy the host's tensors into views of a buffer, after all earlier work on the buffer."""
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
        """Make the device's further work wait for the copy into a buffer."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied[buffer])

    def release(self, buffer: int) -> None:
        """Make the next copy into a buffer wait for the device's work so far."""
        if self._stream is not None:
            self._released[buffer] = torch.cuda.current_stream(self._device).record_event()


class Pinned:
    """Host tensors pinned in place for copies to a CUDA device; does nothing for other devices.

    Pinned memory allocated by torch is rounded up to powers of two, up to twice the bytes. If the
    driver refuses to pin a range, copies from it are slower, and otherwise the same.
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
        for start, stop in _page_ranges(self._tensors):
            if int(driver.cudaHostRegister(start, stop - start, _PORTABLE)) == 0:
                self._addresses.append(start)
            else:
                # CUDA keeps the error for the next kernel, which fails: so one is started here.
                with suppress(RuntimeError):
                    torch.ones(1, device=device)

    def release(self) -> None:
        """Unpin the memory."""
        addresses, self._addresses = self._addresses, []
        for address in addresses:
            driver: Any = torch.cuda.cudart()
            driver.cudaHostUnregister(address)
        self._tensors = []

    def __del__(self) -> None:
        self.release()


def pin_experts(model: nn.Module, devices: Iterable[torch.device]) -> None:
    """Pin the experts on the host of a model on some devices, as long as the model exists."""
    gpu = next((device for device in devices if device.type == "cuda"), None)
    weights = [weight for _, module in on_host(model) for weight in module.parameters()]
    if gpu is not None and weights:
        tensors = [part for weight in weights for part in parts(weight).values()]
        model.__dict__["_duoka_pinned"] = Pinned(gpu, tensors)


def _page_ranges(tensors: Sequence[Tensor]) -> list[tuple[int, int]]:
    """Return merged address ranges of the pages of all tensors: a page can be pinned only once."""
    ranges: list[tuple[int, int]] = []
    for address, size in sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors):
        start, stop = address // PAGESIZE * PAGESIZE, -(-(address + size) // PAGESIZE) * PAGESIZE
        if ranges and start < ranges[-1][1]:
            start, last = ranges.pop()
            stop = max(stop, last)
        ranges.append((start, stop))
    return ranges
