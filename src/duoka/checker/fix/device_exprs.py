"""Which expression names the device that an operand must come to.

The best one is the text of a tensor that is there already and costs nothing to write twice. Where
that tensor is the result of a call, something else at hand is on its device; where nothing is, the
result gets a name on a line before.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

import libcst as cst
from torch import nn

from duoka.report.check_report import Fault, Operand

from ..subject import Subject
from .syntax import Tree, all_names, folded, is_plain, root, statement_of

_KEEP_DEVICE = frozenset(
    {
        "abs", "add", "bfloat16", "bool", "chunk", "clamp", "clone", "contiguous", "cos", "detach",
        "div", "double", "exp", "expand", "expand_as", "float", "flatten", "gelu", "half", "int",
        "long", "masked_fill", "matmul", "mean", "mul", "narrow", "neg", "permute", "pow", "relu",
        "repeat", "reshape", "select", "sigmoid", "sin", "softmax", "split", "sqrt", "squeeze",
        "squeeze_", "sub", "sum", "swapaxes", "transpose", "t", "tril", "triu", "unbind",
        "unflatten", "unsqueeze", "view", "view_as",
    }
)  # fmt: skip
_VIEWS = ("T", "mT", "data", "grad")
_NO_TENSORS = frozenset({"torch", "F", "np", "math", "nn", "functional"})


def anchors(
    tree: Tree, node: cst.BaseExpression, fault: Fault, subject: Subject | None
) -> Iterator[str]:
    """Texts for the target of `fault` where `node` is evaluated, such as "logits.device".

    They name what is on the target as it is written at the operation, on every placement; the best
    first.
    """
    operands = [each for each in fault.operands if not each.moved and each.device == fault.target]
    texts: dict[str, None] = {}
    for operand in operands:
        there = tree.find(operand.place)
        if isinstance(there, cst.BaseExpression):
            texts |= dict.fromkeys(_names_of(tree, there, fault, operand))
            if isinstance(there, cst.Call):
                texts |= dict.fromkeys(_callee(tree, there, fault, subject))
    for operand in operands:
        texts |= dict.fromkeys(_by_origin(tree, node, fault, operand))
    yield from _usable(tree, node, texts)


def lucky(tree: Tree, node: cst.BaseExpression, fault: Fault) -> Iterator[str]:
    """Names in the function that were on the target, though on another placement they may not."""
    near = {tree.code(name) for name in tree.inside(node, cst.Name, cst.Attribute)}
    names = sorted(fault.at_hand, key=lambda text: (text not in near, text.startswith("self.")))
    yield from _usable(tree, node, names)


def _usable(tree: Tree, node: cst.BaseExpression, texts: Iterable[str]) -> Iterator[str]:
    late = _bound_late(tree, node)
    for text in texts:
        if not late & set(re.findall(r"\w+", text)) and folded(text) != folded(tree.code(node)):
            yield f"{text}.device"


def is_hidden(fault: Fault, operand: Operand) -> bool:
    """Whether an operand doesn't stand where it is said to, since one that stays stands there."""
    return operand.place is None or (
        operand.moved
        and folded(operand.expression) == folded(operand.place.text)
        and any(
            (each.place, each.expression) == (operand.place, operand.expression) and not each.moved
            for each in fault.operands
        )
    )


def _names_of(
    tree: Tree, there: cst.BaseExpression, fault: Fault, operand: Operand
) -> Iterator[str]:
    """Texts for the device of an operand that is written out at the operation."""
    text = tree.code(there.with_changes(lpar=[], rpar=[]))
    if folded(operand.expression) != folded(text):
        yield from _spelled_out(tree, there, folded(operand.expression).removeprefix(folded(text)))
        return
    if isinstance(there, cst.NamedExpr):
        yield tree.code(there.target)
    base = _base(there)
    if base is not there and is_plain(base) and root(base) not in _NO_TENSORS:
        name = tree.code(base)
        # What holds a tensor there is at hand; another name is of a list.
        unsure = isinstance(base, cst.Name) and (fault.at_hand or is_plain(there))
        if not unsure or name in fault.at_hand:
            yield name
    if is_plain(there):
        yield text
    if isinstance(base, (cst.BinaryOperation, cst.UnaryOperation)):
        yield from (name for name in _parts(tree, base) if name in fault.at_hand)
    if isinstance(base, cst.Call) and _is_plain_function(tree, base):
        given = [tree.code(each.value) for each in base.args]
        yield from (name for name in given if name in fault.at_hand)


