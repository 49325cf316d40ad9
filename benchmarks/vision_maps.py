"""Full-size image-text models over several cards: duoka's plans beside transformers' "auto".

    python benchmarks/vision_maps.py [--code DIR] [--only NAME,NAME]

For each model and fleet one prompt with a picture of 1120x1120 is checked on virtual GPUs, without
weights, on two maps: the plan that duoka makes for all the cards, and the map that transformers'
`device_map="auto"` makes with the same budgets in the same run. Of a map it says which modules are
cut inside, the faults that CUDA would raise, and the most that a card reserves.

--code is a directory with GLM-4V-9B's published configuration and code, which is run.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forecast_models import SIZES
from planner_auto import balanced_map
from torch import nn

import duoka
from duoka import Fleet, Workload
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.errors import DuokaError
from duoka.models.from_checkpoint import build_model
from duoka.report.check_report import CheckReport

PICTURE = (1120, 1120)
WORKLOAD = Workload(
    prompt_tokens=3584, new_tokens=512, dtype="bfloat16", images=1, image_size=PICTURE
)
CARDS = ("2xRTX3090", "3xRTX3090", "4xRTX3090", "5xRTX3090")
LINE = "| {} | {} | {} | {} | {} | {} |"
NEARLY_FULL = ("2.4375GiB,24GiB", "2.625GiB,24GiB", "2.8125GiB,24GiB", "10x2.75GiB")
"""Where "auto" cuts the tower of GLM-4.1V-9B among what stands behind its blocks."""


def cut_inside(model: nn.Module, device_map: Mapping[str, Any]) -> list[str]:
    """The smallest modules that a map cuts; lists, which may be cut, aside."""
    at: dict[str, set[Any]] = {}
    for name, device in device_map.items():
        parts = name.split(".")
        for depth in range(1, len(parts)):
            at.setdefault(".".join(parts[:depth]), set()).add(device)
    cut = [name for name, devices in at.items() if len(devices) > 1]
    smallest = [name for name in cut if not any(each.startswith(f"{name}.") for each in cut)]
    return [n for n in smallest if not isinstance(model.get_submodule(n), nn.ModuleList)]


def verdict(report: CheckReport) -> tuple[str, str]:
    """What a check found, and the most that a card reserves."""
    if report.stop is not None:
        return f"stops: {report.stop.message}", ""
    faults = [f"{fault.op} at {Path(fault.file).name}:{fault.line}" for fault in report.faults]
    most = max(peak.reserved_bytes for peak in report.memory) / 2**30
    too_large = [] if report.fits else ["doesn't fit"]
    return "; ".join([*faults, *too_large]) or "clean, fits", f"{most:.2f} GiB"


def rows(checkpoint: Checkpoint, gpus: str) -> Iterator[tuple[str, ...]]:
    """duoka's plan, and transformers' map."""
    fleet = Fleet.parse(gpus)
    try:
        plan = duoka.plan(checkpoint, fleet, WORKLOAD, use_all=True)
        report = duoka.check(checkpoint, plan, images=[PICTURE])
        yield "duoka", str(len(plan.devices)), "–", *verdict(report)
    except DuokaError as error:
        yield "duoka", "–", "–", f"refused: {error}", ""
    model = build_model(checkpoint, WORKLOAD)
    device_map = balanced_map(model, fleet)
    cut = ", ".join(cut_inside(model, device_map)) or "–"
    used = {device for device in device_map.values() if isinstance(device, int)}
    if len(used) < len(set(device_map.values())):
        yield "auto", str(len(used)), cut, "keeps modules on the CPU or the disk", ""
        return
    report = duoka.check(checkpoint, device_map, workload=WORKLOAD, fleet=fleet, images=[PICTURE])
    yield "auto", str(len(used)), cut, *verdict(report)


def compare(name: str, checkpoint: Checkpoint, fleets: tuple[str, ...]) -> None:
    """Print a table of one model."""
    print(f"\n## {name}\n")
    print(LINE.format("cards", "map", "cards used", "cut inside", "check", "most reserved"))
    print("|---|---|---:|---|---|---:|")
    for gpus in fleets:
        for row in rows(checkpoint, gpus):
            print(LINE.format(gpus, *row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--code", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    chosen = options.only.split(",")
    if options.code and any(name in "published code" for name in chosen):
        published = Checkpoint.open(options.code, trust_remote_code=True)
        compare("GLM-4V-9B, its published code", published, CARDS)
    for name in ("glm-4v-9b", "glm-4.1v-9b"):
        if not any(part in name for part in chosen):
            continue
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "config.json"
            file.write_text(json.dumps(SIZES[name]), encoding="utf-8")
            fleets = CARDS
            if name == "glm-4.1v-9b":
                fleets += NEARLY_FULL
            compare(name, Checkpoint.open(file), fleets)


if __name__ == "__main__":
    main()
