"""Where the tensors of an operation stand in its source, when a fault doesn't say so."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import libcst as cst

from duoka.report.check_report import Fault, Operand, Place

from .syntax import Tree

_METHOD = "Tensor."


def completed(tree: Tree, fault: Fault) -> Fault:
    """A fault whose operands have places, where the text of the call tells them."""
    if all(operand.place is not None for operand in fault.operands):
        return fault
    written = dict(_written(tree.find(fault.place), fault.op))
    return replace(
        fault,
        operands=tuple(
            _placed(tree, fault, operand, written) if operand.place is None else operand
            for operand in fault.operands
        ),
    )


def _placed(
    tree: Tree, fault: Fault, operand: Operand, written: dict[str, cst.BaseExpression]
) -> Operand:
    argument, *items = re.findall(r"\w+", operand.argument)
    node = written.get(argument)
    if node is None:
        return operand
    line, column, end_line, end_column = tree.span(node)
    text = tree.code(node.with_changes(lpar=[], rpar=[]))
    place = Place(
        file=fault.file,
        line=line,
        column=column,
        end_line=end_line,
        end_column=end_column,
        text=text,
        function=fault.function,
    )
    expression = text + "".join(f"[{item}]" for item in items)
    return replace(operand, place=place, expression=expression)


def _written(node: cst.CSTNode | None, op: str) -> Iterator[tuple[str, cst.BaseExpression]]:
    """The expressions that an operation is called with, by position or keyword.

    Nothing where the expression calls something else, which calls the operation in turn.
    """
    if isinstance(node, cst.BinaryOperation):
        yield from (("0", node.left), ("1", node.right))
    elif isinstance(node, cst.AugAssign) and isinstance(node.target, cst.BaseExpression):
        yield from (("0", node.target), ("1", node.value))
    elif isinstance(node, cst.Call):
        name = op.rpartition(".")[2]
        args = list(_until_star(node))
        if isinstance(node.func, cst.Attribute) and node.func.attr.value == name:
            if op.startswith(_METHOD):
                args = [node.func.value, *args]
        elif not (isinstance(node.func, cst.Name) and node.func.value == name):
            return
        yield from ((str(at), value) for at, value in enumerate(args))
        yield from ((each.keyword.value, each.value) for each in node.args if each.keyword)


def _until_star(call: cst.Call) -> Iterator[cst.BaseExpression]:
    for argument in call.args:
        if argument.star:
            return
        if argument.keyword is None:
            yield argument.value
