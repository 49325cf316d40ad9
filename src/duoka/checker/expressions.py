"""What the arguments of a call are in the source, without running any of it again."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import nn

from duoka.base.model_code import Spot
from duoka.report.check_report import Place

from .source_map import SPOT, locals_of, position, source_of, span

_NOTHING = object()


@dataclass(frozen=True, slots=True)
class OperandText:
    """The text that gave a tensor to an operation, or the module that is called and holds it."""

    text: str
    place: Place | None
    is_callees: bool = False


class Expressions:
    """What the arguments of one call of an operation are in the source.

    A frame of model code is at the call. It is direct where that code calls the operation itself,
    and not by way of a library's function or module. `positions` are of the operation's parameters.
    """

    def __init__(
        self, frame: FrameType, *, direct: bool, positions: Mapping[str, int] | None = None
    ) -> None:
        self._frame = frame
        self._positions = positions or {}
        self._locals = locals_of(frame)
        self._direct = direct
        self._source = source_of(frame.f_code.co_filename)
        self._node = self._source.nodes.get(position(frame.f_code, frame.f_lasti))
        self._arguments = list(self._candidates())
        self._left = [node for _, node in self._arguments]

    @property
    def is_comparison(self) -> bool:
        """Whether Python may have called the right side's method, with the sides exchanged."""
        return isinstance(self._node, ast.Compare)

    def of(self, tensor: torch.Tensor, path: tuple[int | str, ...], receiver: bool) -> OperandText:
        """The text of one tensor."""
        maker: Spot = vars(tensor).get(SPOT, (None, 0))
        is_here = maker[0] is self._frame.f_code
        for node in self._left:
            if is_here and position(*maker) == span(node):
                return self._written(node, self._text(node))
            text = self._named(node, tensor)
            if text is not None:
                return self._written(node, text)
        if self._direct:
            written = self._by_position(path, receiver)
            if written is not None:
                return written
        owner = self._parameter(tensor)
        if owner is not None:
            return owner
        if not self._direct:
            for node in self._left:
                if self._value(node) is _NOTHING or isinstance(self._value(node), torch.Tensor):
                    self._left.remove(node)
                    return self._written(node, self._text(node))
        return OperandText("", None)

    def _candidates(self) -> Iterator[tuple[int | str, ast.expr]]:
        """The expressions that the call is made of, by position or keyword."""
        node = self._node
        if isinstance(node, ast.BinOp):
            yield from ((0, node.left), (1, node.right))
        elif isinstance(node, ast.AugAssign):
            yield from ((0, node.target), (1, node.value))
        elif isinstance(node, ast.Compare):
            yield from ((0, node.left), (1, node.comparators[0]))
        elif isinstance(node, ast.UnaryOp):
            yield (0, node.operand)
        elif isinstance(node, ast.Subscript):
            yield from ((0, node.value), (1, node.slice))
            parent = self._source.parents.get(node)
            if isinstance(parent, ast.Assign) and isinstance(node.ctx, ast.Store):
                yield (2, parent.value)
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                yield (-1, node.func.value)
            yield from enumerate(node.args)
            yield from ((word.arg or "**", word.value) for word in node.keywords)

    def _by_position(self, path: tuple[int | str, ...], receiver: bool) -> OperandText | None:
        first, rest = path[0], path[1:]
        arguments = dict(self._arguments)
        if isinstance(self._node, ast.Call) and isinstance(first, int):
            if receiver and -1 in arguments:
                first -= 1
            for at, node in self._arguments:
                if isinstance(at, int) and isinstance(node, ast.Starred) and first >= at:
                    return self._written(node, f"{self._text(node.value)}[{first - at}]")
        if isinstance(first, str) and first not in arguments:
            # PyTorch's functions hand what was given by position on by name.
            first = self._positions.get(first, first)
        argument = arguments.get(first)
        return None if argument is None else self._inside(argument, rest)

    def _inside(self, node: ast.expr, path: tuple[int | str, ...]) -> OperandText:
        """The text of an item of a list that the source spells out, or of a list's n-th item."""
        for at, step in enumerate(path):
            items = node.elts if isinstance(node, (ast.List, ast.Tuple)) else None
            spelled = items is not None and not any(isinstance(i, ast.Starred) for i in items)
            if items is None or not spelled or isinstance(step, str):
                if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
                    return self._written(node, self._text(node.elt))
                steps = "".join(f"[{step!r}]" for step in path[at:])
                return self._written(node, self._text(node) + steps)
            node = items[step]
        return self._written(node, self._text(node))

    def _named(self, node: ast.expr, tensor: torch.Tensor) -> str | None:
        """The text of `tensor` if the expression is it, or a list with it."""
        value = self._value(node)
        if value is tensor:
            return self._text(node)
        if isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                if item is tensor:
                    return f"{self._text(node)}[{index}]"
        if isinstance(value, dict):
            for key, item in value.items():
                if item is tensor:
                    return f"{self._text(node)}[{key!r}]"
        return None

    def _parameter(self, tensor: torch.Tensor) -> OperandText | None:
        """The text of a parameter or buffer of the module that is called."""
        node = self._node
        if not isinstance(node, ast.Call):
            return None
        module = self._value(node.func)
        if isinstance(module, nn.Module):
            for named in (module.named_parameters(), module.named_buffers()):
                for name, weight in named:
                    if weight is tensor:
                        written = self._written(node.func, f"{self._text(node.func)}.{name}")
                        return replace(written, is_callees=True)
        return None

    def _written(self, node: ast.expr, text: str) -> OperandText:
        return OperandText(text, self._source.place(node, self._frame.f_code.co_qualname))

    def _text(self, node: ast.expr) -> str:
        return self._source.place(node, "").text

    def _value(self, node: ast.expr) -> Any:
        """What an expression means now, if that can be looked up without running any code."""
        if isinstance(node, ast.Name):
            return self._locals.get(node.id, self._frame.f_globals.get(node.id, _NOTHING))
        if isinstance(node, ast.Attribute):
            return _member(self._value(node.value), node.attr)
        if isinstance(node, ast.Subscript):
            return _item(self._value(node.value), self._value(node.slice))
        if isinstance(node, ast.Constant):
            return node.value
        return _NOTHING


def _member(value: Any, name: str) -> Any:
    """An attribute that is stored, not computed."""
    if isinstance(value, nn.Module):
        for table in (value._parameters, value._buffers, value._modules):
            if name in table:
                return table[name]
    return getattr(value, "__dict__", {}).get(name, _NOTHING)


def _item(value: Any, key: Any) -> Any:
    if isinstance(value, nn.ModuleList) and isinstance(key, int):
        value = list(value._modules.values())
    elif isinstance(value, nn.ModuleDict):
        value = value._modules
    elif isinstance(value, (nn.ParameterDict, nn.ParameterList)):
        value, key = value._parameters, str(key)
    if (
        isinstance(value, (list, tuple))
        and isinstance(key, int)
        and -len(value) <= key < len(value)
    ):
        return value[key]
    if isinstance(value, dict) and isinstance(key, (str, int)):
        return value.get(key, _NOTHING)
    return _NOTHING
