"""Source edits of which fixes consist."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

import libcst as cst

from .syntax import Edit, Tree, is_plain, last_name

_CLOSED = (
    cst.Name, cst.Attribute, cst.Subscript, cst.Call, cst.List, cst.Set, cst.Dict, cst.ListComp,
    cst.SetComp, cst.DictComp, cst.BaseString,
)  # fmt: skip
# What stands in one of these may be evaluated several times, or not at all: an `elif`, whose
# question is asked only when all before it was false; `if x: return y`.
_UNMOVABLE = (
    cst.Lambda, cst.ListComp, cst.SetComp, cst.DictComp, cst.GeneratorExp, cst.IfExp,
    cst.BooleanOperation, cst.Await, cst.Decorator, cst.Param, cst.If, cst.SimpleStatementSuite,
)  # fmt: skip


def move(tree: Tree, node: cst.BaseExpression, device: str) -> Edit:
    """Append ``.to(device)`` to an expression, or change the device of an existing move.

    `device` is source text, such as "logits.device" or '"cpu"'.
    """
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        name, owner = node.func.attr.value, tree.code(node.func.value)
        if name in ("cuda", "cpu") and f"{owner}.device" == device:
            # It was there, and went away.
            return Edit(tree, node, f"not {name}", lambda updated: updated.func.value)
    return Edit(tree, node, f"to({device})", lambda updated: _change_device(updated, device))


def _change_device(node: cst.BaseExpression, device: str) -> cst.BaseExpression:
    where = cst.parse_expression(device)
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        method, args = node.func.attr.value, node.args
        if method in ("cuda", "cpu") and len(args) <= 1:
            return node.with_changes(
                func=node.func.with_changes(attr=cst.Name("to")), args=[cst.Arg(where)]
            )
        if method == "to" and args and _gives_device(args[0]):
            return node.with_changes(args=[args[0].with_changes(value=where), *args[1:]])
    return cst.Call(cst.Attribute(parenthesize(node), cst.Name("to")), [cst.Arg(where)])


def _gives_device(argument: cst.Arg) -> bool:
    """Return True if an argument of ``.to`` certainly is a device: "cuda:0", x.device, device."""
    if argument.star or argument.keyword is not None:
        return is_device_keyword(argument)
    return is_literal_device(argument.value) or last_name(argument.value) == "device"


def is_device_keyword(argument: cst.Arg) -> bool:
    """Return True for ``device=…``."""
    return argument.keyword is not None and argument.keyword.value == "device"


def is_literal_device(value: cst.BaseExpression) -> bool:
    """Return True for a literal device: "cuda:0", 0."""
    if isinstance(value, cst.Call) and last_name(value.func) == "device":
        return all(is_literal_device(argument.value) for argument in value.args)
    return isinstance(value, (cst.SimpleString, cst.FormattedString, cst.Integer))


def replace(tree: Tree, node: cst.BaseExpression, text: str) -> Edit:
    """Replace a node by a name, or by an expression that needs no parentheses."""
    return Edit(tree, node, text, lambda updated: cst.parse_expression(text), rewrites=True)


def move_each(tree: Tree, node: cst.BaseExpression, device: str) -> Edit:
    """Replace a container by ``[each.to(device) for each in node]``."""
    names = tree.names_in(node) | set(re.findall(r"\w+", device))
    item = free_name("each", names)

    def change(updated: cst.BaseExpression) -> cst.BaseExpression:
        listed = cst.parse_expression(f"[{item}.to({device}) for {item} in _]")
        assert isinstance(listed, cst.ListComp)
        loop = listed.for_in.with_changes(iter=parenthesize(updated))
        return listed.with_changes(for_in=loop)

    return Edit(tree, node, f"each to({device})", change)


def insert_before(tree: Tree, statement: cst.BaseStatement, line: str) -> Edit:
    """Insert a line before a statement, below its comments."""

    def change(updated: Any) -> Any:
        new = cst.parse_statement(line, config=tree.module.config_for_parsing)
        if isinstance(updated, cst.FlattenSentinel):
            *before, last = updated
            return cst.FlattenSentinel([*before, new, last])
        new = new.with_changes(leading_lines=updated.leading_lines)
        return cst.FlattenSentinel([new, updated.with_changes(leading_lines=())])

    return Edit(tree, statement, f"before: {line}", change, adds_line=True)


def set_device(tree: Tree, call: cst.Call, device: str) -> Edit:
    """Set the keyword argument ``device`` of a call."""

    def change(updated: cst.Call) -> cst.Call:
        value = cst.parse_expression(device)
        args = list(updated.args)
        present = next(
            (at for at, argument in enumerate(args) if is_device_keyword(argument)), None
        )
        if present is None:
            return updated.with_changes(args=_with_keyword(args, value))
        args[present] = args[present].with_changes(value=value)
        return updated.with_changes(args=args)

    return Edit(tree, call, f"device={device}", change)


def _with_keyword(args: Sequence[cst.Arg], value: cst.BaseExpression) -> list[cst.Arg]:
    """Return the arguments with ``device=value``, keeping the line breaks."""
    tight = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    new = cst.Arg(keyword=cst.Name("device"), value=value, equal=tight)
    if not args:
        return [new]
    *before, last = args
    # What stands between the last argument and the parenthesis, a comment say, comes after both.
    new = new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    whitespace = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    blank = cst.SimpleWhitespace("")
    return [*before, last.with_changes(comma=whitespace, whitespace_after_arg=blank), new]


def parenthesize(node: cst.BaseExpression) -> cst.BaseExpression:
    """Parenthesize an expression if something is to be appended to it."""
    if node.lpar or isinstance(node, _CLOSED):
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


# ── results that get a name on a line before, so that what is costly is written once ──


def name_first(
    tree: Tree, nodes: Iterable[cst.BaseExpression], target: cst.BaseExpression
) -> tuple[str, list[Edit]] | None:
    """Assign expressions to names on a line before, in the order of evaluation.

    Returns the device expression of `target` and the edits, or None if the order would change.
    """
    end = tree.span(target)[2:]
    unique = dict.fromkeys(nodes)
    complex_nodes = [node for node in unique if tree.span(node)[2:] <= end and not is_plain(node)]
    statement = statement_to_precede(tree, complex_nodes, target)
    if statement is None:
        return None
    edits: list[Edit] = []
    names = tree.all_names(target)
    name = ""
    for node in sorted(complex_nodes, key=tree.span):
        value = node.with_changes(lpar=[], rpar=[])
        name = free_name(_name_for(node), names)
        if isinstance(value, cst.NamedExpr):
            name, value = tree.code(value.target), value.value
        names.add(name)
        edits.append(insert_before(tree, statement, f"{name} = {on_a_line(tree, value)}"))
        edits.append(replace(tree, node, name))
    return (f"{name}.device", edits) if name else None


def statement_to_precede(
    tree: Tree, nodes: Sequence[cst.BaseExpression], last_node: cst.BaseExpression
) -> cst.BaseStatement | None:
    """Return the statement before which the expressions can be evaluated.

    The last one must be evaluated exactly once whenever the statement runs, and nothing else may be
    called before it.
    """
    statement = tree.statement_of(last_node)
    if not isinstance(statement, (cst.SimpleStatementLine, cst.If)):
        return None
    for outer in takewhile(lambda outer: outer is not statement, tree.ancestors(last_node)):
        if isinstance(outer, _UNMOVABLE):
            return None
    kinds = (cst.Call, cst.Await, cst.Yield, cst.NamedExpr)
    end = tree.span(last_node)[2:]
    earlier_calls = [
        call for call in tree.descendants(statement, *kinds) if tree.span(call)[2:] <= end
    ]
    own_calls = {id(call) for node in nodes for call in tree.descendants(node, *kinds)}
    return None if any(id(call) not in own_calls for call in earlier_calls) else statement


def _name_for(node: cst.BaseExpression) -> str:
    """Choose a name for the result of an expression, after the called function if possible."""
    callee = node.func if isinstance(node, cst.Call) else None
    while isinstance(callee, cst.Subscript):
        callee = callee.value
    name = "" if callee is None else last_name(callee)
    return f"{name.strip('_')}_output" if name else "result"


def free_name(name: str, names: set[str]) -> str:
    """Return a name with a number appended if it is in use."""
    numbered = (f"{name}{number or ''}" for number in range(len(names) + 1))
    return next(candidate for candidate in numbered if candidate not in names)


def on_a_line(tree: Tree, node: cst.BaseExpression) -> str:
    """Return the text of an expression for the start of a line."""
    text = tree.code(node)
    return tree.code(parenthesize(node)) if "\n" in text else text
