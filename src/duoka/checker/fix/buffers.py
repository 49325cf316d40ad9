"""Tensors kept as plain attributes of modules: as buffers they go where their module goes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import libcst as cst
import torch
from torch import nn

from duoka.report.check_report import Operand

from ..subject import device_of
from .sources import Site, SourceError, Sources
from .syntax import Edit, Tree


@dataclass(frozen=True, slots=True)
class NewBuffer:
    """An attribute that becomes a buffer in all modules of the class whose `__init__` sets it."""

    owner: type[nn.Module]
    attribute: str


def as_buffer(site: Site, operand: Operand) -> tuple[Edit, NewBuffer] | None:
    """Let `__init__` register a buffer in place of assigning an attribute, where that cures."""
    origin, subject = operand.origin, site.subject
    if origin is None or origin.kind != "attribute":
        return None
    if device_of(origin.name, dict(subject.entries)) is None:
        return None  # the map would miss the buffer
    module_name, _, attribute = origin.name.rpartition(".")
    module = dict(subject.model.named_modules()).get(module_name)
    if module is None or not isinstance(vars(module).get(attribute), torch.Tensor):
        return None
    for owner in type(module).__mro__:
        assignment = _assignment(owner, attribute, site.sources)
        if assignment is not None:
            return _registration(*assignment, attribute), NewBuffer(owner, attribute)
    return None


def _assignment(
    owner: type, attribute: str, sources: Sources
) -> tuple[Tree, cst.Assign | cst.AnnAssign] | None:
    """The one assignment of ``self.attribute`` in the `__init__` that a class itself has."""
    init = vars(owner).get("__init__")
    if not inspect.isfunction(init):
        return None
    code = inspect.unwrap(init).__code__
    try:
        tree = sources.tree(code.co_filename)
    except SourceError:
        return None
    assignments = []
    for node in tree.inside(tree.module, cst.Assign, cst.AnnAssign):
        function = tree.function_of(node)
        if isinstance(function, cst.FunctionDef) and _assigns(tree, node, attribute):
            first, _, last, _ = tree.span(function)
            # The code begins at the first decorator.
            if first <= code.co_firstlineno + len(function.decorators) <= last:
                assignments.append(node)
    return (tree, assignments[0]) if len(assignments) == 1 else None


def _assigns(tree: Tree, node: cst.Assign | cst.AnnAssign, attribute: str) -> bool:
    targets = [node.target] if isinstance(node, cst.AnnAssign) else [t.target for t in node.targets]
    return node.value is not None and list(map(tree.code, targets)) == [f"self.{attribute}"]


def _registration(tree: Tree, node: cst.Assign | cst.AnnAssign, attribute: str) -> Edit:
    def change(updated: Any) -> cst.Expr:
        call = cst.parse_expression(
            f'self.register_buffer("{attribute}", _, persistent=False)',
            config=tree.module.config_for_parsing,
        )
        assert isinstance(call, cst.Call)
        name, value, persistent = call.args
        args = [name, value.with_changes(value=updated.value), persistent]
        return cst.Expr(call.with_changes(args=args), semicolon=updated.semicolon)

    return Edit(tree, node, f"register_buffer({attribute})", change)


@contextmanager
def registered(model: nn.Module, buffers: Sequence[NewBuffer]) -> Iterator[None]:
    """Let live modules hold buffers, as they would had their `__init__` been repaired."""
    before: list[tuple[nn.Module, dict[str, Any], str]] = []
    try:
        for module, buffer in product(model.modules(), buffers):
            name, attributes = buffer.attribute, dict(vars(module))
            tensor = attributes.get(name)
            if isinstance(module, buffer.owner) and isinstance(tensor, torch.Tensor):
                before.append((module, attributes, name))
                del vars(module)[name]
                module.register_buffer(name, tensor, persistent=False)
        yield
    finally:
        for module, attributes, name in reversed(before):
            module._buffers.pop(name, None)
            module._non_persistent_buffers_set.discard(name)
            vars(module).clear()
            vars(module).update(attributes)
