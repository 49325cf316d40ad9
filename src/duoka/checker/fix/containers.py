"""Operands in a list or tuple: move each of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from duoka.report.check_report import Operand

from .device_exprs import lucky_devices, target_devices
from .edits import (
    free_name,
    insert_before,
    move,
    move_each,
    on_a_line,
    replace,
    statement_to_precede,
)
from .sources import Site
from .syntax import Edit, Tree, element_at, is_plain, last_name, strip_blanks


@dataclass(frozen=True, slots=True)
class Container:
    """Expression of several tensors: a list, or the loop that builds it."""

    node: cst.BaseExpression
    element: cst.BaseExpression | None = None
    """What each of them is in a loop."""


def container_of(tree: Tree, node: cst.CSTNode, operand: Operand) -> Container | None:
    """Return the container of an operand, if the expression at its place is one."""
    written = node.value if isinstance(node, (cst.Arg, cst.StarredElement)) else node
    if not isinstance(written, cst.BaseExpression):
        return None
    if isinstance(written, (cst.ListComp, cst.GeneratorExp, cst.SetComp)):
        return Container(written, written.elt)
    text, expression = strip_blanks(tree.code(written)), strip_blanks(operand.expression)
    is_item = expression.startswith(f"{text}[")
    index = expression.removeprefix(text)
    if is_item and isinstance(written, (cst.List, cst.Tuple)):
        element = element_at(written, index)
        if element is None:
            return None
        return Container(element.value, element.value if type(element) is cst.Element else None)
    return Container(written) if written is not node or is_item else None


def move_contents(site: Site, container: Container) -> Iterator[tuple[Edit, ...]]:
    """Move each tensor of a container to the device of one of them, or of a tensor at hand."""
    tree, node = site.tree, container.node
    for device in target_devices(site, node):
        yield (_move_in(tree, container, device),)
    staying = _staying_index(site, container)
    if staying is not None and container.element is not node:
        if container.element is None and is_plain(node):
            yield (move_each(tree, node, f"{tree.code(node)}[{staying}].device"),)
        elif not is_plain(node):
            yield from _named_first(tree, node, staying)
    for device in lucky_devices(site, node):
        yield (_move_in(tree, container, device),)


def _move_in(tree: Tree, container: Container, device: str) -> Edit:
    if container.element is not None:
        return move(tree, container.element, device)
    return move_each(tree, container.node, device)


def _staying_index(site: Site, container: Container) -> int | None:
    """Return the index of the tensor on the target; -1 for the last."""
    operands = [
        operand
        for operand in site.fault.operands
        if (node := site.tree.find_node(operand.place)) is not None
        and (sibling := container_of(site.tree, node, operand)) is not None
        and sibling.node is container.node
    ]
    staying = [at for at, operand in enumerate(operands) if not operand.moved]
    if not staying:
        return None
    return -1 if staying[-1] == len(operands) - 1 else staying[0]


def _named_first(tree: Tree, node: cst.BaseExpression, staying: int) -> Iterator[tuple[Edit, ...]]:
    """Assign a list display to a name, then move each item."""
    statement = statement_to_precede(tree, [node], node)
    if statement is None:
        return
    text = on_a_line(tree, node.with_changes(lpar=[], rpar=[]))
    is_list = isinstance(node, cst.Call) and last_name(node.func) in ("list", "tuple")
    if isinstance(node, (cst.Call, cst.GeneratorExp)) and not is_list:
        text = f"list({text})"  # it may be gone through only once
    name = free_name("parts", tree.all_names(node))
    yield (
        insert_before(tree, statement, f"{name} = {text}"),
        replace(tree, node, name),
        move_each(tree, node, f"{name}[{staying}].device"),
    )
