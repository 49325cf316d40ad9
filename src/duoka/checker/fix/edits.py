"""The few kinds of change that a repair is made of."""

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
    """Let an expression end in ``.to(device)``; one that ends in another move goes there instead.

    ``device`` is source text, such as "logits.device" or '"cpu"'.
    """
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        name, owner = node.func.attr.value, tree.code(node.func.value)
        if name in ("cuda", "cpu") and f"{owner}.device" == device:
            # It was there, and went away.
            return Edit(tree, node, f"not {name}", lambda updated: updated.func.value)
    return Edit(tree, node, f"to({device})", lambda updated: _moved(updated, device))


def _moved(node: cst.BaseExpression, device: str) -> cst.BaseExpression:
    where = cst.parse_expression(device)
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        method, args = node.func.attr.value, node.args
        if method in ("cuda", "cpu") and len(args) <= 1:
            return node.with_changes(
                func=node.func.with_changes(attr=cst.Name("to")), args=[cst.Arg(where)]
            )
        if method == "to" and args and _gives_device(args[0]):
            return node.with_changes(args=[args[0].with_changes(value=where), *args[1:]])
    return cst.Call(cst.Attribute(closed(node), cst.Name("to")), [cst.Arg(where)])


def _gives_device(argument: cst.Arg) -> bool:
    """Whether an argument of ``.to`` surely is a device: "cuda:0", x.device, device."""
    if argument.star or argument.keyword is not None:
        return is_device_keyword(argument)
    return is_literal_device(argument.value) or last_name(argument.value) == "device"


def is_device_keyword(argument: cst.Arg) -> bool:
    """Whether this is ``device=…``."""
    return argument.keyword is not None and argument.keyword.value == "device"


def is_literal_device(value: cst.BaseExpression) -> bool:
    """Whether an expression is a device that somebody wrote into the code: "cuda:0", 0."""
    if isinstance(value, cst.Call) and last_name(value.func) == "device":
        return all(is_literal_device(argument.value) for argument in value.args)
    return isinstance(value, (cst.SimpleString, cst.FormattedString, cst.Integer))


def replace(tree: Tree, node: cst.BaseExpression, text: str) -> Edit:
    """Put a name, or an expression that needs no parentheses there, in the place of one."""
    return Edit(tree, node, text, lambda updated: cst.parse_expression(text), rewrites=True)


def move_each(tree: Tree, node: cst.BaseExpression, device: str) -> Edit:
    """Put ``[each.to(device) for each in node]`` in the place of what holds several tensors."""
    taken = tree.names_in(node) | set(re.findall(r"\w+", device))
    item = free_name("each", taken)

    def change(updated: cst.BaseExpression) -> cst.BaseExpression:
        listed = cst.parse_expression(f"[{item}.to({device}) for {item} in _]")
        assert isinstance(listed, cst.ListComp)
        loop = listed.for_in.with_changes(iter=closed(updated))
        return listed.with_changes(for_in=loop)

    return Edit(tree, node, f"each to({device})", change)


def insert_before(tree: Tree, statement: cst.BaseStatement, line: str) -> Edit:
    """Put a line of code before a statement; the comments above stay where they are."""

    def change(updated: Any) -> Any:
        new = cst.parse_statement(line, config=tree.module.config_for_parsing)
        if isinstance(updated, cst.FlattenSentinel):
            *before, last = updated
            return cst.FlattenSentinel([*before, new, last])
        new = new.with_changes(leading_lines=updated.leading_lines)
        return cst.FlattenSentinel([new, updated.with_changes(leading_lines=())])

    return Edit(tree, statement, f"before: {line}", change, adds_line=True)


def set_device(tree: Tree, call: cst.Call, device: str) -> Edit:
    """Give a call the keyword argument ``device``, in place of one that it has."""

    def change(updated: cst.Call) -> cst.Call:
        value = cst.parse_expression(device)
        args = list(updated.args)
        known = next((at for at, one in enumerate(args) if is_device_keyword(one)), None)
        if known is None:
            return updated.with_changes(args=_with_keyword(args, value))
        args[known] = args[known].with_changes(value=value)
        return updated.with_changes(args=args)

    return Edit(tree, call, f"device={device}", change)


