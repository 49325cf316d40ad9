"""``duoka plan``: where every module goes, and what that costs."""

from __future__ import annotations

import json as json_format
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

import duoka
from duoka.base.serialization import to_dict
from duoka.errors import Faults, InfeasibleError, PlacementError, UsageError
from duoka.planner.replicas import Replicas
from duoka.report.export import refuse_unknown

from . import options, outputs, planning, training_options
from . import replicas as copies
from .suggestions import as_json
from .terminal import stdout


def _known_tool(tool: str | None) -> str | None:
    """Refuse what there is no export for before the model is traced."""
    if tool is not None:
        refuse_unknown(tool)
    return tool


def plan(
    model: options.Model = None,
    gpus: options.Gpus = None,
    context: options.Context = None,
    new_tokens: options.NewTokens = None,
    batch: options.Batch = None,
    dtype: options.Dtype = None,
    prefill_chunk: options.PrefillChunk = None,
    cache: options.Cache = None,
    quantize: options.Quantize = None,
    images: options.Images = None,
    image_size: options.ImageSize = None,
    objective: options.Objective = None,
    use_all: options.UseAll = False,
    strategy: options.Strategy = None,
    pin: options.Pin = None,
    uncut: options.Uncut = None,
    reserve: options.Reserve = None,
    offload: options.Offload = False,
    train: training_options.Train = None,
    optimizer: training_options.Optimizer = None,
    lora_rank: training_options.LoraRank = None,
    lora_target: training_options.LoraTarget = None,
    gradient_checkpointing: training_options.GradientCheckpointing = False,
    master_weights: training_options.MasterWeights = False,
    micro_batches: training_options.MicroBatches = None,
    schedule: training_options.Schedule = None,
    max_context: options.MaxContext = False,
    max_batch: options.MaxBatch = False,
    replicas: options.Copies = None,
    device_map: options.DeviceMapFile = None,
    plan_file: options.PlanFile = None,
    replan: options.Replan = False,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the plan in a file.", show_default=False),
    ] = None,
    save_device_map: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the plan's device map, as transformers takes it, to a file; of a "
            "--device-map that is refused, the completed one.",
            show_default=False,
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Say why: what binds, why each GPU has no less and no more, what else was "
            "weighed. With --json that alone is printed.",
        ),
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the plan as a page for a browser: one file, no network.",
            show_default=False,
        ),
    ] = None,
    export: Annotated[
        str | None,
        typer.Option(
            metavar="TOOL",
            callback=_known_tool,
            help="Print the plan as another tool takes it: accelerate, vllm, sglang, llama.cpp, "
            "torch-pipelining, torchtitan or deepspeed.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    debug: options.Debug = False,
) -> None:
    """Find where every module goes, and show what that costs. No weight is read.

    [bold]duoka plan[/] ./glm-4-9b-chat --gpus "24GiB,12GiB" --context 32K

    [bold]duoka plan[/] ./chatglm3-6b --gpus "virtual:2x8GiB" --save chatglm3.plan

    [bold]duoka plan[/] ./chatglm3-6b/config.json --gpus 8x24GiB --batch 16 --json

    [bold]duoka plan[/] ./glm-4-9b-chat --gpus 2x24GiB --train lora --context 2K
    """
    wishes = planning.Wishes.of(locals(), training=training_options.read_training(locals()))
    asked = planning.Asked(revision=revision, trust_remote_code=trust_remote_code)
    answer = _Answer(
        save=save,
        save_device_map=save_device_map,
        html=html,
        export=export,
        explain=explain,
        json=json,
    )
    answer.check()
    try:
        if replicas is not None:
            answer.refuse_beside_copies(replan=replan)
            answer.give_copies(planning.make_copies(model, plan_file, wishes, asked=asked))
            return
        made = planning.make_plan(model, plan_file, wishes, replan=replan, asked=asked)
    except PlacementError as error:
        answer.refuse(error)
        raise
    except InfeasibleError as error:
        if json:
            typer.echo(as_json(error))
        raise
    answer.give(made)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What a person wants to have of the plan, besides seeing it."""

    save: Path | None
    save_device_map: Path | None
    html: Path | None
    export: str | None
    explain: bool
    json: bool

    def check(self) -> None:
        """Refuse files that can't be written, before the work."""
        outputs.check(self.save, "the plan")
        outputs.check(self.save_device_map, "the device map")
        outputs.check(self.html, "the page")
        beside = [f"--{name}" for name in ("json", "explain") if getattr(self, name)]
        if self.export is not None and beside:
            raise UsageError(
                f"{', '.join(beside)} can't be given with --export, which prints another form",
                hint="keep the plan with --save FILE, and ask it for each",
            )

    def refuse_beside_copies(self, *, replan: bool) -> None:
        """Refuse what is made of one plan alone."""
        said = {"save-device-map": self.save_device_map, "html": self.html, "export": self.export}
        beside = [f"--{name}" for name, value in said.items() if value is not None]
        beside += ["--explain"] if self.explain else []
        beside += ["--replan"] if replan else []
        if beside:
            raise UsageError(
                f"{', '.join(beside)} can't be given with --replicas: each is for one plan",
                hint="keep the plans with --save FILE, and ask each of them",
            )

    def give_copies(self, found: Replicas) -> None:
        """Write and show the plans of several copies."""
        if self.save is not None:
            copies.save_copies(found, self.save)
        if self.json:
            typer.echo(_json(to_dict(found)))
        else:
            copies.show_copies(found)

    def refuse(self, error: PlacementError) -> None:
        """Say what is wrong with a device map, and keep the completed one."""
        if self.json:
            typer.echo(_faults(error.faults))
        if self.save_device_map is not None and error.completed is not None:
            planning.save_device_map(error.completed, self.save_device_map)
            error.hint = f"look it over, then: --device-map {self.save_device_map}"

    def give(self, made: duoka.Plan) -> None:
        """Write and show a plan."""
        if self.save_device_map is not None:
            planning.save_device_map(made.device_map, self.save_device_map)
        if self.save is not None:
            planning.save(made, self.save)
        if self.html is not None:
            planning.save_page(made, self.html)
        if self.export is not None:
            typer.echo(str(duoka.export(made, self.export)))
            return
        explanation = duoka.explain(made) if self.explain else None
        if self.json:
            typer.echo(made.to_json() if explanation is None else _json(explanation.to_dict()))
            return
        from duoka.report.terminal import render_explanation, render_plan

        stdout().print(render_plan(made))
        if explanation is not None:
            stdout().print("", render_explanation(explanation))


def _faults(faults: Faults) -> str:
    """Every name at fault, as JSON."""
    return _json(asdict(faults))


def _json(data: object) -> str:
    return json_format.dumps(data, indent=1)
