"""Record a run on virtual GPUs: peak memory by kind, transfers, synchronizations."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from duoka.base.model_code import Spot
from duoka.report.check_report import DeviceTransfer, PeakMemory, Sync
from duoka.virtual import VirtualGpu, VirtualTensor

from .execute import BETWEEN
from .mixed_call import Args, Kwargs
from .report_names import ReportNames
from .source_map import model_frame, place_of, spot_of

_aten = torch.ops.aten
_COPIES = frozenset({_aten._to_copy.default, _aten.copy_.default})
_INDEXING = frozenset({_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default})
# Operations for whose result the CPU waits, by their names in the report.
_SYNCS = {
    _aten._local_scalar_dense.default: "item",
    _aten.nonzero.default: "nonzero",
    _aten.masked_select.default: "masked_select",
    _aten._unique2.default: "unique",
    _aten.unique_dim.default: "unique",
    _aten.unique_consecutive.default: "unique_consecutive",
    _aten.repeat_interleave.Tensor: "repeat_interleave",
    _aten.bincount.default: "bincount",
    _aten.equal.default: "equal",
}


@dataclass(slots=True)
class _Peak:
    """State of a GPU at its peak.

    `live` holds bytes by storage; while `is_open`, nothing was freed since the peak, and the
    observer's own table is valid instead.
    """

    allocated: int = 0
    live: dict[int, int] = field(default_factory=dict)
    spot: Spot | None = None
    module: str = ""
    phase: str = ""
    is_open: bool = False


@dataclass(slots=True)
class _StepCounts:
    """Transferred bytes and copies (hops) between devices, and synchronizations, of one step."""

    phase: str
    transfers: Counter[tuple[str, str]] = field(default_factory=Counter)
    hops: Counter[tuple[str, str]] = field(default_factory=Counter)
    syncs: Counter[tuple[str, Spot]] = field(default_factory=Counter)


class Observer:
    """Listener of virtual GPUs (see `virtual.observe`)."""

    def __init__(self, names: ReportNames) -> None:
        self.names = names
        self.steps: list[_StepCounts] = []
        self._live: dict[VirtualGpu, dict[int, int]] = {}
        self._peaks: dict[VirtualGpu, _Peak] = {}
        self._kinds: dict[int, str] = {}

    def begin(self, phase: str) -> None:
        """Start a step."""
        self.steps.append(_StepCounts(phase))

    @property
    def phase(self) -> str:
        """Phase of the running step; "" before the first."""
        return self.steps[-1].phase if self.steps else ""

    def mark(self, kind: str, tensors: Iterable[Any]) -> None:
        """Assign a memory kind to the storages of tensors; the first kind of a storage stays."""
        for tensor in tensors:
            if isinstance(tensor, VirtualTensor):
                self._kinds.setdefault(tensor.storage_id, kind)

    # ── callbacks of the virtual GPUs ──

    def allocated(self, gpu: VirtualGpu, storage_id: int, num_bytes: int) -> None:
        """Handle a new storage; at a new peak, keep the current place, module and phase."""
        live = self._live.setdefault(gpu, {})
        live[storage_id] = num_bytes
        allocated = gpu.allocator.allocated_bytes
        peak = self._peaks.setdefault(gpu, _Peak())
        if allocated > peak.allocated:
            peak.allocated, peak.is_open, peak.phase = allocated, True, self.phase
            frame = model_frame(sys._getframe(1))
            peak.spot = None if frame is None else spot_of(frame)
            peak.module = self.names.module_of(frame)

    def freed(self, gpu: VirtualGpu, storage_id: int) -> None:
        """Handle a freed storage; the first one after a peak saves the storages of the peak."""
        live = self._live.get(gpu, {})
        peak = self._peaks.get(gpu)
        if peak is not None and peak.is_open:
            peak.live, peak.is_open = dict(live), False
        live.pop(storage_id, None)

    def operation(self, func: Any, args: Args, kwargs: Kwargs, result: Any) -> None:
        """Handle an ATen operation: count copies between devices and synchronizations."""
        if self.phase in ("", BETWEEN):
            return
        if func in _COPIES:
            self._record_copy(args, result)
        elif func in _SYNCS:
            self._record_sync(_SYNCS[func])
        elif func in _INDEXING and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            for index in args[1]
        ):
            self._record_sync("index with a mask")

    def _record_copy(self, args: Args, result: Any) -> None:
        """Count a copy between two devices; a copy to the CPU synchronizes too."""
        target, source = (args[0], args[1]) if len(args) > 1 else (result, args[0])
        if not isinstance(source, torch.Tensor) or target.device == source.device:
            return
        if source.numel() == 0 or (source.dim() == 0 and source.device.type == "cpu"):
            return  # no bytes, or a CPU scalar that becomes a kernel argument
        link = (self.names.device(source.device), self.names.device(target.device))
        step = self.steps[-1]
        step.hops[link] += 1
        step.transfers[link] += source.numel() * source.element_size()
        if target.device.type == "cpu":
            self._record_sync("copy to the CPU")

    def _record_sync(self, op: str) -> None:
        """Count a synchronization at the current place in model code."""
        frame = model_frame(sys._getframe(1))
        if frame is not None:
            self.steps[-1].syncs[op, spot_of(frame)] += 1

    # ── results ──

    def memory(self, gpu: VirtualGpu, name: str, budget: int | None) -> PeakMemory:
        """Return the peak memory of a GPU, by kind; unmarked storages are activations."""
        peak = self._peaks.get(gpu, _Peak())
        live = self._live.get(gpu, {}) if peak.is_open else peak.live
        kinds: Counter[str] = Counter()
        for storage_id, num_bytes in live.items():
            kinds[self._kinds.get(storage_id, "activations")] += num_bytes
        rounding = peak.allocated - sum(live.values())
        if rounding > 0:
            kinds["rounding"] = rounding
        return PeakMemory(
            device=name,
            budget_bytes=budget,
            allocated_bytes=peak.allocated,
            reserved_bytes=gpu.settle().max_reserved_bytes,
            kinds=dict(kinds),
            overflows=gpu.overflowed,
            phase=peak.phase,
            place=None if peak.spot is None else place_of(peak.spot),
            module=peak.module,
        )

    def transfers(self) -> tuple[DeviceTransfer, ...]:
        """Return, by phase and pair of devices, the transfers of the step with the most bytes."""
        largest: dict[tuple[str, str, str], DeviceTransfer] = {}
        num_steps = Counter(step.phase for step in self.steps)
        for step in self.steps:
            for link, num_bytes in step.transfers.items():
                key = (step.phase, *link)
                if key not in largest or largest[key].num_bytes < num_bytes:
                    largest[key] = DeviceTransfer(
                        phase=step.phase,
                        source=link[0],
                        target=link[1],
                        hops=step.hops[link],
                        num_bytes=num_bytes,
                        steps=num_steps[step.phase],
                    )
        return tuple(largest.values())

    def syncs(self) -> tuple[Sync, ...]:
        """Return, by phase, operation and place, the most synchronizations in one step."""
        counts: Counter[tuple[str, str, Spot]] = Counter()
        for step in self.steps:
            for (op, spot), count in step.syncs.items():
                key = (step.phase, op, spot)
                counts[key] = max(counts[key], count)
        return tuple(
            Sync(op=op, place=place_of(spot), phase=phase, count=count)
            for (phase, op, spot), count in counts.items()
        )