def _spelled_out(tree: Tree, there: cst.BaseExpression, item: str) -> Iterator[str]:
    """One of several tensors in a list, if that is written out up to it."""
    index = re.fullmatch(r"\[(\d+)\]", item)
    elements = there.elements if isinstance(there, (cst.List, cst.Tuple)) else ()
    written = [each.value for each in takewhile(lambda e: isinstance(e, cst.Element), elements)]
    if index is not None and int(index[1]) < len(written) and is_plain(written[int(index[1])]):
        yield tree.code(written[int(index[1])])


def _is_plain_function(tree: Tree, call: cst.Call) -> bool:
    """Whether what is called is PyTorch's function, or one that the file defines: no module."""
    if isinstance(call.func, cst.Attribute):
        return root(call.func) in _NO_TENSORS
    return isinstance(call.func, cst.Name) and any(
        isinstance(each, cst.FunctionDef) and each.name.value == call.func.value
        for each in tree.module.body
    )


def _base(node: cst.BaseExpression) -> cst.BaseExpression:
    """What a view or the like is of: ``x`` of ``x[..., 1:].float()``."""
    while True:
        if isinstance(node, cst.Subscript) or (
            isinstance(node, cst.Attribute) and node.attr.value in _VIEWS
        ):
            node = node.value
        elif isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            method = node.func.attr.value
            if method not in _KEEP_DEVICE and not (method == "to" and _is_only_dtype(node.args)):
                return node
            node = node.func.value
        else:
            return node


def _is_only_dtype(args: Sequence[cst.Arg]) -> bool:
    """Whether ``.to`` surely changes nothing but the type."""
    [value] = [each.value for each in args] if len(args) == 1 else [None]
    if not isinstance(value, cst.Attribute):
        return False
    name = value.attr.value
    return name == "dtype" or (root(value) == "torch" and name.startswith(("float", "bfloat")))


def _parts(tree: Tree, node: cst.BaseExpression) -> Iterator[str]:
    """The names in a sum or product: any of them that isn't a number is where its result is."""
    for name in tree.inside(node, cst.Name, cst.Attribute):
        outer = tree.parent(name)
        if is_plain(name) and not isinstance(outer, (cst.Attribute, cst.Call, cst.Arg)):
            yield tree.code(name)


def _by_origin(
    tree: Tree, node: cst.BaseExpression, fault: Fault, operand: Operand
) -> Iterator[str]:
    """``self.weight`` for a parameter or table of the module whose method this is."""
    origin = operand.origin
    if origin is None or not fault.path or origin.kind not in ("parameter", "buffer", "attribute"):
        return
    module = fault.path[-1].module
    own = origin.name.removeprefix(f"{module}." if module else "")
    is_own = own != origin.name or not module
    is_text = re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", own)
    if is_own and is_text and "self" in all_names(tree, node):
        yield f"self.{own}"


def _callee(tree: Tree, call: cst.Call, fault: Fault, subject: Subject | None) -> Iterator[str]:
    """``self.proj.weight`` for the result of ``self.proj(x)``, when it has one itself."""
    if not is_plain(call.func):
        return
    called = tree.code(call.func)
    if f"{called}.weight" in fault.at_hand:
        yield f"{called}.weight"
    elif subject is not None and fault.path and root(call.func) == "self":
        names = called.split(".")[1:]
        try:
            module = subject.model.get_submodule(
                ".".join(filter(None, (fault.path[-1].module, *names)))
            )
        except AttributeError:
            return
        if isinstance(module._parameters.get("weight"), nn.Parameter):
            yield f"{called}.weight"
        elif not any(True for _ in (*module.parameters(), *module.buffers())):
            # A dropout or an activation: its result is where its argument is.
            yield from (
                text for each in call.args if (text := tree.code(each.value)) in fault.at_hand
            )


def _bound_late(tree: Tree, node: cst.BaseExpression) -> set[str]:
    """The names that the statement around `node` binds after `node` is evaluated."""
    statement = statement_of(tree, node)
    if statement is None:
        return set()
    start = tree.span(node)[:2]
    return {
        name.value
        for walrus in tree.inside(statement, cst.NamedExpr)
        if tree.span(walrus)[:2] >= start
        for name in tree.inside(walrus.target, cst.Name)
    }
