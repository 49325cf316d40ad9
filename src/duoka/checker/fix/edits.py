"""The few kinds of change that a repair is made of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst

from .syntax import Edit, Tree, all_names, free_name, is_plain, statement_of

_CLOSED = (
    cst.Name,
    cst.Attribute,
    cst.Subscript,
    cst.Call,
    cst.List,
    cst.Set,
    cst.Dict,
    cst.ListComp,
    cst.SetComp,
    cst.DictComp,
    cst.BaseString,
)
_EACH = ("each", "part", "item", "tensor", "each_one")
_SPACE = cst.SimpleWhitespace(" ")


def move(tree: Tree, node: cst.BaseExpression, device: str) -> Edit:
    """Let an expression end in ``.to(device)``; one that ends in another move goes there instead.

    ``device`` is source text, such as "logits.device".
    """
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        held = node.func.value
        if node.func.attr.value in ("cuda", "cpu") and tree.code(held) == device[:-7]:
            # It was there, and went away.
            return Edit(
                tree, node, f"not {node.func.attr.value}", lambda updated: updated.func.value
            )
    return Edit(tree, node, f"to({device})", lambda updated: moved(updated, device))


def to_cpu(tree: Tree, node: cst.BaseExpression) -> Edit:
    """Let an expression end in ``.cpu()``."""

    def change(updated: cst.BaseExpression) -> cst.BaseExpression:
        return cst.Call(cst.Attribute(closed(updated), cst.Name("cpu")))

    return Edit(tree, node, "cpu()", change)


def replace(tree: Tree, node: cst.BaseExpression, text: str) -> Edit:
    """Put a name, or an expression that needs no parentheses there, in the place of one."""
    return Edit(tree, node, text, lambda updated: cst.parse_expression(text), rewrites=True)


def move_each(tree: Tree, node: cst.BaseExpression, device: str, *, lazily: bool = False) -> Edit:
    """Put ``[each.to(device) for each in node]`` in the place of what holds several tensors.

    Lazily, it is a generator and not a list.
    """
    taken = {name.value for name in tree.inside(node, cst.Name)} | set(re.findall(r"\w+", device))
    each = next(name for name in _EACH if name not in taken)
    call = tree.enclosing(node, cst.Call)
    alone = call is not None and [(each.value, each.star) for each in call.args] == [(node, "")]

    def change(updated: cst.BaseExpression) -> cst.BaseExpression:
        listed = cst.parse_expression(f"[{each}.to({device}) for {each} in _]")
        assert isinstance(listed, cst.ListComp)
        loop = listed.for_in.with_changes(iter=closed(updated, loop=True))
        if lazily and alone:
            return cst.GeneratorExp(listed.elt, loop, lpar=[], rpar=[])
        if lazily:
            return cst.GeneratorExp(listed.elt, loop)
        return listed.with_changes(for_in=loop)

    return Edit(tree, node, f"each to({device})", change)


def move_item(tree: Tree, node: cst.BaseExpression, key: str, device: str) -> Edit:
    """Put ``{**node, key: node[key].to(device)}`` in the place of a mapping."""
    text = tree.code(node)
    moved_one = f"{{**{text}, {key}: {text}[{key}].to({device})}}"
    return Edit(tree, node, moved_one, lambda updated: cst.parse_expression(moved_one))


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
        for at, argument in enumerate(updated.args):
            if argument.keyword is not None and argument.keyword.value == "device":
                args = [*updated.args]
                args[at] = argument.with_changes(value=value)
                return updated.with_changes(args=args)
        return updated.with_changes(args=_with_keyword(updated.args, value))

    return Edit(tree, call, f"device={device}", change)


def _with_keyword(args: Sequence[cst.Arg], value: cst.BaseExpression) -> list[cst.Arg]:
    """Arguments and ``device=value``, with commas and line breaks as they are there."""
    new = cst.Arg(
        keyword=cst.Name("device"),
        value=value,
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
    )
    if not args:
        return [new]
    *before, last = args
    new = new.with_changes(whitespace_after_arg=last.whitespace_after_arg)
    last = last.with_changes(whitespace_after_arg=cst.SimpleWhitespace(""))
    if not isinstance(last.comma, cst.Comma):
        one_a_line = isinstance(new.whitespace_after_arg, cst.ParenthesizedWhitespace) and before
        between = before[-1].comma if one_a_line else cst.Comma(whitespace_after=_SPACE)
        return [*before, last.with_changes(comma=between), new]
    after = last.comma.whitespace_after
    if not isinstance(after, cst.ParenthesizedWhitespace):
        return [*before, last.with_changes(comma=cst.Comma(whitespace_after=_SPACE)), new]
    # One argument a line, each with a comma: the comment behind the last one stays with it.
    own_line = after.with_changes(
        first_line=cst.TrailingWhitespace(newline=after.first_line.newline)
    )
    indented = before[-1].comma if before else None
    inside = getattr(indented, "whitespace_after", None)
    wide = cst.SimpleWhitespace(after.last_line.value + " " * 4)
    if isinstance(inside, cst.ParenthesizedWhitespace):
        wide = inside.last_line
    to_new = after.with_changes(empty_lines=[], last_line=wide)
    return [
        *before,
        last.with_changes(comma=cst.Comma(whitespace_after=to_new)),
        new.with_changes(comma=cst.Comma(whitespace_after=own_line)),
    ]


def moved(node: cst.BaseExpression, device: str) -> cst.BaseExpression:
    """An expression that ends in ``.to(device)``."""
    where = cst.parse_expression(device)
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
        method, args = node.func.attr.value, node.args
        if method in ("cuda", "cpu") and len(args) <= 1:
            return node.with_changes(
                func=node.func.with_changes(attr=cst.Name("to")), args=[cst.Arg(where)]
            )
        if method == "to" and args and _is_device(args[0]):
            return node.with_changes(args=[args[0].with_changes(value=where), *args[1:]])
    return cst.Call(cst.Attribute(closed(node), cst.Name("to")), [cst.Arg(where)])


def _is_device(argument: cst.Arg) -> bool:
    """Whether an argument of ``.to`` surely is a device."""
    if argument.star or (argument.keyword is not None and argument.keyword.value != "device"):
        return False
    if argument.keyword is not None:
        return True
    return is_device(argument.value)


def is_device(value: cst.BaseExpression) -> bool:
    """Whether an expression surely is a device: "cuda:0", 0, torch.device(…), x.device, device."""
    if isinstance(value, cst.Attribute):
        return value.attr.value == "device"
    if isinstance(value, cst.Name):
        return value.value == "device"
    return is_written_out(value)


def is_written_out(value: cst.BaseExpression) -> bool:
    """Whether an expression is a device that somebody wrote into the code."""
    if isinstance(value, (cst.SimpleString, cst.FormattedString, cst.Integer)):
        return True
    if isinstance(value, cst.Call) and isinstance(value.func, (cst.Name, cst.Attribute)):
        named = value.func.attr if isinstance(value.func, cst.Attribute) else value.func
        return named.value == "device" and all(is_written_out(each.value) for each in value.args)
    return False


def closed(node: cst.BaseExpression, *, loop: bool = False) -> cst.BaseExpression:
    """An expression that something can be appended to: in parentheses where it needs them.

    What a loop runs over needs them only where it is conditional, a lambda or the like.
    """
    if node.lpar or isinstance(node, _CLOSED):
        return node
    if loop and not isinstance(node, (cst.IfExp, cst.Lambda, cst.NamedExpr, cst.Yield, cst.Tuple)):
        return node
    return node.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])


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
