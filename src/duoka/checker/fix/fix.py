"""Implementation of `duoka.repair`: turn a report into patches with proofs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from torch import nn

from duoka import virtual
from duoka.errors import UsageError
from duoka.report.check_report import CheckReport, Stop

from ..run import check_subject
from ..subject import Subject
from .live_code import ClosureError, SwapError, live_functions, swap_code
from .patch import Patch, Repairs, unified_diff
from .search import Draft, FixSearch
from .sources import Sources
from .verify import Proof, prove


def repair(report: CheckReport) -> Repairs:
    """Find the smallest source changes that fix a report's faults, and prove them.

    No file is changed, and the model stays as it is: while the check is repeated, the model's live
    functions run the patched code, and afterwards their own. Don't use the model meanwhile.

    Parameters
    ----------
    report : CheckReport
        A report that `duoka.check` returned.

    Returns
    -------
    Repairs
        A sequence of patches, one for each file; `uncured` lists the faults without a fix.

    Raises
    ------
    UsageError
        If there are faults, and the report doesn't refer to the checked model.

    Examples
    --------
    >>> layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    >>> report = duoka.check(layers, {"0": 0, "1": 1}, inputs=(torch.zeros(1, 2),))
    >>> [patch.diff for patch in duoka.repair(report)]  # nothing to cure
    []
    """
    if not report.faults:
        return Repairs()
    subject = report.subject
    if not isinstance(subject, Subject):
        raise UsageError(
            "the report has no reference to the checked model, so the check can't be repeated",
            hint="pass the report that duoka.check returned",
        )
    sources, live = Sources(), live_functions()

    @contextmanager
    def patched(draft: Draft, model: nn.Module) -> Iterator[None]:
        original = {file: sources.text(file) for file in draft}
        # A twin is built after `live` was listed, and its code may have created closures.
        functions = live if model is subject.model else live_functions()
        with swap_code(functions, original, draft):
            yield

    def check(draft: Draft) -> CheckReport:
        try:
            with patched(draft, subject.model):
                return check_subject(subject)
        except ClosureError as error:
            # A change that a live closure can't take counts as one that breaks the function.
            return replace(
                report, faults=(), stop=Stop(message=str(error), place=error.place, phase="")
            )

    try:
        outcome = FixSearch(report, sources, check)
        outcome.run()
        proof = _failed_proof(outcome) or virtual.apart(
            prove, report, subject, partial(patched, outcome.draft)
        )
    except SwapError as error:
        return Repairs(uncured=tuple((fault, str(error)) for fault in report.faults))
    return _build_repairs(outcome, sources, proof)


def _failed_proof(outcome: FixSearch) -> Proof | None:
    """Return a failed proof if the last check of the patched code isn't clean; else None."""
    report = outcome.report
    if report.stop is not None:
        return Proof(False, f"the patched code stops early: {report.stop.message}")
    if report.faults:
        lines = ", ".join(f"{fault.op} in {fault.function}" for fault in report.faults)
        return Proof(False, f"faults that remain after the fix: {lines}")
    return None


def _build_repairs(outcome: FixSearch, sources: Sources, proof: Proof) -> Repairs:
    """Return a patch for each changed file, and the faults without a fix."""
    patches = tuple(
        Patch(
            file=file,
            before=original,
            after=patched,
            diff=unified_diff(file, original, patched),
            cures=tuple(outcome.cures(file)),
            proved=proof.holds,
            reason=proof.reason,
        )
        for file, patched in outcome.draft.items()
        if (original := sources.text(file)) != patched
    )
    return Repairs(patches=patches, uncured=tuple(outcome.uncured()))
