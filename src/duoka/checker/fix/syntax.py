"""Syntax tree of a source file with positions in its text, and edits of that text.

An edit inserts or replaces text at positions of the original. Whitespace and comments stay, and the
edits of several faults can be combined in any order.
"""

from __future__ import annotations

import ast
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from duoka.report.check_report import Place

from ..source_map import SourceFile, node_position

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Piece = tuple[int, int, str]
"""Start and end of a span in a text, and the text that replaces the span."""

_BYTE_ORDER_MARK = "\ufeff"
_BLANKS = re.compile(r"(?:\s|\\\r?\n|#[^\r\n]*)*")


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of the expression from `start` to `stop`, or a line inserted at `start == stop`."""

    tree: Tree
    start: int
    stop: int
    pieces: tuple[Piece, ...]

    @property
    def adds_line(self) -> bool:
        """Return True if the edit inserts a line before a statement."""
        return self.start == self.stop

    @property
    def rewrites(self) -> bool:
        """Return True if the edit replaces the whole expression, discarding edits inside it."""
        return not self.adds_line and self.pieces[0][:2] == (self.start, self.stop)

    def collides_with(self, other: Edit) -> bool:
        """Return True if two edits can't both be made."""
        if self.tree is not other.tree or self == other or self.adds_line or other.adds_line:
            return False
        inner, outer = sorted((self, other), key=lambda edit: edit.stop - edit.start)
        is_inside = outer.start <= inner.start and inner.stop <= outer.stop
        is_same = (inner.start, inner.stop) == (outer.start, outer.stop)
        return is_same or (is_inside and outer.rewrites)


class Tree(SourceFile):
    """Syntax tree of a file, whose line ends are kept; empty if the text is not Python."""

    def __init__(self, file: str, text: str) -> None:
        self.source = text.removeprefix(_BYTE_ORDER_MARK)
        self._byte_order_mark = text[: len(text) - len(self.source)]
        super().__init__(file, tuple(io.StringIO(self.source, newline="").readlines()))
        self._starts = [0, *accumulate(map(len, self.lines))]

    @property
    def newline(self) -> str:
        """Return the line end of the first line; a line feed if there is none."""
        first = self.lines[0] if self.lines else ""
        return first[len(first.rstrip("\r\n")) :] or "\n"

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the start and end of a node in the text, without parentheses around it."""
        line, end_line, column, end_column = node_position(node)
        start = self._starts[line - 1] + self.characters(line, column)
        stop = self._starts[end_line - 1] + self.characters(end_line, end_column)
        # Of a generator as the only argument, f(x for x in xs), Python's span has the parentheses.
        if isinstance(node, ast.GeneratorExp) and isinstance(self.parents[node], ast.Call):
            is_bare = not self.source[:start].rstrip().endswith(("(", ",", "="))
            return start + is_bare, stop - is_bare
        return start, stop

    # The syntax tree has no parentheses, so they are searched for in the text. In `(x + y) * z`
    # the span of the sum is "x + y" and its extent "(x + y)". In `f(x)` they are the call's.
    def extent(self, node: ast.AST) -> tuple[int, int]:
        """Return the start and end of a node with the parentheses around it."""
        start, stop = self.span(node)
        parent = self.parents.get(node)
        extents = [(start, stop)]
        while True:
            opening, after = self.source.rfind("(", 0, start), _BLANKS.match(self.source, stop)
            assert after is not None, "it matches no blanks, too"
            is_open = opening >= 0 and _BLANKS.fullmatch(self.source, opening + 1, start)
            if not is_open or not self.source.startswith(")", after.end()):
                break
            start, stop = opening, after.end() + 1
            extents.append((start, stop))
        if len(extents) > 1 and isinstance(parent, ast.Call) and [node] == arguments_of(parent):
            extents.pop()  # the outermost parentheses of an only argument are the call's
        return extents[-1]

    def code(self, node: ast.AST) -> str:
        """Return the text of a node."""
        start, stop = self.span(node)
        return self.source[start:stop]

    def find_node(self, place: Place | None) -> ast.expr | ast.AugAssign | None:
        """Return the expression or augmented assignment at a place.

        None if the file has another text there, or the node is of another type.
        """
        if place is None or not 0 < place.line <= place.end_line <= len(self.lines):
            return None
        column = len(self.lines[place.line - 1][: place.column].encode())
        end_column = len(self.lines[place.end_line - 1][: place.end_column].encode())
        node = self.nodes.get((place.line, place.end_line, column, end_column))
        text = self.text(place.line, place.column, place.end_line, place.end_column)
        is_there = strip_blanks(text) == strip_blanks(place.text)
        return node if is_there and isinstance(node, (ast.expr, ast.AugAssign)) else None

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the ancestors of a node, innermost first."""
        parent = self.parents.get(node)
        while parent is not None:
            yield parent
            parent = self.parents.get(parent)

    def enclosing(self, node: ast.AST, kinds: Any) -> Any:
        """Return the innermost ancestor of the given types; None if there is none."""
        return next((outer for outer in self.ancestors(node) if isinstance(outer, kinds)), None)

    def function_of(self, node: ast.AST) -> Function | None:
        """Return the innermost function or lambda around a node; None at module level."""
        return next((outer for outer in self.ancestors(node) if isinstance(outer, Function)), None)

    def names_before(self, node: ast.AST) -> set[str]:
        """Return the names in the enclosing function before the node's statement.

        Empty at module level.
        """
        function = self.function_of(node)
        if function is None:
            return set()
        start = self.span(self.enclosing(node, ast.stmt))[0]
        named = [
            name
            for name in ast.walk(function)
            if isinstance(name, (ast.Name, ast.arg)) and self.span(name)[0] < start
        ]
        # The statement of a lambda's body is around the lambda: its arguments aren't before that.
        return {arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)} | {
            name.id if isinstance(name, ast.Name) else name.arg for name in named
        }

    def apply(self, edits: Iterable[Edit]) -> str:
        """Return the text with the edits of this tree made; edits of other trees are skipped."""
        # Edits may be nested, as the moves of `x` and of `-x` in `f(-x)`, so several pieces may be
        # at one position. Their order is: pieces at the end of an expression, inner before outer,
        # `f((-x.to(a)).to(b))`; lines inserted before a statement; pieces at the start of an
        # expression, outer before inner.
        pieces: list[tuple[tuple[int, ...], Piece]] = []
        for edit in dict.fromkeys(edits):
            if edit.tree is self:
                for piece in edit.pieces:
                    ends = (piece[0], 0, -edit.start, edit.stop)
                    begins = (piece[0], 1, 0 if edit.adds_line else 1, -edit.stop)
                    pieces.append((ends if piece[0] > edit.start else begins, piece))
        texts, position = [self._byte_order_mark], 0
        for _, (start, stop, text) in sorted(pieces, key=lambda entry: entry[0]):
            texts += (self.source[position:start], text)
            position = stop
        return "".join([*texts, self.source[position:]])


