"""Measure what a machine without a GPU can, and rewrite the tables and plots of `README.md`.

    python benchmarks/run.py [--only NAME ...] [--render] [--list]

A section (`page_sections.py`) is one or a few of the other scripts. Their results are kept as
`results/NAME.json`, with the date, the machine and the CPU time; the tables between the markers of
`README.md` and the plots are made of these files. `--render` only makes the page anew. A section
that fails keeps its earlier result. All of it takes about half an hour on two cores; `--list`
prints the CPU time that each section took.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime as dt
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from page_sections import SECTIONS, Section
from page_tables import render_page

BENCHMARKS = Path(__file__).resolve().parent
PAGE, RESULTS, PLOTS = BENCHMARKS / "README.md", BENCHMARKS / "results", BENCHMARKS / "plots"
MOST_SECONDS = 3600
PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl")
_PR_SET_CHILD_SUBREAPER = 36


def describe_machine() -> dict[str, Any]:
    """Return what matters for the numbers; no names."""
    versions = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "cores": len(os.sched_getaffinity(0)),
        "has_gpu": Path("/dev/nvidiactl").exists(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "versions": versions,
    }


def children_seconds() -> float:
    """Return the CPU time of all processes that have ended and that this one waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def wait_for_orphans() -> None:
    """Wait for processes that a script left, so that their CPU time counts."""
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def run_script(command_line: tuple[str, ...]) -> Any:
    """Run a script, and return what it wrote as JSON."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "result.json"
        script, *arguments = command_line
        command = [sys.executable, str(BENCHMARKS / script), *arguments, "--json", str(path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        subprocess.run(command, check=True, timeout=MOST_SECONDS, env=environment)
        return json.loads(path.read_text(encoding="utf-8"))


def measure(section: Section) -> None:
    """Run the scripts of a section, and keep the result."""
    began, cpu, load = time.perf_counter(), children_seconds(), os.getloadavg()[0]
    with ThreadPoolExecutor(len(section.commands) if section.is_parallel else 1) as pool:
        data = [section.keep(found) for found in pool.map(run_script, section.commands)]
    wait_for_orphans()
    result = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        **describe_machine(),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "cpu_seconds": round(children_seconds() - cpu),
        "seconds": round(time.perf_counter() - began),
        "commands": section.commands,
        "data": data,
    }
    text = json.dumps(result, separators=(",", ":"))
    (RESULTS / f"{section.name}.json").write_text(text + "\n", encoding="utf-8")


def render() -> None:
    """Rewrite the page and the plots from the kept results."""
    PAGE.write_text(render_page(PAGE.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")
    try:
        from page_plots import draw_all
    except ImportError as error:
        print(f"plots are as before: {error} (install matplotlib)", file=sys.stderr)
        return
    PLOTS.mkdir(exist_ok=True)
    draw_all(RESULTS, PLOTS)


def list_sections() -> None:
    """Print the sections with the time of their last run."""
    total = 0
    for section in SECTIONS:
        path = RESULTS / f"{section.name}.json"
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        total += kept.get("cpu_seconds", 0)
        spent = f"{kept['cpu_seconds']} CPU seconds, {kept['date']}" if kept else "not measured"
        print(f"{section.name:16} {spent}")
    print(f"{'in all':16} {total} CPU seconds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [section.name for section in SECTIONS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--render", action="store_true", help="measure nothing")
    parser.add_argument("--list", action="store_true", help="print the sections")
    options = parser.parse_args()
    if options.list:
        list_sections()
        return 0
    RESULTS.mkdir(exist_ok=True)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    failed = []
    for section in [] if options.render else SECTIONS:
        if section.name not in options.only:
            continue
        print(f"── {section.name}", flush=True)
        try:
            measure(section)
        except (subprocess.SubprocessError, OSError, ValueError) as error:
            failed.append(section.name)
            print(f"{section.name} failed, its earlier result stays: {error}", file=sys.stderr)
    render()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main())
