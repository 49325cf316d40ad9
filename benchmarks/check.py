"""What a check finds in transformers' own models, and what it costs at full size.

    python benchmarks/check.py families [--only NAME …] [--limit N] [--out FILE] [--markdown FILE]
    python benchmarks/check.py full [--configs DIR]

`families` makes a tiny model of every causal and every image-text architecture, splits it at three
places into two and into three stages, and checks each split, generating and training: once along
duoka's own blocks, and once by the map that accelerate infers from what transformers says may not
be split. FILE keeps one JSON line for each architecture; those that are in it are not run again.

`full` checks published sizes without weights, on virtual GPUs of 24 GiB, each in its own process.
DIR holds `config.json` files under other names: glm-4-9b-chat.json.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from families_table import checks_of, markdown

from duoka.errors import ModelError, VirtualDeviceError
from duoka.planner.placement import Placement

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

SECONDS = 300
JOBS_A_POOL = 60
CUTS = {2: ((1 / 2,), (1 / 4,), (3 / 4,)), 3: ((1 / 3, 2 / 3), (1 / 5, 3 / 5), (2 / 5, 4 / 5))}
PROMPT_TOKENS, NEW_TOKENS = 16, 4
PICTURE = (100, 80)
TEXT = ("input_ids", "attention_mask", "decoder_input_ids")


class TooLong(BaseException):
    """An architecture took too long. No code of a model's catches it."""


# ── one architecture ──


def architectures() -> list[tuple[str, str]]:
    """Kind and `model_type` of all of them."""
    import families
    import towers

    causal = [("causal", name) for name in families.causal_names()]
    return causal + [("image", name) for name in towers.all_names()]


def measure(job: tuple[str, str]) -> dict[str, Any]:
    kind, name = job
    row: dict[str, Any] = {"kind": kind, "name": name, "checks": []}
    started = time.perf_counter()
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    try:
        _measure(kind, name, row)
    except TooLong:
        row["error"] = f"more than {SECONDS} s"
    except Exception as error:  # whatever model code raises is this benchmark's result
        row["error"] = f"{type(error).__name__}: {error}"[:400]
    finally:
        signal.alarm(0)
    row["seconds"] = round(time.perf_counter() - started, 2)
    return row


def _too_long(*_: Any) -> None:
    raise TooLong


def _measure(kind: str, name: str, row: dict[str, Any]) -> None:
    import families
    import towers

    from duoka.runtime.image_inputs import ImagePrompts

    row["step"] = "build"
    if kind == "image" or towers.is_composite(name):
        model = towers.build(name, causal=kind == "causal")
    else:
        model = families.build(name)
    row["class"] = type(model).__name__
    row["parameters"] = sum(each.numel() for each in model.parameters())
    row["kept whole"] = sorted(model._no_split_modules or [])
    row["step"] = "inputs"
    inputs = (
        ImagePrompts(model, [PICTURE]).inputs(2, PROMPT_TOKENS)
        if kind == "image"
        else families.inputs(model)
    )
    row["step"] = "check"
    whole = {"": 0}
    for train in (False, True):
        found = checked(model, whole, inputs, kind=kind, train=train)
        row["checks"].append({"map": "whole", "stages": 1, "cut": 0, **found})
    for made, maps in (("own", own_maps), ("accelerate", accelerate_maps)):
        try:
            splits = list(maps(model, inputs))
        except Exception as error:
            row[f"no {made} maps"] = f"{type(error).__name__}: {error}"[:300]
            continue
        for stages, cut, split in splits:
            for train in (False, True):
                found = checked(model, split, inputs, kind=kind, train=train)
                if made == "accelerate":
                    found["raised"] = raised(model, split, inputs, train=train)
                row["checks"].append({"map": made, "stages": stages, "cut": cut, **found})
    del row["step"]


