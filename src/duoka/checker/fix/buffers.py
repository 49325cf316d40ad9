"""Tensors kept as plain attributes of modules: as buffers they go where their module goes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import libcst as cst
import torch
from torch import nn

from duoka.report.check_report import Operand

from ..subject import Subject, device_of
from .sources import SourceError, Sources
from .syntax import Edit, Tree, function_of


@dataclass(frozen=True, slots=True)
class Table:
    """An attribute that becomes a buffer in all modules of a class.

    Parameters
    ----------
    owner : type
        The class whose `__init__` assigns it.
    attribute : str
    """

    owner: type[nn.Module]
    attribute: str


def as_buffer(
    operand: Operand, sources: Sources, subject: Subject | None
) -> Iterator[tuple[tuple[Edit, ...], tuple[Table, ...]]]:
    """Let `__init__` register a buffer in place of assigning an attribute."""
    origin = operand.origin
    if origin is None or origin.kind != "attribute" or subject is None:
        return
    if device_of(origin.name, dict(subject.entries)) is None:
        return  # the map would miss the buffer
    module_name, _, attribute = origin.name.rpartition(".")
    try:
        module = subject.model.get_submodule(module_name)
    except AttributeError:
        return
    if not isinstance(vars(module).get(attribute), torch.Tensor):
        return
    for owner in type(module).__mro__:
        found = _assignment(owner, attribute, sources)
        if found is not None:
            yield (_registered(*found, attribute),), (Table(owner, attribute),)
            return


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
    for function in tree.inside(tree.module, cst.FunctionDef):
        first, _, last, _ = tree.span(function)
        if (
            function.name.value == "__init__"
            and first <= code.co_firstlineno + len(function.decorators) <= last
            and code.co_firstlineno <= first
        ):
            found = [
                each
                for each in tree.inside(function, cst.Assign, cst.AnnAssign)
                if function_of(tree, each) is function and _assigns(tree, each, attribute)
            ]
            return (tree, found[0]) if len(found) == 1 else None
    return None


def _assigns(tree: Tree, node: cst.Assign | cst.AnnAssign, attribute: str) -> bool:
    if isinstance(node, cst.AnnAssign):
        return node.value is not None and tree.code(node.target) == f"self.{attribute}"
    return len(node.targets) == 1 and tree.code(node.targets[0].target) == f"self.{attribute}"


def _registered(tree: Tree, node: cst.Assign | cst.AnnAssign, attribute: str) -> Edit:
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
def registered(model: nn.Module, tables: Sequence[Table]) -> Iterator[None]:
    """Let live modules hold buffers, as they would had their `__init__` been repaired."""
    before: list[tuple[nn.Module, dict[str, Any], list[str]]] = []
    try:
        for module in model.modules():
            attributes = dict(vars(module))
            names = [
                table.attribute
                for table in tables
                if isinstance(module, table.owner)
                and isinstance(attributes.get(table.attribute), torch.Tensor)
            ]
            before.append((module, attributes, names))
            for name in names:
                del vars(module)[name]
                module.register_buffer(name, attributes[name], persistent=False)
        yield
    finally:
        for module, attributes, names in before:
            if names:
                for name in names:
                    module._buffers.pop(name, None)
                    module._non_persistent_buffers_set.discard(name)
                vars(module).clear()
                vars(module).update(attributes)
