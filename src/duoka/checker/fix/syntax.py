"""Concrete syntax tree of a source file, which keeps blanks and comments.

All changes of a file are applied in one pass over the tree they refer to, so line numbers stay
valid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

from duoka.report.check_report import Place

Change = Callable[[Any], Any]
Span = tuple[int, int, int, int]
Function = cst.FunctionDef | cst.Lambda

_BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of one node; equal `description` means equal change."""

    tree: Tree
    node: cst.CSTNode
    description: str
    change: Change = field(compare=False)
    """Takes the node, whose parts may have been changed already, and gives what replaces it."""
    rewrites: bool = field(default=False, compare=False)
    """What changes inside of the node is lost."""
    adds_line: bool = field(default=False, compare=False)
    """The node itself stays, and gets a line before it."""


class Tree:
    """Syntax tree of a file with its original line ends.

    Raises
    ------
    libcst.ParserSyntaxError
        If the text is not Python.
    """

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self._mark = _BYTE_ORDER_MARK if text.startswith(_BYTE_ORDER_MARK) else ""
        text = text.removeprefix(_BYTE_ORDER_MARK)
        self._lines = re.split(r"\r\n|\r|\n", text)
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        self.module = wrapper.module
        self._positions = wrapper.resolve(PositionProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._nodes: dict[Span, cst.CSTNode] = {}
        # A node comes after its parts here: of those with one span the last is the outermost.
        for node in self._positions:
            if isinstance(node, (cst.BaseExpression, cst.AugAssign)) or (
                isinstance(node, cst.Arg) and node.star
            ):
                self._nodes[self.span(node)] = node
            if isinstance(node, cst.GeneratorExp) and not node.lpar:
                # Alone in a call; Python counts the call's parentheses to it.
                line, column, end_line, end_column = self.span(node)
                self._nodes[line, column - 1, end_line, end_column + 1] = node

    def span(self, node: cst.CSTNode) -> Span:
        """Return first line (from 1), first column (from 0), last line, end column."""
        position = self._positions[node]
        return (
            position.start.line, position.start.column, position.end.line, position.end.column,
        )  # fmt: skip

    def code(self, node: cst.CSTNode) -> str:
        """Return the text of a node."""
        return self.module.code_for_node(node)

    def find_node(self, place: Place | None) -> cst.CSTNode | None:
        """Return the expression, augmented assignment or starred argument at a place."""
        if place is None:
            return None
        span = (place.line, place.column, place.end_line, place.end_column)
        node = self._nodes.get(span)
        # The file may have been changed, and positions in f-strings are inexact before Python 3.12.
        return (
            node
            if node is not None and self._text_between(span) == strip_blanks(place.text)
            else None
        )

    def _text_between(self, span: Span) -> str:
        """Return the text between two positions without blanks."""
        line, column, end_line, end_column = span
        lines = self._lines[line - 1 : end_line]
        lines[-1] = lines[-1][:end_column]
        lines[0] = lines[0][column:]
        return strip_blanks("".join(lines))

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """Return the parent of a node."""
        return self._parents.get(node)

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the ancestors of a node, innermost first."""
        parent = self.parent(node)
        while parent is not None:
            yield parent
            parent = self.parent(parent)

    def enclosing(self, node: cst.CSTNode, *kinds: Any) -> Any:
        """Return the innermost ancestor of the given types."""
        return next((outer for outer in self.ancestors(node) if isinstance(outer, kinds)), None)

    def descendants(self, node: cst.CSTNode, *kinds: Any) -> Iterator[Any]:
        """Yield the descendants of a node, itself included, in text order."""
        if isinstance(node, kinds):
            yield node
        for child in node.children:
            yield from self.descendants(child, *kinds)

    def names_in(self, node: cst.CSTNode) -> set[str]:
        """Return all names in a node."""
        return {name.value for name in self.descendants(node, cst.Name)}

    def apply(self, edits: Iterable[Edit]) -> str:
        """Return the text after applying the edits of this tree."""
        changes: dict[cst.CSTNode, list[Change]] = {}
        for edit in dict.fromkeys(edits):
            if edit.tree is self:
                changes.setdefault(edit.node, []).append(edit.change)
        # Only the statements that change are gone through: a file may have thousands of lines.
        transformer = _Changes(changes)
        body: list[Any] = []
        touched = {self._top_level(node) for node in changes}
        for statement in self.module.body:
            changed = statement.visit(transformer) if statement in touched else statement
            body += changed if isinstance(changed, cst.FlattenSentinel) else [changed]
        return self._mark + self.module.with_changes(body=body).code

    def _top_level(self, node: cst.CSTNode) -> cst.CSTNode:
        """Return the top-level statement of a node."""
        for outer in self.ancestors(node):
            if outer is self.module:
                break
            node = outer
        return node

    # ── functions, statements and their names ──

    def function_of(self, node: cst.CSTNode) -> Function | None:
        """Return the function or lambda whose body contains a node."""
        function = self.enclosing(node, cst.FunctionDef, cst.Lambda)
        assert function is None or isinstance(function, Function)
        return function

    def statement_of(self, node: cst.CSTNode) -> cst.BaseStatement | None:
        """Return the block statement of a node, before which a line can be inserted."""
        inner: cst.CSTNode = node
        for outer in self.ancestors(node):
            if isinstance(outer, (cst.IndentedBlock, cst.Module)):
                return inner if isinstance(inner, cst.BaseStatement) else None
            inner = outer
        return None

    def all_names(self, node: cst.CSTNode) -> set[str]:
        """Return all names in the function around a node, or in the file."""
        return self.names_in(self.function_of(node) or self.module)

    def names_before(self, node: cst.CSTNode) -> set[str]:
        """Return the names in the enclosing function before the node's statement."""
        function = self.function_of(node)
        if function is None:
            return set()
        start = self.span(self.statement_of(node) or node)[:2]
        names = self.descendants(function, cst.Name)
        # Of a function on one line that statement is the function itself.
        earlier_names = {name.value for name in names if self.span(name)[:2] < start}
        return earlier_names | self.names_in(function.params)


class _Changes(cst.CSTTransformer):
    """Applies all edits of a tree in a single pass."""

    def __init__(self, changes: dict[cst.CSTNode, list[Change]]) -> None:
        super().__init__()
        self._changes = changes

    def on_leave(self, original_node: cst.CSTNode, updated_node: Any) -> Any:
        for change in self._changes.get(original_node, ()):
            updated_node = change(updated_node)
        return updated_node


def strip_blanks(text: str) -> str:
    """Return a text without blanks."""
    return "".join(text.split())


def last_name(called: cst.BaseExpression) -> str:
    """Return the last name of a callee: "stack" of ``torch.stack``; "" if there is none."""
    if isinstance(called, cst.Attribute):
        called = called.attr
    return called.value if isinstance(called, cst.Name) else ""


def element_at(listed: cst.CSTNode, item: str) -> cst.BaseElement | None:
    """Return the element of a list or tuple display, ``[a, *rest]``, for an item such as "[1]"."""
    index = re.fullmatch(r"\[(\d+)\]", item)
    if index is None or not isinstance(listed, (cst.List, cst.Tuple)):
        return None
    for at, element in enumerate(listed.elements):
        if at == int(index[1]) or isinstance(element, cst.StarredElement):
            return element
    return None


def is_plain(expression: cst.CSTNode) -> bool:
    """Return True if an expression can be repeated: names, attributes, constant items."""
    if isinstance(expression, cst.Name):
        return True
    if isinstance(expression, cst.Attribute):
        return is_plain(expression.value)
    if not isinstance(expression, cst.Subscript) or not is_plain(expression.value):
        return False
    return all(
        isinstance(item.slice, cst.Index) and _is_fixed(item.slice.value)
        for item in expression.slice
    )


def _is_fixed(index: cst.BaseExpression) -> bool:
    if isinstance(index, cst.UnaryOperation):
        index = index.expression
    return isinstance(index, (cst.Integer, cst.SimpleString, cst.Name))
