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
_MARK = "\ufeff"
_FOUND = (cst.BaseExpression, cst.AugAssign)


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of one node.

    Parameters
    ----------
    tree : Tree
        What the node belongs to.
    node : libcst.CSTNode
    what : str
        Two edits of one node that say the same are the same.
    change : callable
        Takes the node, whose parts may have been changed already, and gives what takes its place.
    rewrites : bool
        What changes inside of the node is lost.
    adds_line : bool
        The node itself stays, and gets a line before it.
    """

    tree: Tree
    node: cst.CSTNode
    what: str
    change: Change = field(compare=False)
    rewrites: bool = field(default=False, compare=False)
    adds_line: bool = field(default=False, compare=False)


class Tree:
    """The syntax tree of a file.

    Parameters
    ----------
    file : str
    text : str
        With the line ends that it has in the file.

    Raises
    ------
    libcst.ParserSyntaxError
        If this isn't Python.
    """

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.text = text
        self._mark = _MARK if text.startswith(_MARK) else ""
        self._lines = re.split(r"\r\n|\r|\n", text.removeprefix(_MARK))
        module = cst.parse_module(text.removeprefix(_MARK))
        wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
        self.module = wrapper.module
        self._positions = wrapper.resolve(PositionProvider)
        self._parents = wrapper.resolve(ParentNodeProvider)
        self._nodes: dict[Span, cst.CSTNode] = {}
        # A node is told its position after its parts are: of equal ones the last is the outermost.
        for node in self._positions:
            if isinstance(node, _FOUND) or (isinstance(node, cst.Arg) and node.star):
                self._nodes[self.span(node)] = node
            if isinstance(node, cst.GeneratorExp) and not node.lpar:
                # Alone in a call; Python counts the call's parentheses to it.
                line, column, end_line, end_column = self.span(node)
                self._nodes[line, column - 1, end_line, end_column + 1] = node

    def span(self, node: cst.CSTNode) -> Span:
        """First line from 1, first column in characters from 0, last line, column after the end."""
        found = self._positions[node]
        return found.start.line, found.start.column, found.end.line, found.end.column

    def code(self, node: cst.CSTNode) -> str:
        """The text of a node."""
        return self.module.code_for_node(node)

    def find(self, place: Place | None) -> cst.CSTNode | None:
        """The expression at a place, the augmented assignment, or the argument with a star."""
        if place is None:
            return None
        span = (place.line, place.column, place.end_line, place.end_column)
        found = self._nodes.get(span)
        if found is not None and self._between(span) == folded(place.text):
            return found
        return self._by_text(place)

    def _between(self, span: Span) -> str:
        """The text between two positions, without blanks."""
        line, column, end_line, end_column = span
        lines = self._lines[line - 1 : end_line]
        lines[-1] = lines[-1][:end_column]
        lines[0] = lines[0][column:]
        return folded("".join(lines))

    def _by_text(self, place: Place) -> cst.CSTNode | None:
        """What has the place's text on its lines: positions inside of f-strings are inexact."""
        wanted = folded(place.text)
        lines = range(place.line, max(place.end_line, place.line) + 1)
        alike = [
            node
            for span, node in self._nodes.items()
            if wanted and span[0] in lines and folded(self.code(node)) == wanted
        ]
        alike.sort(key=lambda node: abs(self.span(node)[1] - place.column))
        return alike[0] if alike else None

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
        return next((each for each in self.around(node) if isinstance(each, kinds)), None)

    def inside(self, node: cst.CSTNode, *kinds: Any) -> Iterator[Any]:
        """Parts of a node, itself included, in the order of the text."""
        if isinstance(node, kinds):
            yield node
        for child in node.children:
            yield from self.inside(child, *kinds)

    def apply(self, edits: Iterable[Edit]) -> str:
        """The text after all edits that belong to this tree."""
        changes: dict[cst.CSTNode, list[Change]] = {}
        for edit in dict.fromkeys(edits):
            if edit.tree is self:
                changes.setdefault(edit.node, []).append(edit.change)
        # Only the statements that change are gone through: a file may have thousands of lines.
        passing = _Pass(changes)
        body: list[Any] = []
        touched = {self._top_level(node) for node in changes}
        for statement in self.module.body:
            changed = statement.visit(passing) if statement in touched else statement
            body += changed if isinstance(changed, cst.FlattenSentinel) else [changed]
        return self._mark + self.module.with_changes(body=body).code

    def _top_level(self, node: cst.CSTNode) -> cst.CSTNode:
        """The statement of the file that a node stands in."""
        for outer in self.around(node):
            if outer is self.module:
                break
            node = outer
        return node


