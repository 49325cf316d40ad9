"""``duoka tune``: fine-tune a model as planned, on all GPUs."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from duoka.base.files import reading
from duoka.base.progress import heard_by, say_import
from duoka.base.text import choose
from duoka.errors import UsageError
from duoka.forecast.workload import DTYPES, QUANTIZED, read_dtype, read_quantization
from duoka.planner.constraints import EXPERTS
from duoka.planner.plan import Plan

from . import planning, replicas
from .groups import all_but, argument, flag, option, with_groups
from .options import ModelOptions, parse_tokens
from .terminal import note, stdout
from .training_options import PANEL, TrainingOptions

if TYPE_CHECKING:
    from duoka.tuner.prepare import TuneRun
    from duoka.tuner.settings import TuneSettings
    from duoka.tuner.tune import TuneResult

_data = partial(option, panel="Data")
_data_flag = partial(flag, panel="Data")
_how = partial(option, panel=PANEL)
_where = partial(option, panel="Where")
_run = partial(option, panel="The run")
_run_flag = partial(flag, panel="The run")
_UNUSED_DIRECTORY = Path("not-saved")  # for --dry-run, which writes nothing
_NUM_PREVIEWED = 3


def _read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Use the values of a TOML file as the defaults of options that are not given."""
    if file is None:
        return None
    with reading(file, "write it as TOML in UTF-8"):
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    known = {name.removeprefix("--"): it for it in context.command.params for name in it.opts}
    context.default_map = {}
    for name, value in content.items():
        declared = known[choose(f"{file}: the option", name.replace("_", "-"), sorted(known))]
        if isinstance(value, list):
            value = [*map(str, value)]
        elif not isinstance(value, bool):  # text, as on the command line
            value = [str(value)] if declared.multiple or declared.nargs != 1 else str(value)
        context.default_map[declared.name] = value
    return file


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions(TrainingOptions):
    """Options of a training run, as written on the command line; None if not given."""

    data: list[str] | None = argument(
        "DATA",
        "Files or directories: JSON lines (messages, ChatGLM3 and ShareGPT conversations, "
        "questions with answers as in Alpaca, prompt and completion, text), JSON, CSV, Parquet, or "
        "plain text. FILE=2 takes each sample twice per epoch, FILE=0.5 half of them.",
    )
    columns: str | None = _data(
        "NAMES",
        "Columns: prompt=q,response=a (also query, messages, text, system, history, tools, "
        "images, chosen, rejected).",
    )
    max_samples: int | None = _data("N", "Maximum number of training samples.", min=1)
    train_on: str | None = _data(
        "WHICH",
        "Assistant turns to train on: all (the default) or the last one of each chat.",
        values=("all", "last"),
    )
    seq_length: str | None = _data(
        "TOKENS",
        "Maximum sequence length in tokens. By default that of the longest sample, at most 2K.",
        names=("--context",),
    )
    long: str | None = _data(
        "HOW",
        "Rows beyond the sequence length: truncate (the default: drop turns of conversations, skip "
        "rows of which nothing fits) or refuse.",
        values=("truncate", "refuse"),
    )
    skip_bad: bool = _data_flag("Skip invalid rows instead of stopping.")
    eval_data: list[str] | None = _data(
        "DATA", "Evaluation data, or a share of DATA such as 5%. Repeatable.", names=("--eval",)
    )
    dpo_beta: float | None = _how("BETA", "Scale of the rewards of DPO. By default 0.1.")
    eval_prompts: list[str] | None = _data(
        "FILE",
        "Prompts to answer at each evaluation: lines of a text file, or rows as in DATA. "
        "Repeatable.",
    )
    batch: int | None = _how("N", "Sequences per optimizer step. By default 8.", min=1)
    epochs: int | None = _how("N", "Number of epochs. By default 1.", min=1)
    steps: int | None = _how("N", "Number of optimizer steps, instead of --epochs.", min=1)
    lr: float | None = _how(
        "RATE", "Peak learning rate. By default 1e-4, with --train full 1e-5, with --dpo 5e-6."
    )
    lr_schedule: str | None = _how(
        "NAME",
        "Learning rate schedule after the warmup: cosine (the default), linear, constant, "
        "cosine_with_restarts, polynomial or inverse_sqrt.",
        values=(
            *("cosine", "linear", "constant"),
            *("cosine_with_restarts", "polynomial", "inverse_sqrt"),
        ),
    )
    warmup: int | None = _how("STEPS", "Warmup steps. By default 3 % of all steps.", min=0)
    weight_decay: float | None = _how("RATE", "Weight decay of matrices. By default 0.")
    max_grad_norm: float | None = _how(
        "NORM", "Maximum gradient norm; 0 disables clipping. By default 1."
    )
    adapter: Path | None = _how(
        "DIR",
        "A LoRA adapter (from duoka tune or peft) to continue training, instead of a new one.",
    )
    dtype: str | None = _how(
        "DTYPE", "float32, float16, bfloat16 or auto: the checkpoint's own.", values=DTYPES
    )
    quantize: str | None = _how(
        "KIND", "Quantization of frozen weights: int8, int4 or nf4.", values=QUANTIZED
    )
    seed: int | None = _how(
        "N", "Random seed for sample order, adapters and dropout. By default 0.", min=0
    )
    gpus: str | None = _where("GPUS", "GPUs, as for `duoka plan`. By default all; all are used.")
    experts: str | None = _where(
        "PLACE",
        'Where frozen experts are: "auto" (the default: in host memory if the GPUs can\'t hold '
        'them), "gpu" or "host". The GPUs fetch experts from the host in each pass.',
        values=EXPERTS,
    )
    host_memory: str | None = _where("SIZE", "Host memory for experts, as for `duoka plan`.")
    replicas: str | None = _where("N", 'Data-parallel replicas. By default "auto": as many as fit.')
    plan: Path | None = _where("FILE", "Use a saved training plan instead of making one.")
    save: Path | None = _run("DIR", "Directory of the run: checkpoints, metrics and result.")
    resume: bool = _run_flag("Resume the run in --save; --gpus and --replicas may change the GPUs.")
    save_every: int | None = _run(
        "STEPS",
        "Steps between checkpoints. By default 10 % of the run or 15 minutes, whichever is sooner.",
        min=1,
    )
    keep: int | None = _run(
        "N", "Newest checkpoints to keep, beside the best one. By default 2.", min=1
    )
    eval_every: int | None = _run(
        "STEPS", "Steps between evaluations of --eval. By default 10 % of the run.", min=1
    )
    early_stopping: int | None = _run(
        "N",
        "End after N evaluations in a row without a better loss; the result is the best one's.",
        min=1,
    )
    export: Path | None = _run(
        "RUN",
        "Write the adapter of a run's newest checkpoint, or of RUN/checkpoints/step-N, and stop; "
        "with --merge or after --train full the model.",
    )
    report_to: list[str] | None = _run(
        "NAMES",
        "Where metrics go beside metrics.jsonl: tensorboard (the default if installed), wandb, "
        "swanlab. Repeatable.",
    )
    merge: bool = _run_flag("Merge the adapter and write a whole checkpoint.")
    config: Path | None = _run(
        "FILE",
        "A TOML file with any of these options, such as batch = 16.",
        callback=_read_config,
        is_eager=True,
    )
    dry_run: bool = _run_flag("Plan, check the data, print both, and stop.")


