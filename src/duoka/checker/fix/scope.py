"""What a function's names are, as far as its text tells: which are bound before a place."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from .syntax import Tree

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
