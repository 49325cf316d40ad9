"""Losses of fine-tuning: small models on the CPU, in one process and in several."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import fork_server
import pytest
import torch
import tuning
from image_checkpoints import write_family, write_glm4v
from safetensors.torch import load_file

import duoka

from . import records

ONE = "virtual:256MiB"
BASE: dict[str, Any] = {"seq_length": 48, "batch": 8, "lr": 1e-2, "epochs": 2}
# Model, GPUs, replicas, and settings.
RUNS: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("llama", ONE, 1, {}),
    ("llama", ONE, 1, {"method": "full", "lr": 1e-3}),
    ("llama", ONE, 1, {"packing": True, "batch": 2}),
    ("llama", ONE, 1, {"checkpointing": True, "micro_batch": 2, "lr_schedule": "linear",
                       "warmup": 2}),
    ("tied", ONE, 1, {"method": "full", "optimizer": "adafactor", "lr": 1e-3}),
    ("drops", ONE, 1, {"lora_dropout": 0.1, "seed": 7}),
    ("experts", ONE, 1, {"lora_target": ("q_proj", "v_proj"), "optimizer": "sgd", "lr": 1.0}),
    ("shallow", ONE, 1, {"method": "full", "weight_decay": 0.1, "max_grad_norm": 0.5, "lr": 1e-3,
                         "train_on": "last"}),
    ("glm-4v", ONE, 1, {"batch": 4}),
    ("llava", ONE, 1, {"batch": 4, "method": "full", "lr": 1e-3}),
    ("llama", "virtual:2x64MiB", 1, {"schedule": "1f1b"}),
    ("llama", "virtual:2x64MiB", 1, {"schedule": "gpipe", "method": "full", "lr": 1e-3}),
    ("llama", "virtual:2x64MiB", 2, {}),
)  # fmt: skip
# What differs from run to run: times, and the memory of a process that has made other runs before.
_LEFT_OUT = ("seconds", "time", "per_second", "processes")


def write(made: Path) -> None:
    """Fine-tune."""
    root = Path.cwd() / "tunes"
    root.mkdir()
    torch.set_num_threads(1)
    program = fork_server.forking_python(root / "forks", os.getpid())
    records.write(made / "losses.txt", dict(_runs(root, program)))


def _runs(root: Path, program: Path) -> Iterator[tuple[str, str]]:
    chats = tuning.write_chats(root / "chats.jsonl")
    texts = root / "texts.jsonl"
    texts.write_text(f"{json.dumps({'text': 'duoka sees '})}\n" * 8)
    towers = {"glm-4v": write_glm4v, "llava": partial(write_family, "llava")}
    for number, (family, gpus, replicas, more) in enumerate(RUNS):
        said = " ".join(f"{key}={value}" for key, value in more.items())
        name = f"{family} {gpus} x{replicas} {said}".strip()
        if not records.is_wanted(name):
            continue
        path = root / family
        if not path.exists():
            towers.get(family, partial(tuning.write_model, family))(path)
        tune = partial(
            duoka.tune,
            path,
            str(texts if family in towers else chats),
            gpus,
            save=root / f"run-{number}",
            replicas=replicas,
            settings=duoka.TuneSettings(**{**BASE, **more}),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "executable", str(program))
            with tuning.one_process(patch) if gpus == ONE else nullcontext():
                result = tune()
        yield name, _described(result)


def _described(result: Any) -> str:
    """Every step's numbers, and of the result its tensors' norm, to six digits."""
    lines = []
    for line in (result.directory / "metrics.jsonl").read_text().splitlines():
        entry = records.rounded(json.loads(line), 6)
        kept = {k: v for k, v in entry.items() if not any(word in k for word in _LEFT_OUT)}
        lines.append(" ".join(f"{name}={value}" for name, value in kept.items()))
    for file in sorted(result.result.glob("*.safetensors")):
        tensors = load_file(file)
        norm = sum(tensor.double().square().sum().item() for tensor in tensors.values()) ** 0.5
        names = records.digest(sorted(tensors))
        lines.append(f"{file.name}: {len(tensors)} tensors {names}, norm {norm:.5g}")
    return "\n".join(lines)
