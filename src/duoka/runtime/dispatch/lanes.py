"""Lanes: the way from the host's memory to the buffers of one device.

Where the device has streams (CUDA), copies run on a stream of their own beside what is computed,
out of memory that the driver has pinned. Elsewhere a copy is made when it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class Lane:
    """Copies into a few buffers on one device.

    Parameters
    ----------
    device : torch.device
    num_buffers : int
        What was asked of the device so far, the making of the buffers for one, comes before any
        copy into them.
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
        self._tensors: list[Tensor] = []  # held, since memory must not be given back while pinned
        if device.type != "cuda":
            return
        driver: Any = torch.cuda.cudart()
        for tensor in tensors:
            if tensor.nbytes and not tensor.is_pinned():
                code = driver.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, _PORTABLE)
                if int(code) == 0:
                    self._tensors.append(tensor.detach())

    def release(self) -> None:
        """Unpin; also when the last one that needs it is gone."""
        tensors, self._tensors = self._tensors, []
        for tensor in tensors:
            driver: Any = torch.cuda.cudart()
            driver.cudaHostUnregister(tensor.data_ptr())

    def __del__(self) -> None:
        self.release()
