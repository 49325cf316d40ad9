"""Run a subject on virtual GPUs and build the report."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from duoka import virtual
from duoka.base.garbage import free_locals
from duoka.base.model_code import raised_in
from duoka.errors import DuokaError, ModelError
from duoka.models.quantization import parts
from duoka.planner.placement import Placement
from duoka.report.check_report import CheckReport, PeakMemory, Stop
from duoka.runtime.dispatch.install_movers import moving_modules
from duoka.runtime.dispatch.place_tensors import parameter_bytes

from .entry_hooks import watch_entries
from .execute import StepListener, run
from .interceptor import FunctionInterceptor
from .observer import Observer
from .report_names import ReportNames
from .snapshot import on_virtual_gpus, restore_globals
from .source_map import forget_sources, place_of
from .subject import Subject, code_of, named_tensors, placed_modules, tensor_devices

_MOST_NAMED = 5
_MOST_TRIED = 4
_MOST_GPUS = 8


def check_subject(subject: Subject) -> CheckReport:
    """Run a subject on virtual GPUs, continue after each fault, and report all."""
    started = time.perf_counter()
    forget_sources()
    _refuse_scripted(subject)
    report = virtual.apart(_run, subject)
    return replace(report, seconds=time.perf_counter() - started, subject=subject)


def _run(subject: Subject) -> CheckReport:
    # Not within a caller's inference mode, whose tensors have no history.
    with preserve_random_state(), torch.inference_mode(False):
        report = _cheapest(subject, "meta")
        # Code that reads values, or an operation without a shape rule, may run with real numbers.
        if report.stop is None:
            return report
        is_small = parameter_bytes(subject.model) <= virtual.REAL_BYTES
        return _further(report, _cheapest(subject, "cpu" if is_small else "even"), is_small)


def _cheapest(subject: Subject, data: str) -> CheckReport:
    """Run a subject, with mixed operations on the devices that cost the fewest copied bytes.

    The cost of a choice depends on later operations, so other devices are tried by further runs,
    one place after another. A run with fewer copied bytes is kept if its result is no worse.
    """
    run = CheckRun(subject, data)
    report = run.report()
    for spot, _ in run.interceptor.choices.most_common(_MOST_TRIED):
        alternative = replace(subject, elsewhere=subject.elsewhere | {spot})
        tried = CheckRun(alternative, data).report()
        is_as_good = tried.stop == report.stop and tried.fits >= report.fits
        copied, num_faults = _costs(tried)
        if is_as_good and copied < _costs(report)[0] and num_faults <= _costs(report)[1]:
            report, subject = tried, alternative
    return report


def _costs(report: CheckReport) -> tuple[int, int]:
    """Return the bytes copied between devices, and the number of faults with their followups."""
    copied_bytes = sum(transfer.num_bytes * transfer.steps for transfer in report.transfers)
    return copied_bytes, sum(1 + len(fault.followups) for fault in report.faults)


def _refuse_scripted(subject: Subject) -> None:
    """Raise ModelError if the model contains TorchScript."""
    modules = subject.model.named_modules()
    scripted = [name for name, module in modules if isinstance(module, torch.jit.ScriptModule)]
    if scripted:
        raise ModelError(
            f"{subject.name} contains TorchScript, which has no Python code to check: "
            + ", ".join(name or "the model itself" for name in scripted[:_MOST_NAMED]),
            hint="check the model before torch.jit.script or torch.jit.trace",
        )


def _further(report: CheckReport, real: CheckReport, is_small: bool) -> CheckReport:
    """Return `report`, of a run that stopped, or `real`, of a run with values, if longer."""
    assert report.stop is not None
    needs_values = report.stop.message.startswith(virtual.UnknownValueError.__name__)
    if real.stop is not None and not needs_values and len(real.faults) <= len(report.faults):
        return report
    why = "the model's code reads tensor values" if needs_values else report.stop.message
    how = "with real numbers" if is_small else "with tokens routed evenly to experts"
    return replace(real, notes=(*real.notes, f"it ran {how}: {why}"))


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the random state of the process after the scope."""
    plain, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(plain)
            np.random.set_state(numpy_state)