def arguments_of(call: ast.Call) -> list[ast.expr]:
    """Return the values of all arguments of a call."""
    return [*call.args, *(word.value for word in call.keywords)]


def words_of(text: str) -> set[str]:
    """Return all words of a text; its names are among them."""
    return set(re.findall(r"\w+", text))


def strip_blanks(text: str) -> str:
    """Return a text without whitespace."""
    return "".join(text.split())


def last_name(called: ast.AST) -> str:
    """Return the last name of a callee: "stack" of ``torch.stack``; "" if there is none."""
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""


def element_at(listed: ast.AST, item: str) -> ast.expr | None:
    """Return the element of a list or tuple display, ``[a, *rest]``, for an item such as "[1]".

    A starred element stands for all items from its index on. None if `listed` is not such a
    display, or has no such element.
    """
    index = re.fullmatch(r"\[(\d+)\]", item)
    if index is None or not isinstance(listed, (ast.List, ast.Tuple)):
        return None
    for position, element in enumerate(listed.elts):
        if position == int(index[1]) or isinstance(element, ast.Starred):
            return element
    return None


def is_plain(node: ast.AST) -> bool:
    """Return True if repeating an expression is free: names, attributes, simple items of these."""
    if isinstance(node, ast.Attribute):
        return is_plain(node.value)
    if isinstance(node, ast.Subscript):
        items = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return is_plain(node.value) and all(map(_is_fixed, items))
    return isinstance(node, ast.Name)


def _is_fixed(index: ast.expr) -> bool:
    """Return True for a constant or a name as an index, also with a sign."""
    index = index.operand if isinstance(index, ast.UnaryOp) else index
    return isinstance(index, (ast.Constant, ast.Name))
