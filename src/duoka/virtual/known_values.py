"""Known values on a virtual GPU without data, whose tensors are on the meta device.

Model code reads values: masks, positions, lengths. So small integer and boolean tensors, and small
results computed from known values alone, keep their numbers in host memory, while weights have
none. A tensor is *known* if its backing is a CPU tensor, *unknown* if it is a meta tensor. The
result of an operation on both kinds is unknown.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from duoka.base.model_code import is_model_code
from duoka.errors import VirtualDeviceError

from .world import thread_state

if TYPE_CHECKING:
    from .tensor import VirtualTensor


KNOWN_LIMIT_BYTES = 16 * 2**20
"""The largest tensor whose values are kept on a GPU without data."""

GROWN_LIMIT_BYTES = 2**20
"""The same for a result with more elements than any of its operands.

Models read positions and padding masks, which may be long. They don't read the attention masks
broadcast from these, which are far larger.
"""

REAL_BYTES = 2**30
"""The most bytes of parameters with which `with_values` computes real numbers."""

KNOWN_CONSTANT_BYTES = 2**20
"""The largest floating-point tensor of ones, zeros or another constant whose values are kept."""

T = TypeVar("T")
_aten = torch.ops.aten
# The result's shape depends on values, or the result is a value: meta kernels can't run these.
_NEEDS_VALUES = {_aten.repeat_interleave.Tensor} | {
    getattr(_aten, name).default
    for name in (
        *("nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"),
        *("equal", "_local_scalar_dense"),
    )
}
_MASK_DTYPES = (torch.bool, torch.uint8)
# Operators whose result may exceed the bound of `_is_small`: shape-inferred first, then computed.
_GROW = frozenset({"repeat", "constant_pad_nd", "tile", "one_hot", "_pad_enum"})
# Results on meta tensors are inferred once for each combination of shapes: layers repeat the same
# calls, and PyTorch's shape rules are slow Python. Not cached are writes, which may resize their
# target, and operators whose result shares memory with an argument.
_MOST_CALLS = 2**14
_PLAIN = frozenset({str, torch.dtype, torch.device, torch.layout, torch.memory_format})
_results: dict[Any, Any] = {}
_MASKED_WRITES = frozenset({"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"})
_INDEXING = _MASKED_WRITES | {"index", "_unsafe_index"}


class UnknownValueError(VirtualDeviceError):
    """Raised where code reads an unknown value on a GPU without data."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message, hint='use virtual GPUs with data="cpu", which compute real numbers'
        )


def unknown_value(what: str) -> UnknownValueError:
    """Build the error for a read of an unknown value, with the line of the model's code."""
    file, line = caller()
    return UnknownValueError(
        f"{what} depends on values that a virtual GPU with meta data doesn't have ({file}:{line})"
    )


