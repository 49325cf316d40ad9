"""The options that say how a model is trained, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from duoka.errors import UsageError
from duoka.forecast.workload import Training

TRAINING = "Training instead of answering"

Train = Annotated[
    str | None,
    typer.Option(
        metavar="METHOD",
        help="Plan for training: lora (adapters on frozen weights) or full (every parameter). "
        "--context is then the length of a sequence, and --batch a micro-batch.",
        rich_help_panel=TRAINING,
        show_default=False,
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="adamw (the default) or sgd, torch's own.",
        rich_help_panel=TRAINING,
        show_default=False,
    ),
]
LoraRank = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Rank of the adapters. By default 8.",
        rich_help_panel=TRAINING,
        show_default=False,
    ),
]
LoraTarget = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Modules that get adapters, by the end of their names (q_proj). Repeatable; by "
        "default every linear layer but the head.",
        rich_help_panel=TRAINING,
        show_default=False,
    ),
]
GradientCheckpointing = Annotated[
    bool,
    typer.Option(
        "--gradient-checkpointing",
        help="Compute activations again in the backward pass instead of keeping them.",
        rich_help_panel=TRAINING,
    ),
]
MasterWeights = Annotated[
    bool,
    typer.Option(
        "--master-weights",
        help="Keep what is trained, gradients and optimizer states in float32, and compute under "
        "autocast in the plan's type.",
        rich_help_panel=TRAINING,
    ),
]
MicroBatches = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Micro-batches whose gradients are added up for a step. By default 1.",
        rich_help_panel=TRAINING,
        show_default=False,
    ),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="sequential (the default: one micro-batch after another), gpipe (all forward, then "
        "all backward) or 1f1b (as many in flight as there are stages to the end).",
        rich_help_panel=TRAINING,
        show_default=False,
    ),
]

_OPTION = {
    "optimizer": "--optimizer",
    "lora_rank": "--lora-rank",
    "lora_target": "--lora-target",
    "gradient_checkpointing": "--gradient-checkpointing",
    "master_weights": "--master-weights",
    "micro_batches": "--micro-batches",
    "schedule": "--schedule",
}


def read_training(said: Mapping[str, Any]) -> Training | None:
    """How to train, as far as a person said it; None where a model is to answer."""
    method = said["train"]
    given = {name: said[name] for name in _OPTION if said[name] not in (None, False, [])}
    if method is None:
        if given:
            told = ", ".join(_OPTION[name] for name in given)
            raise UsageError(
                f"{told} {'are' if len(given) > 1 else 'is'} for training, and the plan is to "
                "answer",
                hint="say how to train: --train lora or --train full",
            )
        return None
    adapters = [_OPTION[name] for name in ("lora_rank", "lora_target") if name in given]
    if method == "full" and adapters:
        raise UsageError(
            f"{', '.join(adapters)} is for adapters, and --train full has none",
            hint="leave it out, or say --train lora",
        )
    targets = tuple(given.pop("lora_target", ()))
    return Training(method=method, lora_targets=targets, **given)
