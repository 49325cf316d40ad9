"""Find the expression that names the target device.

The best choice is the text of a tensor that is on the target and free to repeat. If that tensor is
the result of a call, the call is assigned to a name first (`edits.name_first`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from duoka.report.check_report import Fault, Operand

from .sources import Site
from .syntax import Tree, element_at, is_plain, strip_blanks

_VIEWS = ("T", "mT", "data", "grad")
_MOVES = ("to", "cuda", "cpu")


def target_devices(site: Site, node: cst.BaseExpression) -> Iterator[str]:
    """Yield expressions of the target device at `node`, such as "logits.device", the best first.

    They name tensors that are on the target in every placement.
    """
    texts: dict[str, None] = {}
    for operand, written in staying_operands(site):
        texts |= dict.fromkeys(_names_of(site, written, operand))
        if isinstance(written, cst.Call):
            # ``self.proj.weight`` for the result of ``self.proj(x)``, where that is at hand.
            weight = f"{site.tree.code(written.func)}.weight"
            texts |= {weight: None} if weight in site.fault.at_hand else {}
    own_text = strip_blanks(site.tree.code(node))
    yield from (f"{text}.device" for text in texts if strip_blanks(text) != own_text)


def staying_operands(site: Site) -> Iterator[tuple[Operand, cst.BaseExpression]]:
    """Yield the operands on the target device with their expressions."""
    for operand in site.fault.operands:
        node = site.tree.find_node(operand.place)
        stays = not operand.moved and operand.device == site.fault.target
        if stays and isinstance(node, cst.BaseExpression):
            yield operand, node


def lucky_devices(site: Site, node: cst.BaseExpression) -> Iterator[str]:
    """Yield local names that were on the target, but may not be in another placement."""
    tree, at_hand = site.tree, site.fault.at_hand
    near = {tree.code(name) for name in tree.descendants(node, cst.Name, cst.Attribute)}
    for text in sorted(at_hand, key=lambda text: (text not in near, text.startswith("self."))):
        if strip_blanks(text) != strip_blanks(tree.code(node)):
            yield f"{text}.device"


def is_hidden(fault: Fault, operand: Operand) -> bool:
    """Return True if an operand is not at its place because an operand that stays is there."""
    return operand.place is None or (
        operand.moved
        and strip_blanks(operand.expression) == strip_blanks(operand.place.text)
        and any(
            (sibling.place, sibling.expression) == (operand.place, operand.expression)
            and not sibling.moved
            for sibling in fault.operands
        )
    )


def _names_of(site: Site, written: cst.BaseExpression, operand: Operand) -> Iterator[str]:
    """Yield expressions for the device of an operand that is written at the operation."""
    tree = site.tree
    text = tree.code(written.with_changes(lpar=[], rpar=[]))
    if strip_blanks(operand.expression) != strip_blanks(text):
        element = element_at(
            written, strip_blanks(operand.expression).removeprefix(strip_blanks(text))
        )
        if isinstance(element, cst.Element) and is_plain(element.value):
            yield tree.code(element.value)
        return
    if isinstance(written, cst.NamedExpr):
        yield tree.code(written.target)
    base = _base(tree, written)
    # What holds a tensor there is at hand; another name may be of a list or a module.
    if base is not written and is_plain(base) and tree.code(base) in site.fault.at_hand:
        yield tree.code(base)
    if is_plain(written):
        yield text


def _base(tree: Tree, node: cst.BaseExpression) -> cst.BaseExpression:
    """Return the tensor below views and casts: ``x`` of ``x[..., 1:].float()``."""
    while True:
        if isinstance(node, cst.Subscript) or (
            isinstance(node, cst.Attribute) and node.attr.value in _VIEWS
        ):
            node = node.value
        elif (
            isinstance(node, cst.Call)
            and isinstance(node.func, cst.Attribute)
            and (node.func.attr.value not in _MOVES or _is_only_dtype(tree, node))
        ):
            node = node.func.value
        else:
            return node


def _is_only_dtype(tree: Tree, call: cst.Call) -> bool:
    """Return True if ``.to`` certainly changes only the dtype."""
    arguments = [tree.code(argument.value) for argument in call.args]
    return len(arguments) == 1 and bool(re.fullmatch(r"torch\.\w+|[\w.]+\.dtype", arguments[0]))