def caller() -> tuple[str, int]:
    """Return file and line of the innermost frame of model code; "unknown" and 0 without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_model_code(frame.f_code):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return "unknown", 0


def keeps_values(dtype: torch.dtype, num_elements: int) -> bool:
    """Return True if a new tensor keeps its values on a GPU without data.

    These are integers and booleans up to `KNOWN_LIMIT_BYTES`, and tensors of a single number.
    """
    if num_elements * dtype.itemsize > KNOWN_LIMIT_BYTES:
        return False
    return num_elements == 1 or not (dtype.is_floating_point or dtype.is_complex)


def keeps_constant(dtype: torch.dtype, num_elements: int) -> bool:
    """Return True if a new tensor of one constant keeps its values: masks are made like this."""
    num_bytes = num_elements * dtype.itemsize
    return num_bytes <= KNOWN_CONSTANT_BYTES or keeps_values(dtype, num_elements)


def current(tensor: VirtualTensor) -> torch.Tensor:
    """Return a tensor's meta backing, for a storage overwritten by unknown values.

    A backing on the CPU, which is outdated, is replaced first.
    """
    unknown = tensor.block.unknown
    assert unknown is not None
    if not tensor.backing.is_meta:
        tensor.backing = _meta_view(unknown, tensor.backing)
    return tensor.backing


def forget(tensor: VirtualTensor) -> None:
    """Make a known tensor unknown, together with all views of its storage."""
    # Unknown is a property of the storage, since views share its numbers. Example: v = a[1:], then
    # `a` is filled with unknown values: the block is marked, `a` gets a meta backing now, and `v`
    # gets its own when an operator next takes it (`current`).
    if tensor.block.unknown is None and not tensor.backing.is_meta:
        tensor.block.forget()
        current(tensor)


# Example: meta weights, and a prompt of 8 tokens of which 6 are no padding, [1, 8]:
#
#   mask = input_ids != pad         known with known        known: bool [1, 8]
#   mask.all().item()               a read of known         False
#   hidden = embedding(input_ids)   known with unknown      unknown: [1, 8, hidden_size]
#   hidden[mask]                    unknown, known mask     unknown: [6, hidden_size]
#   hidden.max().item()             a read of unknown       UnknownValueError, with the model's line
#
# operands          shape depends on values        result
# all known         any                            computed, if small; else unknown
# some unknown      no   (add, matmul, softmax)    shape alone, by PyTorch's meta kernels
# some unknown      yes  (nonzero, item)           UnknownValueError
# known mask        x[mask] with unknown x         shape alone: the mask's positions are known
def execute(func: Any, args: list[Any], kwargs: dict[str, Any], *, writes: bool = False) -> Any:
    """Run an operator on backing tensors: compute if all are known, else infer shapes alone.

    `writes` is True for an operator that writes to an argument: it runs always, and uncached.
    """
    # With some unknown operands the shape must not depend on their values. Indexing by a known mask
    # is allowed: the mask is replaced by the positions of its True elements.
    num_known, num_unknown = count(args, kwargs)
    if num_unknown == 0:
        return func(*args, **kwargs) if writes else _evaluate(func, args, kwargs)
    if func in _NEEDS_VALUES:
        raise unknown_value(str(func))
    name = func.overloadpacket.__name__
    if name in _INDEXING:
        masks = [i for i in _tensors(args[1:2]) if i.is_meta and i.dtype in _MASK_DTYPES]
        if name in _MASKED_WRITES and masks:
            # An unknown mask leaves the written elements unknown, but not the shape.
            return args[0] if writes else torch.empty_like(args[0], device="meta")
        args = [args[0], _positions(args[1]), *args[2:]]
    if num_known or name in _INDEXING:
        args = without_values(args)
        kwargs = {key: without_values(value) for key, value in kwargs.items()}
    try:
        return func(*args, **kwargs) if writes else _infer_shapes(func, args, kwargs)
    except NotImplementedError as error:
        if name in _INDEXING:
            raise unknown_value(f"{func} with a mask") from error
        raise VirtualDeviceError(
            f"{func} can't run on a virtual GPU with meta data: PyTorch has no shape rule for it",
            hint='use virtual GPUs with data="cpu", or another implementation of this layer',
        ) from error


def even_choice(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator; `topk` of unknown scores returns known indices, every candidate in turn.

    An index with an unknown mask selects every element, as a mask without padding does.
    """
    if func is _aten.index.Tensor:
        args = [args[0], [_select_all(index) for index in args[1]]]
    result = execute(func, args, kwargs)
    if func is not _aten.topk.default or not args[0].is_meta:
        return result
    values, indices = result
    if not keeps_values(indices.dtype, indices.numel()):
        return result
    # Scores [4 tokens, 8 experts] and k = 2 give the experts [[0, 1], [2, 3], [4, 5], [6, 7]].
    dim = args[2] if len(args) > 2 else kwargs.get("dim", -1)
    turns = torch.arange(indices.numel()).reshape(indices.movedim(dim, -1).shape)
    return values, turns.remainder(args[0].shape[dim]).movedim(-1, dim).contiguous()


def _select_all(index: torch.Tensor | None) -> torch.Tensor | None:
    """Replace an unknown mask by one that is True everywhere."""
    if index is None or not index.is_meta or index.dtype not in _MASK_DTYPES:
        return index
    return torch.ones(index.shape, dtype=torch.bool)


def with_values(run: Callable[[str], T], num_bytes: Callable[[], int]) -> T:
    """Call `run` with the cheapest kind of data on virtual GPUs that answers all reads of values.

    First with "meta"; if code reads unknown values, with "even", which makes choices of experts
    known; if that isn't enough either, and the parameters take at most `REAL_BYTES` (`num_bytes`),
    with "cpu", which computes real numbers.
    """
    with suppress(UnknownValueError):
        return run("meta")
    try:
        return run("even")
    except UnknownValueError:
        if num_bytes() > REAL_BYTES:
            raise
    return run("cpu")


def unknown_numbers_as(number: float) -> AbstractContextManager[None]:
    """Return `number` from reads of unknown floating-point values in this thread, in the scope."""
    return thread_state(unknown_number=number)


