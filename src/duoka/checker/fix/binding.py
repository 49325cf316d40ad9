"""Results that get a name on a line before, so that what is costly is written once."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from .edits import closed, insert_before, replace
from .scope import all_names, free_name, is_plain, statement_of
from .syntax import Edit, Tree

_UNMOVABLE = (
    cst.Lambda,
    cst.ListComp,
    cst.SetComp,
    cst.DictComp,
    cst.GeneratorExp,
    cst.IfExp,
    cst.BooleanOperation,
    cst.Await,
    cst.Decorator,
    cst.Param,
    # An `elif`, whose question is asked only when all before it was false; `if x: return y`.
    cst.If,
    cst.SimpleStatementSuite,
)


@dataclass(frozen=True, slots=True)
class Named:
    """A device by the name that something on it has been given.

    Parameters
    ----------
    device : str
        Source text, such as "mlp_output.device".
    edits : tuple of Edit
        What gives the name.
    """

    device: str
    edits: tuple[Edit, ...]


def named(tree: Tree, nodes: list[cst.BaseExpression], target: cst.BaseExpression) -> Named | None:
    """Give what isn't plain a name on a line before, in the order of evaluation."""
    statement = statement_of(tree, target)
    if statement is None or not can_precede(tree, statement, target):
        return None
    end = tree.span(target)[2:]
    given = dict.fromkeys(nodes)
    first = [node for node in given if tree.span(node)[2:] <= end and not is_plain(node)]
    if calls_before(tree, statement, first, target):
        return None
    edits: list[Edit] = []
    taken = all_names(tree, target)
    text = ""
    for node in sorted(first, key=tree.span):
        value = node.with_changes(lpar=[], rpar=[])
        text = free_name(name_for(node), taken)
        if isinstance(value, cst.NamedExpr):
            text, value = tree.code(value.target), value.value
        taken.add(text)
        edits.append(insert_before(tree, statement, f"{text} = {on_a_line(tree, value)}"))
        edits.append(replace(tree, node, text))
    return Named(f"{text}.device", tuple(edits)) if text else None


def can_precede(tree: Tree, statement: cst.BaseStatement, node: cst.BaseExpression) -> bool:
    """Whether `node` is evaluated once each time that its statement is reached."""
    for outer in tree.around(node):
        if outer is statement:
            break
        if isinstance(outer, _UNMOVABLE):
            return False
    return isinstance(statement, (cst.SimpleStatementLine, cst.If))


def calls_before(
    tree: Tree,
    statement: cst.BaseStatement,
    named_first: list[cst.BaseExpression],
    last: cst.BaseExpression,
) -> bool:
    """Whether a statement calls something else before the last of what gets a name."""
    kinds = (cst.Call, cst.Await, cst.Yield, cst.NamedExpr)
    end = tree.span(last)[2:]
    before = [each for each in tree.inside(statement, *kinds) if tree.span(each)[2:] <= end]
    known = {id(call) for node in named_first for call in tree.inside(node, *kinds)}
    return any(id(call) not in known for call in before)


def name_for(node: cst.BaseExpression, plain: str = "result") -> str:
    """A name for the result of an expression: of what is called, where something is."""
    if not isinstance(node, cst.Call):
        return plain
    called = node.func
    while isinstance(called, cst.Subscript):
        called = called.value
    if isinstance(called, cst.Attribute):
        called = called.attr
    return f"{called.value.strip('_')}_output" if isinstance(called, cst.Name) else plain


def on_a_line(tree: Tree, node: cst.BaseExpression) -> str:
    """The text of an expression that starts a line of its own."""
    text = tree.code(node)
    return tree.code(closed(node)) if "\n" in text else text
