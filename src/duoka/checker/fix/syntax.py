"""A source file as a syntax tree that keeps every blank and comment, and what its names are.

All changes of a file are made in one pass over the tree that they were found in, so none shifts
the lines of another. What is changed, and why, is decided elsewhere.
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
    """One change of one node; two edits of one node with the same `description` are the same."""

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
    """The syntax tree of a file; the text has the line ends that it has in the file.

    Raises
    ------
    libcst.ParserSyntaxError
        If this isn't Python.
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
        """First line from 1, first column in characters from 0, last line, column after the end."""
        position = self._positions[node]
        return (
            position.start.line, position.start.column, position.end.line, position.end.column,
        )  # fmt: skip

    def code(self, node: cst.CSTNode) -> str:
        """The text of a node."""
        return self.module.code_for_node(node)

    def find(self, place: Place | None) -> cst.CSTNode | None:
        """The expression at a place, the augmented assignment, or the argument with a star."""
        if place is None:
            return None
        span = (place.line, place.column, place.end_line, place.end_column)
        node = self._nodes.get(span)
        # The file may have been changed, and positions in f-strings are inexact before Python 3.12.
        return node if node is not None and self._between(span) == folded(place.text) else None

    def _between(self, span: Span) -> str:
        """The text between two positions, without blanks."""
        line, column, end_line, end_column = span
        lines = self._lines[line - 1 : end_line]
        lines[-1] = lines[-1][:end_column]
        lines[0] = lines[0][column:]
        return folded("".join(lines))

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """What a node is a part of."""
        return self._parents.get(node)

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """All that a node is a part of, innermost first."""
        parent = self.parent(node)
        while parent is not None:
            yield parent
            parent = self.parent(parent)

    def enclosing(self, node: cst.CSTNode, *kinds: Any) -> Any:
        """The innermost node of some kinds that a node is a part of."""
        return next((outer for outer in self.around(node) if isinstance(outer, kinds)), None)

    def inside(self, node: cst.CSTNode, *kinds: Any) -> Iterator[Any]:
        """Parts of a node, itself included, in the order of the text."""
        if isinstance(node, kinds):
            yield node
        for child in node.children:
            yield from self.inside(child, *kinds)

    def names_in(self, node: cst.CSTNode) -> set[str]:
        """Every name in a node."""
        return {name.value for name in self.inside(node, cst.Name)}

    def apply(self, edits: Iterable[Edit]) -> str:
        """The text after all edits that belong to this tree."""
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
        """The statement of the file that a node stands in."""
        for outer in self.around(node):
            if outer is self.module:
                break
            node = outer
        return node

    # ── functions, statements and their names ──

    def function_of(self, node: cst.CSTNode) -> Function | None:
        """The function or lambda whose body a node stands in."""
        function = self.enclosing(node, cst.FunctionDef, cst.Lambda)
        assert function is None or isinstance(function, Function)
        return function

    def statement_of(self, node: cst.CSTNode) -> cst.BaseStatement | None:
        """The statement of a block that a node stands in: nothing fits before the others."""
        inner: cst.CSTNode = node
        for outer in self.around(node):
            if isinstance(outer, (cst.IndentedBlock, cst.Module)):
                return inner if isinstance(inner, cst.BaseStatement) else None
            inner = outer
        return None

    def all_names(self, node: cst.CSTNode) -> set[str]:
        """Every name in the function around a node, or in the file."""
        return self.names_in(self.function_of(node) or self.module)

    def names_before(self, node: cst.CSTNode) -> set[str]:
        """The names that occur in the function around a node before its statement."""
        function = self.function_of(node)
        if function is None:
            return set()
        start = self.span(self.statement_of(node) or node)[:2]
        names = self.inside(function, cst.Name)
        # Of a function on one line that statement is the function itself.
        before = {name.value for name in names if self.span(name)[:2] < start}
        return before | self.names_in(function.params)


class _Changes(cst.CSTTransformer):
    """One pass over a tree that makes all changes."""

    def __init__(self, changes: dict[cst.CSTNode, list[Change]]) -> None:
        super().__init__()
        self._changes = changes

    def on_leave(self, original_node: cst.CSTNode, updated_node: Any) -> Any:
        for change in self._changes.get(original_node, ()):
            updated_node = change(updated_node)
        return updated_node


def folded(text: str) -> str:
    """A text without its blanks."""
    return "".join(text.split())


def last_name(called: cst.BaseExpression) -> str:
    """The last name of what is called: "stack" of ``torch.stack``; "" where it has none."""
    if isinstance(called, cst.Attribute):
        called = called.attr
    return called.value if isinstance(called, cst.Name) else ""


def element_at(listed: cst.CSTNode, item: str) -> cst.BaseElement | None:
    """The part of a written list or tuple, ``[a, *rest]``, that gives an item such as "[1]"."""
    index = re.fullmatch(r"\[(\d+)\]", item)
    if index is None or not isinstance(listed, (cst.List, cst.Tuple)):
        return None
    for at, element in enumerate(listed.elements):
        if at == int(index[1]) or isinstance(element, cst.StarredElement):
            return element
    return None


def is_plain(expression: cst.CSTNode) -> bool:
    """Whether an expression can be written twice: names, attributes, fixed items."""
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
