"""The sections of the benchmark page that `run.py` measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# Small and large, dense and mixture of experts, with and without windows.
PLANNED_MODELS = (
    "chatglm3-6b", "glm-4-9b-chat", "glm-4-32b-0414", "llama-3.1-8b", "qwen3-30b-a3b",
    "gemma-3-12b",
)  # fmt: skip
COMPARED_FAMILIES = ("glm4", "llama", "qwen3_moe", "gemma3_text")
# Grouped and latent attention, mixtures of experts, a state space model, an encoder with a decoder,
# towers for images.
MEASURED_MODELS = (
    "glm-4-9b", "llama-3-8b", "qwen3-0.6b", "gpt2-xl", "mixtral-8x7b", "deepseek-v2-lite",
    "mamba2-2.7b", "t5-large", "glm-4.1v-9b", "llava-1.5-7b",
)  # fmt: skip
_CELL_KEYS = (
    "model", "machine", "gpus", "context", "batch", "fewest", "duoka", "auto", "auto_gpus",
    "auto_trouble", "cpu_seconds",
)  # fmt: skip


def _keep_all(data: Any) -> Any:
    return data


def _keep_planner(data: Any) -> Any:
    """Drop what the page doesn't show."""
    cells = [{key: row[key] for key in _CELL_KEYS} for row in data["cells"]]
    for row in cells:
        row["cpu_seconds"] = round(row["cpu_seconds"], 4)
    kept = {key: data[key] for key in ("seed", "machines_per_workload", "contexts", "balance")}
    return {**kept, "cells": cells}


def _keep_load(data: Any) -> Any:
    """Round the seconds."""
    return {
        kind: {
            way: [{key: round(value, 4) for key, value in run.items()} for run in runs]
            for way, runs in found.items()
        }
        for kind, found in data.items()
    }


@dataclass(frozen=True)
class Section:
    """A part of the page, and the scripts that measure it: each is given `--json FILE`."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    keep: Callable[[Any], Any] = _keep_all
    is_parallel: bool = False
    """The scripts may run at the same time, as no time is measured."""


SECTIONS = (
    Section(
        "forecast",
        tuple(
            ("forecast.py", "--quick", "--only", ",".join(MEASURED_MODELS), "--part", f"{part}/2")
            for part in (1, 2)
        ),
        is_parallel=True,
    ),
    Section("training-memory", (("tune.py",),)),
    Section(
        "planner",
        tuple(
            (
                "planner.py", "--models", *PLANNED_MODELS, "--machines", "2", "--lengths", "1",
                "--measure", "0", "--part", f"{part}/2",
            )
            for part in (1, 2)
        ),
        _keep_planner,
        is_parallel=True,
    ),
    Section(
        "optimality",
        (("optimality.py", "--cases", "3000", "--profiles", "1000", "--fleets", "100"),),
    ),
    Section(
        "plan-time",
        (
            ("plan_time.py", "--layers", "40", "80"),
            ("plan_time.py", "--layers", "40", "--plain"),
        ),
    ),
    Section("load", (("load.py", "--gib", "0.5", "--rounds", "3", "--warm"),), _keep_load),
    Section("dispatch", (("dispatch.py", "--rounds", "4"),)),
    Section("scaling", (("scaling.py",),)),
    Section(
        "engine",
        (
            (
                "engine.py", "--only", "transformers", "--hidden", "256", "512", "--context",
                "256", "--rounds", "3",
            ),
        ),
    ),
    Section("equality", (("engine_equality.py", *COMPARED_FAMILIES),)),
    Section("training", (("tune_beside.py", "text"), ("tune_beside.py", "vision"))),
    Section("checker", (("check_corpus.py",),)),
)  # fmt: skip
