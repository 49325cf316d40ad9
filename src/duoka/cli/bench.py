"""``duoka bench``: measure what planning can't know from published figures."""

from __future__ import annotations

import json as json_format
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

import duoka
from duoka.base.files import why
from duoka.base.serialization import to_dict
from duoka.base.text import choose
from duoka.base.units import format_bytes
from duoka.errors import UsageError
from duoka.forecast.workload import QUANTIZED, Cache, Dtype, Quantization
from duoka.planner.request import PlanProblem

from . import options, planning
from .terminal import stderr, stdout

if TYPE_CHECKING:
    from duoka.tools.bench.calibrate import Calibrated
    from duoka.tools.bench.quality import Quality

_MEASURED: tuple[Cache, ...] = ("dynamic", "int8")


def bench(
    model: options.Model = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure the GPUs' overhead, memory, matrix rates, launches and links, and keep "
            "it for the plans to come. It takes less than a minute.",
        ),
    ] = False,
    quality: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Measure what quantization costs: the model's perplexity on a text, unquantized "
            "and quantized.",
            show_default=False,
        ),
    ] = None,
    quantize: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="With --quality: int8, int4 or nf4; repeatable. By default int8 and int4.",
            show_default=False,
        ),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="With --quality: int8 measures a KV cache in 8 bit, and with --quantize both "
            "together.",
            show_default=False,
        ),
    ] = None,
    context: options.Context = None,
    stride: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="With --quality: by how much each window begins after the one before. By default "
            "half of --context, which is 512 then.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="With --quality: how much of the text is read. By default 8K.",
            show_default=False,
        ),
    ] = None,
    dtype: options.Dtype = None,
    gpus: options.Gpus = None,
    json: Annotated[bool, typer.Option("--json", help="Print what was measured as JSON.")] = False,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    debug: options.Debug = False,
) -> None:
    """Measure this machine, or what quantization does to a model.

    [bold]duoka bench[/] --calibrate

    [bold]duoka bench[/] --calibrate --gpus 2,3

    [bold]duoka bench[/] --calibrate --gpus virtual:2x1GiB   (a rehearsal)

    [bold]duoka bench[/] --quality book.txt ./glm-4-9b-chat --quantize int8 --quantize int4
    """
    if calibrate == (quality is not None):
        raise UsageError(
            "nothing was said to be measured" if not calibrate else "one thing at a time",
            hint="say --calibrate, or --quality FILE MODEL",
        )
    named = planning.ALL_GPUS if gpus is None else gpus
    if quality is None:
        _refuse_beside_calibrate(
            {
                "a model": model,
                "--quantize": quantize,
                "--cache": cache,
                "--context": context,
                "--stride": stride,
                "--tokens": tokens,
                "--dtype": dtype,
                "--revision": revision,
            }
        )
        _calibrate(named, json=json)
        return
    asked = planning.Asked(revision=revision, trust_remote_code=trust_remote_code, to_run=True)
    if model is None:
        raise UsageError("no model was given", hint="name it: --quality FILE MODEL")
    wanted = _Wanted(
        file=quality,
        forms=_forms(quantize, cache),
        cache=choose("cache", cache or "dynamic", _MEASURED),
        context=_read_tokens(context),
        stride=_read_tokens(stride),
        tokens=_read_tokens(tokens),
        dtype=options.parse_dtype(dtype or "auto"),
    )
    _refuse_unreadable(quality)
    found = _measure(planning.open_checkpoint(model, asked), planning.read_fleet(named), wanted)
    if json:
        typer.echo(json_format.dumps(to_dict(found), indent=1, ensure_ascii=False))
    else:
        _print_quality(found)


def _refuse_beside_calibrate(said: Mapping[str, object]) -> None:
    """Refuse what is for --quality."""
    beside = [name for name, value in said.items() if value is not None]
    if beside:
        raise UsageError(
            f"{', '.join(beside)} can't be given with --calibrate, which measures GPUs alone",
            hint="--quality FILE MODEL measures a model",
        )


def _refuse_unreadable(file: Path) -> None:
    """Look at a text before anything is said or downloaded of a model."""
    try:
        file.open("rb").close()
    except OSError as error:
        raise UsageError(
            f"{file} can't be read: {why(error)}", hint="give a file with text in UTF-8"
        ) from error


class _Wanted(NamedTuple):
    """What a person said about measuring quality."""

    file: Path
    forms: list[Quantization]
    cache: Cache
    context: int | None
    stride: int | None
    tokens: int | None
    dtype: Dtype


