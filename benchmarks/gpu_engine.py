"""The engine on a real GPU: tokens a second, a long prompt in pieces, and memory by its forecast.

One stage; `benchmarks/gpu.py` runs this on the checkpoint that it has written. Beside it, on the
same weights: transformers' `generate` for one request and `generate_batch` for many. Two stages in
processes of their own need two GPUs: a plan names each device once.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import duoka
from duoka.engine import Engine, SamplingParams
from duoka.hardware.fleet import Fleet
from duoka.runtime import devices

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import tuning

GIB = 2**30
# Special tokens by which the family's prompts are known.
_SPECIAL = [
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|system|>",
]
_VOCABULARY = 200
_ROUNDS = 3


@dataclass(frozen=True)
class Sizes:
    """What is asked: so many requests at once, of so many tokens; and one long prompt."""

    loads: tuple[int, ...] = (1, 16, 64)
    prompt_tokens: int = 1024
    new_tokens: int = 64
    long_tokens: int = 16384
    chunk_tokens: int = 2048


SMALL = Sizes((1, 4), prompt_tokens=32, new_tokens=8, long_tokens=128, chunk_tokens=32)


def add_tokenizer(folder: Path) -> None:
    """A token for each byte, and the special ones."""
    tokenizer = tuning.make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL})
    tokenizer.save_pretrained(folder)


def measure(path: Path, fleet: Fleet, *, small: bool) -> dict[str, Any]:
    """All of it, on the one device of a fleet."""
    sizes = SMALL if small else Sizes()
    add_tokenizer(path)
    work = duoka.Workload(
        cache="paged",
        batch=max(sizes.loads),
        prompt_tokens=sizes.long_tokens,
        new_tokens=sizes.new_tokens,
        prefill_chunk_tokens=sizes.chunk_tokens,
        pages=-(-(2 * max(sizes.loads) * (sizes.prompt_tokens + sizes.new_tokens)) // 16)
        + -(-(sizes.long_tokens + sizes.new_tokens) // 16),
    )
    plan = duoka.plan(path, fleet, work)
    (device,) = plan.devices
    rows = list(_transformers(path, fleet, device, sizes))
    devices.materialise(plan.fleet)
    devices.reset_peaks(device)
    with Engine(plan) as engine:
        rows += _engine(engine, sizes)
        (peaks,) = engine.peaks()
        lost_pages = engine.capacity.pages - engine.load().free_pages
    forecast = plan.forecast.devices[0]
    return {
        "rows": rows,
        "lost_pages": lost_pages,
        "allocated_bytes": [forecast.allocated_bytes, peaks.allocated_bytes],
        "reserved_bytes": [forecast.reserved_bytes, peaks.reserved_bytes],
    }


def _texts(rng: random.Random, number: int, length: int) -> list[list[int]]:
    return [[rng.randrange(_VOCABULARY) for _ in range(length)] for _ in range(number)]


def _speeds(run: Callable[[list[list[int]], int], Any], load: int, sizes: Sizes) -> float:
    """Tokens a second of so many requests: the time of all tokens less that of the first ones."""
    rng, speeds = random.Random(load), []
    for turn in range(_ROUNDS + 1):
        seconds = []
        for number in (1, sizes.new_tokens):
            texts = _texts(rng, load, sizes.prompt_tokens)  # others, whose pages aren't there
            begin = time.perf_counter()
            run(texts, number)
            seconds.append(time.perf_counter() - begin)
        if turn:  # the first is for warming up
            speeds.append(load * (sizes.new_tokens - 1) / max(seconds[1] - seconds[0], 1e-9))
    return statistics.median(speeds)


def _prefill(run: Callable[[list[list[int]], int], Any], sizes: Sizes) -> float:
    """Tokens a second of a long prompt."""
    rng, speeds = random.Random(0), []
    for _ in range(_ROUNDS + 1):
        texts = _texts(rng, 1, sizes.long_tokens)
        begin = time.perf_counter()
        run(texts, 1)
        speeds.append(sizes.long_tokens / (time.perf_counter() - begin))
    return statistics.median(speeds[1:])


def _engine(engine: Engine, sizes: Sizes) -> Iterator[dict[str, Any]]:
    def run(texts: list[list[int]], number: int) -> None:
        engine.generate(texts, SamplingParams(max_new_tokens=number, min_new_tokens=number))

    for load in sizes.loads:
        yield _row("the engine", f"{load} at once", _speeds(run, load, sizes))
    yield _row("the engine", "a long prompt", _prefill(run, sizes))


def _transformers(path: Path, fleet: Fleet, device: str, sizes: Sizes) -> Iterator[dict[str, Any]]:
    work = duoka.Workload(
        prompt_tokens=sizes.long_tokens, new_tokens=sizes.new_tokens, prefill_chunk_tokens=None
    )
    with _loaded(path, fleet, work, device) as model:

        def one(texts: list[list[int]], number: int) -> None:
            ids = torch.tensor(texts, device=device)
            mask = torch.ones_like(ids)
            model.generate(ids, attention_mask=mask, generation_config=_config(number))

        def many(texts: list[list[int]], number: int) -> None:
            # What it takes by itself, but for the rehearsal, which hasn't memory for that.
            few = {"max_batch_tokens": 256, "num_blocks": 16} if sizes is SMALL else {}
            own = ContinuousBatchingConfig(**few)
            model.generate_batch(
                texts, generation_config=_config(number), continuous_batching_config=own
            )

        for load in sizes.loads:
            name, run = ("generate", one) if load == 1 else ("generate_batch", many)
            yield _tried(name, f"{load} at once", partial(_speeds, run, load, sizes))
        yield _tried("generate", "a long prompt", partial(_prefill, one, sizes))


@contextmanager
def _loaded(path: Path, fleet: Fleet, work: duoka.Workload, device: str) -> Iterator[Any]:
    """The model as transformers runs it; its memory is free again afterwards."""
    model: Any = duoka.load(duoka.plan(path, fleet, work))
    try:
        yield model
    finally:
        model.to("meta")
        devices.synchronize(device)
        torch.get_device_module(device).empty_cache()


def _config(number: int) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=number, min_new_tokens=number, do_sample=False, pad_token_id=0
    )


def _row(way: str, what: str, speed: float | None, why: str = "") -> dict[str, Any]:
    return {"way": way, "what": what, "tokens_per_second": speed, "why": why}


def _tried(way: str, what: str, measure: Callable[[], float]) -> dict[str, Any]:
    """What other code did, or why it didn't: that ends no measurement of ours."""
    try:
        return _row(way, what, measure())
    except Exception as error:
        return _row(way, what, None, f"{type(error).__name__}: {str(error)[:200]}")


def table(report: dict[str, Any]) -> Iterator[str]:
    """What came out."""
    others = [row for row in report["rows"] if row["way"] != "the engine"]
    theirs = {row["what"]: row["tokens_per_second"] for row in others}
    for row in report["rows"]:
        speed, other = row["tokens_per_second"], theirs.get(row["what"])
        ratio = f"{speed / other:6.2f}" if speed and other else ""
        text = f"{speed:10.1f} tokens/s {ratio}" if speed else f"not measured: {row['why']}"
        yield f"{row['way']:15} {row['what']:15} {text}"
    for kind in ("allocated", "reserved"):
        forecast, measured = report[f"{kind}_bytes"]
        yield (
            f"the engine's {kind:10} forecast {forecast / GIB:7.3f} GiB, measured "
            f"{measured / GIB:7.3f} GiB ({100 * (measured / forecast - 1):+.2f} %)"
        )
    yield f"{report['lost_pages']} pages lost; two stages in processes need two GPUs: left out"
