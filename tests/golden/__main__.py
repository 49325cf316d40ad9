"""Golden files: what duoka does, as text, so that a change that should change nothing shows it.

``python tests/golden [option ...] [part ...]`` makes each part anew in a directory of its own, by a
process with a home, a cache and an environment of its own, and compares it with `kept`, record by
record. The exit code is 1 where something differs. ``--update`` keeps what differs; ``--only TEXT``
takes the records alone whose names have it; ``--show N`` says how many lines of a difference are
shown; ``--into DIR`` leaves what was made there. With ``--cache DIR`` models that were traced in an
earlier run aren't traced again: for changes that don't touch tracing.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[0] = str(HERE.parent)

from golden import records  # noqa: E402

KEPT = HERE / "kept"
PARTS = ("plans", "checks", "commands", "requests", "tunes", "rig")
_RIG_PYTHON = HERE.parents[1] / ".venv-cuda" / "bin" / "python"
_MOST_SAID = 5000
# What a part's process takes over; all else would make one machine's output differ from another's.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "DUOKA_RIG_PYTHON")


def main() -> int:
    """Make the parts, and compare or keep them."""
    parser = argparse.ArgumentParser(prog="python tests/golden", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=", ".join(PARTS))
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--show", type=int, default=30, metavar="N")
    parser.add_argument("--into", type=Path, metavar="DIR")
    parser.add_argument("--only", default="", metavar="TEXT")
    parser.add_argument("--cache", type=Path, metavar="DIR")
    given = parser.parse_args()
    unknown = [part for part in given.parts if part not in PARTS]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    is_different = False
    with tempfile.TemporaryDirectory(prefix="duoka-golden-") as name:
        for part in given.parts or PARTS:
            if part == "rig" and not rig_python().exists():
                say("rig: left out, as there is no .venv-cuda (make cuda)")
                continue
            start = time.monotonic()
            made = Path(name) / "made" / part
            cache = (given.cache or Path(name) / "cache").resolve()
            if not make(part, Path(name), made, cache, given.only):
                say(f"{part}: could not be made")
                is_different = True
                continue
            counts = compare(part, made, given.show, given.only)
            is_different |= any(counts[1:])
            seconds = round(time.monotonic() - start)
            same, changed, new, missing = counts
            say(f"{part}: {same} same, {changed} changed, {new} new, {missing} gone ({seconds} s)")
            if given.update:
                keep(made, KEPT / part, given.only)
            if given.into is not None:
                shutil.copytree(made, given.into / part, dirs_exist_ok=True)
    return int(is_different and not given.update)


def rig_python() -> Path:
    """The Python with PyTorch's CUDA build."""
    return Path(os.environ.get("DUOKA_RIG_PYTHON", _RIG_PYTHON))


def make(part: str, root: Path, made: Path, cache: Path, only: str) -> bool:
    """Let a process make a part; whether it did."""
    made.mkdir(parents=True)
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | {
        "HOME": str(root / "home"),
        "TMPDIR": str(root / "tmp"),
        "DUOKA_CACHE": str(cache),
        records.ONLY: only,
        "COLUMNS": "96",
        "LINES": "40",
        "TERM": "xterm",
        "NO_COLOR": "1",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "CUBLAS_WORKSPACE_CONFIG": ":0:0",
    }
    for directory in (root / "home", root / "tmp", cache):
        directory.mkdir(parents=True, exist_ok=True)
    code = f"import sys; sys.path[0] = {sys.path[0]!r}; from pathlib import Path; "
    code += f"from golden import {part}; {part}.write(Path(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(made)]
    log = root / f"{part}.log"
    with log.open("w") as errors:
        done = subprocess.run(command, env=environment, cwd=root, stderr=errors, check=False)
    if done.returncode:
        say(log.read_text(encoding="utf-8", errors="replace")[-_MOST_SAID:])
    return done.returncode == 0


def keep(made: Path, kept: Path, only: str) -> None:
    """Keep what was made; of a part of the records these alone are changed."""
    kept.mkdir(parents=True, exist_ok=True)
    for path in [] if only else kept.glob("*.txt"):
        path.unlink()
    for path in made.glob("*.txt"):
        before = records.read(kept / path.name)
        records.write(kept / path.name, {**before, **records.read(path)})


def compare(part: str, made: Path, most_lines: int, only: str) -> tuple[int, int, int, int]:
    """Say what differs; how many records are the same, changed, new, and gone."""
    same = changed = new = gone = 0
    names = {path.name for root in (KEPT / part, made) for path in root.glob("*.txt")}
    for name in sorted(names):
        before, after = (records.read(root / name) for root in (KEPT / part, made))
        for record in [*before, *(each for each in after if each not in before)]:
            # Of several that are compared with one another not all may have been made.
            if only and (only not in record or record not in after):
                continue
            old, now = before.get(record), after.get(record)
            if old == now:
                same += 1
                continue
            new, gone = new + (old is None), gone + (now is None)
            changed += old is not None and now is not None
            say(f"--- {part}/{name}: {record}" + _difference(old, now, most_lines))
    return same, changed, new, gone


def _difference(old: str | None, now: str | None, most_lines: int) -> str:
    if old is None or now is None:
        return " (new)" if old is None else " (gone)"
    lines = list(difflib.unified_diff(old.split("\n"), now.split("\n"), lineterm="", n=1))[2:]
    left_out = len(lines) - most_lines
    more = [f"… {left_out} more lines: --show N"] if left_out > 0 else []
    return "".join(f"\n{line}" for line in [*lines[:most_lines], *more])


def say(text: str) -> None:
    """Print a line now."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
