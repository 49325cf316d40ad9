"""Which expression names the device that an operand must come to.

The best one is the text of a tensor that is there already and costs nothing to write twice. Where
that tensor is the result of a call, it gets a name on a line before (see `edits.name_first`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from duoka.report.check_report import Fault, Operand

from .sources import Site
from .syntax import Tree, element_at, folded, is_plain

_VIEWS = ("T", "mT", "data", "grad")
_MOVES = ("to", "cuda", "cpu")


def target_devices(site: Site, node: cst.BaseExpression) -> Iterator[str]:
    """Texts for the target of the fault where `node` is evaluated, such as "logits.device".

    They name what is on the target as it is written at the operation, on every placement; the best
    first.
    """
    texts: dict[str, None] = {}
    for operand, written in staying_operands(site):
        texts |= dict.fromkeys(_names_of(site, written, operand))
        if isinstance(written, cst.Call):
            # ``self.proj.weight`` for the result of ``self.proj(x)``, where that is at hand.
            weight = f"{site.tree.code(written.func)}.weight"
            texts |= {weight: None} if weight in site.fault.at_hand else {}
    own_text = folded(site.tree.code(node))
    yield from (f"{text}.device" for text in texts if folded(text) != own_text)


def staying_operands(site: Site) -> Iterator[tuple[Operand, cst.BaseExpression]]:
    """The operands that are on the target of the fault, with the expressions that give them."""
    for operand in site.fault.operands:
        node = site.tree.find(operand.place)
        stays = not operand.moved and operand.device == site.fault.target
        if stays and isinstance(node, cst.BaseExpression):
            yield operand, node


def lucky_devices(site: Site, node: cst.BaseExpression) -> Iterator[str]:
    """Names in the function that were on the target, though on another placement they may not."""
    tree, at_hand = site.tree, site.fault.at_hand
    near = {tree.code(name) for name in tree.inside(node, cst.Name, cst.Attribute)}
    for text in sorted(at_hand, key=lambda text: (text not in near, text.startswith("self."))):
        if folded(text) != folded(tree.code(node)):
            yield f"{text}.device"


def is_hidden(fault: Fault, operand: Operand) -> bool:
    """Whether an operand doesn't stand where it is said to, since one that stays stands there."""
    return operand.place is None or (
        operand.moved
        and folded(operand.expression) == folded(operand.place.text)
        and any(
            (other.place, other.expression) == (operand.place, operand.expression)
            and not other.moved
            for other in fault.operands
        )
    )


def _names_of(site: Site, written: cst.BaseExpression, operand: Operand) -> Iterator[str]:
    """Texts for the device of an operand that is written out at the operation."""
    tree = site.tree
    text = tree.code(written.with_changes(lpar=[], rpar=[]))
    if folded(operand.expression) != folded(text):
        element = element_at(written, folded(operand.expression).removeprefix(folded(text)))
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
    """What a view or the like is of: ``x`` of ``x[..., 1:].float()``."""
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
    """Whether ``.to`` surely changes nothing but the type."""
    arguments = [tree.code(argument.value) for argument in call.args]
    return len(arguments) == 1 and bool(re.fullmatch(r"torch\.\w+|[\w.]+\.dtype", arguments[0]))
