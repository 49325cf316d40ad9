"""The tables of `planner.py`, as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Row = dict[str, Any]
Test = Callable[[Row], bool]


def report(found: Row) -> str:
    lines = [
        *_totals(found),
        *_missed(found["cells"]),
        *_by("machine", found["cells"]),
        *_by("model", found["cells"]),
        *_by("context", found["cells"]),
        *_times(found["cells"]),
        *(_contexts(found["contexts"]) if found["contexts"] else ()),
        *_measured(found["measured"]),
        *_audit(found),
    ]
    return "\n".join(lines) + "\n"


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that a share of them doesn't exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * 1000) * len(ordered) // 1000) - 1)] if ordered else 0.0


def fits(row: Row) -> bool:
    return row["fewest"] is not None


def planned(row: Row) -> bool:
    return row["duoka"] is not None


def held(row: Row) -> bool:
    return row["auto"] is not None


def fits_one(row: Row) -> bool:
    return row["fewest"] == 1


def line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _totals(found: Row) -> Iterator[str]:
    rows = found["cells"]

    def count(*tests: Test) -> int:
        return sum(all(test(row) for test in tests) for row in rows)

    one = (fits_one, _several)
    least = (fits, lambda row: row["duoka"] == row["fewest"])
    yield line("", "exhaustive search", "duoka", "`auto`")
    yield "|---|---:|---:|---:|"
    yield line("cells that fit", count(fits), count(fits, planned), count(fits, held))
    yield line("fit, and not solved", "", count(fits, _unplanned), count(fits, _unheld))
    yield line("solved, and don't fit", "", count(_over, planned), count(_over, held))
    yield line("prompt whole in one step", "", count(planned, _at_once), count(_auto_at_once))
    yield line(
        "several GPUs where one suffices: takes one",
        count(*one),
        count(*one, lambda row: row["duoka"] == 1),
        count(*one, held, lambda row: row["auto_gpus"] == 1),
    )
    yield line("as few GPUs as can be", count(fits), count(*least), count(fits, held, _auto_least))
    both = [row for row in rows if fits(row) and planned(row) and held(row)]
    means = (
        sum(row[name] for row in both) / max(1, len(both))
        for name in ("fewest", "duoka", "auto_gpus")
    )
    yield line("GPUs, mean where all three solve", *(f"{mean:.2f}" for mean in means))
    models = len({row["model"] for row in rows})
    yield f"\n{len(rows)} cells of {models} models ({found['machines_per_workload']} machines for"
    yield f"each workload, seed {found['seed']}), judged in {found['seconds']:.0f} s."
    offloads = count(fits, _offloads)
    broken = count(fits, _unheld, lambda row: row["auto_trouble"] and not _offloads(row))
    yield f"Where it fits and `auto` fails, its map puts layers on the CPU in {offloads} cells, "
    yield f"breaks a block or a tie in {broken}, and overflows a GPU in the others."


def _unplanned(row: Row) -> bool:
    return row["duoka"] is None


def _unheld(row: Row) -> bool:
    return row["auto"] is None


def _over(row: Row) -> bool:
    return row["fewest"] is None


def _offloads(row: Row) -> bool:
    return bool(row["auto_trouble"] == "offloads")


def _auto_at_once(row: Row) -> bool:
    return bool(row["auto"] == "whole")


def _auto_least(row: Row) -> bool:
    return bool(row["auto_gpus"] == row["fewest"])


def _at_once(row: Row) -> bool:
    return row["duoka_chunk"] is None


def _several(row: Row) -> bool:
    return row["gpus"] > 1


def _missed(rows: Sequence[Row]) -> Iterator[str]:
    yield "\n## Where duoka differs from the search\n"
    wrong = [row for row in rows if row["duoka"] != row["fewest"]]
    if not wrong:
        yield "Nowhere."
    for row in wrong:
        yield (
            f"- {row['model']} on {row['machine']}, {row['context']} tokens, batch {row['batch']}: "
            f"fewest {row['fewest']} (chunk {row['fewest_chunk']}), duoka {row['duoka']} "
            f"(chunk {row['duoka_chunk']})"
        )


def _by(name: str, rows: Sequence[Row]) -> Iterator[str]:
    yield f"\n## By {name}\n"
    yield f"| {name} | cells | fit | duoka | `auto` | one suffices | duoka takes one |"
    yield "|---|---:|---:|---:|---:|---:|---:|"
    for value in dict.fromkeys(row[name] for row in rows):
        own = [row for row in rows if row[name] == value]
        one = [row for row in own if fits_one(row)]
        numbers = (
            len(own),
            sum(map(fits, own)),
            sum(map(planned, own)),
            sum(map(held, own)),
            len(one),
            sum(row["duoka"] == 1 for row in one),
        )
        yield line(value, *numbers)


def _times(rows: Sequence[Row]) -> Iterator[str]:
    yield "\n## Seconds to plan, from a profile in memory\n"
    yield "| | cells | median | 95th percentile | longest | processor: median | 95th | longest |"
    yield "|---|---:|---:|---:|---:|---:|---:|---:|"
    groups = (
        ("cells that fit", list(filter(fits, rows))),
        ("cells that don't", [row for row in rows if not fits(row)]),
    )
    for name, own in groups:
        told = [
            f"{percentile([row[kind] for row in own], share):.3f}"
            for kind in ("seconds", "cpu_seconds")
            for share in (0.5, 0.95, 1.0)
        ]
        yield line(name, len(own), *told)
    slowest = max(rows, key=lambda row: row["cpu_seconds"])
    yield f"\nThe longest: {slowest['model']} on {slowest['machine']}, {slowest['context']} tokens,"
    yield f"batch {slowest['batch']}."


def _contexts(rows: Sequence[Row]) -> Iterator[str]:
    yield "\n## The longest context of one sequence, and the largest batch\n"
    yield "| | contexts | batches of 8K |\n|---|---:|---:|"
    kinds = [[row for row in rows if row["what"] == what] for what in ("context", "batch")]
    some = [[row for row in own if row["best"]] for own in kinds]
    yield line("models on machines", *map(len, kinds))
    yield line("that hold any", *map(len, some))
    yield line("duoka plans for as much", *(sum(map(_as_much, own)) for own in some))
    held = [[row["auto"] / row["best"] for row in own] for own in some]
    yield line("`auto` holds as much", *(sum(share >= 1 for share in own) for own in held))
    yield line("`auto` holds nothing", *(sum(not share for share in own) for own in held))
    means = [f"{100 * sum(own) / max(1, len(own)):.0f} %" for own in held]
    yield line("what `auto` holds of the best split's, mean", *means)
    for own, unit in zip(some, ("tokens", "sequences"), strict=True):
        yield ""
        yield line("model", "machine", f"limit, {unit}", "best split", "duoka", "`auto`")
        yield "|---|---|---:|---:|---:|---:|"
        names = ("model", "machine", "limit", "best", "duoka", "auto")
        yield from (line(*(row[name] for name in names)) for row in own)


def _as_much(row: Row) -> bool:
    return bool(row["duoka"] >= row["best"])


def _measured(rows: Sequence[Row]) -> Iterator[str]:
    yield "\n## Run on virtual GPUs\n"
    own = [row for row in rows if row["way"] == "duoka" and row["fits"]]
    for kind in ("allocated", "reserved"):
        off = [row[f"forecast_{kind}"] / row[kind] - 1 for row in own]
        sizes = [abs(each) for each in off]
        yield (
            f"- {kind}: forecast against measured on {len(own)} GPUs of duoka's placements: median "
            f"{percentile(sizes, 0.5):.3%}, 95th percentile {percentile(sizes, 0.95):.3%}, largest "
            f"{max(sizes, default=0):.3%}, most under {-min(off, default=0):.3%}"
        )
    for way in ("duoka", "auto"):
        ran = [row for row in rows if row["way"] == way]
        cells = {(row["model"], row["machine"], row["context"], row["batch"]) for row in ran}
        wrong = [row for row in ran if row["fits"] != row["forecast_fits"]]
        yield f"- {way}: {len(cells)} cells run; verdicts that the replay had wrong: {len(wrong)}"
        yield from (f"  - {row}" for row in wrong)


def _audit(found: Row) -> Iterator[str]:
    audit = found["audit"]
    yield "\n## The search's own savings, checked\n"
    yield (
        f"{audit['drawn']} stages were replayed afresh: {audit['bounds_too_high']} bounds were too "
        f"high, {audit['memory_of_alikes_wrong']} remembered replays were wrong, and "
        f"{audit['verdict_wrong']} stages were judged wrongly."
    )
    yield from (f"- {line}" for line in audit["told"])
