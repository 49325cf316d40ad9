"""Find the expression that names the target device.

The best choice is the text of a tensor that is on the target and free to repeat. If that tensor is
the result of a call, the call is assigned to a name first (`edits.name_first`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from duoka.report.check_report import Fault, Operand

from .sources import Site
from .syntax import Tree, arguments_of, element_at, is_plain, strip_blanks

_MOVES = ("to", "cuda", "cpu")


def target_devices(site: Site, node: ast.expr) -> Iterator[str]:
    """Yield expressions of the target device at `node`, such as "logits.device", the best first.

    The named tensors are operands on the target, or weights of the module that computed one.
    """
    texts: dict[str, None] = {}
    for operand, written in staying_operands(site):
        texts |= dict.fromkeys(_names_of(site, written, operand))
        if isinstance(written, ast.Call):
            # ``self.proj.weight`` for the result of ``self.proj(x)``, if it was on the target.
            weight = f"{site.tree.code(written.func)}.weight"
            texts |= {weight: None} if weight in site.fault.at_hand else {}
    own_text = strip_blanks(site.tree.code(node))
    yield from (f"{text}.device" for text in texts if strip_blanks(text) != own_text)


def staying_operands(site: Site) -> Iterator[tuple[Operand, ast.expr]]:
    """Yield the operands on the target device with their expressions."""
    for operand in site.fault.operands:
        node = site.tree.find_node(operand.place)
        stays = not operand.moved and operand.device == site.fault.target
        if stays and isinstance(node, ast.expr):
            yield operand, node


def lucky_devices(site: Site, node: ast.expr) -> Iterator[str]:
    """Yield devices of local tensors that are on the target, but maybe not in another placement."""
    tree, at_hand = site.tree, site.fault.at_hand
    near = {
        tree.code(name) for name in ast.walk(node) if isinstance(name, ast.Name | ast.Attribute)
    }
    for text in sorted(at_hand, key=lambda text: (text not in near, text.startswith("self."))):
        if strip_blanks(text) != strip_blanks(tree.code(node)):
            yield f"{text}.device"


def is_hidden(fault: Fault, operand: Operand) -> bool:
    """Return True if an operand has no expression of its own: none, or a staying operand's."""
    return operand.place is None or (
        operand.moved
        and strip_blanks(operand.expression) == strip_blanks(operand.place.text)
        and any(
            (sibling.place, sibling.expression) == (operand.place, operand.expression)
            and not sibling.moved
            for sibling in fault.operands
        )
    )


def _names_of(site: Site, written: ast.expr, operand: Operand) -> Iterator[str]:
    """Yield names of tensors on the device of an operand, from its expression `written`."""
    tree = site.tree
    text = tree.code(written)
    if strip_blanks(operand.expression) != strip_blanks(text):
        element = element_at(
            written, strip_blanks(operand.expression).removeprefix(strip_blanks(text))
        )
        if element is not None and is_plain(element):
            yield tree.code(element)
        elif is_plain(written) and operand.expression.endswith(("']", '"]')):
            yield operand.expression
        return
    if isinstance(written, ast.NamedExpr):
        yield tree.code(written.target)
    base = _base(tree, written)
    # A name in `at_hand` held a tensor on the target; another may be of a list or a module.
    if base is not written and is_plain(base) and tree.code(base) in site.fault.at_hand:
        yield tree.code(base)
    if is_plain(written):
        yield text


def _base(tree: Tree, node: ast.expr) -> ast.expr:
    """Return the expression below views and casts: ``x`` of ``x[..., 1:].float()``."""
    match node:
        case (
            ast.Subscript(value=inner)
            | ast.Attribute(value=inner, attr="T" | "mT" | "data" | "grad")
        ):
            return _base(tree, inner)
        case ast.Call(func=ast.Attribute(value=inner, attr=method)):
            keeps_device = method not in _MOVES or _is_only_dtype(tree, node)
            return _base(tree, inner) if keeps_device else node
    return node


def _is_only_dtype(tree: Tree, call: ast.Call) -> bool:
    """Return True if ``.to`` certainly changes only the dtype."""
    arguments = [tree.code(value) for value in arguments_of(call)]
    return len(arguments) == 1 and bool(re.fullmatch(r"torch\.\w+|[\w.]+\.dtype", arguments[0]))
