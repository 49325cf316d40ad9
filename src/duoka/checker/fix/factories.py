"""Fixes for tensors created on the wrong device: set the device in the creating call."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from duoka.report.check_report import Operand

from .device_exprs import lucky_devices, target_devices
from .edits import device_keyword, is_literal_device, move, set_device
from .sources import Site
from .syntax import Edit, Tree, last_name, words_of

_FACTORIES = frozenset(
    {
        "arange", "asarray", "as_tensor", "bartlett_window", "blackman_window", "empty",
        "empty_strided", "eye", "full", "hamming_window", "hann_window", "linspace", "logspace",
        "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor",
        "tril_indices", "triu_indices", "zeros",
    }
)  # fmt: skip


def make_on_target(site: Site, operand: Operand) -> Iterator[tuple[Edit, ...]]:
    """Yield edits to create an operand on the target device, if created in the same function.

    In another function no name is known that is on the target device.
    """
    tree, origin = site.tree, operand.origin
    if origin is None or origin.kind != "operation" or origin.place is None:
        return
    used, node = tree.find_node(site.fault.place), tree.find_node(origin.place)
    if origin.place.file != tree.file or used is None or not isinstance(node, ast.Call):
        return
    function = tree.function_of(used)
    if function is None or function is not tree.function_of(node):
        return
    earlier_names = tree.names_before(node)
    near = earlier_names & words_of(tree.code(node))
    devices = [text for text in target_devices(site, node) if _root(text) in earlier_names]
    devices += [text for text in lucky_devices(site, node) if _root(text) in near]
    for device in devices:
        edit = _create_on(tree, node, device)
        if edit is not None:
            yield (edit,)


def _root(text: str) -> str:
    """Return the first name of an expression: "x" of "x.weight.device"."""
    return re.split(r"\W", text, maxsplit=1)[0]


def _create_on(tree: Tree, node: ast.Call, device: str) -> Edit | None:
    """Return the edit that creates the result of a call on `device`.

    None if the call isn't known to take a device, or takes the device of another tensor.
    """
    name = last_name(node.func)
    named = device_keyword(node)
    is_fixed = any(map(is_literal_device, [*node.args, *([] if named is None else [named])]))
    if name in ("cuda", "cpu") or (name == "to" and is_fixed):
        return move(tree, node, device)  # a `.to(x.device)` stays as it is
    if not isinstance(node.func, ast.Attribute) or not _is_torch(node.func.value):
        return None
    if named is not None and not is_literal_device(named):
        return None  # the device of another tensor, given on purpose
    is_layer = name[:1].isupper() and last_name(node.func.value) == "nn"
    if name in _FACTORIES or named is not None or is_layer:
        return set_device(tree, node, device)
    return None


def _is_torch(node: ast.expr) -> bool:
    """Return True for ``torch`` or ``nn``, or a submodule, such as ``torch.cuda``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in ("torch", "th", "nn")
