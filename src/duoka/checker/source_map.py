"""Map a running instruction to its source expression.

Since Python 3.11 every instruction knows the lines and columns of its expression (PEP 657); the
syntax tree of the file then gives its parts.
"""

from __future__ import annotations

import ast
import linecache
import warnings
from collections.abc import Iterator
from dis import opname
from functools import cache, cached_property, lru_cache
from inspect import CO_OPTIMIZED
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from duoka.base.model_code import Spot, is_model_code, torch_folder
from duoka.report.check_report import Place

_TORCH_MODULES = torch_folder() + "nn/modules/"
_RUNNER = str(Path(__file__).parent / "execute.py")

Position = tuple[int, int, int, int]
"""First and last line, from 1, then start and end column in UTF-8 bytes, from 0."""

SPOT = "_duoka_spot"
"""Tensor attribute: the place in model code that created the tensor."""


def model_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of model code, from `frame` outwards; None if there is none."""
    while frame is not None and not is_model_code(frame.f_code):
        if frame.f_code.co_filename == _RUNNER:
            return None
        frame = frame.f_back
    return frame


def library_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of `torch.nn.modules`; None if there is none."""
    while frame is not None and not frame.f_code.co_filename.startswith(_TORCH_MODULES):
        if frame.f_code.co_filename == _RUNNER:
            return None
        frame = frame.f_back
    return frame


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return a copy of the local variables of a frame, without keeping them alive in the frame."""
    live_names = frame.f_locals
    if type(live_names) is not dict or not frame.f_code.co_flags & CO_OPTIMIZED:
        return dict(live_names)
    # Before Python 3.13 the frame keeps this dict, and with it every tensor, as long as it runs.
    names = live_names.copy()
    live_names.clear()
    return names


def spot_of(frame: FrameType) -> Spot:
    """Return the current instruction of a frame."""
    return Spot(frame.f_code, frame.f_lasti, frame.f_code.co_filename)


@cache
def place_of(spot: Spot) -> Place:
    """Return the source place of an instruction's expression."""
    code, offset, file = spot
    source = source_of(file)
    position = source.tested(code, offset) or code_position(code, offset)
    return source.place(position, code.co_qualname)


