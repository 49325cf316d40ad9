"""Faults in custom functions: what `backward` returns goes to its input, or the input moves."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from duoka.report.check_report import Fault

from .edits import insert_before, move
from .syntax import Edit, Tree, bound_before, is_plain, parameters


def at_gradient(tree: Tree, fault: Fault) -> Iterator[tuple[Edit, ...]]:
    """Cast a gradient that `backward` returns to the device of its input."""
    operand = next((each for each in fault.operands if each.moved), None)
    node = None if operand is None else tree.find(operand.place)
    backward = None if node is None else tree.enclosing(node, cst.FunctionDef)
    if not isinstance(node, cst.BaseExpression) or backward is None:
        return
    owner = tree.enclosing(backward, cst.ClassDef)
    forward = None if owner is None else _method(tree, owner, "forward")
    index = _index_returned(tree, node)
    inputs = [] if forward is None else list(parameters(forward))[1:]
    name = inputs[index] if index is not None and index < len(inputs) else None
    known = bound_before(tree, node) - {"ctx", "self"}
    for text in sorted(known, key=lambda each: (each != name, each)):
        yield (move(tree, node, f"{text}.device"),)
    if name is not None and forward is not None:
        kept = f"{next(parameters(forward))}.{name}_device"
        first = next(iter(_statements(forward)), None)
        if first is not None:
            own = f"{next(parameters(backward))}.{name}_device"
            yield insert_before(tree, first, f"{kept} = {name}.device"), move(tree, node, own)


def at_apply(tree: Tree, fault: Fault) -> Iterator[tuple[Edit, ...]]:
    """Move an input of a custom function where the function is applied."""
    place = tree.find(fault.place)
    forward = None if place is None else tree.enclosing(place, cst.FunctionDef)
    owner = None if forward is None else tree.enclosing(forward, cst.ClassDef)
    if (
        forward is None
        or owner is None
        or forward.name.value != "forward"
        or not is_function(owner)
    ):
        return
    inputs = list(parameters(forward))[1:]
    moved = [each.expression for each in fault.operands if each.moved]
    stays = [each.expression for each in fault.operands if not each.moved]
    if not all(each in inputs for each in moved):
        return
    for text in stays:
        if text in inputs:
            edits = tuple(_at_calls(tree, owner, inputs, moved, text))
            if edits:
                yield edits


def _at_calls(
    tree: Tree, owner: cst.ClassDef, inputs: list[str], moved: list[str], stays: str
) -> Iterator[Edit]:
    for call in tree.inside(tree.module, cst.Call):
        if tree.code(call.func) != f"{owner.name.value}.apply" or len(call.args) < len(inputs):
            continue
        given = dict(zip(inputs, (each.value for each in call.args), strict=False))
        if is_plain(given[stays]):
            for name in moved:
                yield move(tree, given[name], f"{tree.code(given[stays])}.device")


def is_function(owner: cst.ClassDef) -> bool:
    """Whether a class is a custom function of autograd's, by the name of its base."""
    bases = (base.value for base in owner.bases)
    return any(
        (base.attr.value if isinstance(base, cst.Attribute) else getattr(base, "value", ""))
        == "Function"
        for base in bases
    )


def _method(tree: Tree, owner: cst.ClassDef, name: str) -> cst.FunctionDef | None:
    return next(
        (each for each in tree.inside(owner, cst.FunctionDef) if each.name.value == name), None
    )


def _statements(function: cst.FunctionDef) -> Iterator[cst.BaseStatement]:
    """The statements of a function that stand on lines of their own, the docstring not."""
    body = function.body
    if isinstance(body, cst.IndentedBlock):
        for at, statement in enumerate(body.body):
            is_text = (
                isinstance(statement, cst.SimpleStatementLine)
                and isinstance(statement.body[0], cst.Expr)
                and isinstance(statement.body[0].value, cst.BaseString)
            )
            if at or not is_text:
                yield statement


def _index_returned(tree: Tree, node: cst.BaseExpression) -> int | None:
    """Which of the returned gradients an expression is."""
    element = tree.parent(node)
    outer = None if element is None else tree.parent(element)
    if isinstance(element, cst.Return):
        return 0
    if isinstance(outer, cst.Tuple):
        return next(at for at, each in enumerate(outer.elements) if each is element)
    return None
