"""Operands that a `functools.partial` holds: they don't stand where the operation is called."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import libcst as cst

from duoka.report.check_report import Fault

from ..subject import Subject
from .device_exprs import anchors, lucky
from .edits import move, replace
from .syntax import Edit, Tree, bound_before, function_of, is_container, is_plain, root

Held = tuple[int | str, cst.BaseExpression]
"""What a partial holds: its position or keyword, and its expression."""


def at_hidden(tree: Tree, fault: Fault, subject: Subject | None) -> Iterator[tuple[Edit, ...]]:
    """Move what a partial holds: where it is made, or where it is called."""
    call = tree.find(fault.place)
    if not isinstance(call, cst.Call) or not is_plain(call.func):
        return
    made = list(_partials(tree, tree.code(call.func)))
    for each in made:
        yield from _where_made(tree, call, each, fault, subject)
    for each in made:
        for held in _held(each):
            for anchor in chain(anchors(tree, call, fault, subject), lucky(tree, call, fault)):
                yield (_where_called(tree, call, held, anchor),)


def at_map(tree: Tree, fault: Fault) -> Iterator[tuple[Edit, ...]]:
    """Move what `map` gives to a function: where it is run through is far from where it is made."""
    place = tree.find(fault.place)
    if not isinstance(place, cst.Call) or not is_container(place):
        return
    function = function_of(tree, place)
    moved = [each.argument for each in fault.operands if each.moved]
    stays = [each.argument for each in fault.operands if not each.moved]
    if function is None or not moved or not stays:
        return
    for call in tree.inside(function, cst.Call):
        names = [f"each{number or ''}" for number in range(len(call.args) - 1)]
        positions = {str(at) for at in range(len(names))}
        if not _is_map(call) or not {*moved, *stays} <= positions:
            continue
        device = f"{names[int(stays[0])]}.device"
        given = [
            f"{name}.to({device})" if str(at) in moved else name for at, name in enumerate(names)
        ]
        called = tree.code(call.args[0].value)
        text = f"lambda {', '.join(names)}: {called}({', '.join(given)})"
        yield (replace(tree, call.args[0].value, text),)


def _is_map(call: cst.Call) -> bool:
    named = isinstance(call.func, cst.Name) and call.func.value == "map"
    return named and is_plain(call.args[0].value) and not any(each.star for each in call.args)


def _partials(tree: Tree, text: str) -> Iterator[cst.Call]:
    """The calls of `partial` whose results are assigned to what `text` names."""
    for assignment in tree.inside(tree.module, cst.Assign):
        made = assignment.value
        if any(tree.code(each.target) == text for each in assignment.targets) and _is_partial(made):
            assert isinstance(made, cst.Call)
            yield made


def _is_partial(node: cst.BaseExpression) -> bool:
    if not isinstance(node, cst.Call):
        return False
    named = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
    return isinstance(named, cst.Name) and named.value == "partial"


def _held(made: cst.Call) -> Iterator[Held]:
    for position, argument in enumerate(made.args[1:]):
        if argument.star or isinstance(argument.value, (cst.SimpleString, cst.Integer, cst.Float)):
            continue
        yield argument.keyword.value if argument.keyword else position, argument.value


def _where_made(
    tree: Tree, call: cst.Call, made: cst.Call, fault: Fault, subject: Subject | None
) -> Iterator[tuple[Edit, ...]]:
    if function_of(tree, call) is not function_of(tree, made):
        return
    bound = bound_before(tree, made)
    for _, value in _held(made):
        for anchor in chain(anchors(tree, value, fault, subject), lucky(tree, value, fault)):
            where = cst.parse_expression(anchor)
            if root(where) in bound:
                yield (move(tree, value, anchor),)


def _where_called(tree: Tree, call: cst.Call, held: Held, device: str) -> Edit:
    """A keyword is given again; a position can't be, so its function is called instead."""
    at, _ = held
    held_by = tree.code(call.func)

    def change(updated: cst.Call) -> cst.Call:
        if isinstance(at, str):
            value = cst.parse_expression(f'{held_by}.keywords["{at}"].to({device})')
            given = cst.parse_expression(f"f({at}=0)")
            assert isinstance(given, cst.Call)
            return updated.with_changes(
                args=[*updated.args, given.args[0].with_changes(value=value)]
            )
        before = [f"*{held_by}.args[:{at}]"] if at else []
        listed = ", ".join([*before, f"{held_by}.args[{at}].to({device})"])
        inner = cst.parse_expression(f"{held_by}.func({listed})")
        assert isinstance(inner, cst.Call)
        return updated.with_changes(func=inner.func, args=[*inner.args, *updated.args])

    return Edit(tree, call, f"{at} to({device})", change)
