"""Candidates for a fault, the smallest and most likely first.

Another check decides which candidate is correct; nothing here runs code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice

from duoka.report.check_report import Fault, Operand

from .containers import container_of, move_contents
from .device_exprs import is_hidden, lucky_devices, staying_operands, target_devices
from .edits import move, name_first, replace
from .factories import make_on_target
from .sources import Site, SourceError, Sources
from .syntax import Edit, last_name

_MOST = 12
"""Maximum number of candidates for one operand."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Edits that may fix a fault, and the number of bytes moved at each execution."""

    edits: tuple[Edit, ...]
    step_bytes: int = 0


def candidates(fault: Fault, sources: Sources) -> Iterator[Candidate]:
    """Yield candidates for a fault, the best first; raise SourceError if no edit can fix it."""
    tree = sources.tree(fault.file)
    node = tree.find_node(fault.place)
    if node is None:
        raise SourceError(f"{fault.file}:{fault.line} doesn't contain {fault.source!r}")
    owner = tree.enclosing(node, ast.ClassDef)
    bases = () if owner is None else [last_name(base) for base in owner.bases]
    if fault.kind == "gradient" or "Function" in bases:
        raise SourceError(
            "the fault is in a custom autograd function, whose gradients must be on the devices "
            "of its inputs; its author must fix it"
        )
    site = Site(fault, tree)
    moving = _operands_to_move(site.fault)
    per_operand = [
        list(dict.fromkeys(islice(_for_operand(site, operand), _MOST))) for operand in moving
    ]
    if not all(per_operand):
        raise SourceError(
            "one of its tensors has no expression at that line (functools.partial, sum() or "
            "other code holds it), so no move can be inserted"
        )
    if not per_operand:
        return
    # Not all combinations: the n-th candidate takes the n-th option of each operand, and the last
    # one of a shorter list. Options m1, m2, m3 of a mask and s1, s2 of a scale give three
    # candidates, (m1, s1), (m2, s2), (m3, s2), in place of six. Each costs a check of the model.
    for number in range(max(map(len, per_operand))):
        chosen = [options[min(number, len(options) - 1)] for options in per_operand]
        yield Candidate(
            tuple(dict.fromkeys(chain.from_iterable(candidate.edits for candidate in chosen))),
            sum(candidate.step_bytes for candidate in chosen),
        )


def _operands_to_move(fault: Fault) -> list[Operand]:
    """Return the operands to move, one per place: items of a list share a place."""
    by_place: dict[object, Operand] = {}
    for number, operand in enumerate(fault.operands):
        if operand.moved:
            by_place.setdefault(operand.place or number, operand)
    return list(by_place.values())


def _for_operand(site: Site, operand: Operand) -> Iterator[Candidate]:
    """Yield candidates for an operand: creation on the target, then moves at its use."""
    yield from map(Candidate, make_on_target(site, operand))
    tree, fault = site.tree, site.fault
    node = None if is_hidden(fault, operand) else tree.find_node(operand.place)
    container = None if node is None else container_of(tree, node, operand)
    ways: Iterator[tuple[Edit, ...]] = iter(())
    if container is not None:
        ways = move_contents(site, container)
    elif isinstance(node, ast.expr):
        ways = _at_use(site, node)
    listed = [item for item in fault.operands if item.moved and item.place == operand.place]
    num_bytes = sum(item.num_bytes for item in listed)
    yield from (Candidate(edits, step_bytes=num_bytes) for edits in ways)


def _at_use(site: Site, node: ast.expr) -> Iterator[tuple[Edit, ...]]:
    """Yield edits of an operand's expression: ``.to(x.device)`` for various tensors x."""
    tree, fault = site.tree, site.fault
    if fault.target == "cpu":
        # The call needs a CPU tensor on every placement: numpy, lengths of sequences.
        yield (move(tree, node, '"cpu"'),)
    for device in target_devices(site, node):
        yield (move(tree, node, device),)
    nodes = [tree.find_node(operand.place) for operand in fault.operands]
    written = [target for target in nodes if isinstance(target, ast.expr)]
    for _, target in staying_operands(site):
        by_name = name_first(tree, written, target)
        if by_name is not None:
            names, lines = by_name
            device = f"{[*names.values()][-1]}.device"
            used = [
                replace(tree, named, f"{name}.to({device})" if named is node else name)
                for named, name in names.items()
            ]
            yield (*lines, *used, *([] if node in names else [move(tree, node, device)]))
    for device in lucky_devices(site, node):
        yield (move(tree, node, device),)
