"""The tables of the benchmark page, made of kept results.

Each function takes the data of a section, one item for each of its scripts, and returns lines of
Markdown.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from page_kept import host_rows, rig_rows, rig_training_rows

Row = dict[str, Any]
GIB = 2**30
EQUAL_BYTES = 512  # the unit of torch's caching allocator


def line(*cells: object) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def head(*titles: str) -> list[str]:
    """Return the first two lines of a table; columns after the first are aligned to the right."""
    return [line(*titles), f"|---|{'---:|' * (len(titles) - 1)}"]


def signed(error: float) -> str:
    """Return a relative error in percent."""
    return "0" if abs(error) < 5e-6 else f"{error:+.3%}"


def largest(errors: Iterable[float]) -> float:
    """Return the error that is farthest from 0."""
    return max(errors, key=abs, default=0.0)


# ── memory ──


def with_errors(rows: Iterable[Row]) -> list[Row]:
    """Add relative errors and whether both peaks are equal."""
    found = []
    for row in rows:
        row = dict(row)
        for kind in ("allocated", "reserved"):
            forecast = row[f"forecast_{kind}_bytes"]
            row[kind] = forecast / row[f"measured_{kind}_bytes"] - 1
        allocated = row["forecast_allocated_bytes"] - row["measured_allocated_bytes"]
        row["is_equal"] = abs(allocated) <= EQUAL_BYTES and row["reserved"] == 0
        found.append(row)
    return found


def memory_table(rows: Sequence[Row], key: Callable[[Row], str], title: str) -> list[str]:
    """Return a table with a row for each key and one for all."""
    lines = head(title, "GPUs", "equal", "allocated, largest error", "reserved, largest error")
    groups = [(name, list(own)) for name, own in groupby(sorted(rows, key=key), key)]
    for name, own in [*groups, ("**all**", list(rows))]:
        errors = (signed(largest(row[kind] for row in own)) for kind in ("allocated", "reserved"))
        lines.append(line(name, len(own), sum(row["is_equal"] for row in own), *errors))
    return lines


def forecast_table(data: list[Any]) -> list[str]:
    rows = with_errors(row for part in data for row in part)
    pairs = {str(row["pair"]) for row in rows}
    off = [row for row in rows if not row["is_equal"]]
    lines = memory_table(rows, lambda row: row["pair"][0], "model")
    lines += ["", f"{len(pairs)} pairs of a model and a workload. Not equal:", ""]
    lines += [
        "- {} on {}, {} + {} tokens, batch {}, ".format(*row["pair"])
        + f"{row['device']}: allocated {signed(row['allocated'])}, reserved "
        f"{signed(row['reserved'])}"
        for row in off
    ] or ["- none"]
    return lines


def training_memory_table(data: list[Any]) -> list[str]:
    return memory_table(with_errors(data[0]), itemgetter("run"), "run")


def rig_table(data: list[Any]) -> list[str]:
    """Make the table of the CUDA rig from the archive."""
    lines = head("what", "GPUs", "equal", "allocated, largest error", "reserved, largest error")
    for name, rows in (("inference", rig_rows()), ("fine-tuning", rig_training_rows())):
        rows = with_errors(rows)
        errors = (signed(largest(row[kind] for row in rows)) for kind in ("allocated", "reserved"))
        lines.append(line(name, len(rows), sum(row["is_equal"] for row in rows), *errors))
    rows = with_errors([*rig_rows(), *rig_training_rows()])
    worst = sorted(rows, key=lambda row: -abs(row["reserved"]))[:5]
    lines += ["", "Largest errors of reserved memory:", ""]
    lines += head("case", "GPU", "forecast, MiB", "measured, MiB", "error")
    for row in worst:
        sizes = (
            f"{row[f'{kind}_reserved_bytes'] / 2**20:,.0f}" for kind in ("forecast", "measured")
        )
        lines.append(line(row["case"], row["device"], *sizes, signed(row["reserved"])))
    return lines


# ── planner ──


def planner_table(data: list[Any]) -> list[str]:
    cells, contexts, balance = (joined(data, key) for key in ("cells", "contexts", "balance"))
    return [
        *_planned_cells(cells),
        "",
        *_planned_contexts(contexts),
        "",
        *_planned_balance(balance),
    ]


def joined(data: list[Any], key: str) -> list[Row]:
    """Return the rows of all parts."""
    return [row for part in data for row in part[key]]


def _planned_cells(rows: Sequence[Row]) -> list[str]:
    fit = [row for row in rows if row["fewest"] is not None]
    several = [row for row in fit if row["fewest"] == 1 and row["gpus"] > 1]
    held = [row for row in fit if row["auto"] is not None]
    lines = head(
        f"{len(rows)} cells of a model, machine, context, batch", "search", "duoka", "auto"
    )
    planned = sum(row["duoka"] is not None for row in fit)
    lines.append(line("fits the machine", len(fit), planned, len(held)))
    wrong = [sum(row[name] is not None for row in rows) for name in ("duoka", "auto")]
    over = [number - one for number, one in zip(wrong, (planned, len(held)), strict=True)]
    lines.append(line("accepted, does not fit", "", *over))
    one = [
        sum(row["duoka"] == 1 for row in several),
        sum(row["auto"] is not None and row["auto_gpus"] == 1 for row in several),
    ]
    lines.append(line("one of several GPUs is enough: uses one", len(several), *one))
    fewest = [
        sum(row["duoka"] == row["fewest"] for row in fit),
        sum(row["auto_gpus"] == row["fewest"] for row in held),
    ]
    lines.append(line("uses the fewest GPUs", len(fit), *fewest))
    offloads = sum(row["auto_trouble"] == "offloads" for row in fit)
    lines += [
        "",
        f"`auto` fails in {len(fit) - len(held)} of {len(fit)} cells that fit: it puts layers on "
        f"the CPU in {offloads}, and a GPU overflows or a block is split in the others.",
    ]
    return lines


def _planned_contexts(rows: Sequence[Row]) -> list[str]:
    lines = head("model, machine", "longest context: search", "duoka", "auto", "auto / duoka")
    own = [row for row in rows if row["what"] == "context"]
    for row in own:
        share = f"{row['auto'] / row['duoka']:.0%}" if row["duoka"] else "–"
        name = f"{row['model']}, {row['machine']}"
        lines.append(line(name, *(f"{row[key]:,}" for key in ("best", "duoka", "auto")), share))
    least = [row for row in own if row["best"]]
    equal = sum(row["duoka"] >= row["best"] for row in least)
    batches = [row for row in rows if row["what"] == "batch" and row["best"]]
    equal_batches = sum(row["duoka"] >= row["best"] for row in batches)
    lines += [
        "",
        f"duoka plans for the longest context of the search in {equal} of {len(least)} cases, and "
        f"for its largest batch in {equal_batches} of {len(batches)}; `auto` holds as much as the "
        f"search in {sum(row['auto'] >= row['best'] for row in least)} and "
        f"{sum(row['auto'] >= row['best'] for row in batches)}. Contexts end at 131,072 tokens or "
        "the model's own limit; 0: nothing fits.",
    ]
    return lines


def _planned_balance(rows: Sequence[Row]) -> list[str]:
    lines = head(
        "machine", "models", "free on the fullest GPU, duoka: median GiB", "auto: median GiB",
        "auto overflows or offloads", "auto leaves more",
    )  # fmt: skip
    for machine, group in groupby(sorted(rows, key=itemgetter("machine")), itemgetter("machine")):
        own = list(group)
        both = [row for row in own if row["auto"] is not None]
        medians = [
            f"{statistics.median(row[name] for row in both) / GIB:.2f}" if both else "–"
            for name in ("duoka", "auto")
        ]
        more = sum(row["auto"] > row["duoka"] for row in both)
        lines.append(line(machine, len(own), *medians, len(own) - len(both), more))
    lines += [
        "",
        "One sequence of 8,192 tokens or of the model's own limit over all GPUs of the machine, "
        "both with the prompt chunks of duoka's plan. Medians are of the models that both hold.",
    ]
    return lines


def optimality_table(data: list[Any]) -> list[str]:
    titles = {
        "tables": "random cost tables, five objectives each",
        "profiles": "random model profiles, planned whole",
        "fleets": "replicas, and largest context or batch",
    }
    lines = head("kind", "cases", "that fit", "differences")
    for row in data[0]["rows"]:
        counts = row["counts"]
        fits = counts.get("fit", sum(counts[name] for name in counts if name.endswith("that fit")))
        cases = counts.get("asked", counts["cases"])
        lines.append(line(titles[row["kind"]], f"{cases:,}", f"{fits:,}", row["differences"]))
    return lines


def plan_time_table(data: list[Any]) -> list[str]:
    compiled, plain = ([row for row in rows if "gpus" in row] for rows in data)
    lines = head("layers", "GPUs", "cases", "median ms", "longest ms", "in Python: ratio")
    key = itemgetter("layers", "gpus")
    slow = {_case(row): row["ms"] for row in plain}
    for (layers, gpus), group in groupby(compiled, key):
        own = list(group)
        times = [row["ms"] for row in own]
        ratios = sorted(slow[_case(row)] / row["ms"] for row in own if _case(row) in slow)
        told = f"{ratios[0]:.1f} to {ratios[-1]:.1f}" if ratios else "–"
        medians = f"{statistics.median(times):.0f}", f"{max(times):.0f}"
        lines.append(line(layers, gpus, len(own), *medians, told))
    command = next(row["s"] for row in data[0] if "command" in row)
    lines += [
        "",
        "CPU milliseconds of one plan from a profile in memory, best of 3. The whole command "
        f"`duoka plan` with a cached profile took {command:.1f} s by the clock.",
    ]
    return lines


def _case(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("layers", "gpus", "context", "room"))


# ── loading and running ──


def load_table(data: list[Any]) -> list[str]:
    lines = head(
        "checkpoint, way", "CPU seconds", "CPU time / raw read", "wall time / raw read",
        "own memory, GiB",
    )  # fmt: skip
    for kind, found in data[0].items():
        for name in ("raw", "transformers", "duoka"):
            runs, raw = found[f"{name} warm"], found["raw warm"]
            cpu, wall = median_of(runs, "cpu_seconds"), _whole(runs)
            ratios = f"{cpu / median_of(raw, 'cpu_seconds'):.1f}", f"{wall / _whole(raw):.1f}"
            own = f"{median_of(runs, 'own_gib'):.2f}"
            lines.append(line(f"{kind}, {name}", f"{cpu:.2f}", *ratios, own))
    sums = [
        {run["sum"] for runs in found.values() for run in runs if "sum" in run}
        for found in data[0].values()
    ]
    same = all(len(each) == 1 for each in sums)
    lines += ["", f"All ways compute the same logits: {'yes' if same else '**no**'}."]
    return lines


def _whole(runs: Sequence[Row]) -> float:
    """Return the time of the load and the first pass."""
    return statistics.median(run["load_seconds"] + run["first_pass_seconds"] for run in runs)


def median_of(runs: Sequence[Row], key: str) -> float:
    """Return the median of a value over runs."""
    return statistics.median(run[key] for run in runs)


def dispatch_table(data: list[Any]) -> list[str]:
    found = data[0]
    lines = head("way", "hooks", "CPU ms per token, median", "to plain, median", "quartiles")
    for name, value in found["seconds_per_token"].items():
        ratio = found["ratio_to_plain"].get(name)
        told = ("1.00", "–")
        if ratio:
            quartiles = f"{ratio['lower_quartile']:.2f} to {ratio['upper_quartile']:.2f}"
            told = f"{ratio['median']:.2f}", quartiles
        lines.append(line(name, found["hooks"][name], f"{value['median'] * 1000:.1f}", *told))
    return lines


def host_table(data: list[Any]) -> list[str]:
    """Make the table of the CUDA rig from the archive, for two kinds of decode steps."""
    lines = head("way", "launches", "copies", "waits", "CPU time / plain", "16 x 8192: CPU / plain")
    rows = {(row["step"], row["way"]): row for row in host_rows()}
    ways = [way for step, way in rows if step == "decode, 16 x 512"]
    for way in ways:
        short, long = rows["decode, 16 x 512", way], rows["decode, 16 x 8192", way]
        counts = (short[name] for name in ("launches", "copies", "waits"))
        lines.append(line(way, *counts, f"{short['ratio']:.2f}", f"{long['ratio']:.2f}"))
    return lines


def scaling_table(data: list[Any]) -> list[str]:
    lines = head("stages", "micro-batches", "speed-up", "ideal", "of the ideal", "rounds, from to")
    for row in sorted(data[0], key=itemgetter("micro_batches", "stages")):
        speeds = [row["computed_seconds"] / seconds for seconds in row["seconds"]]
        best, ideal = max(speeds), row["ideal_speedup"]
        spread = f"{min(speeds):.2f} to {best:.2f}"
        cells = f"{best:.2f}", f"{ideal:.2f}", f"{best / ideal:.0%}", spread
        lines.append(line(row["stages"], row["micro_batches"], *cells))
    return lines


def engine_table(data: list[Any]) -> list[str]:
    lines = head("hidden size, requests x context", "beside", "engine / beside", "rounds, from to")
    for row in data[0]:
        (base, theirs), (_, ours) = row["tokens_per_second"].items()
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        told = f"{statistics.median(ours) / statistics.median(theirs):.2f}"
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        lines.append(line(f"{row['hidden']}, {row['case']}", f"`{base}`", told, spread))
    return lines


def equality_table(data: list[Any]) -> list[str]:
    lines = head("family", "forms", "greedy answers", "not equal", "log-probabilities within")
    for row in data[0]:
        forms, wrong = row["forms"].split(", "), len(row["problems"])
        answers = 40 * len(forms)
        lines.append(line(row["family"], len(forms), answers, wrong, f"{row['logprob_error']:.0e}"))
    return lines


def training_table(data: list[Any]) -> list[str]:
    lines = head("model", "way", "loss, first step", "loss, last step", "largest difference")
    for row in [row for rows in data for row in rows]:
        first = next(one for rows in data for one in rows if one["model"] == row["model"])
        pairs = zip(first["losses"], row["losses"], strict=True)
        difference = max(abs(one - other) for one, other in pairs)
        losses = (f"{row['losses'][at]:.6f}" for at in (0, -1))
        lines.append(line(row["model"], row["way"], *losses, f"{difference:.0e}"))
    return lines


def checker_table(data: list[Any]) -> list[str]:
    rows = data[0]
    faulty = [row for row in rows if row["repaired"] is not None]
    clean = [row for row in rows if not row["expected"]]
    expected = sum(row["expected"] for row in rows)
    quiet = sum(not row["extra"] and not row["note"] for row in clean)
    lines = head("what", "number", "of")
    lines.append(line("marked lines found", sum(row["found"] for row in rows), expected))
    lines.append(
        line("reports on other lines (false alarms)", sum(row["extra"] for row in rows), "–")
    )
    lines.append(line("clean files without a report", quiet, len(clean)))
    fixed = sum(bool(row["proved"]) for row in faulty)
    lines.append(line("faulty files fixed, with a proof", fixed, len(faulty)))
    missed = [row["name"].removeprefix("fault_") for row in faulty if not row["proved"]]
    lines += ["", f"Found but not fixed: {', '.join(f'`{name}`' for name in missed) or 'none'}."]
    return lines


# ── the page ──

TABLES: dict[str, Callable[[list[Any]], list[str]]] = {
    "forecast": forecast_table,
    "training-memory": training_memory_table,
    "rig": rig_table,
    "planner": planner_table,
    "optimality": optimality_table,
    "plan-time": plan_time_table,
    "load": load_table,
    "dispatch": dispatch_table,
    "host": host_table,
    "scaling": scaling_table,
    "engine": engine_table,
    "equality": equality_table,
    "training": training_table,
    "checker": checker_table,
}
KEPT = ("rig", "host")  # tables of the archive, which need more than run.py does


def describe_run(name: str, result: Row) -> list[str]:
    """Return when, where and how a section was measured."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    gpu = "a GPU, not used" if result["has_gpu"] else "no GPU"
    before, after = result["load"]
    scripts = [f"benchmarks/{' '.join(command)}" for command in result["commands"]]
    return [
        f"Measured {result['date']} on {result['cores']} CPU cores ({result['machine']}, {gpu}; "
        f"load average {before} before, {after} after), Python {result['python']}, {versions}; "
        f"{result['cpu_seconds']} CPU seconds.",
        "",
        "```sh",
        f"python benchmarks/run.py --only {name}",
        *(f"# this result: python {script}" for script in scripts),
        "```",
        "",
    ]


def render_section(name: str, results: Path) -> str:
    """Return what stands between the markers of a section."""
    if name in KEPT:
        return "\n".join(TABLES[name]([]))
    path = results / f"{name}.json"
    if not path.exists():
        return (
            "Not measured by this script yet. The [archive](archive/README.md) has earlier tables."
        )
    result = json.loads(path.read_text(encoding="utf-8"))
    return "\n".join([*describe_run(name, result), *TABLES[name](result["data"])])


def render_page(page: str, results: Path) -> str:
    """Return the page with the tables of the kept results."""

    def replace(found: re.Match[str]) -> str:
        name = found[1]
        inner = render_section(name, results)
        return f"<!-- begin {name} -->\n\n{inner}\n\n<!-- end {name} -->"

    return re.sub(r"<!-- begin ([\w-]+) -->\n.*?<!-- end \1 -->", replace, page, flags=re.DOTALL)
