"""Memory of fine-tuning in processes: what each stage's allocator measured beside the forecast.

    python benchmarks/tune.py [--only TEXT] [--json FILE]

`duoka tune` on virtual GPUs, a process for each, on a Llama of random weights, with sequences that
are all as long as planned: LoRA and full, with and without checkpointing, in every schedule.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import duoka
from duoka import TuneSettings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import tuning
from fork_server import forking_python

TOKENS = 256
THREE, TWO = "virtual:3x512MiB", "virtual:2x512MiB"
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("LoRA, 1F1B", {}, THREE),
    ("LoRA, GPipe", {"schedule": "gpipe"}, THREE),
    ("LoRA, one at a time", {"schedule": "sequential"}, THREE),
    ("LoRA, checkpointing", {"checkpointing": True}, THREE),
    ("LoRA, micro-batches of 2", {"micro_batch": 2}, TWO),
    ("LoRA, in bfloat16", {"dtype": "bfloat16"}, THREE),
    ("LoRA, not packed", {"packing": False}, THREE),
    ("full, 1F1B", {"method": "full"}, THREE),
    ("full, checkpointing", {"method": "full", "checkpointing": True}, THREE),
    ("full, Adafactor", {"method": "full", "optimizer": "adafactor"}, TWO),
]
LENGTHS: dict[str, Any] = {"seq_length": TOKENS, "steps": 3, "packing": True}
LINE = "| {} | {} | {:.2f} | {:+.2%} | {:.2f} | {:+.2%} |"
MIB = 2**20


def stage_bytes(stage: Any) -> dict[str, Any]:
    """Return the forecast and the measured peaks of a stage."""
    return {
        "device": stage.device,
        "forecast_allocated_bytes": stage.forecast_allocated_bytes,
        "measured_allocated_bytes": stage.allocated_bytes,
        "forecast_reserved_bytes": stage.forecast_reserved_bytes,
        "measured_reserved_bytes": stage.reserved_bytes,
    }


def main() -> None:
    """Run all cases, and print a row for each stage."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose names contain this text")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    warnings.simplefilter("ignore")
    errors: list[float] = []
    print("| run | stage | allocated, MiB | forecast | reserved, MiB | forecast |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        sys.executable = str(forking_python(Path(place) / "forks", os.getpid()))
        model = tuning.write_model("large", Path(place) / "model")
        data = Path(place) / "text.jsonl"
        data.write_text(f"{json.dumps({'text': 'duoka ' * 3000})}\n")
        cases = [case for case in CASES if arguments.only in case[0]]
        for number, (name, options, gpus) in enumerate(cases):
            result = duoka.tune(
                model,
                str(data),
                gpus,
                save=Path(place) / str(number),
                replicas=1,
                settings=TuneSettings(**{**LENGTHS, **options}),
            )
            assert result.report is not None
            for stage in result.report.devices:
                allocated = stage.forecast_allocated_bytes / stage.allocated_bytes - 1
                reserved = stage.forecast_reserved_bytes / stage.reserved_bytes - 1
                errors.append(allocated)
                rows.append({"run": name, **stage_bytes(stage)})
                sizes = stage.allocated_bytes / MIB, allocated, stage.reserved_bytes / MIB, reserved
                print(LINE.format(name, stage.device, *sizes), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows))
    absolute = sorted(map(abs, errors))
    print(
        f"\nallocated: median {statistics.median(absolute):.2%}, worst {absolute[-1]:.2%}, most "
        f"under {min(errors):+.2%}"
    )


if __name__ == "__main__":
    main()
