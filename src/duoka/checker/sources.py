"""From a running instruction to the source text of its expression, and of what it works on.

Since Python 3.11 every instruction knows the lines and columns of its expression (PEP 657). The
syntax tree of the file then tells which of its parts gave which tensor.
"""

from __future__ import annotations

import ast
import linecache
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from dis import opname
from functools import cache
from inspect import CO_OPTIMIZED
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from ..report import Place

_OWN = str(Path(__file__).parent.parent) + "/"
_TORCH = str(Path(torch.__file__).parent) + "/"
_STANDARD = sysconfig.get_paths()["stdlib"] + "/"
_RUNNER = str(Path(__file__).parent / "running.py")
_INSTALLED = ("/site-packages/", "/dist-packages/")
_NOTHING = object()

SPOT = "_duoka_spot"
"""The attribute of a tensor that says where in model code it was made."""

Spot = tuple[CodeType, int]
"""A code object and the offset of an instruction in it."""


def is_installed(file: str | None) -> bool:
    """Whether a file is a library's: the standard one's, or one that was installed."""
    if file is None:
        return True
    return file.startswith((_OWN, _STANDARD)) or any(part in file for part in _INSTALLED)


@cache
def is_model_code(code: CodeType) -> bool:
    """Whether code is neither PyTorch's, nor duoka's, nor the standard library's."""
    file = code.co_filename
    if file.startswith((_OWN, _TORCH, "<frozen")):
        return False
    return not file.startswith(_STANDARD) or any(part in file for part in _INSTALLED)


def is_own_code(code: CodeType) -> bool:
    """Whether code is duoka's."""
    return code.co_filename.startswith(_OWN)


def model_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of model code, from `frame` outwards to where the check runs it."""
    while frame is not None and not is_model_code(frame.f_code):
        if frame.f_code.co_filename == _RUNNER:
            return None
        frame = frame.f_back
    return frame


def locals_of(frame: FrameType) -> dict[str, Any]:
    """The local names of a frame, and what they mean now."""
    found = frame.f_locals
    if type(found) is not dict or not frame.f_code.co_flags & CO_OPTIMIZED:
        return dict(found)
    # Before Python 3.13 the frame keeps this dict, and with it every tensor, as long as it runs.
    names = found.copy()
    found.clear()
    return names


def spot_of(frame: FrameType) -> Spot:
    """Where a frame is."""
    return frame.f_code, frame.f_lasti


@cache
def place_of(spot: Spot) -> Place:
    """The expression that an instruction belongs to."""
    code, offset = spot
    source = _source(code.co_filename)
    line, end_line, column, end_column = source.tested(code, offset) or _position(code, offset)
    start = source.characters(line, column)
    end = source.characters(end_line, end_column)
    return Place(
        file=code.co_filename,
        line=line,
        column=start,
        end_line=end_line,
        end_column=end,
        text=source.text(line, start, end_line, end),
        function=code.co_qualname,
    )


def _position(code: CodeType, offset: int) -> tuple[int, int, int, int]:
    found = next(islice(code.co_positions(), offset // 2, None), (None, None, None, None))
    line, end_line, column, end_column = found
    line = line or code.co_firstlineno
    return line, end_line or line, column or 0, end_column or 0


class _Source:
    """A file's lines, and its syntax tree by position."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.lines = linecache.getlines(file)
        self.parents: dict[ast.AST, ast.AST] = {}
        self.nodes: dict[tuple[int, int, int, int], ast.AST] = {}
        try:
            tree = ast.parse("".join(self.lines))
        except (SyntaxError, ValueError):
            return  # made at run time, or changed since: then only the line is known
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
            # A statement that is a mere expression has the expression's span.
            if isinstance(node, (ast.expr, ast.stmt)) and not isinstance(node, ast.Expr):
                self.nodes.setdefault(_span(node), node)

    def tested(self, code: CodeType, offset: int) -> tuple[int, int, int, int] | None:
        """The whole of what is tested, where a jump on it carries the span of its first part."""
        if "JUMP" not in opname[code.co_code[offset]]:
            return None
        node = self.nodes.get(_position(code, offset))
        while node is not None and isinstance(outer := self.parents.get(node), ast.BoolOp):
            node = outer
        return _span(node) if isinstance(node, ast.BoolOp) else None

    def function(self, code: CodeType) -> ast.FunctionDef | None:
        """The definition of a function; its code begins at its first decorator."""
        for node in self.nodes.values():
            if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                if first == code.co_firstlineno:
                    return node
        return None

    def characters(self, line: int, column: int) -> int:
        """A column in characters; Python counts the bytes of UTF-8."""
        if not 0 < line <= len(self.lines):
            return column
        return len(self.lines[line - 1].encode()[:column].decode(errors="replace"))

    def text(self, line: int, column: int, end_line: int, end_column: int) -> str:
        """The text between two positions as one line."""
        lines = self.lines[line - 1 : end_line]
        if not lines or (line, column) == (end_line, end_column):
            return lines[0].strip() if lines else ""
        lines[-1] = lines[-1][:end_column]
        lines[0] = lines[0][column:]
        return " ".join(part.strip() for part in lines).strip()

    def place(self, node: ast.AST, function: str) -> Place:
        """Where a node stands."""
        line, end_line, column, end_column = _span(node)
        start, end = self.characters(line, column), self.characters(end_line, end_column)
        return Place(
            file=self.file,
            line=line,
            column=start,
            end_line=end_line,
            end_column=end,
            text=self.text(line, start, end_line, end),
            function=function,
        )


