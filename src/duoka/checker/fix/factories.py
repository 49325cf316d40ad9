"""Tensors that are made on the wrong device: the call that makes them is told the right one."""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from duoka.report.check_report import Fault, Operand

from ..subject import Subject
from .device_exprs import anchors, lucky
from .edits import is_written_out, move, set_device
from .sources import SourceError, Sources
from .syntax import Edit, Tree, bound_before, evident_tensors, function_of

_FACTORIES = frozenset(
    {
        "arange", "asarray", "as_tensor", "bartlett_window", "blackman_window", "empty",
        "empty_strided", "eye", "full", "hamming_window", "hann_window", "linspace", "logspace",
        "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor",
        "tril_indices", "triu_indices", "zeros",
    }
)  # fmt: skip
_LIKE = frozenset(
    {
        "empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like",
        "zeros_like",
    }
)  # fmt: skip
_MOVES = frozenset({"cuda", "cpu", "to"})


def at_factory(
    tree: Tree, fault: Fault, operand: Operand, sources: Sources, subject: Subject | None
) -> Iterator[tuple[Edit, ...]]:
    """Make a tensor where it is needed, if it comes from a call that makes it out of nothing."""
    origin = operand.origin
    if origin is None or origin.kind != "operation" or origin.place is None:
        return
    try:
        maker = sources.tree(origin.place.file)
    except SourceError:
        return  # what can't be read can't be changed: the tensor is moved where it is used
    node = maker.find(origin.place)
    if not isinstance(node, cst.Call) or not isinstance(node.func, (cst.Attribute, cst.Name)):
        return
    for device in _devices(tree, maker, node, fault, subject):
        edit = _told(maker, node, device)
        if edit is not None:
            yield (edit,)


def _devices(
    tree: Tree, maker: Tree, node: cst.Call, fault: Fault, subject: Subject | None
) -> Iterator[str]:
    """Texts that name the right device where the call stands."""
    here = tree.find(fault.place)
    if here is None or maker is not tree or not _same_function(tree, here, node):
        for name in evident_tensors(maker, node)[:2]:
            yield f"{name}.device"
        return
    bound = bound_before(maker, node)
    read = {name.value for name in tree.inside(node, cst.Name)}
    for anchor in anchors(tree, node, fault, subject):
        if _root(anchor) in bound:
            yield anchor
    for anchor in lucky(tree, node, fault):
        # Which other tensor it should follow nobody knows; where it is used that is plain.
        if _root(anchor) in bound & read:
            yield anchor


def _root(text: str) -> str:
    return re.split(r"\W", text, maxsplit=1)[0]


def _same_function(tree: Tree, here: cst.CSTNode, node: cst.CSTNode) -> bool:
    function = function_of(tree, here)
    return function is not None and function is function_of(tree, node)


def _told(maker: Tree, node: cst.Call, device: str) -> Edit | None:
    """The edit that makes a call's result be on `device`."""
    assert isinstance(node.func, (cst.Attribute, cst.Name))
    name = node.func.attr.value if isinstance(node.func, cst.Attribute) else node.func.value
    if name in _MOVES:
        return _moved_there(maker, node, name, device)
    if isinstance(node.func, cst.Name) or not _is_torch(node.func.value):
        return None
    given = next(
        (each for each in node.args if each.keyword and each.keyword.value == "device"), None
    )
    if given is not None and not is_written_out(given.value):
        return None  # it follows another tensor on purpose
    if name in _FACTORIES or (name in _LIKE and given is not None):
        return set_device(maker, node, device)
    if _is_layer(node.func):
        return set_device(maker, node, device)
    if name == "from_numpy" or name.endswith("Tensor"):
        return move(maker, node, device)
    return None


def _is_layer(called: cst.BaseExpression) -> bool:
    """Whether a module of PyTorch's is made, such as ``nn.LayerNorm(width)``."""
    if not isinstance(called, cst.Attribute) or not called.attr.value[:1].isupper():
        return False
    held = called.value.attr if isinstance(called.value, cst.Attribute) else called.value
    return isinstance(held, cst.Name) and held.value == "nn"


def _moved_there(maker: Tree, node: cst.Call, name: str, device: str) -> Edit | None:
    """For ``.cuda()`` and ``.to("cuda")``; a ``.to`` that follows a tensor stays."""
    if name == "to" and not any(
        is_written_out(each.value)
        for each in node.args
        if each.keyword is None or each.keyword.value == "device"
    ):
        return None
    return move(maker, node, device)


def _is_torch(node: cst.BaseExpression) -> bool:
    """``torch``, or ``torch.cuda`` for its old types."""
    if isinstance(node, cst.Attribute):
        return _is_torch(node.value)
    return isinstance(node, cst.Name) and node.value in ("torch", "th", "nn")
