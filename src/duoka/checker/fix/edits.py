"""Source edits that make up a fix: moves, device arguments, and hoisted assignments."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from .syntax import Edit, Tree, arguments_of, is_plain, last_name, words_of

_SELF_DELIMITED = (
    ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.List, ast.Set, ast.Dict, ast.ListComp,
    ast.SetComp, ast.DictComp, ast.JoinedStr,
)  # fmt: skip
# An expression inside one of these may be evaluated several times, not at all, or later.
_UNMOVABLE = (
    ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp, ast.BoolOp,
    ast.Await,
)  # fmt: skip
_COMPOUND = (
    ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.For, ast.AsyncFor, ast.While, ast.With,
    ast.AsyncWith, ast.Match, ast.Try, ast.TryStar,
)  # fmt: skip
_CALLS = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)


def move(tree: Tree, node: ast.expr, device: str) -> Edit:
    """Append ``.to(device)`` to an expression, or change the device of an existing move.

    `device` is source text, such as "logits.device" or '"cpu"'.
    """
    start, stop = tree.extent(node)
    pieces = [(stop, stop, f".to({device})")]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner, method, end = node.func.value, node.func.attr, tree.span(node)[1]
        device_argument = _device_argument(node)
        if method in ("cuda", "cpu") and f"{tree.code(owner)}.device" == device:
            pieces = [(tree.extent(owner)[1], end, "")]  # already there: drop the call
        elif method in ("cuda", "cpu") and len(arguments_of(node)) <= 1:
            pieces = [(tree.span(node.func)[1] - len(method), end, f"to({device})")]
        elif method == "to" and device_argument is not None:
            pieces = [(*tree.extent(device_argument), device)]
    elif not _is_self_delimited(tree, node):
        pieces = [(start, start, "("), (stop, stop, f").to({device})")]
    return Edit(tree, start, stop, tuple(pieces))


def _device_argument(call: ast.Call) -> ast.expr | None:
    """Return the argument of ``.to`` that certainly is a device: "cuda:0", x.device, device.

    None if no argument certainly is one.
    """
    if not call.args:
        first = call.keywords[0] if call.keywords else None
        return first.value if first is not None and first.arg == "device" else None
    is_device = is_literal_device(call.args[0]) or last_name(call.args[0]) == "device"
    return call.args[0] if is_device else None


def device_keyword(call: ast.Call) -> ast.expr | None:
    """Return the value of a call's ``device=…``; None if the call has no such keyword."""
    return next((word.value for word in call.keywords if word.arg == "device"), None)


def is_literal_device(value: ast.AST) -> bool:
    """Return True for a literal device: "cuda:0", 0, torch.device("cuda", 0)."""
    if isinstance(value, ast.Call) and last_name(value.func) == "device":
        return all(map(is_literal_device, arguments_of(value)))
    is_constant = isinstance(value, ast.Constant) and type(value.value) in (str, int)
    return is_constant or isinstance(value, ast.JoinedStr)


def _is_self_delimited(tree: Tree, node: ast.expr) -> bool:
    """Return True if ``.to(…)`` can follow an expression without parentheses around it."""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    is_parenthesized = tree.extent(node) != tree.span(node) or (
        isinstance(node, (ast.Tuple, ast.GeneratorExp)) and tree.code(node).startswith("(")
    )
    return isinstance(node, _SELF_DELIMITED) or is_text or is_parenthesized


def replace(tree: Tree, node: ast.expr, text: str) -> Edit:
    """Replace an expression, including the parentheses around it, by a text."""
    start, stop = tree.extent(node)
    return Edit(tree, start, stop, ((start, stop, text),))


def move_each(tree: Tree, node: ast.expr, device: str) -> Edit:
    """Replace a container by ``[each.to(device) for each in node]``."""
    item = free_name("each", words_of(tree.code(node)) | words_of(device))
    opening, closing = ("", "]") if _is_self_delimited(tree, node) else ("(", ")]")
    start, stop = tree.extent(node)
    loop = f"[{item}.to({device}) for {item} in {opening}"
    return Edit(tree, start, stop, ((start, start, loop), (stop, stop, closing)))


def insert_before(tree: Tree, statement: ast.stmt, line: str) -> Edit:
    """Insert a line directly above a statement, with the same indentation."""
    start = tree.span(statement)[0]
    text = f"{line}{tree.newline}{_before_on_line(tree, statement)}"
    return Edit(tree, start, start, ((start, start, text),))