@cache
def _source(file: str) -> _Source:
    return _Source(file)


def assigned_to(spot: Spot) -> str:
    """The text that the expression's value is assigned to; "" where it isn't."""
    source = _source(spot[0].co_filename)
    node = source.nodes.get(_position(*spot))
    while node is not None and not isinstance(node, ast.stmt):
        node = source.parents.get(node)
    if isinstance(node, ast.Assign):
        return " ".join(source.place(target, "").text for target in node.targets)
    if isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        return source.place(node.target, "").text
    return ""


def is_named(spot: Spot, device: object) -> bool:
    """Whether the source of a call itself says which device, and doesn't ask a tensor for its."""
    node = _source(spot[0].co_filename).nodes.get(_position(*spot))
    if not isinstance(node, ast.Call):
        return True
    given = next((word.value for word in node.keywords if word.arg == "device"), None)
    if given is None and isinstance(node.func, ast.Attribute) and node.args:
        given = node.args[0]
    if given is None:
        return True
    if isinstance(device, int) and not isinstance(given, ast.Constant):
        return False
    return not any(
        isinstance(each, ast.Attribute)
        and each.attr in ("device", "get_device", "index")
        and ast.unparse(each) != "torch.device"
        for each in ast.walk(given)
    )


def returned(code: CodeType, index: int) -> Place:
    """What a function returns at a position, where it says so in its first `return`."""
    source = _source(code.co_filename)
    function = source.function(code)
    inside = [] if function is None else list(ast.walk(function))
    found = next((node for node in inside if isinstance(node, ast.Return)), None)
    if found is None or found.value is None:
        return Place(file=code.co_filename, line=code.co_firstlineno, function=code.co_qualname)
    value: ast.expr = found.value
    if isinstance(value, ast.Tuple) and index < len(value.elts):
        value = value.elts[index]
    return source.place(value, code.co_qualname)


def forget_sources() -> None:
    """Read files anew: they may have been edited since."""
    linecache.checkcache()
    _source.cache_clear()
    place_of.cache_clear()


def _span(node: ast.AST) -> tuple[int, int, int, int]:
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Written:
    """The text that gave a tensor to an operation."""

    text: str
    place: Place | None