class _Pass(cst.CSTTransformer):
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


Function = cst.FunctionDef | cst.Lambda
_BINDING = (
    cst.AssignTarget,
    cst.AnnAssign,
    cst.NamedExpr,
    cst.For,
    cst.AsName,
)
_OF_TENSORS = frozenset({"shape", "size", "dtype", "device", "dim", "ndim", "numel", "new_zeros"})
_OF_TENSORS |= {"new_ones", "new_full", "new_empty", "new_tensor", "requires_grad"}


def function_of(tree: Tree, node: cst.CSTNode) -> Function | None:
    """The function or lambda whose body a node stands in."""
    found = tree.enclosing(node, cst.FunctionDef, cst.Lambda)
    assert found is None or isinstance(found, Function)
    return found


def parameters(function: Function) -> Iterator[str]:
    """The names of the parameters, but for those with stars."""
    given = function.params
    for parameter in (*given.posonly_params, *given.params, *given.kwonly_params):
        yield parameter.name.value


def all_names(tree: Tree, node: cst.CSTNode) -> set[str]:
    """Every name in the function around a node, or in the file."""
    function = function_of(tree, node)
    within = tree.module if function is None else function
    return {name.value for name in tree.inside(within, cst.Name)}


def free_name(name: str, taken: set[str]) -> str:
    """A name, with a number where it is taken."""
    numbered = (f"{name}{number or ''}" for number in range(len(taken) + 1))
    return next(each for each in numbered if each not in taken)


def bound_before(tree: Tree, node: cst.CSTNode) -> set[str]:
    """The names that the function around a node surely or maybe has bound before its statement."""
    function = function_of(tree, node)
    if function is None:
        return set()
    bound = set(parameters(function))
    start = tree.span(statement_of(tree, node) or node)[:2]
    for target in tree.inside(function, *_BINDING):
        if tree.span(target)[:2] < start and function_of(tree, target) is function:
            written = getattr(target, "name" if isinstance(target, cst.AsName) else "target")
            bound |= {name.value for name in tree.inside(written, cst.Name)}
    return bound


def statement_of(tree: Tree, node: cst.CSTNode) -> cst.BaseStatement | None:
    """The statement of a block that a node stands in: nothing fits before the others."""
    inner: cst.CSTNode = node
    for outer in tree.around(node):
        if isinstance(outer, (cst.IndentedBlock, cst.Module)):
            return inner if isinstance(inner, cst.BaseStatement) else None
        inner = outer
    return None


def root(expression: cst.BaseExpression) -> str | None:
    """The name that attributes and items begin with: "self" of ``self.layers[0].weight``."""
    while isinstance(expression, (cst.Attribute, cst.Subscript)):
        expression = expression.value
    return expression.value if isinstance(expression, cst.Name) else None


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


def is_container(call: cst.Call) -> bool:
    """Whether this is `list` or `tuple` of something."""
    named = isinstance(call.func, cst.Name) and call.func.value in ("list", "tuple")
    return named and len(call.args) == 1


def _is_fixed(index: cst.BaseExpression) -> bool:
    if isinstance(index, cst.UnaryOperation):
        index = index.expression
    return isinstance(index, (cst.Integer, cst.SimpleString, cst.Name))


def evident_tensors(tree: Tree, node: cst.CSTNode) -> list[str]:
    """Names bound before `node` that its function treats as tensors (``x.shape``).

    Those that `node` itself reads come first.
    """
    function = function_of(tree, node)
    if function is None:
        return []
    bound = bound_before(tree, node)
    found: dict[str, None] = {}
    for within in (node, function):
        for attribute in tree.inside(within, cst.Attribute):
            held = attribute.value
            if attribute.attr.value in _OF_TENSORS and isinstance(held, cst.Name):
                found.setdefault(held.value)
    return [name for name in found if name in bound and name not in ("self", "cls")]
