"""Operands in a list or tuple: move each of its tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from duoka.report.check_report import Operand

from .device_exprs import lucky_devices, target_devices
from .edits import (
    free_name,
    insert_before,
    move,
    move_each,
    names_around,
    on_a_line,
    replace,
    statement_to_precede,
)
from .sources import Site
from .syntax import Edit, Tree, element_at, is_plain, last_name, strip_blanks


@dataclass(frozen=True, slots=True)
class Container:
    """Expression of several tensors: a list, or the loop that builds it."""

    node: ast.expr
    element: ast.expr | None = None
    """What each of them is in a loop."""


# Forms in which several tensors come to an operation. D is a device expression, e a loop variable.
#
#   written                   operand          container              argument after the fix
#   cat([a, b])               b                None: moved by itself  [a, b.to(D)]
#   cat([a, *rest])           [a, *rest][1]    rest                   [a, *[e.to(D) for e in rest]]
#   cat(parts)                parts[1]         parts                  [e.to(D) for e in parts]
#   cat([f(x) for x in xs])   f(x)             loop, element f(x)     [f(x).to(D) for x in xs]
#   block_diag(*parts)        parts[1]         parts                  *[e.to(D) for e in parts]
def container_of(tree: Tree, node: ast.AST, operand: Operand) -> Container | None:
    """Return the container of an operand, if the expression at its place is one."""
    written = node.value if isinstance(node, ast.Starred) else node
    if not isinstance(written, ast.expr):
        return None
    if isinstance(written, (ast.ListComp, ast.GeneratorExp, ast.SetComp)):
        return Container(written, written.elt)
    text, expression = strip_blanks(tree.code(written)), strip_blanks(operand.expression)
    is_item = expression.startswith(f"{text}[")
    index = expression.removeprefix(text)
    if is_item and isinstance(written, (ast.List, ast.Tuple)):
        element = element_at(written, index)
        if isinstance(element, ast.Starred):
            return Container(element.value)
        return None if element is None else Container(element, element)
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


# Where only the container itself has tensors on the target, D is the device of one of its items:
# `[e.to(parts[-1].device) for e in parts]`. A call or a loop gets the name `parts` on a line before
# (`_named_first`), so that it is evaluated once.
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


def _named_first(tree: Tree, node: ast.expr, staying: int) -> Iterator[tuple[Edit, ...]]:
    """Assign a list display to a name, then move each item."""
    statement = statement_to_precede(tree, [node], node)
    if statement is None:
        return
    text = on_a_line(tree, node)
    is_list = isinstance(node, ast.Call) and last_name(node.func) in ("list", "tuple")
    if isinstance(node, (ast.Call, ast.GeneratorExp)) and not is_list:
        text = f"list({text})"  # it may be gone through only once
    name = free_name("parts", names_around(tree, node))
    loop = f"[each.to({name}[{staying}].device) for each in {name}]"
    yield insert_before(tree, statement, f"{name} = {text}"), replace(tree, node, loop)