def count(args: list[Any], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Count the known and the unknown tensors of a call."""
    num_known = num_unknown = 0
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            if value.is_meta:
                num_unknown += 1
            else:
                num_known += 1
        elif type(value) is list and not (value and type(value[0]) is int):
            inner_known, inner_unknown = count(value, {})
            num_known += inner_known
            num_unknown += inner_unknown
    return num_known, num_unknown


def _evaluate(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Compute a call on known operands; a result too large to keep is only shape-inferred."""
    if func in _NEEDS_VALUES or func.is_view or _is_small(func, args):
        return func(*args, **kwargs)
    shapes = without_values(args), {key: without_values(value) for key, value in kwargs.items()}
    try:
        shaped = _infer_shapes(func, *shapes)
    except (NotImplementedError, RuntimeError):
        return func(*args, **kwargs)
    results = shaped if isinstance(shaped, (list, tuple)) else (shaped,)
    largest = max((item.numel() for item in _tensors(args)), default=0)
    for tensor in _tensors(results):
        limit = KNOWN_LIMIT_BYTES if tensor.numel() <= largest else GROWN_LIMIT_BYTES
        if tensor.numel() * tensor.element_size() > limit:
            return shaped
    return func(*args, **kwargs)


def _is_small(func: Any, args: list[Any]) -> bool:
    """Return True if the result has at most `GROWN_LIMIT_BYTES`, without inferring its shape.

    The bound is the product of the operands' sizes, which no broadcast or matrix product exceeds.
    """
    if func.overloadpacket.__name__ in _GROW:
        return False
    bound = 8
    for tensor in _tensors(args):
        bound *= max(1, tensor.numel())
    return bound <= GROWN_LIMIT_BYTES


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments or results, and in lists among them."""
    for value in values:
        for item in value if type(value) is list else (value,):
            if isinstance(item, torch.Tensor):
                yield item


def without_values(value: Any) -> Any:
    """Return an argument with the tensors in it replaced by meta tensors of their geometry."""
    if isinstance(value, torch.Tensor):
        if value.is_meta:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if type(value) is list:
        return [without_values(item) for item in value]
    return value


def _meta_view(storage_of: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor with the geometry of `view`, on the storage of `storage_of`."""
    view_on_meta = torch.empty(0, dtype=view.dtype, device="meta")
    storage = storage_of.untyped_storage()
    view_on_meta.set_(storage, view.storage_offset(), view.shape, view.stride())
    return view_on_meta


def _positions(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Replace known masks among indices by the positions of their True elements."""
    positions: list[torch.Tensor | None] = []
    for index in indices:
        is_known_mask = index is not None and not index.is_meta and index.dtype in _MASK_DTYPES
        positions += (
            index.nonzero(as_tuple=True) if index is not None and is_known_mask else [index]
        )
    return positions


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Infer the shape of grouped matrix products; PyTorch's own rule supports only bfloat16.

    left [tokens, in] or [groups, tokens, in]; right [groups, in, out] or [in, out].
    """
    rows: tuple[int, ...] = left.shape[1:2] if right.dim() == 2 else left.shape[:-1]
    if left.dim() == 2 and right.dim() == 2:
        assert offs is not None, "groups of two matrices are given by offsets"
        rows = (offs.shape[0], left.shape[0])
    return left.new_empty((*rows, right.shape[-1]), dtype=out_dtype or left.dtype)


# Shape rules used instead of PyTorch's own. None marks the operators that aren't cached: results
# share an operand's memory (``_unsafe_view``) or aren't tensors.
_rules: dict[Any, Any] = {torch.ops.aten._grouped_mm.default: _grouped_mm}


class _Uncacheable(Exception):
    """Raised for a call that can't be cached by its shapes and rebuilt."""


def _infer_shapes(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator on meta tensors, or rebuild the results of an identical earlier call."""
    rule = _rules.get(func, func)
    if rule is None:
        return func(*args, **kwargs)
    try:
        key = (
            rule,
            tuple([_key_of(value) for value in args]),
            tuple([(name, _key_of(value)) for name, value in kwargs.items()]),
        )
    except _Uncacheable:
        return rule(*args, **kwargs)
    cached_recipe = _results.get(key)
    if cached_recipe is not None:
        return _rebuild(cached_recipe)
    result = rule(*args, **kwargs)
    try:
        recipe = _recipe(result, args)
    except _Uncacheable:
        _rules[func] = None
        return result
    if len(_results) >= _MOST_CALLS:
        _results.clear()
    _results[key] = recipe
    return result


def _key_of(value: Any) -> Any:
    """Return an argument as part of a cache key: tensors by shape, strides and dtype."""
    kind = type(value)
    if kind is torch.Tensor:
        return value.shape, value.stride(), value.dtype
    if kind is list or kind is tuple:
        return tuple([_key_of(item) for item in value])
    if kind is int or kind is float or kind is bool:
        # 1, 1.0 and True are one key otherwise.
        return kind, value
    if value is None or kind in _PLAIN:
        return value
    raise _Uncacheable


# The recipe of a tensor is (shape, stride, dtype), that of several results (type, recipes). An
# operator whose result shares memory with an argument has none: rebuilt as an empty tensor, a view
# would lose its storage, on which the accounting is based.
def _recipe(result: Any, args: list[Any]) -> Any:
    """Describe a result for `_rebuild`; raise `_Uncacheable` if that is impossible."""
    if type(result) is torch.Tensor:
        storage = result.untyped_storage()._cdata
        if any(_shares_storage(value, storage) for value in args):
            raise _Uncacheable
        return result.shape, result.stride(), result.dtype
    if type(result) in (tuple, list):
        return type(result), [_recipe(item, args) for item in result]
    raise _Uncacheable


def _shares_storage(value: Any, storage: int) -> bool:
    if type(value) is list or type(value) is tuple:
        return any(_shares_storage(item, storage) for item in value)
    return type(value) is torch.Tensor and value.untyped_storage()._cdata == storage


def _rebuild(recipe: Any) -> Any:
    """Make new meta tensors by a recipe."""
    if len(recipe) == 2:
        kind, items = recipe
        return kind([_rebuild(item) for item in items])
    shape, stride, dtype = recipe
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
