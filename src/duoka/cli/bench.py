"""``duoka bench``: measure deployments of a model, the GPUs, or the cost of quantization."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import duoka
from duoka.base.files import why
from duoka.base.progress import say, say_import
from duoka.base.serialization import to_dict
from duoka.base.text import choose
from duoka.base.units import format_bytes
from duoka.errors import UsageError
from duoka.forecast.workload import (
    QUANTIZED,
    Cache,
    Quantization,
    read_dtype,
    read_quantization,
)
from duoka.planner.resolve import workload_for

from . import planning
from .deployments import bench_deployments
from .groups import Only, flag, option, with_groups
from .options import ModelOptions, PlanOptions, given_options, parse_tokens, refuse_beside
from .terminal import new_table, stderr, stdout, working

if TYPE_CHECKING:
    from duoka.hardware.calibration import Calibration
    from duoka.tools.bench.quality import Quality

_MEASURED: tuple[Cache, ...] = ("dynamic", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options of measurement."""

    forecast: bool = flag("--forecast", "Run nothing: tell of each deployment what is forecast.")
    cpu: bool = flag("--cpu", "Run the model on the processor alone, too.")
    calibrate: bool = flag(
        "--calibrate",
        "Measure the GPUs' overhead, memory, matrix rates, launches and links, and keep it for the "
        "plans to come. It takes less than a minute.",
    )
    quality: Path | None = option(
        "FILE",
        "Measure what quantization costs: the model's perplexity on a text, unquantized and "
        "quantized.",
    )
    quantize: list[str] | None = option(
        "KIND",
        "Weights in int8, int4 or nf4, too; repeatable. By default none, and with --quality int8 "
        "and int4.",
        values=QUANTIZED,
    )
    cache: str | None = option(
        "KIND",
        "With --quality: int8 measures a KV cache in 8 bit, and with --quantize both together.",
        values=_MEASURED,
    )
    json: bool = flag("--json", "Print what was measured as JSON.")

    def forms(self, usual: Sequence[str]) -> list[Quantization]:
        """Return the forms of quantized weights."""
        return [read_quantization(name, QUANTIZED) for name in self.quantize or usual]


@with_groups
def bench(
    choice: BenchOptions,
    options: Annotated[PlanOptions, Only(("gpus", "context", "new_tokens", "sequences", "dtype"))],
    model: ModelOptions,
) -> None:
    """Find the best way to run a model here, measure the GPUs, or what quantization costs.

    [bold]duoka bench[/] ./glm-4-9b-chat

    [bold]duoka bench[/] ./glm-4-9b-chat --gpus 2xRTX3090 --quantize int8 --forecast

    [bold]duoka bench[/] ./chatglm3-6b --gpus "virtual:3x16GiB" --cpu

    [bold]duoka bench[/] --calibrate

    [bold]duoka bench[/] --quality book.txt ./glm-4-9b-chat --quantize int8 --quantize int4
    """
    if choice.calibrate and choice.quality is not None:
        raise UsageError("one thing at a time", hint="say --calibrate, or --quality FILE MODEL")
    if choice.quality is not None:
        _bench_quality(choice, options, model)
    elif model.model is not None:
        refuse_beside(
            given_options(choice, "cache"), "deployments", "it is for --quality FILE MODEL"
        )
        bench_deployments(choice, options, model)
    elif choice.calibrate:
        refuse_beside(
            [
                *given_options(choice, "quantize", "cache", "forecast", "cpu"),
                *given_options(options, "context", "new_tokens", "sequences", "dtype"),
                *given_options(model, "revision"),
            ],
            "--calibrate alone, which measures GPUs",
            "name a MODEL, too",
        )
        _calibrate(planning.ALL_GPUS if options.gpus is None else options.gpus, choice.json)
    else:
        raise UsageError(
            "nothing was said to be measured",
            hint="name a MODEL; or say --calibrate, or --quality FILE MODEL",
        )


def _bench_quality(choice: BenchOptions, options: PlanOptions, model: ModelOptions) -> None:
    """Measure the cost of quantization, and print it."""
    refuse_beside(
        [
            *given_options(choice, "forecast", "cpu"),
            *given_options(options, "new_tokens", "sequences"),
        ],
        "--quality",
        "duoka bench MODEL without it tells deployments",
    )
    if model.model is None:
        raise UsageError("no model was given", hint="name it: --quality FILE MODEL")
    assert choice.quality is not None, "the caller has checked it"
    quality = _measure_quality(choice.quality, choice, options, model)
    if choice.json:
        typer.echo(json.dumps(to_dict(quality), indent=1, ensure_ascii=False))
    else:
        _print_quality(quality)


