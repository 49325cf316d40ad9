"""``duoka check``: every device fault in a model's own code, found without a GPU."""

from __future__ import annotations

import json as json_format
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import duoka
from duoka.errors import UsageError
from duoka.planner.device_map import DeviceMap
from duoka.planner.limits import fleet_for

from . import fixing, options, outputs, pictures, planning
from .errors import NOT_OK
from .terminal import stderr, stdout, working

if TYPE_CHECKING:
    from duoka.report.check_report import Report

_TRAINING_TOKENS = "1"  # a workload answers at least one
_FIXING = "How to repair"


def check(
    model: options.Model = None,
    gpus: options.Gpus = None,
    plan_file: options.PlanFile = None,
    device_map: options.DeviceMapFile = None,
    context: options.Context = None,
    new_tokens: options.NewTokens = None,
    batch: options.Batch = None,
    dtype: options.Dtype = None,
    quantize: options.Quantize = None,
    train: Annotated[
        bool,
        typer.Option(
            "--train",
            help="Run the loss and backward, instead of the prompt and decode steps.",
            rich_help_panel=options.PLANNING,
        ),
    ] = False,
    image: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WxH|FILE",
            help="A picture in the prompt, by its size (1120x1120) or as a file; repeatable.",
            rich_help_panel=options.PLANNING,
            show_default=False,
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    sarif: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the report as SARIF 2.1.0, which code hosts show in pull requests.",
            show_default=False,
        ),
    ] = None,
    fix: Annotated[
        bool,
        typer.Option(
            "--fix",
            help="Write the smallest changes that cure the faults, prove them, and show them.",
            rich_help_panel=_FIXING,
        ),
    ] = False,
    in_place: Annotated[
        bool,
        typer.Option(
            "--in-place",
            help="With --fix: change the files themselves, where the change is proved.",
            rich_help_panel=_FIXING,
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="DIRECTORY",
            help="With --fix: where the changed copies go. By default duoka-fixed.",
            rich_help_panel=_FIXING,
            show_default=False,
        ),
    ] = None,
    save_device_map: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the device map that was checked, completed if it wasn't complete.",
            show_default=False,
        ),
    ] = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    debug: options.Debug = False,
) -> None:
    """Run a model's own code on virtual GPUs, and report every device fault with its line.

    It needs no GPU and reads no weights. Exit code 0 when all is well, 13 otherwise.

    [bold]duoka check[/] ./glm-4-9b-chat --gpus virtual:2x24GiB

    [bold]duoka check[/] ./my-model --trust-remote-code --gpus virtual:2x24GiB --train --fix

    [bold]duoka check[/] ./chatglm3-6b --device-map map.json --save-device-map completed.json
    """
    wishes = planning.Wishes.of(locals())
    fixes = fixing.Fixes(wanted=fix, in_place=in_place, output=output)
    fixes.refuse_contradictions()
    outputs.check(sarif, "the SARIF log")
    outputs.check(save_device_map, "the device map")
    asked = planning.Asked(revision=revision, trust_remote_code=trust_remote_code)
    question = _question(model, plan_file, wishes, asked, train=train)
    question |= {"train": train, "images": [pictures.size(each) for each in image or ()]}
    with working("running the model on virtual GPUs"):
        report: Report = duoka.check(**question)
    if save_device_map is not None:
        _save_map(report, save_device_map)
    if sarif is not None:
        from duoka.report.sarif import dumps

        outputs.write(sarif, dumps(report) + "\n", "the SARIF log")
    if not json:
        _print(report, advice=not fix)
    repaired = fixes.repair(report) if fix else None
    if json:
        found = report.to_dict() | ({} if repaired is None else repaired.to_dict())
        typer.echo(json_format.dumps(found, indent=1, ensure_ascii=False))
    if repaired is not None:
        if not json:
            repaired.print(stdout())
        repaired.write()
    if not report.ok and not (repaired is not None and repaired.cures(report)):
        raise typer.Exit(NOT_OK)


def _question(
    model: str | None,
    plan_file: Path | None,
    wishes: planning.Wishes,
    asked: planning.Asked,
    *,
    train: bool,
) -> dict[str, Any]:
    """What `duoka.check` is asked: the cheap refusals come before torch is imported."""
    if plan_file is not None:
        wishes.refuse_any()
        plan = planning.make_plan(model, plan_file, wishes, replan=False, asked=asked)
        checkpoint = planning.open_checkpoint(model or plan.source, asked)
        return {"model": checkpoint, "placement": plan, "workload": plan.workload}
    if train and wishes.new_tokens is not None:
        raise UsageError(
            "--new-tokens is for answers, and --train makes none",
            hint="--context says how long a sequence is",
        )
    given = None if wishes.device_map is None else DeviceMap.load(wishes.device_map)
    checkpoint = planning.open_checkpoint(model, asked)
    fleet = None
    if wishes.gpus is not None or given is None:
        fleet = fleet_for(planning.read_fleet(wishes.gpus or planning.ALL_GPUS), given)
    return {
        "model": checkpoint,
        "placement": given,
        "workload": planning.workload_for(checkpoint, _for_training(wishes) if train else wishes),
        "fleet": fleet,
    }


def _for_training(wishes: planning.Wishes) -> planning.Wishes:
    """All tokens of the context are the prompt's, but for one."""
    return replace(wishes, new_tokens=_TRAINING_TOKENS)


def _save_map(report: Report, file: Path) -> None:
    """Write the map that was checked; there is none where the model couldn't be built."""
    completed = report.completeness.completed
    if completed is not None:
        planning.save_device_map(completed, file)
    elif report.subject is not None:
        planning.save_device_map(dict(report.subject.entries), file)
    else:
        stderr().print("no device map was saved: the model's code stopped before there was one")


def _print(report: Report, *, advice: bool) -> None:
    from duoka.report.terminal import render_report

    stdout().print(render_report(report, advice=advice))
