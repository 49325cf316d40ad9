"""From a fault to the changes that may cure it, the smallest and most likely first.

Which of them does is decided by checking again; nothing here runs any code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

import libcst as cst

from duoka.report.check_report import Fault, Operand

from ..subject import Subject
from .autograd import at_apply, at_gradient
from .buffers import Table, as_buffer
from .containers import each_of, folded_items, items_of
from .device_exprs import anchors, is_hidden, lucky
from .edits import move, named, to_cpu
from .factories import at_factory
from .hidden import at_hidden, at_map
from .operands import completed
from .sources import SourceError, Sources
from .syntax import Edit, Tree, folded

_MOST = 12
"""How many ways are tried for one fault."""


@dataclass(frozen=True, slots=True)
class Cure:
    """Changes that may cure a fault.

    Parameters
    ----------
    edits : tuple of Edit
    tables : tuple of Table
        Attributes of live modules that become buffers with them.
    """

    edits: tuple[Edit, ...]
    tables: tuple[Table, ...] = ()


@dataclass(frozen=True, slots=True)
class Site:
    """A fault where it is in the source.

    Parameters
    ----------
    fault : Fault
    tree : Tree
        Of the file that it stands in.
    sources : Sources
        Of the other files.
    subject : Subject, optional
        What was checked, where it is at hand.
    """

    fault: Fault
    tree: Tree
    sources: Sources
    subject: Subject | None


def cures(fault: Fault, sources: Sources, subject: Subject | None) -> Iterator[Cure]:
    """What may cure a fault, the best first; nothing where no way is known."""
    tree = sources.tree(fault.file)
    if tree.find(fault.place) is None:
        raise SourceError(f"{fault.file}:{fault.line} doesn't say {fault.source!r}")
    fault = completed(tree, fault)
    site = Site(fault, tree, sources, subject)
    if fault.kind == "gradient":
        yield from map(Cure, at_gradient(site.tree, fault))
        return
    yield from map(Cure, at_apply(site.tree, fault))
    yield from _at_target(site)
    moved = _distinct(site)
    if not moved:
        return
    ways = [list(_first(_ways(site, operand))) for operand in moved]
    if not all(ways):
        return
    for number in range(max(map(len, ways))):
        chosen = [each[min(number, len(each) - 1)] for each in ways]
        yield Cure(
            tuple(dict.fromkeys(chain.from_iterable(cure.edits for cure in chosen))),
            tuple(dict.fromkeys(chain.from_iterable(cure.tables for cure in chosen))),
        )


def _at_target(site: Site) -> Iterator[Cure]:
    """Make what is written to on a GPU, where model code made it on the CPU."""
    fault = site.fault
    gpus = [each.device for each in fault.operands if each.moved and each.device != "cpu"]
    if fault.target != "cpu" or fault.kind != "in-place" or not gpus:
        return
    operands = tuple(replace(each, moved=each.device == "cpu") for each in fault.operands)
    turned = replace(fault, target=gpus[0], operands=operands, at_hand=())
    for operand in operands:
        if operand.moved:
            for edits, tables in as_buffer(operand, site.sources, site.subject):
                yield Cure(edits, tables)
            yield from map(Cure, at_factory(site.tree, turned, operand, site.sources, site.subject))


def _first(ways: Iterator[Cure]) -> Iterator[Cure]:
    """The first ways, without those that come twice."""
    known: set[Cure] = set()
    for way in ways:
        if way not in known:
            known.add(way)
            yield way
        if len(known) == _MOST:
            return


def _distinct(site: Site) -> list[Operand]:
    """The operands to move, those of one list once."""
    found: dict[object, Operand] = {}
    for number, operand in enumerate(site.fault.operands):
        if operand.moved:
            found.setdefault(operand.place or number, operand)
    return list(found.values())


def _ways(site: Site, operand: Operand) -> Iterator[Cure]:
    yield from (
        Cure(edits, tables) for edits, tables in as_buffer(operand, site.sources, site.subject)
    )
    yield from map(Cure, at_factory(site.tree, site.fault, operand, site.sources, site.subject))
    tree, fault = site.tree, site.fault
    yield from map(Cure, at_map(tree, fault))
    node = None if is_hidden(fault, operand) else tree.find(operand.place)
    items = folded_items(tree, fault)
    if items is None and node is not None:
        items = items_of(tree, node, operand)
    if items is not None:
        yield from map(Cure, each_of(items, fault, site.subject))
    elif node is not None and _is_written(operand):
        if isinstance(node, cst.BaseExpression):
            yield from map(Cure, _at_use(site, node))
    elif edits := tuple(_at_module(site)):
        yield Cure(edits)
    else:
        yield from map(Cure, at_hidden(tree, fault, site.subject))


def _is_written(operand: Operand) -> bool:
    """Whether the expression at an operand's place is the operand itself."""
    return operand.place is None or folded(operand.expression) == folded(operand.place.text)


def _at_module(site: Site) -> Iterator[Edit]:
    """Bring the arguments of a module to its parameter, which can't move without the module."""
    tree, fault = site.tree, site.fault
    call = tree.find(fault.place)
    if not isinstance(call, cst.Call):
        return
    called = f"{folded(tree.code(call.func))}."
    own = [
        each.expression
        for each in fault.operands
        if each.moved and folded(each.expression).startswith(called)
    ]
    given = {each.value for each in call.args}
    for other in fault.operands if own else ():
        node = tree.find(other.place)
        stays = not other.moved and other.device == fault.target
        if stays and node in given and isinstance(node, cst.BaseExpression):
            yield move(tree, node, f"{own[0]}.device")


def _at_use(site: Site, node: cst.BaseExpression) -> Iterator[tuple[Edit, ...]]:
    """``.to(x.device)`` where an expression gives its tensor to the operation."""
    tree, fault = site.tree, site.fault
    if fault.target == "cpu":
        # What only works there, whatever else it is given: numpy, lengths of sequences.
        yield (to_cpu(tree, node),)
    for anchor in anchors(tree, node, fault, site.subject):
        yield (move(tree, node, anchor),)
    found = [(each, tree.find(each.place)) for each in fault.operands]
    written = [node for _, node in found if isinstance(node, cst.BaseExpression)]
    for operand, target in found:
        stays = not operand.moved and operand.device == fault.target
        if stays and isinstance(target, cst.BaseExpression):
            by_name = named(tree, written, target)
            if by_name is not None:
                yield (*by_name.edits, move(tree, node, by_name.device))
    for anchor in lucky(tree, node, fault):
        yield (move(tree, node, anchor),)
