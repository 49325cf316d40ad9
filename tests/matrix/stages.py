"""Stages: loss and every gradient of a model in stages are those of one device."""

from __future__ import annotations

from typing import Any

import families
from families import Family
from staging import differences, learn_in_stages, learn_whole, placement_of

LEFT_OUT = {
    "xlm": "its layers are lists beside each other, so residuals in the model's own code span all",
}


def batches_of(model: Any, number: int = 3) -> list[dict[str, Any]]:
    batches = []
    for seed in range(number):
        ids = families.inputs(model, seed=seed)["input_ids"]
        batches.append({"input_ids": ids, "labels": ids, "use_cache": False})
    return batches


def check(family: Family, num_devices: int = 2, schedule: str = "1f1b") -> None:
    """Compare three micro-batches in stages with the same on one device."""
    model = family.model()
    batches = batches_of(model)
    placement = placement_of(model, batches[0], num_devices)
    learnt = learn_in_stages(model, placement, batches, schedule)
    assert differences(learn_whole(model, batches), learnt) == []
