"""Operands that come in a list: each of its tensors is moved."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from duoka.report.check_report import Fault, Operand

from ..subject import Subject
from .device_exprs import anchors, lucky
from .edits import (
    calls_before,
    can_precede,
    insert_before,
    move,
    move_each,
    move_item,
    name_for,
    on_a_line,
    replace,
)
from .syntax import Edit, Tree, all_names, folded, free_name, is_container, is_plain, statement_of

_LOOPS = (cst.ListComp, cst.GeneratorExp, cst.SetComp)
_FOLDING = {"sum": 0, "reduce": 1, "accumulate": 0}
"""Which argument these add up."""
_ONE_PASS = frozenset({"values", "map", "filter", "reversed", "zip", "chain", "items"})


@dataclass(frozen=True, slots=True)
class Items:
    """What holds several tensors.

    Parameters
    ----------
    tree : Tree
    node : libcst.BaseExpression
        The list, or the loop that makes it.
    element : libcst.BaseExpression, optional
        What each of them is in a loop.
    is_lazy : bool
        It is only run through: a generator will do.
    whole : libcst.BaseExpression, optional
        The call of `list` or `tuple` around it.
    is_summed : bool
        It is what `sum` adds up, one after the other.
    key : str
        It is a mapping, and this the text of the key of what moves.
    """

    tree: Tree
    node: cst.BaseExpression
    element: cst.BaseExpression | None = None
    is_lazy: bool = False
    whole: cst.BaseExpression | None = None
    is_summed: bool = False
    key: str = ""


def items_of(tree: Tree, node: cst.CSTNode, operand: Operand) -> Items | None:
    """What holds an operand among others, if the expression at its place does."""
    if isinstance(node, cst.AugAssign):
        return None
    starred = isinstance(node, (cst.Arg, cst.StarredElement))
    written = node.value if isinstance(node, (cst.Arg, cst.StarredElement)) else node
    assert isinstance(written, cst.BaseExpression)
    inner, whole = written, None
    while isinstance(inner, cst.Call) and is_container(inner):
        inner, whole = inner.args[0].value, written
    lazy = starred or whole is not None
    if isinstance(inner, _LOOPS):
        return Items(tree, inner, inner.elt, lazy, whole)
    text, expression = folded(tree.code(written)), folded(operand.expression)
    is_item = expression.startswith(f"{text}[")
    if is_item and isinstance(written, (cst.List, cst.Tuple)):
        return _spelled_out(tree, written, expression.removeprefix(text))
    key = re.fullmatch(r"\[(['\"]\w+['\"])\]", expression.removeprefix(text))
    if is_item and key is not None:
        return Items(tree, inner, key=key[1])
    return Items(tree, inner, None, lazy, whole) if starred or is_item else None


def _spelled_out(tree: Tree, listed: cst.List | cst.Tuple, item: str) -> Items | None:
    """The part of ``[a, *rest]`` that gives an item, such as "[2]"."""
    index = re.match(r"\[(\d+)\]", item)
    if index is None:
        return None
    number = int(index[1])
    for at, element in enumerate(listed.elements):
        if isinstance(element, cst.StarredElement):
            return Items(tree, element.value, None, True)
        if at == number:
            return Items(tree, element.value, element.value)
    return None


def folded_items(tree: Tree, fault: Fault) -> Items | None:
    """What `sum` or `reduce` adds up, if that is the call at fault."""
    call = tree.find(fault.place)
    while isinstance(call, cst.Call) and is_container(call):
        call = call.args[0].value  # `list(accumulate(…))`: only the list runs through it
    node = _folded(call) if isinstance(call, cst.Call) else None
    if node is None:
        return None
    if isinstance(node, _LOOPS):
        return Items(tree, node, node.elt, True, None, True)
    return Items(tree, node, None, True, None, True)


def _folded(call: cst.Call) -> cst.BaseExpression | None:
    named = call.func.attr if isinstance(call.func, cst.Attribute) else call.func
    at = _FOLDING.get(named.value) if isinstance(named, cst.Name) else None
    if at is None or len(call.args) <= at or any(each.star for each in call.args):
        return None
    return call.args[at].value


def each_of(items: Items, fault: Fault, subject: Subject | None) -> Iterator[tuple[Edit, ...]]:
    """Move each of several tensors: to one of them, or to what is at hand."""
    tree, node = items.tree, items.node
    own = _own_index(items, fault)
    for anchor in anchors(tree, node, fault, subject):
        yield (_each(items, anchor),)
    if own is not None and items.element is None and is_plain(node) and not items.key:
        yield (_each(items, f"{tree.code(node)}[{own}].device"),)
    if not is_plain(node):
        yield from _named_first(items, own)
    for anchor in lucky(tree, node, fault):
        yield (_each(items, anchor),)


def _each(items: Items, device: str) -> Edit:
    if items.key:
        return move_item(items.tree, items.node, items.key, device)
    if items.element is not None:
        return move(items.tree, items.element, device)
    return move_each(items.tree, items.node, device, lazily=items.is_lazy)


def _own_index(items: Items, fault: Fault) -> int | None:
    """Which of the tensors is on the target: from the end where it is the last."""
    held = [
        operand
        for operand in fault.operands
        if (found := items.tree.find(operand.place)) is not None
        and (other := items_of(items.tree, found, operand)) is not None
        and other.node is items.node
    ]
    if items.is_summed:
        return -1  # only two of them meet at a time; all go where the last one is
    fitting = [at for at, operand in enumerate(held) if not operand.moved]
    if not fitting:
        return None
    return -1 if fitting[-1] == len(held) - 1 else fitting[0]


def _named_first(items: Items, own: int | None) -> Iterator[tuple[Edit, ...]]:
    """Give a list that is made on the spot a name, then move each of it."""
    tree, node = items.tree, items.whole or items.node
    statement = statement_of(tree, node)
    if own is None or statement is None or node is items.element or items.key:
        return
    if not can_precede(tree, statement, node) or calls_before(tree, statement, [node], node):
        return
    name = "parts" if items.whole is not None else name_for(node, "parts")
    name = free_name(name, all_names(tree, node))
    lazily = items.is_lazy and items.whole is None
    yield (
        insert_before(tree, statement, f"{name} = {_as_list(tree, node)}"),
        replace(tree, node, name),
        move_each(tree, node, f"{name}[{own}].device", lazily=lazily),
    )


def _as_list(tree: Tree, node: cst.BaseExpression) -> str:
    """The text of something that can be indexed."""
    bare = node.with_changes(lpar=[], rpar=[])
    text = on_a_line(tree, bare)
    if isinstance(node, cst.GeneratorExp):
        return f"[{tree.code(bare)}]"
    if isinstance(node, cst.Call) and is_container(node):
        inner = node.args[0].value
        return _as_list(tree, inner) if isinstance(inner, _LOOPS) else text
    if isinstance(node, cst.Call):
        called = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
        if isinstance(called, cst.Name) and called.value in _ONE_PASS:
            return f"list({text})"
    return text