@with_groups
def tune(model: ModelOptions, options: TuneOptions) -> None:
    """Fine-tune a model on your data with all GPUs. The plan is proved first.

    [bold]duoka tune[/] ./glm-4-9b-chat train.jsonl --gpus 2x24GiB --save run

    [bold]duoka tune[/] ./chatglm3-6b train.jsonl --train qlora --context 4K --save run

    [bold]duoka tune[/] --save run --resume
    """
    if options.export is not None:
        _export(options, model, options.export)
        return
    if options.save is None and not options.dry_run:
        raise UsageError("no directory for the run was given", hint="--save DIR")
    say_import("torch")
    from duoka.tuner.trainer import LostError
    from duoka.workers.worker import LOST

    try:
        _print_result(_resume(options) if options.resume else _start(options, model))
    except LostError:
        raise typer.Exit(LOST) from None  # the torchrun process at fault has reported why


def _start(options: TuneOptions, model: ModelOptions) -> TuneResult:
    """Plan a new run, print the plan and sample data, and train."""
    if not model.model or not options.data:
        raise UsageError(
            "MODEL or DATA is missing", hint="give at least: duoka tune MODEL DATA --save DIR"
        )
    _refuse_conflicts(options)
    gpus = options.gpus or planning.ALL_GPUS
    planning.read_fleet(gpus)
    checkpoint = planning.open_checkpoint(model, to_run=True)
    with heard_by(note):
        from duoka.tuner.tune import tune

        return tune(
            checkpoint,
            options.data,
            gpus,
            save=options.save or _UNUSED_DIRECTORY,
            settings=_settings(options),
            replicas=replicas.read_number(options.replicas or "auto"),
            plan=None if options.plan is None else Plan.load(options.plan),
            adapter=options.adapter,
            show=partial(_print_plans, goes_on=not options.dry_run),
        )


