"""``duoka check``: every device fault in a model's own code, found without a GPU, and fixed."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.syntax import Syntax
from rich.text import Text

import duoka
from duoka.base.progress import say_import
from duoka.base.units import format_bytes
from duoka.errors import UsageError
from duoka.forecast.workload import Training
from duoka.planner.limits import fleet_for
from duoka.planner.resolve import native_training, workload_for
from duoka.report.terminal.words import format_place

from . import planning
from .errors import NOT_OK
from .groups import OptionGroup, flag, option, with_groups
from .options import IMAGE_SIZE, PLANNING, ModelOptions, PlanOptions, parse_pixels
from .terminal import check_file, note, print_json, stdout, working, write_file
from .training_options import TrainingOptions

if TYPE_CHECKING:
    from duoka.checker.fix import Repairs
    from duoka.report.check_report import CheckReport

_TRAINING_TOKENS = "1"  # the minimum of a workload; training generates none
_DIRECTORY = Path("duoka-fixed")
_THEME = "ansi_dark"
_fix = partial(flag, panel="Fixing")
# Fields of the option groups that `duoka check` has.
_PLAN = ("gpus", "plan_file", "device_map", "context", "new_tokens", "batch", "dtype", "quantize")
_RUN = "method", "micro_batch", "lora_rank", "lora_target", "train_vision", "checkpointing"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun(TrainingOptions):
    """Options of the training to check the model with."""

    method: str | None = option(
        "METHOD",
        "Run loss and backward of a micro-batch instead of prefill and decode steps: for every "
        "parameter (full, the default of --train) or for adapters (lora, qlora).",
        panel=PLANNING,
        names=("--train",),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportOutput(OptionGroup):
    """Options for output besides the printed report."""

    json: bool = flag("Print the report as JSON.")
    sarif: Path | None = option(
        "FILE",
        "Write the report as SARIF 2.1.0, which code hosting services show in pull requests.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FixOptions(OptionGroup):
    """Options of --fix."""

    fix: bool = _fix(
        "Find the smallest changes that fix the faults, prove them, show them, and write changed "
        "copies to duoka-fixed."
    )
    in_place: bool = _fix("With --fix: change the files in place, if the change is proved.")

    def check(self) -> None:
        """Refuse contradicting options and an unwritable directory."""
        if not self.fix:
            self.refuse("in_place", beside="a check alone", hint="add --fix, or omit it")
        elif not self.in_place:
            _refuse_unwritable(_DIRECTORY)

    def write(self, repairs: Repairs) -> None:
        """Write the changed files, and report their paths."""
        from duoka.checker.fix import apply, apply_in_place

        proved = [patch for patch in repairs if patch.proved]
        for file in apply_in_place(proved) if self.in_place else apply(repairs, _DIRECTORY):
            note(f"saved to {file}")

    def cures(self, report: CheckReport, repairs: Repairs) -> bool:
        """Return True if --in-place changed the files and no problem of the report remains."""
        faults = report.completeness
        # `faults.split` is ignored: those modules had to stay whole because of the fixed faults.
        is_named = not (faults.missing or faults.unknown or faults.doubled or faults.misplaced)
        is_well = is_named and report.fits and report.stop is None
        return self.in_place and is_well and repairs.proved

    def print(self, repairs: Repairs, console: Console) -> None:
        """Print each change as a diff with its verdict, and the faults without a fix."""
        if not repairs and not repairs.uncured:
            console.print("nothing to fix: the check found no fault in the model's code")
        for patch in repairs:
            console.print()
            if console.is_terminal:
                diff = Syntax(patch.diff.rstrip("\n"), "diff", theme=_THEME, word_wrap=True)
                console.print(diff)
            else:
                console.print(Text(patch.diff.rstrip("\n")), soft_wrap=True)
            for cure in patch.cures:
                moved = format_bytes(cure.step_bytes) if cure.step_bytes else "nothing"
                console.print(Text(f"moves {moved} a step: {cure.source}"), soft_wrap=True)
            verdict = ("proved", "bold green") if patch.proved else ("not proved", "bold red")
            reason = f": {patch.reason}" if patch.reason else ""
            if self.in_place and not patch.proved:
                reason += "; the file is unchanged"
            console.print(Text.assemble(verdict, reason), soft_wrap=True)
        for fault, reason in repairs.uncured:
            console.print()
            text = f" {format_place(fault.place)}, {fault.op}: {reason}"
            console.print(Text.assemble(("not fixed:", "bold red"), text), soft_wrap=True)


def _repairs_to_dict(repairs: Repairs) -> dict[str, Any]:
    """Return the keys that --fix adds to the JSON form of a report."""
    return {
        "patches": [
            {"file": it.file, "diff": it.diff, "proved": it.proved, "reason": it.reason}
            for it in repairs
        ],
        "cures": [
            {"file": patch.file, "source": cure.source, "step_bytes": cure.step_bytes}
            for patch in repairs
            for cure in patch.cures
        ],
        "uncured": [
            {"file": fault.file, "line": fault.line, "op": fault.op, "reason": reason}
            for fault, reason in repairs.uncured
        ],
    }


@with_groups
def check(
    options: Annotated[PlanOptions, (*_PLAN, "images", "image_size")],
    run: Annotated[CheckedRun, _RUN],
    output: ReportOutput,
    fixes: FixOptions,
    model: ModelOptions,
) -> None:
    """Run a model's own code on virtual GPUs, and report each device fault with its line.

    Needs no GPU and reads no weights. Exits with 0 if no fault is found, otherwise with 13.

    [bold]duoka check[/] ./glm-4-9b-chat --gpus virtual:2x24GiB

    [bold]duoka check[/] ./my-model --trust-remote-code --gpus virtual:2x24GiB --train --fix

    [bold]duoka check[/] ./chatglm3-6b --device-map map.json
    """
    fixes.check()
    check_file(output.sarif, "the SARIF log")
    how_to_train, options = run.read(options)
    if how_to_train is not None:  # a loop of the user's: rows with a mask, weights of one dtype
        how_to_train = replace(how_to_train, master_weights=False, rows="padded")
        how_to_train = replace(how_to_train, schedule="sequential", micro_batches=1)
    images = [parse_pixels(options.image_size or IMAGE_SIZE)] * (options.images or 0)
    if images:  # `duoka.check` gets `images`, and plans for them
        from duoka.base.images import refuse_size

        refuse_size(*images[0])
        options = replace(options, images=None, image_size=None)
    arguments = _check_arguments(model, options, how_to_train)
    with working():
        say_import("torch")
        train = how_to_train or False
        report: CheckReport = duoka.check(**arguments, train=train, images=images)
    if output.sarif is not None:
        from duoka.report.sarif import dumps

        write_file(output.sarif, dumps(report) + "\n")
    if not output.json:
        from duoka.report.terminal import render_report

        stdout().print(render_report(report, advice=not fixes.fix))
    repairs = _search_repairs(report) if fixes.fix else None
    if output.json:
        print_json(report.to_dict() | ({} if repairs is None else _repairs_to_dict(repairs)))
    if repairs is not None:
        if not output.json:
            fixes.print(repairs, stdout())
        fixes.write(repairs)
    if not report.ok and not (repairs is not None and fixes.cures(report, repairs)):
        raise typer.Exit(NOT_OK)


def _search_repairs(report: CheckReport) -> Repairs:
    """Search for changes and prove them; no file is written yet."""
    from duoka.checker.fix import repair

    with working("searching a fix, and proving it" if report.faults else ""):
        return repair(report)


def _check_arguments(
    model: ModelOptions, options: PlanOptions, training: Training | None
) -> dict[str, Any]:
    """Return the arguments of `duoka.check`, after the refusals that don't need torch."""
    if options.plan_file is not None:
        plan, _ = planning.find_plan(model, options)
        checkpoint = planning.open_checkpoint(replace(model, model=model.model or plan.source))
        return {"model": checkpoint, "placement": plan, "workload": plan.workload}
    if training is not None:  # refuses the options that `duoka plan` refuses; images come later
        planning.read_workload(options, replace(training, train_vision=False))
    device_map, gpus = planning.read_device_map(options), options.gpus or planning.ALL_GPUS
    planning.read_fleet(gpus)
    checkpoint = planning.open_checkpoint(model)
    fleet = None
    if options.gpus is not None or device_map is None:
        fleet = fleet_for(duoka.Fleet.parse(gpus), device_map)
    if training is not None:  # the prompt gets all tokens of the context but one
        options = replace(options, new_tokens=_TRAINING_TOKENS)
    workload = planning.read_workload(options, limit=checkpoint.max_context_tokens)
    workload_for(checkpoint, workload)  # called for its refusals, before torch is imported
    native_training(checkpoint, training)
    planning.say_quantization(options.quantize, workload)
    return {
        "model": checkpoint,
        "placement": device_map or options.device_map,
        "workload": workload,
        "fleet": fleet,
    }


def _refuse_unwritable(directory: Path) -> None:
    """Raise UsageError if a directory can't be created or written."""
    existing = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        hint = "run the command in a directory that you may write to"
        raise UsageError(f"the changed files can't be written to {str(directory)!r}", hint=hint)
