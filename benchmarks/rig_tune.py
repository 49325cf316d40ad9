"""Memory of `duoka tune` on machines without a GPU: forecast and what PyTorch's allocator counts.

    python benchmarks/rig_tune.py [--only TEXT] [--json FILE]

with the Python of `make cuda`; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True counts for all of
it. Models have their published sizes and no weights (tests/cuda_rig/hole_checkpoint.py); a process
for each GPU trains on the CUDA rig, whose GPUs have the budgets and 768 MiB for CUDA.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rig import ROOT, enter_rig

from duoka.base.quiet import quiet_libraries

# Model, budgets, replicas, and settings.
Run = tuple[str, str, int, dict[str, Any]]
CHECKPOINTED: dict[str, Any] = {"checkpointing": True}
FULL: dict[str, Any] = {"method": "full", "dtype": "bfloat16"}
QLORA: dict[str, Any] = {"method": "qlora", **CHECKPOINTED}
EIGHT: dict[str, Any] = {"optimizer": "adamw8bit"}
RUNS: list[Run] = [
    ("llama-3-8b", "24GiB", 1, {"seq_length": 2048, **CHECKPOINTED}),
    ("llama-3-8b", "24GiB,24GiB", 1, {"seq_length": 512}),
    ("glm-4-9b", "24GiB,24GiB", 1, {"seq_length": 2048, **CHECKPOINTED}),
    ("qwen2.5-7b", "24GiB,16GiB", 1, {"seq_length": 800, "micro_batch": 2, **CHECKPOINTED}),
    ("mistral-7b", "4x8GiB", 1, {"seq_length": 1024, "schedule": "gpipe", **CHECKPOINTED}),
    ("llama-3-8b", "12GiB", 1, {"seq_length": 1024, **QLORA}),
    ("glm-4-9b", "8GiB,8GiB", 1, {"seq_length": 700, **QLORA}),
    ("qwen3-0.6b", "24GiB", 1, {"seq_length": 1024, "micro_batch": 2, **FULL}),
    ("qwen3-0.6b", "12GiB,12GiB", 1, {"seq_length": 512, **FULL, **CHECKPOINTED}),
    ("qwen3-0.6b", "16GiB", 1, {"seq_length": 1024, **FULL, **EIGHT}),
    ("llama-3-8b", "2x24GiB", 2, {"seq_length": 1024, **CHECKPOINTED}),
    ("qwen3-0.6b", "2x24GiB", 2, {"seq_length": 1024, **FULL}),
    ("qwen2.5-7b", "4x12GiB", 2, {"seq_length": 512, **CHECKPOINTED}),
]
STEPS: dict[str, Any] = {"batch": 4, "steps": 2}
# In the processes too, code that looks at masks and positions sees them. Gradients, which nothing
# computes, have what lies in their memory: their norm is 0.
CUSTOMIZE = """
import torch
from cuda_rig.values import values
values().__enter__()
total_norm = torch.nn.utils.get_total_norm
torch.nn.utils.get_total_norm = lambda gradients: (total_norm(gradients), torch.zeros(()))[1]
"""


def main() -> None:
    """Train in all ways, and print a row for each process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="runs whose line has this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with quiet_libraries():  # before the fork: CUDA mustn't start here
        from rig_pairs import line_of, summary
    rows: list[dict[str, Any]] = []
    print("| run | device | allocated: forecast, MiB | measured | | reserved | measured | |")
    print("|---|---|---:|---:|---:|---:|---:|---:|", flush=True)
    for run in RUNS:
        if options.only not in str(run):
            continue
        begin = time.perf_counter()
        found = list(rows_of(run))
        rows += found
        print(*map(line_of, found), sep="\n", flush=True)
        print(f"{time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    print(*summary(rows), sep="\n")


def rows_of(run: Run) -> Iterator[dict[str, Any]]:
    """Train in a fork, which has the run's GPUs; yield a row for each process."""
    fork: Any = multiprocessing.get_context("fork")
    reader, writer = fork.Pipe(duplex=False)
    child = fork.Process(target=measure, args=(run, writer))
    child.start()
    writer.close()
    try:
        found = reader.recv()
    except EOFError:
        found = "the process died"
    child.join()
    name, gpus, replicas, settings = run
    pair = name, gpus, settings["seq_length"], 0, {"replicas": replicas, **settings}
    if isinstance(found, str):
        yield {
            "pair": pair,
            "device": "",
            "allocated_bytes": [0, 0],
            "reserved_bytes": [0, 0],
            "error": found,
        }
        return
    for row in found:
        yield {"pair": pair, **row, "error": ""}


def measure(run: Run, writer: Connection) -> None:
    """In a fork: send the rows of a run, or the error with which it ends."""
    from rig_pairs import FOR_CUDA_BYTES, MIB, NUM_GPUS

    import duoka

    name, gpus, replicas, settings = run
    sizes = [gpu.budget_bytes + FOR_CUDA_BYTES for gpu in duoka.Fleet.parse(gpus).devices]
    sizes += [MIB] * (NUM_GPUS - len(sizes))  # torch has counted them before the fork
    os.environ["RIG_GPUS"] = ",".join(f"{size // MIB}MiB" for size in sizes)
    assert ctypes.CDLL(None).rig_restart() == 0
    with tempfile.TemporaryDirectory() as directory:
        try:
            writer.send(train(name, gpus, replicas, settings, Path(directory)))
        except Exception as error:
            writer.send(f"{type(error).__name__}: {error}"[:300])


def train(
    name: str, gpus: str, replicas: int, settings: dict[str, Any], directory: Path
) -> list[dict[str, Any]]:
    """Fine-tune a model on sequences of full length; return forecast and peaks of each process."""
    from cuda_rig.hole_checkpoint import hole_checkpoint
    from forecast_models import SIZES
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from tuning import make_tokenizer

    import duoka

    (directory / "sitecustomize.py").write_text(CUSTOMIZE)
    paths = [str(directory), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    data = directory / "text.jsonl"
    data.write_text(f"{json.dumps({'text': 'duoka ' * 6000})}\n")
    config = AutoConfig.for_model(**SIZES[name]).to_dict()
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]
    with hole_checkpoint({**config, "architectures": [architecture]}) as model:
        make_tokenizer().save_pretrained(model)
        result = duoka.tune(
            model,
            str(data),
            gpus,
            save=directory / "run",
            replicas=replicas,  # type: ignore[arg-type]
            settings=duoka.TuneSettings(**STEPS, **settings),
        )
    assert result.report is not None
    return [
        {
            "device": f"{each.label}",
            "allocated_bytes": [each.forecast_allocated_bytes, each.allocated_bytes],
            "reserved_bytes": [each.forecast_reserved_bytes, each.reserved_bytes],
        }
        for each in result.report.devices
    ]


if __name__ == "__main__":
    enter_rig()
    sys.path.insert(0, str(ROOT / "tests"))
    main()
