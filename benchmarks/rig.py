"""duoka's forecast beside what PyTorch's CUDA allocator counts, on machines without a GPU.

    python benchmarks/rig.py [--only TEXT] [--bare] [--json FILE]

with the Python of `make cuda`. Models have their published sizes; each case is planned, and its
plan's own steps run on the CUDA rig (tests/cuda_rig), in a fork with GPUs of the plan's budgets and
768 MiB for CUDA. Told are forecast and peak of each device; `--bare` switches cuBLAS's workspaces
off. Offloaded, int8 and nf4 cases do what a load would, without reading weights.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from duoka.base.quiet import quiet_libraries

ROOT = Path(__file__).resolve().parents[1]


def enter_rig() -> None:
    """Start this program again on the rig, unless it runs there."""
    if hasattr(ctypes.CDLL(None), "rig_restart"):
        return
    build = [sys.executable, str(ROOT / "tests/cuda_rig/build.py")]
    library = subprocess.run(build, check=True, capture_output=True, text=True).stdout.strip()
    os.environ["LD_PRELOAD"], os.environ["LD_LIBRARY_PATH"] = library, str(Path(library).parent)
    os.environ["RIG_GPUS"] = "8x1GiB"
    os.execv(sys.executable, [sys.executable, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose line has this")
    parser.add_argument("--bare", action="store_true", help="without cuBLAS's workspaces")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.bare:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
    with quiet_libraries():  # before the fork: CUDA mustn't start here
        from rig_pairs import PAIRS, line_of, rows_of, summary
    rows: list[dict[str, Any]] = []
    profiles: dict[str, Any] = {}
    print("| case | device | allocated: forecast, MiB | measured | | reserved | measured | |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    for pair in PAIRS:
        if options.only not in str(pair):
            continue
        started = time.perf_counter()
        try:
            found = list(rows_of(pair, profiles))
        except Exception as error:
            print(f"| {pair} | {type(error).__name__}: {error} |", flush=True)
            continue
        rows += found
        print(*map(line_of, found), sep="\n", flush=True)
        print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
    print(*summary(rows), sep="\n")


if __name__ == "__main__":
    enter_rig()
    sys.path.insert(0, str(ROOT / "tests"))
    main()