def _measure_quality(
    file: Path, choice: BenchOptions, options: PlanOptions, model: ModelOptions
) -> Quality:
    forms = choice.forms(["int8", "int4"] if choice.cache is None else [])
    cache = choose("cache", choice.cache or "dynamic", _MEASURED)
    context = None if options.context is None else parse_tokens(options.context)
    dtype = read_dtype(options.dtype or "auto")
    try:  # before anything of a model is downloaded
        file.open("rb").close()
    except OSError as error:
        raise UsageError(
            f"{file} can't be read: {why(error)}", hint="give a file with text in UTF-8"
        ) from error
    gpus = planning.ALL_GPUS if options.gpus is None else options.gpus
    planning.read_fleet(gpus)
    checkpoint, fleet = planning.open_checkpoint(model, to_run=True), duoka.Fleet.parse(gpus)
    tokens = max(context or 0, 2)
    workload_for(checkpoint, duoka.Workload(prompt_tokens=tokens - 1, new_tokens=1, dtype=dtype))
    with working():
        say_import("torch")
        from duoka.tools.bench.quality import Windows, measure_quality

        say("measuring")
        windows = None if context is None else Windows(context_tokens=context)
        return measure_quality(
            checkpoint, file, fleet, dtype=dtype, cache=cache, forms=forms, windows=windows
        )


def _print_quality(quality: Quality) -> None:
    unquantized, windows = quality.scores[0], quality.windows
    has_caches = any(score.cache != unquantized.cache for score in quality.scores)
    text_columns = ["weights", "cache"] if has_caches else ["weights"]
    table = new_table(
        *text_columns,
        *("bytes", "of it", "perplexity", "more", "in percent"),
        num_text_columns=len(text_columns),
        caption=f"{quality.scored_tokens} tokens of {quality.file}, in windows of "
        f"{windows.context_tokens} every {windows.stride_tokens}",
    )
    for score in quality.scores:
        increase = score.perplexity - unquantized.perplexity
        table.add_row(
            score.weights,
            *([score.cache] if has_caches else []),
            format_bytes(score.weight_bytes),
            f"{score.weight_bytes / unquantized.weight_bytes:.0%}",
            f"{score.perplexity:.4f}",
            "" if score is unquantized else f"{increase:+.4f}",
            "" if score is unquantized else f"{increase / unquantized.perplexity:+.2%}",
        )
    stdout().print(table)


def _calibrate(gpus: str, as_json: bool) -> None:
    fleet = duoka.Fleet.parse(gpus)
    with working():
        say_import("torch")
        from duoka.tools.bench.calibrate import calibrate

        say("measuring")
        calibrated = calibrate(fleet)
    if as_json:
        typer.echo(json.dumps(to_dict(calibrated.calibration), indent=1))
    else:
        _print_calibration(calibrated.calibration)
    end = "virtual GPUs: a rehearsal, of which nothing is kept"
    if calibrated.path is not None:
        end = f"kept in {calibrated.path}; remove it to forget"
    stderr().print(end, markup=False, soft_wrap=True)


def _print_calibration(calibration: Calibration) -> None:
    table = new_table(
        *("GPU", "outside", "GB/s", "TFLOPs", "fp32", "launch", "from host"),
        caption="outside: held outside torch's allocator; GB/s of its memory; TFLOPs in 16 bit;\n"
        "from the host's pinned memory in GB/s",
    )
    for gpu in calibration.gpus:
        from_host = gpu.host_bytes_per_second
        table.add_row(
            gpu.product,
            format_bytes(gpu.overhead_bytes),
            _number(gpu.memory_bytes_per_second, 1e9),
            _number(gpu.flops_per_second, 1e12),
            _number(gpu.float32_flops_per_second, 1e12),
            f"{_number(gpu.launch_seconds, 1e-6)} µs",
            "–" if from_host is None else _number(from_host, 1e9),
        )
    stdout().print(table)
    for link in calibration.links:
        stdout().print(
            f"{link.source} → {link.target}  {_number(link.bytes_per_second, 1e9)} GB/s, "
            f"{_number(link.latency_seconds, 1e-6)} µs",
            markup=False,
            soft_wrap=True,
        )


def _number(value: float, unit: float) -> str:
    return f"{value / unit:.3g}"
