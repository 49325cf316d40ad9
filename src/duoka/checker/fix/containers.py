"""Fixes for operands in a list, tuple or dict: move the tensors of the container."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from duoka.report.check_report import Operand

from .device_exprs import lucky_devices, target_devices
from .edits import (
    free_name,
    insert_before,
    move,
    move_each,
    name_first,
    names_around,
    on_a_line,
    replace,
    statement_to_precede,
)
from .sources import Site
from .syntax import Edit, Tree, element_at, is_plain, last_name, strip_blanks


@dataclass(frozen=True, slots=True)
class Container:
    """Expression of several tensors: a list, a comprehension or a dict."""

    node: ast.expr
    element: ast.expr | None = None
    """Expression of one tensor, in the comprehension or list; None to move `node` by its items."""


# Forms in which several tensors come to an operation. D is a device expression, e a loop variable.
#
#   written                   operand          container              argument after the fix
#   cat([a, b])               b                None: moved by itself  [a, b.to(D)]
#   cat([a, *rest])           [a, *rest][1]    rest                   [a, *[e.to(D) for e in rest]]
#   cat(parts)                parts[1]         parts                  [e.to(D) for e in parts]
#   cat([f(x) for x in xs])   f(x)             loop, element f(x)     [f(x).to(D) for x in xs]
#   block_diag(*parts)        parts[1]         parts                  *[e.to(D) for e in parts]
#   attend(q, **options)      options['m']     options                **{**options, 'm':
#                                                                       options['m'].to(D)}
def container_of(tree: Tree, node: ast.AST, operand: Operand) -> Container | None:
    """Return the container of an operand; None if the operand's own expression can be moved."""
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
    """Yield edits that move each tensor of a container to the target device.

    Its expression names another operand, an item of the container, or a local tensor.
    """
    tree, node = site.tree, container.node
    keys = _moved_keys(site, node)
    if keys:
        yield from _move_values(site, node, keys)
        return
    for device in target_devices(site, node):
        yield (_move_in(tree, container, device),)
    staying = _staying_index(site, container)
    if staying is not None and container.element is not node:
        if container.element is None and is_plain(node):
            yield (move_each(tree, node, f"{tree.code(node)}[{staying}].device"),)
        elif not is_plain(node):
            yield from _hoist_and_move(tree, node, staying)
    for device in lucky_devices(site, node):
        yield (_move_in(tree, container, device),)


def _moved_keys(site: Site, node: ast.expr) -> list[str]:
    """Return the keys, as source text, of the operands to move in a dict; empty for a list."""
    item = re.compile(re.escape(strip_blanks(site.tree.code(node))) + r"\[(['\"].+['\"])\]")
    moved = [strip_blanks(operand.expression) for operand in site.fault.operands if operand.moved]
    return [match[1] for match in map(item.fullmatch, moved) if match]


def _move_values(site: Site, node: ast.expr, keys: Sequence[str]) -> Iterator[tuple[Edit, ...]]:
    """Yield edits that move the values of some keys of a dict, which is evaluated once."""
    tree = site.tree
    hoisted = name_first(tree, [node], node)
    if hoisted is None and not is_plain(node):
        return
    names, lines = hoisted or ({node: tree.code(node)}, [])
    for device in chain(target_devices(site, node), lucky_devices(site, node)):
        moved = [f"{key}: {names[node]}[{key}].to({device})" for key in keys]
        yield *lines, replace(tree, node, f"{{**{names[node]}, {', '.join(moved)}}}")


def _move_in(tree: Tree, container: Container, device: str) -> Edit:
    """Move the element, or each item of the container, to a device."""
    if container.element is not None:
        return move(tree, container.element, device)
    return move_each(tree, container.node, device)


# Where only the container itself has tensors on the target, D is the device of one of its items:
# `[e.to(parts[-1].device) for e in parts]`. A call or a loop gets the name `parts` on a line before
# (`_hoist_and_move`), so that it is evaluated once.
def _staying_index(site: Site, container: Container) -> int | None:
    """Return the index of an item on the target: -1 if the last one is, else the first.

    None if no item is on the target.
    """
    operands = [
        operand
        for operand in site.fault.operands
        if (node := site.tree.find_node(operand.place)) is not None
        and (sibling := container_of(site.tree, node, operand)) is not None
        and sibling.node is container.node
    ]
    staying = [index for index, operand in enumerate(operands) if not operand.moved]
    if not staying:
        return None
    return -1 if staying[-1] == len(operands) - 1 else staying[0]


def _hoist_and_move(tree: Tree, node: ast.expr, staying: int) -> Iterator[tuple[Edit, ...]]:
    """Assign a container to a name on the line before, and move each of its items."""
    statement = statement_to_precede(tree, [node], node)
    if statement is None:
        return
    text = on_a_line(tree, node)
    is_list = isinstance(node, ast.Call) and last_name(node.func) in ("list", "tuple")
    if isinstance(node, (ast.Call, ast.GeneratorExp)) and not is_list:
        text = f"list({text})"  # an iterator can be consumed only once
    name = free_name("parts", names_around(tree, node))
    loop = f"[each.to({name}[{staying}].device) for each in {name}]"
    yield insert_before(tree, statement, f"{name} = {text}"), replace(tree, node, loop)