class Expressions:
    """What the arguments of one call of an operation are in the source.

    Parameters
    ----------
    frame : FrameType
        Of model code, which is at the call.
    direct : bool
        The frame calls the operation itself, and not by way of a library's function or module.
    """

    def __init__(self, frame: FrameType, *, direct: bool) -> None:
        self._frame = frame
        self._locals = locals_of(frame)
        self._direct = direct
        self._source = _source(frame.f_code.co_filename)
        self._node = self._source.nodes.get(_position(frame.f_code, frame.f_lasti))
        self._given = list(self._candidates())
        self._left = [node for _, node in self._given]

    @property
    def is_comparison(self) -> bool:
        """Whether Python may have called the right side's method, with the sides exchanged."""
        return isinstance(self._node, ast.Compare)

    def of(self, tensor: torch.Tensor, path: tuple[int | str, ...], receiver: bool) -> Written:
        """The text of one tensor.

        Parameters
        ----------
        tensor : torch.Tensor
        path : tuple
            Its place in the call: a position or a keyword, then positions in lists.
        receiver : bool
            The operation is a method, and position 0 what it was called on.
        """
        made: Spot | None = vars(tensor).get(SPOT)
        is_here = made is not None and made[0] is self._frame.f_code
        for node in self._left:
            if made is not None and is_here and _position(*made) == _span(node):
                return self._written(node, self._text(node))
            text = self._named(node, tensor)
            if text is not None:
                return self._written(node, text)
        if self._direct:
            found = self._by_position(path, receiver)
            if found is not None:
                return found
        owner = self._parameter(tensor)
        if owner is not None:
            return owner
        if not self._direct:
            for node in self._left:
                if self._value(node) is _NOTHING or isinstance(self._value(node), torch.Tensor):
                    self._left.remove(node)
                    return self._written(node, self._text(node))
        return Written("", None)

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

    def _by_position(self, path: tuple[int | str, ...], receiver: bool) -> Written | None:
        first, rest = path[0], path[1:]
        given = dict(self._given)
        if isinstance(self._node, ast.Call) and isinstance(first, int):
            if receiver and -1 in given:
                first -= 1
            starred = [at for at, node in self._given if isinstance(node, ast.Starred)]
            if starred and first >= (at := starred[0]):  # type: ignore[operator]
                node = given[at]
                assert isinstance(node, ast.Starred)
                return self._written(node, f"{self._text(node.value)}[{first - at}]")  # type: ignore[operator]
        found = given.get(first)
        return None if found is None else self._inside(found, rest)

    def _inside(self, node: ast.expr, path: tuple[int | str, ...]) -> Written:
        """The text of an item of a list that the source spells out, or of a list's n-th item."""
        for at, step in enumerate(path):
            items = node.elts if isinstance(node, (ast.List, ast.Tuple)) else None
            if items is None or any(isinstance(item, ast.Starred) for item in items):
                if isinstance(node, (ast.ListComp, ast.GeneratorExp)):
                    return self._written(node, self._text(node.elt))
                steps = "".join(f"[{each!r}]" for each in path[at:])
                return self._written(node, self._text(node) + steps)
            node = items[step]  # type: ignore[index]
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

    def _parameter(self, tensor: torch.Tensor) -> Written | None:
        """The text of a parameter or buffer of the module that is called."""
        node = self._node
        if not isinstance(node, ast.Call):
            return None
        module = self._value(node.func)
        if isinstance(module, nn.Module):
            for named in (module.named_parameters(), module.named_buffers()):
                for name, own in named:
                    if own is tensor:
                        return self._written(node.func, f"{self._text(node.func)}.{name}")
        return None

    def _written(self, node: ast.expr, text: str) -> Written:
        return Written(text, self._source.place(node, self._frame.f_code.co_qualname))

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
    own = getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        for table in (value._parameters, value._buffers, value._modules):
            if name in table:
                return table[name]
    return own.get(name, _NOTHING)


def _item(value: Any, key: Any) -> Any:
    if isinstance(value, nn.ModuleList) and isinstance(key, int):
        value = list(value._modules.values())
    elif isinstance(value, nn.ModuleDict):
        value = value._modules
    if (
        isinstance(value, (list, tuple))
        and isinstance(key, int)
        and -len(value) <= key < len(value)
    ):
        return value[key]
    if isinstance(value, dict) and isinstance(key, (str, int)):
        return value.get(key, _NOTHING)
    return _NOTHING
