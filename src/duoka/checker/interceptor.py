"""Continue after an operation on several devices: record the fault, move the tensors, repeat.

Two layers work together. The virtual GPUs judge ATen operations as CUDA does, so that nothing that
CUDA accepts is reported as a fault. The tensors are moved at the Python call around the failed ATen
operation, where autograd records the move, as it records a `.to` in source code. An ATen operation
outside of any Python call of a PyTorch function (backward, custom functions) is settled by itself.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from duoka.base.model_code import Spot, is_installed, is_own_code
from duoka.report.check_report import CallSite, Fault, FaultKind, Operand, Origin, Place
from duoka.virtual import MixedDevicesError, settled_by

from .entry_hooks import PlacedModule
from .expressions import Expressions
from .gradients import check_gradients
from .hardcoded import (
    CurrentDevice,
    device_position,
    is_asked_device,
    on_virtual_gpu,
    present_as_cuda,
    virtual_cuda,
)
from .mixed_call import (
    CAUSE,
    Args,
    FaultRecord,
    Kwargs,
    MixedCall,
    Path,
    cause_of_result,
    mark_cause,
    op_name,
    positions_of,
    tensors_of,
)
from .report_names import ReportNames, at_hand
from .source_map import (
    SPOT,
    is_named,
    is_written_back,
    library_frame,
    model_frame,
    place_of,
    returned_expression,
    spot_of,
)

_HARD = "_duoka_hard_coded"
_DEVICE_QUERIES: Any = (
    torch.Tensor.device.__get__,
    torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
)
_GET_ITEM, _SET_ITEM = "Tensor.__getitem__", "Tensor.__setitem__"

# Operations that write into a copy of the first operand, and return it.
_COPYING_WRITES = frozenset(
    {
        "masked_scatter", "masked_fill", "index_put", "index_add", "index_copy", "index_fill",
        "scatter", "scatter_add", "scatter_reduce", "slice_scatter", "select_scatter", "copy",
    }
)  # fmt: skip
_LARGE_BYTES = 2**20
"""Weights up to this size may be moved to their use, which takes fewer changes of code."""


class FunctionInterceptor(TorchFunctionMode):
    """Intercept all calls of PyTorch functions, and continue after calls that mix devices."""

    def __init__(self, names: ReportNames, elsewhere: frozenset[Spot] = frozenset()) -> None:
        super().__init__()
        self.names = names
        # Places where an operation runs on another device than the module around it; and all places
        # that have such a choice, with the bytes that are moved there.
        self._elsewhere = elsewhere
        self.choices: Counter[Spot] = Counter()
        self.phase = "forward"
        self.step = 0
        self.stage: torch.device | None = None
        self.running: list[PlacedModule] = []
        self.findings: dict[tuple[Any, ...], FaultRecord] = {}
        self.hard_coded: dict[Spot, tuple[str, str, int]] = {}
        self.current = CurrentDevice()
        self._calls = _Calls()
        self._explained: set[Spot | None] = set()  # hard-coded devices with a fault
        self._reads: dict[Place, FaultRecord] = {}  # faults of reading an item
        self._chosen: dict[tuple[Any, ...], torch.device] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record faults and continue after them inside the scope."""
        with ExitStack() as stack:
            stack.enter_context(settled_by(self))
            stack.enter_context(check_gradients(self._record_gradient))
            stack.enter_context(self._in_backward())
            self.current = stack.enter_context(virtual_cuda(self.names.num_gpus))
            stack.enter_context(self)
            yield

    @contextmanager
    def _in_backward(self) -> Iterator[None]:
        """Stay active in backward, where PyTorch deactivates function modes."""
        engine = vars(torch.autograd)["_engine_run_backward"]

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._calls.outside(), self:
                return engine(*args, **kwargs)

        with mock.patch.object(torch.autograd, "_engine_run_backward", run):
            yield

    # ── calls of PyTorch's functions ──

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        frame = sys._getframe(1)
        if func in _DEVICE_QUERIES and not is_installed(frame.f_code.co_filename):
            device = present_as_cuda(args[0].device)
            return device if func == _DEVICE_QUERIES[0] else device.type == "cuda"
        position = device_position(func, args, kwargs)
        if position is not None:
            named = func
            device, func, args, kwargs = on_virtual_gpu(func, args, kwargs, position, self.current)
            self._count_hard_coded(frame, named, device)
        self._calls.depth += 1
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            mixed = MixedCall(error, func, args, kwargs, frame)
            if not mixed.is_mix:
                raise
            result = self._move_and_repeat(mixed)
        finally:
            self._calls.depth -= 1
        self._mark_result(result, frame, args)
        return result

    def _mark_result(self, result: Any, frame: FrameType, args: Args) -> None:
        """Mark new tensors with their place of origin and the fault that decided their device."""
        for tensor in result if type(result) in (tuple, list) else (result,):
            if not isinstance(tensor, torch.Tensor) or SPOT in (marks := vars(tensor)):
                continue
            if is_own_code(frame.f_code) and args and isinstance(args[0], torch.Tensor):
                # The copy that duoka's mover makes has the origin of the moved tensor.
                if SPOT in vars(args[0]):
                    marks[SPOT] = vars(args[0])[SPOT]
                continue
            caller = model_frame(frame)
            if caller is not None:
                marks[SPOT] = spot = spot_of(caller)
                if self.hard_coded:
                    marks[_HARD] = spot if spot in self.hard_coded else _hard_coded_spot(args)
            if self.findings:
                cause = cause_of_result(args, tensor.device)
                if cause is not None:
                    marks[CAUSE] = cause

    # ── faults ──

    def _move_and_repeat(self, mixed: MixedCall) -> Any:
        """Record the fault of a call, and repeat the call with its tensors on one device."""
        mixed.move_to(self._target(mixed))
        if not mixed.moving_ids:
            return self._settle_each(mixed)  # the tensors that mix are not arguments
        finding = self._record(mixed)
        args, kwargs = mixed.args, mixed.kwargs = mixed.moved_arguments()
        try:
            result = mixed.func(*args, **kwargs)
        except MixedDevicesError:
            result = self._settle_each(mixed)
        if mixed.written is None:  # a written tensor stays on its device
            mark_cause(result, finding)
        return result

    def _settle_each(self, mixed: MixedCall) -> Any:
        """Repeat a call, and settle each ATen operation inside by itself."""
        with self._calls.outside():
            return mixed.func(*mixed.args, **mixed.kwargs)

    def settle(self, error: MixedDevicesError, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Return moved arguments for an ATen operation that is outside of any Python call.

        `virtual.settled_by` calls this; inside of a Python call the error is raised to that call.
        """
        if self._calls.depth:
            raise error
        mixed = MixedCall(error, error.func, args, kwargs, sys._getframe(1))
        target = self._target(mixed)
        if target.type == "cpu":
            target = next(t.device for _, t in mixed.tensors if t.device.type != "cpu")
        mixed.move_to(target, is_forced=True)
        self._record(mixed)
        with settled_by(None):
            return mixed.moved_arguments()

    def bring_to_cpu(self, error: TypeError, tensor: torch.Tensor) -> torch.Tensor:
        """Return a CPU copy of a tensor whose memory is read, as by `numpy()`; record the fault."""
        mixed = MixedCall(error, torch.Tensor.numpy, (tensor,), {}, sys._getframe(1))
        mixed.move_to(torch.device("cpu"))
        self._record(mixed)
        return tensor.cpu()

    def _target(self, mixed: MixedCall) -> torch.device:
        """Choose the device for an operation on tensors of several devices."""
        # No fix changes where a result is written or which argument must be on the CPU. Else the
        # operation belongs to the module entered last, unless that means to move a large weight.
        # Where more bytes would move than stay, the other device is noted as a choice, for another
        # run to try (see `run`). Example: hidden states of 8 MiB on cuda:0, a mask of 1 KiB on
        # cuda:1, and a layer of cuda:1 entered last: cuda:1, with cuda:0 as a choice.
        tensors = [tensor for _, tensor in mixed.tensors]
        if mixed.written is not None:
            return mixed.written.device
        if mixed.for_cpu is not None:
            return torch.device("cpu")
        if mixed.kernel in _COPYING_WRITES and tensors and tensors[0].device.type != "cpu":
            return tensors[0].device
        devices = {tensor.device for tensor in tensors}
        spot = None if mixed.caller is None else spot_of(mixed.caller)
        if spot is not None and mixed.op == _GET_ITEM and is_written_back(spot):
            return tensors[0].device
        key = (spot, frozenset(devices))
        if torch._C._current_graph_task_id() != -1 and key in self._chosen:
            # Backward recomputes a checkpointed region on the devices of the forward pass.
            return self._chosen[key]
        held_bytes: Counter[torch.device] = Counter()
        gpu = [tensor for tensor in tensors if tensor.device.type != "cpu"] or tensors
        for tensor in gpu:
            held_bytes[tensor.device] += tensor.nbytes
        largest = max(gpu, key=lambda tensor: tensor.nbytes)
        # A weight larger than the other operands together stays: copying it costs more.
        large_bytes = max(held_bytes.total() - held_bytes[largest.device], _LARGE_BYTES)
        is_large = isinstance(largest, torch.nn.Parameter) and largest.nbytes > large_bytes
        target = self.stage
        if target is None or target not in devices or is_large:
            target = held_bytes.most_common(1)[0][0]
        elif spot is not None:
            moved_bytes = held_bytes.total() - held_bytes[target]
            other = next((it for it, _ in held_bytes.most_common() if it != target), target)
            if held_bytes[other] > held_bytes[target] or moved_bytes > _LARGE_BYTES:
                self.choices[spot] += moved_bytes
                target = other if spot in self._elsewhere else target
        self._chosen[key] = target
        return target

    def _record(self, mixed: MixedCall) -> FaultRecord:
        """Return the record of a fault at this place, new or known, and count the occurrence."""
        caller = mixed.caller or library_frame(mixed.frame)
        place = Place(file="", line=0) if caller is None else place_of(spot_of(caller))
        key = (caller and spot_of(caller), mixed.op)
        if mixed.op == _SET_ITEM and place in self._reads:
            return self._reads[place]  # `x[i] += 1` reads the item first: that is one fault
        finding = self.findings.get(key)
        if finding is None:
            finding = FaultRecord(self._fault(mixed, caller, place))
            self.findings[key] = finding
            home = self.running[-1].device if self.running else None
            cause = mixed.earlier_cause(self.names, home)
            if cause is not None:
                finding.cause = cause
                cause.followups.append(finding)
        if mixed.op == _GET_ITEM:
            self._reads[place] = finding
        finding.count_in(self.step, self.names.module_of(caller), at_hand(caller, mixed.target))
        return finding

    def _record_gradient(
        self, function: type, index: int, gradient: torch.Tensor, expected: torch.device
    ) -> None:
        """Record a fault: a custom function returned a gradient on a wrong device."""
        code = function.backward.__code__  # type: ignore[attr-defined]
        place = returned_expression(code, index)
        where, got = self.names.device(expected), self.names.device(gradient.device)
        key = (place, index)
        if key not in self.findings:
            fault = Fault(
                kind="gradient",
                effect="raises",
                op=f"{function.__qualname__}.backward",
                operands=(self._operand((index,), gradient, place.text, place),),
                target=where,
                place=place,
                message=f"Function {function.__name__}Backward returned an invalid gradient at "
                f"index {index} - expected device {where} but got {got}",
                path=(CallSite(place=place),),
                phase=self.phase,
            )
            self.findings[key] = FaultRecord(fault)
        self.findings[key].count_in(self.step, "", ())

    def _fault(self, mixed: MixedCall, caller: FrameType | None, place: Place) -> Fault:
        """Build the fault of a call; hard-coded devices of its tensors count as explained."""
        spots = {id(tensor): vars(tensor).get(_HARD) for _, tensor in mixed.tensors}
        self._explained |= {*spots.values()}
        kind: FaultKind = "in-place" if mixed.written is not None else "mixed-devices"
        if any(spots.get(number) is not None for number in mixed.moving_ids):
            kind = "hard-coded-device"
        return Fault(
            kind=kind,
            effect="raises",
            op=mixed.op,
            operands=self._operands(mixed, caller),
            target=self.names.device(mixed.target),
            place=place,
            message=self.names.renamed(str(mixed.error)),
            path=tuple(self.names.path(caller)),
            phase=self.phase,
        )

    def _operands(self, mixed: MixedCall, caller: FrameType | None) -> tuple[Operand, ...]:
        """Build the operands of a fault, with their source expressions and origins."""
        expressions = None
        if caller is not None:
            positions = positions_of(mixed.func)
            expressions = Expressions(caller, direct=mixed.is_direct, positions=positions)
        operands = []
        for path, tensor in mixed.sampled_tensors():
            text, place, is_moved = "", None, id(tensor) in mixed.moving_ids
            if expressions is not None:
                written = expressions.of(tensor, path, mixed.is_method)
                text = written.text
                # The source names the module: moving that isn't moving its parameter.
                place = None if written.is_callees and is_moved else written.place
            operand = self._operand(path, tensor, text, place)
            operands.append(replace(operand, moved=is_moved, origin=self._origin(tensor)))
        if expressions is not None and expressions.is_comparison:
            operands.sort(key=lambda one: (one.place.line, one.place.column) if one.place else ())
        return tuple(operands)

    def _operand(self, path: Path, tensor: torch.Tensor, text: str, place: Place | None) -> Operand:
        """Build an operand, at first as a moved tensor of unknown origin."""
        return Operand(
            argument="".join([str(path[0]), *(f"[{step}]" for step in path[1:])]),
            expression=text,
            place=place,
            device=self.names.device(tensor.device),
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            num_bytes=tensor.numel() * tensor.element_size(),
            moved=True,
        )

    def _origin(self, tensor: torch.Tensor) -> Origin | None:
        """Return the name or the creating operation of a tensor; None if unknown."""
        name = self.names.tensor(tensor)
        if name is not None:
            return name
        spot = vars(tensor).get(SPOT)
        return None if spot is None else Origin(kind="operation", place=place_of(spot))

    # ── hard-coded devices ──

    def warnings(self) -> Iterator[Fault]:
        """Yield warnings for hard-coded devices without a fault in this placement."""
        for spot, (op, device, count) in self.hard_coded.items():
            if spot not in self._explained:
                yield Fault(
                    kind="hard-coded-device",
                    effect="nothing",
                    op=op,
                    operands=(),
                    target=device,
                    place=place_of(spot),
                    message=f"{device} is hard-coded; the code works on this placement only",
                    count=count,
                )

    def _count_hard_coded(self, frame: FrameType, func: Callable[..., Any], device: Any) -> None:
        """Count a call whose source names a CUDA device.

        A tensor's device doesn't count, nor a bare "cuda" after the code set the current device.
        """
        caller = model_frame(frame)
        is_bare = not isinstance(device, int) and torch.device(device or "cuda").index is None
        if is_asked_device(device) or (is_bare and self.current.is_set):
            return
        if caller is not None and is_named(spot_of(caller), device):
            spot = spot_of(caller)
            _, _, count = self.hard_coded.get(spot, ("", "", 0))
            name = f"cuda:{self.current.number(device)}"
            self.hard_coded[spot] = (op_name(func), name, count + 1)


# The depth decides where a mix is settled. Inside of a Python call (depth 1 or more) the ATen error
# rises to `__torch_function__`, which moves the arguments of the whole call and repeats it. At
# depth 0 there is no such call, and `settle` moves the arguments of the ATen operation itself:
#
#   F.layer_norm(x, [4], w)             depth 1   w.to(x.device) is recorded by autograd
#   a C++ node of the backward pass     depth 0   the node's arguments are moved, unrecorded
class _Calls:
    """Nesting depth of calls of PyTorch's functions."""

    depth = 0

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Reset the depth to zero inside the scope."""
        depth, self.depth = self.depth, 0
        try:
            yield
        finally:
            self.depth = depth


# Example: t = torch.zeros(4, device="cuda:0") is on a hard-coded device, and so is t * 2. The sum
# t + h is not, as the device of h follows from the placement.
def _hard_coded_spot(args: Args) -> Spot | None:
    """Return the place of a hard-coded device if all tensors off the CPU are on such; else None."""
    spots = [
        vars(tensor).get(_HARD) for _, tensor in tensors_of(args, {}) if tensor.device.type != "cpu"
    ]
    return spots[0] if spots and None not in spots else None