def checked(
    model: Any, placement: Any, inputs: dict[str, Any], *, kind: str, train: bool
) -> dict[str, Any]:
    import duoka
    from duoka.api.check import check

    choices: dict[str, Any] = {"inputs": with_labels(inputs) if train else inputs}
    if kind == "causal" and not train:
        sizes = {"prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}
        choices = {"workload": duoka.Workload(**sizes, prefill_chunk_tokens=None)}
    report = check(model, placement, train=train, **choices)
    return {
        "train": train,
        "ok": report.ok,
        "complete": report.complete,
        "stop": _stopped(report.stop),
        "faults": [_line(fault) for fault in report.faults],
        "warnings": len(report.warnings),
        "notes": list(report.notes),
        "seconds": round(report.seconds, 3),
    }


def with_labels(inputs: dict[str, Any]) -> dict[str, Any]:
    labels = inputs.get("decoder_input_ids", inputs.get("input_ids")).clone()
    return {**{k: v for k, v in inputs.items() if k != "decoder_input_ids"}, "labels": labels}


def raised(model: Any, split: Mapping[str, Any], inputs: dict[str, Any], *, train: bool) -> str:
    """What one call raises when accelerate itself spreads the model over virtual GPUs."""
    import torch
    from accelerate import dispatch_model

    from duoka import virtual

    given = with_labels(inputs) if train else inputs
    first = f"vgpu:{first_device(model, split, given)}"
    with virtual.gpus([None] * 3), torch.set_grad_enabled(train):
        copied = copy.deepcopy(model)
        devices = {name: f"vgpu:{device}" for name, device in split.items()}
        try:
            dispatch_model(
                copied,
                devices,
                main_device=first,
                skip_keys=model._skip_keys_device_placement,
                force_hooks=True,
            )
            found = copied(**{name: value.to(first) for name, value in given.items()})
            if train:
                found.loss.backward()
        except Exception as error:  # whatever comes is the result
            return f"{type(error).__name__}: {error}"[:200]
    return ""


def _stopped(stop: Any) -> str:
    if stop is None:
        return ""
    where = "" if stop.place is None else f" at {_short(stop.place.file)}:{stop.place.line}"
    return f"{stop.phase}: {stop.message[:300]}{where}"


def _line(fault: Any) -> dict[str, Any]:
    return {
        "at": f"{_short(fault.file)}:{fault.line}",
        "function": fault.function,
        "op": fault.op,
        "source": fault.source[:200],
        "devices": [
            f"{part.expression or part.argument}: {part.device}" for part in fault.operands
        ],
        "phase": fault.phase,
        "kind": fault.kind,
        "followups": len(fault.followups),
        "message": fault.message[:300],
    }


def _operand(operand: Any) -> str:
    return f"{operand.expression or operand.argument}: {operand.device}"


def _short(file: str) -> str:
    return file.partition("site-packages/")[2] or file


class Found(BaseException):
    """The first module with a parameter is entered. No code of a model's catches it."""


def first_module(model: Any, given: Mapping[str, Any]) -> str:
    """The module that runs first, where a check lets inputs start."""
    names = {module: name for name, module in model.named_modules()}

    def enter(module: Any, _: Any) -> None:
        raise Found(names[module])

    handles = [
        module.register_forward_pre_hook(enter)
        for module in names
        if next(module.parameters(recurse=False), None) is not None
    ]
    try:
        model(**given)
    except Found as found:
        return str(found.args[0])
    finally:
        for handle in handles:
            handle.remove()
    return ""


def first_device(model: Any, split: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """The device where a check lets inputs start."""
    name = first_module(model, given)
    while name not in split and name:
        name = name.rpartition(".")[0]
    return split.get(name, 0)


# ── where they are split ──


def own_maps(model: Any, inputs: dict[str, Any]) -> Iterator[tuple[int, int, Placement]]:
    """Stages of duoka's blocks, as a plan has them."""
    from duoka.runtime.dispatch.dispatch import without_data
    from duoka.tracing import TraceSpec, trace_call

    spec = TraceSpec(fingerprint="benchmark")
    try:
        profile = trace_call(without_data(model), spec, inputs)
    except (ModelError, VirtualDeviceError):
        # A tower that reads pixels can't be traced without them. It goes where its relatives go.
        text = {name: value for name, value in inputs.items() if name in TEXT}
        profile = trace_call(without_data(model), spec, text)
    blocks = [block for block in profile.blocks if block.modules]
    for stages, fractions in CUTS.items():
        for cut, fraction in enumerate(fractions):
            bounds = [max(1, round(each * len(blocks))) for each in fraction]
            numbers = [sum(index >= bound for bound in bounds) for index in range(len(blocks))]
            for index, block in enumerate(blocks):
                if block.tied_to is not None:
                    numbers[index] = numbers[block.tied_to]
            entries = [
                (module, f"cuda:{number}")
                for block, number in zip(blocks, numbers, strict=True)
                for module in block.modules
            ]
            if len(set(numbers)) == stages:
                yield stages, cut, Placement(entries=tuple(entries))


def accelerate_maps(
    model: Any, inputs: dict[str, Any]
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Maps by sizes, as `device_map="auto"` makes them."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import compute_module_sizes

    total = compute_module_sizes(model)[""]
    whole = list(model._no_split_modules or [])
    for stages in CUTS:
        seen: list[dict[str, Any]] = []
        for percent in (50, 35, 65, 25, 75, 45, 55, 15, 85):
            share = total * percent // 100 if stages == 2 else total * percent // 150
            memory = dict.fromkeys(range(stages - 1), share) | {stages - 1: 4 * total}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = infer_auto_device_map(model, memory, no_split_module_classes=whole)
            if len(set(found.values())) == stages and dict(found) not in seen:
                seen.append(dict(found))
                yield stages, len(seen) - 1, dict(found)
            if len(seen) == 3:
                break


# ── all of them ──


def families_mode(options: argparse.Namespace) -> None:
    jobs = [job for job in architectures() if not options.only or job[1] in options.only]
    rows = _kept(options.out)
    known = {(row["kind"], row["name"]) for row in rows}
    jobs = [job for job in jobs if job not in known][: options.limit]
    for row in measured(jobs, options.processes):
        rows.append(row)
        print(_summary(row), flush=True)
        if options.out:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
    text = "\n".join(markdown(rows))
    if options.markdown:
        options.markdown.write_text(text + "\n", encoding="utf-8")
    print(text)


def measured(jobs: list[tuple[str, str]], processes: int) -> Iterator[dict[str, Any]]:
    """Rows as they come; every so often in new processes, as model code leaves things behind."""
    context = multiprocessing.get_context("spawn")
    for start in range(0, len(jobs), JOBS_A_POOL):
        chosen = jobs[start : start + JOBS_A_POOL]
        with ProcessPoolExecutor(processes, context, _quietly) as pool:
            yield from (
                each.result() for each in as_completed(pool.submit(measure, j) for j in chosen)
            )


def _kept(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _quietly() -> None:
    import families  # noqa: F401  (and with it torch and transformers)
    import torch

    import duoka.api.load  # noqa: F401

    # A check collects garbage; what is imported needn't be looked at each time.
    gc.freeze()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)


def _summary(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['kind']:6} {row['name']:26} {row.get('step', '')}: {row['error'][:120]}"
    parts = [
        f"{made} {sum(each['ok'] for each in found)}/{len(found)}"
        for made in ("whole", "own", "accelerate")
        if (found := checks_of(row, made))
    ]
    return f"{row['kind']:6} {row['name']:26} {', '.join(parts)}, {row['seconds']} s"


# ── full size ──


# Published sizes that no file beside this repository holds.
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "dtype": "bfloat16",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    # Transformers' defaults for this family are the sizes of GLM-4.1V-9B, but for the rotation.
    "glm-4.1v-9b": {
        "model_type": "glm4v",
        "architectures": ["Glm4vForConditionalGeneration"],
        "dtype": "bfloat16",
        "text_config": {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [8, 12, 12],
            }
        },
    },
}
FULL = (
    ("glm-4-9b-chat", "virtual:2x24GiB", ()),
    ("glm-4.1v-9b", "virtual:2x24GiB", ((1120, 1120),)),
    ("qwen3-30b-a3b", "virtual:3x24GiB", ()),
)


def full_mode(options: argparse.Namespace) -> None:
    print("| model | GPUs | run | plan s | check s (CPU) | whole process MiB | verdict |")
    print("|---|---|---|---|---|---|---|")
    for name, gpus, images in FULL:
        config = PUBLISHED.get(name)
        if config is None:
            config = json.loads((options.configs / f"{name}.json").read_text(encoding="utf-8"))
        for train in (False, True):
            context = multiprocessing.get_context("spawn")
            with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as pool:
                job = (config, gpus, images, train)
                found = pool.submit(check_full_size, job).result()
            what = "loss and backward" if train else "prompt and decode steps"
            what += "".join(f", {width}x{height}" for width, height in images)
            print(f"| {name} | {gpus} | {what} | {found} |", flush=True)


def check_full_size(job: tuple[dict[str, Any], str, tuple[tuple[int, int], ...], bool]) -> str:
    """Plan a model of which there is only a configuration, then check that plan."""
    config, gpus, images, train = job
    import duoka
    from duoka.api.check import check

    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["DUOKA_CACHE"] = str(Path(directory) / "cache")
        (Path(directory) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        started = time.perf_counter()
        placed = duoka.plan(directory, gpus, use_all=True)
        planned, busy = time.perf_counter(), time.process_time()
        report = check(directory, placed, train=train, images=images)
        seconds, busy = time.perf_counter() - planned, time.process_time() - busy
    # The kernel counts in KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    verdict = "clean" if report.ok else _verdict(report)
    return f"{planned - started:.2f} | {seconds:.2f} ({busy:.2f}) | {peak} | {verdict}"


def _verdict(report: Any) -> str:
    parts = [
        f"{each.device} needs {each.reserved_bytes / 2**30:.1f} GiB"
        for each in report.memory
        if each.overflows
    ]
    parts += [f"{_short(fault.file)}:{fault.line} {fault.op}" for fault in report.faults]
    return "; ".join(filter(None, [*parts, _stopped(report.stop)]))


def main() -> None:
    parser = argparse.ArgumentParser()
    modes = parser.add_subparsers(required=True)
    every = modes.add_parser("families")
    every.set_defaults(run=families_mode)
    every.add_argument("--only", nargs="*", default=[])
    every.add_argument("--limit", type=int)
    every.add_argument("--processes", type=int, default=1)
    every.add_argument("--out", type=Path, help="one JSON line for each architecture; resumed")
    every.add_argument("--markdown", type=Path)
    full = modes.add_parser("full")
    full.set_defaults(run=full_mode)
    full.add_argument("--configs", type=Path)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
