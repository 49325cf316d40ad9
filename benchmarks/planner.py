"""Which published models fit which machines: by exhaustive search, by duoka, and by "auto".

    python benchmarks/planner.py [--quick] [--models NAME …] [--machines N] [--lengths N]
                                 [--measure N] [--seed N] [--part I/N] [--json FILE]
                                 [--markdown FILE]
    python benchmarks/planner.py --merge FILE … [--markdown FILE]

A cell is a model, a machine, a context and a batch (`planner_models.py`). For each cell:

- `planner_referee.py` searches all cuts and orders of the GPUs, and says on how few GPUs it fits;
- duoka plans it, by the clock and by the processor's time;
- transformers makes its `device_map="auto"` for the machine (`planner_auto.py`), and what that map
  holds is asked of the same replay.

Then, for each model and --lengths machines, how long a context each of the three supports
(`planner_contexts.py`); how much memory is left on the fullest GPU where all GPUs are used
(`planner_balance.py`); and some cells are run on virtual GPUs without data, as duoka and "auto"
place them (`planner_measure.py`). There are some 7,000 cells; each workload is tried on --machines
of the machines, drawn with the seed. Profiles are traced into a temporary directory, or taken
from DUOKA_CACHE.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from planner_balance import balance
from planner_cells import Row, Subject, cells, judge, workload_of
from planner_contexts import contexts
from planner_measure import measure_some
from planner_models import BATCHES, CONTEXTS, MACHINES, MODELS
from planner_referee import Audit, Bench
from planner_report import report

from duoka.hardware.fleet import Fleet


def audit(subject: Subject, seed: int, found: Audit) -> None:
    """Check the referee's savings on workloads of this model."""
    rng = random.Random(f"{seed} {subject.name}")
    for _ in range(2):
        workload = workload_of(
            rng.choice([each for each in CONTEXTS if each <= subject.longest]), rng.choice(BATCHES)
        )
        fleet = Fleet.parse(MACHINES[rng.choice(sorted(MACHINES))])
        referee = rng.choice(Bench(subject.profile, workload).referees)
        found.draw(referee, [device.budget_bytes for device in fleet.devices], 4)


def run(options: argparse.Namespace, directory: Path) -> Row:
    names = options.models or list(MODELS)[:: 8 if options.quick else 1]
    number, parts = map(int, options.part.split("/"))
    started = time.perf_counter()
    found: Row = {"seed": options.seed, "machines_per_workload": options.machines}
    found |= {"cells": [], "contexts": [], "balance": [], "measured": []}
    checked = Audit(options.seed)
    for name in names[number - 1 :: parts]:
        rng = random.Random(f"{options.seed} {name}")
        subject = Subject.of(name, directory)
        own = [
            row
            for workload, machines in cells(subject, rng, options.machines)
            for row in judge(subject, workload, machines)
        ]
        found["cells"] += own
        found["contexts"] += contexts(subject, rng.sample(sorted(MACHINES), options.lengths))
        found["balance"] += balance(subject)
        audit(subject, options.seed, checked)
        found["measured"] += measure_some(subject, own, rng, options.measure / len(names))
        found |= {"audit": vars(checked), "seconds": time.perf_counter() - started}
        print(f"{name}: done at {found['seconds']:.0f} s", file=sys.stderr)
        if options.json:  # what there is, should the rest be cut short
            options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return found


def merged(paths: list[Path]) -> Row:
    """The results of several parts of one run."""
    whole, *others = found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    rates = {str(each["machines_per_workload"]) for each in found}
    whole["machines_per_workload"] = " or ".join(sorted(rates))
    for other in others:
        if whole["seed"] != other["seed"]:
            raise SystemExit("these are no parts of one run")
        for name in ("cells", "contexts", "balance", "measured", "seconds"):
            whole[name] += other[name]
        for name in set(other["audit"]) - {"seed"}:
            whole["audit"][name] += other["audit"][name]
    return whole


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a few models on two machines")
    parser.add_argument("--models", nargs="+", choices=MODELS, help="only these")
    parser.add_argument("--machines", type=int, default=4, help="machines for each workload")
    parser.add_argument("--lengths", type=int, default=1, help="machines to find contexts for")
    parser.add_argument("--measure", type=float, default=40, help="cells to run on virtual GPUs")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--part", default="1/1", help="2/3: the second of three parts")
    parser.add_argument("--merge", type=Path, nargs="+", help="report the JSON of all parts")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.machines, options.measure = 2, 2
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        os.environ.setdefault("DUOKA_CACHE", directory)
        found = merged(options.merge) if options.merge else run(options, Path(directory))
    text = report(found)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
