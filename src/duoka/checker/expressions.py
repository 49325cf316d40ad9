"""Find the source expressions of a call's arguments without running code."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import nn

from duoka.base.model_code import Spot
from duoka.report.check_report import Place

from .source_map import SPOT, code_position, locals_of, node_position, source_of

_NOTHING = object()


@dataclass(frozen=True, slots=True)
class OperandText:
    """Source text of a tensor operand; `is_callees` marks a parameter of the called module.

    The place of such a parameter is that of the module's expression.
    """

    text: str
    place: Place | None
    is_callees: bool = False


class Expressions:
    """Source expressions of the arguments of one call.

    `frame` is the frame of model code at the call. `direct` is False if model code calls the
    operation through a library function or module. `positions` maps the operation's parameter names
    to their positions.
    """

    def __init__(
        self, frame: FrameType, *, direct: bool, positions: Mapping[str, int] | None = None
    ) -> None:
        self._frame = frame
        self._positions = positions or {}
        self._locals = locals_of(frame)
        self._direct = direct
        self._source = source_of(frame.f_code.co_filename)
        self._node = self._source.nodes.get(code_position(frame.f_code, frame.f_lasti))
        self._arguments = list(self._candidates())
        self._remaining = [node for _, node in self._arguments]

    @property
    def is_comparison(self) -> bool:
        """Return True if Python may have called the right operand's reflected method."""
        return isinstance(self._node, ast.Compare)

    def of(self, tensor: torch.Tensor, path: tuple[int | str, ...], receiver: bool) -> OperandText:
        """Return the expression of the tensor at `path`; an empty text and no place if unknown.

        `receiver` is True if the operation is a method, whose receiver is argument 0.
        """
        # Five rules, the surest first. None runs model code, which may have side effects: values
        # are looked up among locals, globals, stored attributes and constant items (`_value`).
        #
        #   rule                                      call                    expression
        #   1 the argument's own code made it         torch.add(x, y.neg())   y.neg()
        #   2 it is the argument's value, or an item  torch.cat(xs)           xs[1]
        #   3 the argument at its position            torch.add(x, table(n))  table(n)
        #   4 a parameter of the called module        self.proj(x)            self.proj.weight
        #   5 an argument of unknown value            self.norm(table(n))     table(n)
        #
        # Rule 1 compares positions: `SPOT` names the instruction that made a tensor. For a model's
        # own function `table` that is inside of `table`. Rule 3 needs a call by model code itself:
        # behind a module, positions are those of the operation in the module.
        maker: Spot | None = vars(tensor).get(SPOT)
        is_here = maker is not None and maker.code is self._frame.f_code
        made_at = code_position(maker.code, maker.offset) if maker and is_here else None
        for node in self._remaining:
            if made_at == node_position(node):
                return self._written(node, self._text(node))
            text = self._match_value(node, tensor)
            if text is not None:
                return self._written(node, text)
        if self._direct:
            written = self._by_position(path, receiver)
            if written is not None:
                return written
        owner = self._callee_parameter(tensor)
        if owner is not None:
            return owner
        if not self._direct:
            for node in self._remaining:
                if self._value(node) is _NOTHING or isinstance(self._value(node), torch.Tensor):
                    self._remaining.remove(node)
                    return self._written(node, self._text(node))
        return OperandText("", None)

    def _candidates(self) -> Iterator[tuple[int | str, ast.expr]]:
        """Yield the argument expressions by position or keyword; a method's receiver is at -1."""
        node = self._node
        match node:
            case (
                ast.BinOp(left=left, right=right)
                | ast.AugAssign(target=left, value=right)
                | ast.Compare(left=left, comparators=[right, *_])
                | ast.Subscript(value=left, slice=right)
            ):
                yield from enumerate((left, right))
            case ast.UnaryOp(operand=operand):
                yield (0, operand)
            case ast.Call():
                if isinstance(node.func, ast.Attribute):
                    yield (-1, node.func.value)
                yield from enumerate(node.args)
                yield from ((word.arg or "**", word.value) for word in node.keywords)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            parent = self._source.parents.get(node)
            if isinstance(parent, ast.Assign):
                yield (2, parent.value)

    # In `x.add(y)` the operation gets x at 0 and y at 1; in the source they are at -1 (the
    # receiver) and 0. From the position of `*rest` on the arguments are items of `rest`.
    def _by_position(self, path: tuple[int | str, ...], receiver: bool) -> OperandText | None:
        """Return the expression at a position or keyword; None if the call has none there."""
        index, rest = path[0], path[1:]
        arguments = dict(self._arguments)
        if isinstance(self._node, ast.Call) and isinstance(index, int):
            if receiver and -1 in arguments:
                index -= 1
            for start, node in self._arguments:
                if isinstance(start, int) and isinstance(node, ast.Starred) and index >= start:
                    return self._written(node, f"{self._text(node.value)}[{index - start}]")
        if isinstance(index, str) and index not in arguments:
            # PyTorch's functions pass on by name an argument that was given by position.
            index = self._positions.get(index, index)
        spread = [node for name, node in self._arguments if name == "**"]
        if index not in arguments and isinstance(path[0], str) and len(spread) == 1:
            return self._item_text(spread[0], path)
        return self._item_text(arguments[index], rest) if index in arguments else None

    def _item_text(self, node: ast.expr, path: tuple[int | str, ...]) -> OperandText:
        """Return the element of a display at `path`, or the container with indices: "xs[1]"."""
        for depth, step in enumerate(path):
            if isinstance(node, ast.Dict):
                keys = [key.value if isinstance(key, ast.Constant) else None for key in node.keys]
                if step in keys:
                    node = node.values[keys.index(step)]
                    continue
            items = node.elts if isinstance(node, (ast.List, ast.Tuple)) else None
            spelled = items is not None and not any(isinstance(i, ast.Starred) for i in items)
            if items is None or not spelled or isinstance(step, str):
                if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
                    return self._written(node, self._text(node.elt))
                steps = "".join(f"[{step!r}]" for step in path[depth:])
                return self._written(node, self._text(node) + steps)
            node = items[step]
        return self._written(node, self._text(node))

    def _match_value(self, node: ast.expr, tensor: torch.Tensor) -> str | None:
        """Return the text of `node`, or of an item of it, with the value `tensor`; else None."""
        value = self._value(node)
        if value is tensor:
            return self._text(node)
        items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
        items = enumerate(value) if isinstance(value, (list, tuple)) else items
        return next((f"{self._text(node)}[{key!r}]" for key, item in items if item is tensor), None)

    def _callee_parameter(self, tensor: torch.Tensor) -> OperandText | None:
        """Return the expression of a parameter or buffer of the called module; None for others."""
        node = self._node
        if not isinstance(node, ast.Call):
            return None
        module = self._value(node.func)
        if isinstance(module, nn.Module):
            for name, weight in (*module.named_parameters(), *module.named_buffers()):
                if weight is tensor:
                    written = self._written(node.func, f"{self._text(node.func)}.{name}")
                    return replace(written, is_callees=True)
        return None

    def _written(self, node: ast.expr, text: str) -> OperandText:
        place = self._source.place(node_position(node), self._frame.f_code.co_qualname)
        return OperandText(text, place)

    def _text(self, node: ast.expr) -> str:
        return self._source.place(node_position(node), "").text

    def _value(self, node: ast.expr) -> Any:
        """Look up the value of an expression without running code; `_NOTHING` if that fails."""
        if isinstance(node, ast.Name):
            return self._locals.get(node.id, self._frame.f_globals.get(node.id, _NOTHING))
        if isinstance(node, ast.Attribute):
            return _member(self._value(node.value), node.attr)
        if isinstance(node, ast.Subscript):
            return _item(self._value(node.value), self._value(node.slice))
        return node.value if isinstance(node, ast.Constant) else _NOTHING


def _member(value: Any, name: str) -> Any:
    """Look up a stored attribute; `_NOTHING` if it is absent or computed."""
    if isinstance(value, nn.Module):
        for table in (value._parameters, value._buffers, value._modules):
            if name in table:
                return table[name]
    return getattr(value, "__dict__", {}).get(name, _NOTHING)


def _item(value: Any, key: Any) -> Any:
    """Look up an item of a plain or PyTorch container; `_NOTHING` if that fails."""
    if isinstance(value, nn.ModuleList) and isinstance(key, int):
        value = list(value._modules.values())
    elif isinstance(value, nn.ModuleDict):
        value = value._modules
    elif isinstance(value, (nn.ParameterDict, nn.ParameterList)):
        value, key = value._parameters, str(key)
    if isinstance(value, (list, tuple)) and isinstance(key, int):
        return value[key] if -len(value) <= key < len(value) else _NOTHING
    is_known = isinstance(value, dict) and isinstance(key, (str, int))
    return value.get(key, _NOTHING) if is_known else _NOTHING