def _forms(quantize: list[str] | None, cache: str | None) -> list[Quantization]:
    """What the weights become; nothing where only a cache is to be measured."""
    usual = ["int8", "int4"] if cache is None else []
    return [choose("quantize", each, QUANTIZED) for each in quantize or usual]


def _read_tokens(text: str | None) -> int | None:
    return None if text is None else options.parse_tokens(text)


def _measure(checkpoint: duoka.Checkpoint, fleet: duoka.Fleet, wanted: _Wanted) -> Quality:
    from duoka.tools.bench.quality import measure_quality, windows_for

    chosen = windows_for(checkpoint)
    if wanted.context is not None:
        half = max(wanted.context // 2, 1)
        chosen = replace(chosen, context_tokens=wanted.context, stride_tokens=half)
    if wanted.stride is not None:
        chosen = replace(chosen, stride_tokens=wanted.stride)
    if wanted.tokens is not None:
        chosen = replace(chosen, most_tokens=wanted.tokens)
    console = stderr()
    with console.status("measuring") as status:
        return measure_quality(
            checkpoint,
            wanted.file,
            PlanProblem(
                fleet=fleet, workload=duoka.Workload(dtype=wanted.dtype, cache=wanted.cache)
            ),
            forms=wanted.forms,
            windows=chosen,
            progress=status.update,
        )


def _print_quality(found: Quality) -> None:
    from rich import box
    from rich.table import Table

    first = found.scores[0]
    cached = any(score.cache != first.cache for score in found.scores)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("weights")
    if cached:
        table.add_column("cache")
    for name in ("bytes", "of it", "perplexity", "more", "in percent"):
        table.add_column(name, justify="right")
    for score in found.scores:
        more = score.perplexity - first.perplexity
        table.add_row(
            score.weights,
            *([score.cache] if cached else []),
            format_bytes(score.weight_bytes),
            f"{score.weight_bytes / first.weight_bytes:.0%}",
            f"{score.perplexity:.4f}",
            "" if score is first else f"{more:+.4f}",
            "" if score is first else f"{more / first.perplexity:+.2%}",
        )
    windows = found.windows
    table.caption = (
        f"{found.scored_tokens} tokens of {found.file}, in windows of {windows.context_tokens} "
        f"every {windows.stride_tokens}"
    )
    table.caption_justify = "left"
    stdout().print(table)


def _calibrate(gpus: str, *, json: bool) -> None:
    fleet = planning.read_fleet(gpus)
    from duoka.tools.bench.calibrate import calibrate

    console = stderr()
    with console.status("measuring") as status:
        found = calibrate(fleet, progress=status.update)
    if json:
        typer.echo(json_format.dumps(to_dict(found.calibration), indent=1))
    else:
        _print(found)
    if found.path is None:
        console.print("virtual GPUs: a rehearsal, of which nothing is kept", markup=False)
    else:
        console.print(f"kept in {found.path}; remove it to forget", markup=False, soft_wrap=True)


def _print(found: Calibrated) -> None:
    from rich import box
    from rich.table import Table

    measured = found.calibration
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("GPU", overflow="fold")
    for name in ("outside", "GB/s", "TFLOPs", "fp32", "launch", "from host", "to host"):
        table.add_column(name, justify="right")
    for each in measured.gpus:
        table.add_row(
            each.product,
            format_bytes(each.overhead_bytes),
            _number(each.memory_bytes_per_second, 1e9),
            _number(each.flops_per_second, 1e12),
            _number(each.float32_flops_per_second, 1e12),
            f"{_number(each.launch_seconds, 1e-6)} µs",
            _pair(each.from_pinned_bytes_per_second, each.from_pageable_bytes_per_second),
            _pair(each.to_pinned_bytes_per_second, each.to_pageable_bytes_per_second),
        )
    table.caption = (
        "outside: held outside torch's allocator; GB/s of its memory; TFLOPs in 16 bit;\n"
        "from and to the host in GB/s, pinned and pageable"
    )
    table.caption_justify = "left"
    stdout().print(table)
    for link in measured.links:
        stdout().print(
            f"{link.source} → {link.target}  {_number(link.bytes_per_second, 1e9)} GB/s, "
            f"{_number(link.latency_seconds, 1e-6)} µs",
            markup=False,
            soft_wrap=True,
        )


def _pair(pinned: float | None, pageable: float) -> str:
    told = "–" if pinned is None else _number(pinned, 1e9)
    return f"{told}, {_number(pageable, 1e9)}"


def _number(value: float, unit: float) -> str:
    return f"{value / unit:.3g}"