def _refuse_conflicts(options: TuneOptions) -> None:
    """Raise UsageError for combinations in which one option would be ignored."""
    either = "omit one of them"
    if options.plan is not None:
        options.refuse(
            "gpus", "replicas", beside="--plan, which already contains the GPUs", hint=either
        )
    options.refuse_adapters()
    if options.method == "full":
        options.refuse("adapter", beside="--train full, which has no adapters", hint=either)
    if options.adapter is not None:
        shape = "lora_rank", "lora_alpha", "rslora", "lora_target"
        options.refuse(*shape, beside="--adapter, which has its own settings", hint=either)
    if not options.dpo:
        options.refuse("dpo_beta", beside="training without --dpo", hint="add --dpo")
    if options.steps is not None:
        options.refuse("epochs", beside="--steps", hint="use one of them")


def _read_columns(text: str) -> dict[str, str]:
    """Read names of columns, such as prompt=question,response=answer."""
    pairs = [pair.partition("=")[::2] for pair in text.split(",")]
    columns = {role.strip(): column.strip() for role, column in pairs}
    if len(columns) < len(pairs):
        raise UsageError(f"--columns {text} names a role twice", hint="name each role once")
    return columns


def _settings(options: TuneOptions) -> TuneSettings:
    """Convert the given options to settings; the settings' defaults apply to the others."""
    from duoka.tuner.settings import TuneSettings

    readers: dict[str, Callable[[Any], Any]] = {
        "seq_length": parse_tokens,
        "columns": _read_columns,
        "dtype": read_dtype,
        "quantize": read_quantization,
        "eval_data": tuple,
        "eval_prompts": tuple,
        "lora_target": tuple,
        "report_to": lambda names: tuple(name for text in names for name in text.split(",")),
    }
    names = {item.name for item in fields(TuneSettings)} & {*all_but(TuneOptions)}
    values = {name: value for name in names if (value := getattr(options, name)) is not None}
    values |= {name: read(values[name]) for name, read in readers.items() if name in values}
    return TuneSettings(**values)


def _print_plans(run: TuneRun, *, goes_on: bool) -> bool:
    """Print the plans and the first samples; return `goes_on`: False ends the run here."""
    from duoka.report.terminal import render_plan
    from duoka.tuner.data import render_preview

    console = stdout()
    for plan in run.plans:
        console.print(render_plan(plan))
    console.print(render_preview(run.samples, run.tokenizer, _NUM_PREVIEWED))
    if run.eval_samples is not None:
        console.print("\nfor evaluation", style="bold")
        console.print(render_preview(run.eval_samples, run.tokenizer, 0))
    return goes_on


def _resume(options: TuneOptions) -> TuneResult:
    """Resume a run from its last checkpoint, on the same GPUs or on other ones."""
    fixed_names = all_but(TuneOptions, "save", "resume", "gpus", "replicas", "data")
    changes = options.given_options(*fixed_names)
    if changes:
        hint = "omit it, or start a new run in another directory"
        raise UsageError(f"{', '.join(changes)} can't change when a run is resumed", hint=hint)
    with heard_by(note):
        from duoka.tuner.run import RunDirectory
        from duoka.tuner.tune import move, resume

        assert options.save is not None, "it was asked for"
        directory = RunDirectory(options.save)
        if options.gpus is not None or options.replicas is not None:
            number = replicas.read_number(options.replicas or "auto")
            move(directory, options.gpus, number)
        return resume(directory)


def _export(options: TuneOptions, model: ModelOptions, path: Path) -> None:
    """Write the result of a checkpoint of a run, and print its directory."""
    beside = "--export, which uses the model and the settings of the run"
    options.refuse(*all_but(TuneOptions, "export", "merge"), beside=beside, hint="omit it")
    model.refuse(*all_but(ModelOptions), beside=beside, hint="omit it")
    with heard_by(note):
        from duoka.tuner.tune import export_result

        result = export_result(path, merge=options.merge)
    _print_directory(result)


def _print_directory(result: Path, of_step: str = "") -> None:
    """Print the directory of a result, and before it the option that vLLM needs for an adapter."""
    from duoka.tuner.result import describe_for_vllm

    for text in (describe_for_vllm(result), f"the result is in {result}{of_step}"):
        if text is not None:
            stdout().print(text, markup=False, highlight=False, soft_wrap=True)


def _print_result(result: TuneResult) -> None:
    """Print the report and the result; exit with the signal's code if the run was stopped."""
    from duoka.tuner.report import render_report

    if result.report is not None:
        stdout().print(render_report(result.report))
    if result.result is not None:
        is_last = result.result_step == result.steps
        of_step = "" if is_last else f", from step {result.result_step}"
        _print_directory(result.result, of_step)
    if result.best is not None:
        text = f"best evaluation loss: {result.best} (duoka tune --export {result.best})"
        stdout().print(text, markup=False, soft_wrap=True)
    if result.stopped_by is not None:
        command = f"duoka tune --save {result.directory} --resume"
        note(f"stopped after step {result.steps}; to resume: {command}")
        raise typer.Exit(128 + result.stopped_by)
