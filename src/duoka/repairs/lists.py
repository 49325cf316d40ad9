"""Operands that come in a list: each of its tensors is moved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from ..checker import Subject
from ..report import Fault, Operand
from .anchors import anchors, can_precede, fresh_name
from .edits import insert_before, move, move_each, replace
from .scope import all_names, is_plain, statement_of
from .trees import Edit, Tree, folded

_LOOPS = (cst.ListComp, cst.GeneratorExp, cst.SetComp)
_CONTAINERS = frozenset({"list", "tuple"})
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
    """

    tree: Tree
    node: cst.BaseExpression
    element: cst.BaseExpression | None = None
    is_lazy: bool = False


def items_of(tree: Tree, node: cst.CSTNode, operand: Operand) -> Items | None:
    """What holds an operand among others, if the expression at its place does."""
    is_lazy = False
    written = node
    while True:
        if isinstance(node, (cst.Arg, cst.StarredElement)):
            node = node.value
        elif isinstance(node, cst.Call) and _is_container(node):
            node, is_lazy = node.args[0].value, True
        else:
            break
    assert isinstance(node, cst.BaseExpression)
    if isinstance(node, _LOOPS):
        return Items(tree, node, node.elt, is_lazy)
    expression = folded(operand.expression)
    starred = isinstance(written, (cst.Arg, cst.StarredElement))
    if starred or expression.startswith(f"{folded(tree.code(written))}["):
        return Items(tree, node, None, is_lazy or _is_summed(tree, node))
    return None


def _is_container(node: cst.Call) -> bool:
    return (
        isinstance(node.func, cst.Name) and node.func.value in _CONTAINERS and len(node.args) == 1
    )


def _is_summed(tree: Tree, node: cst.BaseExpression) -> bool:
    """Whether this is the one argument of `sum`."""
    call = tree.enclosing(node, cst.Call)
    return (
        call is not None
        and len(call.args) == 1
        and call.args[0].value is node
        and isinstance(call.func, cst.Name)
        and call.func.value == "sum"
    )


def each_of(items: Items, fault: Fault, subject: Subject | None) -> Iterator[tuple[Edit, ...]]:
    """Move each of several tensors: to one of them, or to what is at hand."""
    tree, node = items.tree, items.node
    own = _own_index(items, fault)
    if items.element is not None:
        for anchor in anchors(tree, node, fault, subject):
            yield (move(tree, items.element, anchor.device),)
        yield from _named_first(items, own)
        return
    if own is not None and is_plain(node):
        yield (_each(items, f"{tree.code(node)}[{own}].device"),)
    for anchor in anchors(tree, node, fault, subject):
        yield (_each(items, anchor.device),)
    if not is_plain(node):
        yield from _named_first(items, own)


def _each(items: Items, device: str) -> Edit:
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
    fitting = [at for at, operand in enumerate(held) if not operand.moved]
    if not fitting:
        return None
    return -1 if fitting[-1] == len(held) - 1 else fitting[0]


def _named_first(items: Items, own: int | None) -> Iterator[tuple[Edit, ...]]:
    """Give a list that is made on the spot a name, then move each of it."""
    tree, node = items.tree, items.node
    statement = statement_of(tree, node)
    if own is None or statement is None or not can_precede(tree, statement, node):
        return
    name = fresh_name(node, all_names(tree, node)).replace("result", "parts").replace("_output", "")
    if name in all_names(tree, node):
        name = f"{name}_parts"
    yield (
        insert_before(tree, statement, f"{name} = {_as_list(tree, node)}"),
        replace(tree, node, name),
        _each(items, f"{name}[{own}].device"),
    )


def _as_list(tree: Tree, node: cst.BaseExpression) -> str:
    """The text of something that can be indexed."""
    bare = node.with_changes(lpar=[], rpar=[]) if node.lpar else node
    text = tree.code(bare)
    if isinstance(node, cst.GeneratorExp):
        return f"[{text}]"
    if isinstance(node, cst.Call):
        called = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
        if isinstance(called, cst.Name) and called.value in _ONE_PASS:
            return f"list({text})"
    return text