def _with_keyword(args: Sequence[cst.Arg], value: cst.BaseExpression) -> list[cst.Arg]:
    """Arguments and ``device=value``, with the line breaks that are there."""
    tight = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    new = cst.Arg(keyword=cst.Name("device"), value=value, equal=tight)
    if not args:
        return [new]
    *before, last = args
    # What stands between the last argument and the parenthesis, a comment say, comes after both.
    new = new.with_changes(comma=last.comma, whitespace_after_arg=last.whitespace_after_arg)
    between = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    blank = cst.SimpleWhitespace("")
    return [*before, last.with_changes(comma=between, whitespace_after_arg=blank), new]


def closed(node: cst.BaseExpression) -> cst.BaseExpression:
    """An expression that something can be appended to: in parentheses where it may need them."""
    if node.lpar or isinstance(node, _CLOSED):
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


# ── results that get a name on a line before, so that what is costly is written once ──


def name_first(
    tree: Tree, nodes: Iterable[cst.BaseExpression], target: cst.BaseExpression
) -> tuple[str, list[Edit]] | None:
    """Give what isn't plain a name on a line before, in the order of evaluation.

    The device of `target` by that name, and the edits; None where the order would change.
    """
    end = tree.span(target)[2:]
    unique = dict.fromkeys(nodes)
    first = [node for node in unique if tree.span(node)[2:] <= end and not is_plain(node)]
    statement = statement_to_precede(tree, first, target)
    if statement is None:
        return None
    edits: list[Edit] = []
    taken = tree.all_names(target)
    name = ""
    for node in sorted(first, key=tree.span):
        value = node.with_changes(lpar=[], rpar=[])
        name = free_name(_name_for(node), taken)
        if isinstance(value, cst.NamedExpr):
            name, value = tree.code(value.target), value.value
        taken.add(name)
        edits.append(insert_before(tree, statement, f"{name} = {on_a_line(tree, value)}"))
        edits.append(replace(tree, node, name))
    return (f"{name}.device", edits) if name else None


def statement_to_precede(
    tree: Tree, nodes: Sequence[cst.BaseExpression], last: cst.BaseExpression
) -> cst.BaseStatement | None:
    """The statement that some expressions are evaluated in, if they can be evaluated before it.

    So the last of them must be evaluated once each time that the statement is reached, and nothing
    else may be called before.
    """
    statement = tree.statement_of(last)
    if not isinstance(statement, (cst.SimpleStatementLine, cst.If)):
        return None
    for outer in takewhile(lambda outer: outer is not statement, tree.around(last)):
        if isinstance(outer, _UNMOVABLE):
            return None
    kinds = (cst.Call, cst.Await, cst.Yield, cst.NamedExpr)
    end = tree.span(last)[2:]
    before = [call for call in tree.inside(statement, *kinds) if tree.span(call)[2:] <= end]
    known = {id(call) for node in nodes for call in tree.inside(node, *kinds)}
    return None if any(id(call) not in known for call in before) else statement


def _name_for(node: cst.BaseExpression) -> str:
    """A name for the result of an expression: of what is called, where something is."""
    called = node.func if isinstance(node, cst.Call) else None
    while isinstance(called, cst.Subscript):
        called = called.value
    name = "" if called is None else last_name(called)
    return f"{name.strip('_')}_output" if name else "result"


def free_name(name: str, taken: set[str]) -> str:
    """A name, with a number where it is taken."""
    numbered = (f"{name}{number or ''}" for number in range(len(taken) + 1))
    return next(candidate for candidate in numbered if candidate not in taken)


def on_a_line(tree: Tree, node: cst.BaseExpression) -> str:
    """The text of an expression that starts a line of its own."""
    text = tree.code(node)
    return tree.code(closed(node)) if "\n" in text else text
