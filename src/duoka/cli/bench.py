"""``duoka bench``: measure deployments of a model, the GPUs, or the cost of quantization."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import duoka
from duoka.base.files import reading
from duoka.base.progress import say, say_import
from duoka.base.serialization import to_dict
from duoka.base.units import format_bytes, format_count
from duoka.errors import UsageError
from duoka.forecast.workload import QUANTIZED, read_dtype, read_quantization
from duoka.hardware.nvml import NoDriverError
from duoka.planner.resolve import workload_for

from . import planning
from .deployments import bench_deployments
from .groups import OptionGroup, flag, option, with_groups
from .options import ModelOptions, PlanOptions, parse_tokens
from .terminal import new_table, note, print_json, stdout, working

if TYPE_CHECKING:
    from duoka.hardware.calibration import Calibration
    from duoka.tools.bench.quality import Quality


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions(OptionGroup):
    """Options of `duoka bench`."""

    forecast: bool = flag("Run nothing; print the forecast of each deployment.")
    calibrate: bool = flag(
        "Measure each GPU's memory overhead, memory bandwidth, matrix throughput, kernel launch "
        "time and links, and the bandwidth of host memory, and save the results for later plans. "
        "Takes less than a minute."
    )
    quality: Path | None = option(
        "FILE",
        "Measure the quality loss of quantization: the perplexity of the model on a text, "
        "unquantized and quantized.",
    )
    quantize: list[str] | None = option(
        "KIND",
        "Also measure weights in int8, int4 or nf4; repeatable. By default none; with --quality "
        "int8 and int4.",
        values=QUANTIZED,
    )
    json: bool = flag("Print the measurements as JSON.")


@with_groups
def bench(
    choice: BenchOptions,
    options: Annotated[PlanOptions, ("gpus", "context", "new_tokens", "sequences", "dtype")],
    model: ModelOptions,
) -> None:
    """Compare deployments of a model, calibrate GPUs, or measure the loss of quantization.

    [bold]duoka bench[/] ./glm-4-9b-chat

    [bold]duoka bench[/] ./glm-4-9b-chat --gpus 2xRTX3090 --quantize int8 --forecast

    [bold]duoka bench[/] ./chatglm3-6b --gpus "virtual:3x16GiB"

    [bold]duoka bench[/] --calibrate

    [bold]duoka bench[/] --quality book.txt ./glm-4-9b-chat --quantize int8 --quantize int4
    """
    if choice.quality is not None:
        _bench_quality(choice.quality, choice, options, model)
    elif model.model is not None:
        bench_deployments(choice, options, model)
    elif choice.calibrate:
        beside, hint = "--calibrate, which measures the machine only", "also give a MODEL"
        choice.refuse("quantize", "forecast", beside=beside, hint=hint)
        options.refuse("context", "new_tokens", "sequences", "dtype", beside=beside, hint=hint)
        model.refuse("revision", beside=beside, hint=hint)
        _calibrate(options.gpus, choice.json)
    else:
        hint = "give a MODEL, --calibrate, or --quality FILE MODEL"
        raise UsageError("nothing to measure was given", hint=hint)


def _bench_quality(
    file: Path, choice: BenchOptions, options: PlanOptions, model: ModelOptions
) -> None:
    """Measure the perplexity with and without quantization, and print it."""
    hint = "use `duoka bench MODEL` without it to compare deployments"
    choice.refuse("forecast", "calibrate", beside="--quality", hint=hint)
    options.refuse("new_tokens", "sequences", beside="--quality", hint=hint)
    if model.model is None:
        raise UsageError("no model was given", hint="give it after the file: --quality FILE MODEL")
    quality = _measure_quality(file, choice, options, model)
    if choice.json:
        print_json(to_dict(quality))
    else:
        _print_quality(quality)


def _measure_quality(
    file: Path, choice: BenchOptions, options: PlanOptions, model: ModelOptions
) -> Quality:
    """Read the options, refuse bad ones before the download, and measure the perplexities."""
    forms = [read_quantization(name, QUANTIZED) for name in choice.quantize or ("int8", "int4")]
    context = None if options.context is None else parse_tokens(options.context)
    dtype = read_dtype(options.dtype or "auto")
    with reading(file, "give a UTF-8 text file"):  # before the model is downloaded
        file.open("rb").close()
    gpus = options.gpus or planning.ALL_GPUS
    planning.read_fleet(gpus)
    checkpoint, fleet = planning.open_checkpoint(model, to_run=True), duoka.Fleet.parse(gpus)
    tokens = max(context or 0, 2)
    workload_for(checkpoint, duoka.Workload(prompt_tokens=tokens - 1, new_tokens=1, dtype=dtype))
    with working():
        say_import("torch")
        from duoka.tools.bench.quality import Windows, measure_quality

        say("measuring")
        windows = None if context is None else Windows(context_tokens=context)
        return measure_quality(checkpoint, file, fleet, dtype=dtype, forms=forms, windows=windows)


def _print_quality(quality: Quality) -> None:
    """Print a table of the scores, compared with the unquantized model."""
    unquantized, windows = quality.scores[0], quality.windows
    table = new_table(
        *("weights", "bytes", "of it", "perplexity", "more", "in percent"),
        caption=f"{quality.scored_tokens} tokens of {quality.file}, in windows of "
        f"{windows.context_tokens} every {windows.stride_tokens}",
    )
    for score in quality.scores:
        increase = score.perplexity - unquantized.perplexity
        table.add_row(
            score.weights,
            format_bytes(score.weight_bytes),
            f"{score.weight_bytes / unquantized.weight_bytes:.0%}",
            f"{score.perplexity:.4f}",
            "" if score is unquantized else f"{increase:+.4f}",
            "" if score is unquantized else f"{increase / unquantized.perplexity:+.2%}",
        )
    stdout().print(table)


def _fleet_to_measure(gpus: str | None) -> duoka.Fleet | None:
    """Parse the GPUs to measure; None on a machine without a GPU, if none are given."""
    try:
        return duoka.Fleet.parse(gpus or planning.ALL_GPUS)
    except NoDriverError as error:
        if gpus is not None:
            raise
        note(f"no NVIDIA GPU, so only host memory is measured: {error}")
        return None


def _calibrate(gpus: str | None, as_json: bool) -> None:
    """Measure the GPUs and the host, print the figures, and report the file they were saved in."""
    fleet = _fleet_to_measure(gpus)
    with working():
        say_import("torch")
        from duoka.tools.bench.calibrate import calibrate

        say("measuring")
        calibrated = calibrate(fleet)
    if as_json:
        print_json(to_dict(calibrated.calibration))
    else:
        _print_calibration(calibrated.calibration)
    if calibrated.path is None:
        note("virtual GPUs: a dry run, nothing was saved")
    else:
        note(f"saved in {calibrated.path}; delete the file to discard the calibration")


def _print_calibration(calibration: Calibration) -> None:
    """Print a table of the GPU figures, a line per link, and a line for the host."""
    table = new_table(
        *("GPU", "outside", "GB/s", "TFLOPs", "fp32", "launch", "from host"),
        caption="outside: memory outside PyTorch's allocator; GB/s of GPU memory; TFLOPs in 16 "
        "bit;\n"
        "from host: GB/s from pinned CPU memory",
    )
    for gpu in calibration.gpus:
        from_host = gpu.host_bytes_per_second
        table.add_row(
            gpu.product,
            format_bytes(gpu.overhead_bytes),
            _scaled(gpu.memory_bytes_per_second, 1e9),
            _scaled(gpu.flops_per_second, 1e12),
            _scaled(gpu.float32_flops_per_second, 1e12),
            f"{_scaled(gpu.launch_seconds, 1e-6)} µs",
            "–" if from_host is None else _scaled(from_host, 1e9),
        )
    if calibration.gpus:
        stdout().print(table)
    for link in calibration.links:
        speed, latency = _scaled(link.bytes_per_second, 1e9), _scaled(link.latency_seconds, 1e-6)
        text = f"{link.source} → {link.target}  {speed} GB/s, {latency} µs"
        stdout().print(text, markup=False, soft_wrap=True)
    if host := calibration.host:
        threads = format_count(host.threads, "thread")
        stdout().print(f"host memory  {_scaled(host.memory_bytes_per_second, 1e9)} GB/s, {threads}")


def _scaled(value: float, unit: float) -> str:
    """Format a value in a unit with three significant digits."""
    return f"{value / unit:.3g}"
