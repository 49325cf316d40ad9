"""``duoka plan``: plan the device of every module, and print the memory."""

from __future__ import annotations

from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path

import typer

import duoka
from duoka.base.serialization import to_dict
from duoka.base.text import choose
from duoka.errors import InfeasibleError, PlacementError, UsageError
from duoka.forecast.workload import Training
from duoka.hardware.detect import describe_numbers
from duoka.planner.plan_profile import CONVENTIONS, Convention, map_of
from duoka.planner.replicas import Replicas
from duoka.report.export import TOOLS, Pins, plan_for_tool, refuse_tool

from . import planning, replicas
from .groups import OptionGroup, flag, option, refuse_beside, with_groups
from .options import ModelOptions, PlanOptions
from .suggestions import as_json
from .terminal import check_file, print_json, stdout
from .training_options import TrainingOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutput(OptionGroup):
    """Options for output besides the printed plan."""

    save: Path | None = option("FILE", "Save the plan in a file.")
    save_device_map: Path | None = option(
        "FILE",
        "Write the plan's device map for transformers to a file; for a refused --device-map, "
        "write the completed one.",
    )
    names: str | None = option(
        "WHOSE",
        "Names in the device map: those of the model in duoka and transformers (model, the "
        "default), or those of the checkpoint and its own code (checkpoint).",
        values=CONVENTIONS,
    )
    explain: bool = flag(
        "Explain the plan: the binding GPU, and why each GPU has no fewer and no more modules. "
        "With --json print only that."
    )
    export: str | None = option(
        "TOOL",
        "Print the plan in the form of another tool: accelerate, vllm, sglang, llama.cpp or swift.",
        values=TOOLS,
    )
    gguf: Path | None = option(
        "FILE",
        "GGUF file for --export llama.cpp: print its name, and the size of its weights on each "
        "GPU.",
    )
    json: bool = flag("Print the plan as JSON.")

    @property
    def convention(self) -> Convention:
        """The naming convention, "model" by default; UsageError if unknown."""
        return choose("names", self.names or "model", CONVENTIONS)

    def check(self, options: PlanOptions) -> None:
        """Refuse unwritable files and contradicting options before planning."""
        if self.convention != "model" and self.save_device_map is None and self.export is None:
            hint = "add --save-device-map FILE or --export TOOL"
            raise UsageError("--names needs --save-device-map or --export", hint=hint)
        if self.gguf is not None and self.export is None:
            raise UsageError("--gguf needs --export", hint="add --export llama.cpp")
        if self.export is not None:
            refuse_tool(self.export, self.convention, self.gguf)
        check_file(self.save, "the plan")
        check_file(self.save_device_map, "the device map")
        if self.export is not None:
            hint = "save the plan with --save FILE, then request each separately with --plan FILE"
            beside = "--export, which prints another format"
            self.refuse("json", "explain", beside=beside, hint=hint)
        if options.replicas is not None:
            beside = "--replicas: they apply to a single plan"
            hint = "save the plans with --save FILE, then request it for each with --plan FILE"
            outputs = self.given_options("save_device_map", "explain", "export")
            refuse_beside(outputs + planning.given_map(options), beside, hint)
            options.refuse("replan", "max_context", "max_batch", beside=beside, hint=hint)

    def write_replicas(self, copies: Replicas) -> None:
        """Save and print the plans of several replicas."""
        if self.save is not None:
            files = replicas.files(self.save, len(copies.plans))
            for plan, file in zip(copies.plans, files, strict=True):
                planning.save_plan(plan, file)
        if self.json:
            print_json(to_dict(copies))
        else:
            replicas.show_copies(copies)

    def report_faults(self, error: PlacementError) -> None:
        """Print the faults of a device map as JSON, and save the completed map, if requested."""
        if self.json:
            print_json(asdict(error.faults))
        if self.save_device_map is not None and error.completed is not None:
            planning.save_device_map(error.completed, self.save_device_map)
            error.hint = f"review it, then use --device-map {self.save_device_map}"

    def write(self, plan: duoka.Plan) -> None:
        """Save the plan in the requested files, and print it in the requested form."""
        if self.save_device_map is not None:
            planning.save_device_map(map_of(plan, self.convention), self.save_device_map)
        if self.save is not None:
            planning.save_plan(plan, self.save)
        if self.export is not None:
            exported = duoka.export(plan, self.export, names=self.convention, gguf=self.gguf)
            typer.echo(str(exported))
            return
        explanation = duoka.explain(plan) if self.explain else None
        if self.json and explanation is not None:
            print_json(explanation.to_dict())
            return
        if self.json:
            typer.echo(plan.to_json())
            return
        from duoka.report.terminal import render_explanation, render_plan

        stdout().print(render_plan(plan))
        numbers = describe_numbers(plan.fleet.only(plan.devices).devices)
        if numbers:
            stdout().print(numbers, markup=False)
        if explanation is not None:
            stdout().print("", render_explanation(explanation))


@with_groups
def plan(
    options: PlanOptions, training: TrainingOptions, output: PlanOutput, model: ModelOptions
) -> None:
    """Plan which GPU holds each module, and show the memory of each GPU. Reads no weights.

    [bold]duoka plan[/] ./glm-4-9b-chat --gpus "24GiB,12GiB" --context 32K

    [bold]duoka plan[/] ./chatglm3-6b --gpus "virtual:2x8GiB" --save chatglm3.plan

    [bold]duoka plan[/] ./chatglm3-6b/config.json --gpus 8x24GiB --batch 16 --json

    [bold]duoka plan[/] ./glm-4-9b-chat --gpus 2x24GiB --train lora --context 2K
    """
    how_to_train, options = training.read(options)
    output.check(options)
    if how_to_train is not None and training.data and options.plan_file is None:
        options = planning.fit_to_data(model, options, how_to_train, training.data)
    try:
        if options.replicas is None:
            new_plan = planning.find_plan(model, options, how_to_train)[0]
            if output.export and options.plan_file is None and not planning.given_map(options):
                again = partial(_plan_with_pins, model, options, how_to_train)
                new_plan = plan_for_tool(new_plan, output.export, again)
            output.write(new_plan)
        else:
            number = replicas.read_number(options.replicas)
            output.write_replicas(planning.find_replicas(model, options, how_to_train, number))
    except PlacementError as error:
        output.report_faults(error)
        raise
    except InfeasibleError as error:
        if output.json:
            typer.echo(as_json(error))
        raise


def _plan_with_pins(
    model: ModelOptions, options: PlanOptions, training: Training | None, pins: Pins
) -> duoka.Plan:
    """Plan with additional pins, without messages."""
    all_pins = [*(options.pin or ()), *(f"{name}={at}" for name, at in pins)]
    with redirect_stderr(StringIO()):
        return planning.find_plan(model, replace(options, pin=all_pins), training)[0]