# From an instruction to a node of the syntax tree. In line 12, "    y = x + self.scale", let the
# addition be at offset 38 of the code. `co_positions()` has an item for each two bytes, so item 19
# is its span: lines 12 to 12, columns 8 to 22. `SourceFile.nodes` has the node `x + self.scale`
# under the same key, since the compiler takes spans from the same syntax tree.
def code_position(code: CodeType, offset: int) -> Position:
    """Return the position of an instruction's expression; its function's first line if unknown."""
    positions = islice(code.co_positions(), offset // 2, None)
    line, end_line, column, end_column = next(positions, (None, None, None, None))
    line = line or code.co_firstlineno
    return line, end_line or line, column or 0, end_column or 0


def parse_quietly(text: str) -> ast.Module:
    """Parse a source text, with Python's warnings suppressed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text.removeprefix("\ufeff"))


class SourceFile:
    """Lines and syntax tree of a file, indexed by position."""

    def __init__(self, file: str, lines: tuple[str, ...]) -> None:
        self.file = file
        self.lines = lines

    @property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """Parent of each node."""
        return self._tree[0]

    @property
    def nodes(self) -> dict[Position, ast.AST]:
        """Expressions and statements by position."""
        return self._tree[1]

    # Lazy: of most files only the lines are needed.
    @cached_property
    def _tree(self) -> tuple[dict[ast.AST, ast.AST], dict[Position, ast.AST]]:
        """`parents` and `nodes` of the file; empty if the file does not parse."""
        parents: dict[ast.AST, ast.AST] = {}
        nodes: dict[Position, ast.AST] = {}
        try:
            tree = parse_quietly("".join(self.lines))
        except (SyntaxError, ValueError):
            return {}, {}  # generated code, or a changed file: only the lines are known
        # `ast.walk` goes level by level: of two nodes with the same span the outer one is kept.
        for node in ast.walk(tree):
            parents |= dict.fromkeys(ast.iter_child_nodes(node), node)
            # A statement that is a mere expression has the expression's span.
            if isinstance(node, (ast.expr, ast.stmt)) and not isinstance(node, ast.Expr):
                nodes.setdefault(node_position(node), node)
        return parents, nodes

    def tested(self, code: CodeType, offset: int) -> Position | None:
        """Return the position of the whole condition if a jump tests a part of it; else None."""
        # `if a > b and c:` jumps after each part with the span of that part. A fault in a jump is
        # one of `bool(...)`, and belongs to all that is tested.
        if "JUMP" not in opname[code.co_code[offset]]:
            return None
        node = self.nodes.get(code_position(code, offset))
        while node is not None and isinstance(outer := self.parents.get(node), ast.BoolOp):
            node = outer
        return node_position(node) if isinstance(node, ast.BoolOp) else None

    def function(self, code: CodeType) -> ast.FunctionDef | None:
        """Return the definition of a function, found by its first line; None if there is none."""
        for node in self.nodes.values():
            if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
                decorator_lines = [decorator.lineno for decorator in node.decorator_list]
                if min([node.lineno, *decorator_lines]) == code.co_firstlineno:
                    return node
        return None

    def meanings(self, name: ast.expr, code: CodeType) -> Iterator[ast.expr]:
        """Return the expressions assigned to a local name in its function."""
        function = self.function(code)
        if isinstance(name, ast.Name) and function is not None:
            for node in ast.walk(function):
                if isinstance(node, ast.Assign) and any(
                    isinstance(target, ast.Name) and target.id == name.id for target in node.targets
                ):
                    yield node.value

    def characters(self, line: int, column: int) -> int:
        """Convert a UTF-8 byte column to characters."""
        if not 0 < line <= len(self.lines):
            return column
        return len(self.lines[line - 1].encode()[:column].decode(errors="replace"))

    def text(self, line: int, column: int, end_line: int, end_column: int) -> str:
        """Return the text between two positions as one line; for an empty span the whole line."""
        lines = [*self.lines[line - 1 : end_line]]
        if not lines or (line, column) == (end_line, end_column):
            return lines[0].strip() if lines else ""
        lines[-1] = lines[-1][:end_column]
        lines[0] = lines[0][column:]
        return " ".join(part.strip() for part in lines).strip()

    def place(self, position: Position, function: str) -> Place:
        """Return the place of a position in a function."""
        line, end_line, column, end_column = position
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
def source_of(file: str) -> SourceFile:
    """Return the current source of a file."""
    return _unedited(file, tuple(linecache.getlines(file)))


@lru_cache(maxsize=16)
def _unedited(file: str, lines: tuple[str, ...]) -> SourceFile:
    """Return the source of a file with these lines, cached: an unmodified file is parsed once."""
    return SourceFile(file, lines)


def is_written_back(spot: Spot) -> bool:
    """Return True if an item is read to be written back, as in `x[i] += 1`."""
    source = source_of(spot.file)
    node = source.nodes.get(code_position(spot.code, spot.offset))
    outer = None if node is None else source.parents.get(node)
    return isinstance(outer, ast.AugAssign) and outer.target is node


# A device that the call takes from a tensor follows any placement; a device it names does not:
#
#   x.cuda(), x.to("cuda:0"), zeros(3, device="cuda")    named
#   x.to(y.device), x.cuda(y.get_device())               from a tensor
#   d = y.device; x.to(d)                                from a tensor, by the assignment to `d`
def is_named(spot: Spot, device: object) -> bool:
    """Return True if the call itself names the device, rather than taking it from a tensor."""
    node = source_of(spot.file).nodes.get(code_position(spot.code, spot.offset))
    if not isinstance(node, ast.Call):
        return True
    argument = next((word.value for word in node.keywords if word.arg == "device"), None)
    if argument is None and isinstance(node.func, ast.Attribute) and node.args:
        argument = node.args[0]
    if argument is None:
        return True
    if isinstance(device, int) and not isinstance(argument, ast.Constant):
        return False
    source = source_of(spot.file)
    meanings = [argument, *source.meanings(argument, spot.code)]
    return not any(map(_asks_for_device, meanings))


def _asks_for_device(node: ast.AST) -> bool:
    """Return True if an expression reads a tensor's device, or a device's index."""
    return any(
        isinstance(part, ast.Attribute)
        and part.attr in ("device", "get_device", "index")
        and ast.unparse(part) != "torch.device"
        for part in ast.walk(node)
    )


def returned_expression(code: CodeType, index: int) -> Place:
    """Return the place of a returned value: item `index` of the function's first `return`."""
    source = source_of(code.co_filename)
    function = source.function(code)
    nodes = ast.walk(function) if function is not None else ()
    value = next((node.value for node in nodes if isinstance(node, ast.Return)), None)
    if value is None:
        return Place(file=code.co_filename, line=code.co_firstlineno, function=code.co_qualname)
    if isinstance(value, ast.Tuple) and index < len(value.elts):
        value = value.elts[index]
    return source.place(node_position(value), code.co_qualname)


def forget_sources() -> None:
    """Clear the caches of files and places, before a check of maybe changed files."""
    linecache.checkcache()
    source_of.cache_clear()
    place_of.cache_clear()


def node_position(node: ast.AST) -> Position:
    """Return the position of a syntax node."""
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset  # type: ignore[attr-defined]