class _FirstFound(BaseException):
    """Signal of the first entry into a placed module; model code can't catch it as Exception."""


class CheckRun(StepListener):
    """One run. `data` as in `virtual`: "meta" (no numbers), "even" (balanced routing) or "cpu"."""

    def __init__(self, subject: Subject, data: str) -> None:
        self.subject = subject
        self.data = data
        self._prefix = "vgpu" if any(d.startswith("vgpu") for d in subject.devices) else "cuda"
        numbers = [_gpu_index(name) for name in subject.devices if name != "cpu"]
        self._num_placed = max(numbers, default=0) + 1
        # Model code may name a GPU that the placement does not use.
        self._num_gpus = max(self._num_placed, _MOST_GPUS)
        self._capacities = [
            subject.budgets.get(f"{self._prefix}:{index}") for index in range(self._num_gpus)
        ]
        self._noted: list[str] = []

    def report(self) -> CheckReport:
        """Run and return the report."""
        first_device = self._find_first_device()
        model = self.subject.model
        with (
            restore_globals(model),
            virtual.unnamed_gpus(
                self._capacities, data=self.data, generation=self.subject.generation
            ) as world,
        ):
            for gpu in world.gpus:
                gpu.refuses = False
            names = self._names()
            self.observer = Observer(names)
            with virtual.observe(self.observer), self._on_devices():
                # After the move, which replaces buffers by new objects.
                names.learn(named_tensors(model))
                for tensor in (*model.parameters(), *model.buffers()):
                    self.observer.mark("weights", parts(tensor).values())
                self.interceptor = FunctionInterceptor(names, self.subject.elsewhere)
                stop = self._run(first_device)
                memory = tuple(self._memory(world))
        return self._build_report(stop, memory)

    def _build_report(self, stop: Stop | None, memory: tuple[PeakMemory, ...]) -> CheckReport:
        """Build the report; follow-ups are part of the faults that cause them."""
        findings = self.interceptor.findings.values()
        return CheckReport(
            model=self.subject.name,
            code=code_of(self.subject.model),
            not_run=self.subject.not_run,
            devices=self.subject.devices,
            completeness=self.subject.completeness,
            faults=tuple(finding.fault() for finding in findings if finding.cause is None),
            warnings=tuple(self.interceptor.warnings()),
            memory=memory,
            transfers=self.observer.transfers(),
            syncs=self.observer.syncs(),
            notes=tuple(self._notes()),
            stop=stop,
            train=self.subject.train,
        )

    def _names(self) -> ReportNames:
        names = {virtual.virtual_device(at): f"{self._prefix}:{at}" for at in range(self._num_gpus)}
        modules = {id(module): name for name, module in self.subject.model.named_modules()}
        return ReportNames(names, modules, self._num_placed)

    def _device(self, name: str) -> torch.device:
        return torch.device("cpu") if name == "cpu" else virtual.virtual_device(_gpu_index(name))

    @contextmanager
    def _on_devices(self) -> Iterator[None]:
        """Keep the model on its virtual devices inside the scope."""
        devices, modules = self._tensor_devices(), self._placed_modules()
        model, offloaded = self.subject.model, self.subject.offloaded
        with on_virtual_gpus(model, devices, modules, offloaded) as self._snapshot:
            yield

    def _placed_modules(self) -> dict[nn.Module, torch.device]:
        """Return the modules at which arguments are moved, with their virtual devices."""
        model, entries = self.subject.model, self.subject.entries
        if self.subject.is_dispatched:
            virtual_entries = tuple((name, str(self._device(device))) for name, device in entries)
            placement = Placement(entries=virtual_entries)
            return moving_modules(model, placement, self._tensor_devices())
        modules = placed_modules(model, entries)
        return {module: self._device(device) for module, device in modules.items()}

    def _tensor_devices(self) -> dict[str, torch.device]:
        names = tensor_devices(self.subject.model, self.subject.entries)
        return {name: self._device(device) for name, device in names.items()}

    def _find_first_device(self) -> torch.device:
        """Return the device of the first placed module that runs: inputs start there."""
        entered: list[torch.device] = []
        subject = self.subject
        first_device = self._device(subject.devices[0]) if subject.devices else torch.device("cpu")

        def enter(device: torch.device) -> None:
            entered.append(device)
            raise _FirstFound

        world = virtual.unnamed_gpus([None] * self._num_gpus, data=self.data)
        with restore_globals(subject.model), world, self._on_devices():
            modules = self._placed_modules()
            modules.pop(subject.model, None)
            watch_entries(modules, enter, [])
            # An error before the first entry is reported by the actual run.
            with suppress(_FirstFound, Exception), FunctionInterceptor(self._names()).watching():
                run(subject, first_device, StepListener())
        return entered[0] if entered else first_device

    def _run(self, first_device: torch.device) -> Stop | None:
        """Run the subject; return the stop if its code raised an error, else None."""
        subject, interceptor = self.subject, self.interceptor
        # The hooks are removed when the model's attributes are restored.
        watch_entries(
            self._placed_modules(), partial(setattr, interceptor, "stage"), interceptor.running
        )
        try:
            with interceptor.watching():
                self.finish(run(subject, first_device, self))
        except Exception as error:  # whatever the model's own code raises
            if isinstance(error, DuokaError) and not isinstance(error, virtual.UnknownValueError):
                raise
            return self._stop(error)
        return None

    # ── callbacks of `execute.run` ──

    def begin(self, phase: str) -> None:
        """Handle the start of a step."""
        self.interceptor.phase = phase
        self.interceptor.step += 1
        self.observer.begin(phase)

    def finish(self, result: Any) -> None:
        """Handle the end of the run."""

    def note(self, text: str) -> None:
        """Handle a note for the report."""
        self._noted.append(text)

    def mark(self, kind: str, tensors: Any) -> None:
        """Handle tensors of a memory kind."""
        self.observer.mark(kind, tensors)

    # ── results ──

    def _memory(self, world: virtual.World) -> Iterator[PeakMemory]:
        """Yield the peak memory of each GPU of the placement."""
        gradients = [parameter.grad for parameter in self.subject.model.parameters()]
        self.observer.mark("gradients", gradients)  # None where a parameter has none
        for name in self.subject.devices:
            if name != "cpu":
                gpu = world.gpu(_gpu_index(name))
                yield self.observer.memory(gpu, name, self.subject.budgets.get(name))

    def _stop(self, error: Exception) -> Stop:
        """Describe the error that ended the run, and release the tensors in its frames."""
        spot = raised_in(error)
        stop = Stop(
            message=self.interceptor.names.renamed(f"{type(error).__name__}: {error}"),
            place=None if spot is None else place_of(spot),
            phase=self.observer.phase,
            hint=getattr(error, "hint", None) or "",
        )
        free_locals(error)  # which would keep the run's graphs alive
        return stop

    def _notes(self) -> Iterator[str]:
        """Yield the notes for the report, of the subject and of the run."""
        if self._snapshot.num_replaced:
            yield (
                "an autograd graph kept alive by the model's code holds parameters: "
                f"{self._snapshot.num_replaced} parameters of the model are now new objects with "
                "the same values; create its optimizers again"
            )
        yield from self.subject.notes
        yield from self._noted
        names = [
            name or type(module).__name__
            for name, module in self.subject.model.named_modules()
            if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
        ]
        if names:
            yield f"compiled code ran eagerly: {', '.join(names)}"


def _gpu_index(name: str) -> int:
    """Return the index in a GPU's name: 1 for "cuda:1"."""
    return int(name.rpartition(":")[2] or 0)