def _before_on_line(tree: Tree, statement: ast.stmt) -> str:
    """Return the text before a statement on its line: indentation, or other code."""
    line = tree.lines[statement.lineno - 1]
    return line[: tree.characters(statement.lineno, statement.col_offset)]


def set_device(tree: Tree, call: ast.Call, device: str) -> Edit:
    """Add the keyword argument ``device`` to a call, or replace its value."""
    start, stop = tree.span(call)
    present = device_keyword(call)
    if present is not None:
        return Edit(tree, start, stop, ((*tree.extent(present), device),))
    values = arguments_of(call)
    # The keyword follows the last argument directly: a comma or comment there stays behind it.
    end = max((tree.extent(value)[1] for value in values), default=stop - 1)
    text = f", device={device}" if values else f"device={device}"
    return Edit(tree, start, stop, ((end, end, text),))


# ── hoisting: results assigned to a name on the line before, so that a call is written once ──


def name_first(
    tree: Tree, nodes: Iterable[ast.expr], target: ast.expr
) -> tuple[Mapping[ast.expr, str], list[Edit]] | None:
    """Assign expressions to names on lines before their statement, in the order of evaluation.

    Expressions after `target` and plain names stay where they are. Returns the name of each hoisted
    expression, `target` last unless it is plain, and the edits that insert the lines. None if
    hoisting could change the order or number of evaluations, or if no expression needs a name.
    """
    end = tree.span(target)[1]
    unique = dict.fromkeys(nodes)
    complex_nodes = [node for node in unique if tree.span(node)[1] <= end and not is_plain(node)]
    statement = statement_to_precede(tree, complex_nodes, target)
    if statement is None or not complex_nodes:
        return None
    used_names = names_around(tree, target)
    names: dict[ast.expr, str] = {}
    edits = []
    for node in sorted(complex_nodes, key=tree.span):
        name, value = free_name(_name_for(node), used_names), node
        if isinstance(node, ast.NamedExpr):
            name, value = node.target.id, node.value
        used_names.add(name)
        names[node] = name
        edits.append(insert_before(tree, statement, f"{name} = {on_a_line(tree, value)}"))
    return names, edits


def names_around(tree: Tree, node: ast.AST) -> set[str]:
    """Return all words in the function around a node; those of the file if there is none."""
    function = tree.function_of(node)
    return words_of(tree.source if function is None else tree.code(function))


def statement_to_precede(
    tree: Tree, nodes: Sequence[ast.expr], last_node: ast.expr
) -> ast.stmt | None:
    """Return the statement of expressions if they can be hoisted to lines before it, else None.

    None if hoisting could change the order or number of evaluations: `last_node`, the last of the
    expressions, must be evaluated exactly once whenever the statement runs, and the only calls
    evaluated before the end of `last_node` may be those in `nodes`.
    """
    statement: ast.stmt = tree.enclosing(last_node, ast.stmt)
    # Code hoisted out of an `elif` would run even if an earlier branch is taken. A statement that
    # shares its line, as in `if x: return y`, has no place for a line before it.
    is_elif = tree.code(statement).startswith(("elif ", "elif("))
    if isinstance(statement, _COMPOUND) or is_elif or _before_on_line(tree, statement).strip():
        return None
    outer_nodes = takewhile(lambda outer: outer is not statement, tree.ancestors(last_node))
    if any(isinstance(outer, _UNMOVABLE) for outer in outer_nodes):
        return None
    end = tree.span(last_node)[1]
    own_nodes = {inner for node in nodes for inner in ast.walk(node)}
    for call in ast.walk(statement):
        if isinstance(call, _CALLS) and tree.span(call)[1] <= end and call not in own_nodes:
            return None
    return statement


def _name_for(node: ast.expr) -> str:
    """Choose a name for the result of an expression, after the called function if possible."""
    callee = node.func if isinstance(node, ast.Call) else None
    while isinstance(callee, ast.Subscript):
        callee = callee.value
    name = "" if callee is None else last_name(callee)
    return f"{name.strip('_')}_output" if name else "result"


def free_name(name: str, names: set[str]) -> str:
    """Return a name, with a number appended if the name is in `names`."""
    numbered = (f"{name}{number or ''}" for number in range(len(names) + 1))
    return next(candidate for candidate in numbered if candidate not in names)


def on_a_line(tree: Tree, node: ast.expr) -> str:
    """Return the text of an expression for an assignment, parenthesized if it spans lines."""
    text = tree.code(node)
    return f"({text})" if "\n" in text and not isinstance(node, _SELF_DELIMITED) else text
