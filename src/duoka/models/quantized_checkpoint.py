"""Models of checkpoints published quantized: their weights hold the stored numbers and scales.

Each format has a function that decodes the stored tensors of one weight, by part, to `StoredRows`.
The same function runs on tensors without data, made of the headers, when the model is built: so the
model has the shapes that are loaded, and a weight that can't be loaded exactly is refused then.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from duoka.checkpoint.headers import TensorInfo
from duoka.checkpoint.quantized import group_parts
from duoka.errors import ModelError

from .boxes import TensorCopy, whole_box
from .conversion import plan_tensors, published_tensors
from .quantization import (
    ExpertStack,
    StoredRows,
    empty_stored,
    has_interface,
    let_compute_in,
    takes_rows,
    use_implementation,
)
from .quantization.scaled import Mxfp4Weight, ScaledWeight
from .quantization.stacked import Int4Tiles
from .quantization.weights import BLOCK, GROUPS, ROWS, Nf4Weight, Scheme, require

Parts = Mapping[str, Tensor]
Settings = Mapping[str, Any]
Shape = Sequence[int]

_ATTRIBUTE = "_duoka_stored_weights"
_HINT = "use the 16-bit checkpoint with --quantize int4 or int8, or run this one in vLLM or SGLang"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the place in a word of each of eight rows
_SCHEMES: dict[type[Any], Scheme] = {Int4Tiles: "int4", Nf4Weight: "nf4"}  # need packages
_NF4_STATE = "weight.quant_state.bitsandbytes__nf4"


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The quantized weights of a checkpoint: names of tensors by part, and shapes, by weight."""

    settings: Settings
    parts: dict[str, dict[str, str]]
    shapes: Mapping[str, tuple[int, ...]]

    def shapes_in(self, tensors: Mapping[str, Any]) -> dict[str, Shape]:
        """Return the shapes of a checkpoint's weights, from descriptions of its tensors."""
        parts = group_parts(tensors) if self.parts else {name: {"weight": name} for name in tensors}
        return {
            name: self.shapes[name] if name in self.shapes else tensors[names["weight"]].shape
            for name, names in parts.items()
        }

    def decode(self, weight: str, tensors: Parts) -> StoredRows:
        """Decode the stored tensors of a weight, by part."""
        return _decode(weight, tensors, self.settings, self.shapes[weight])


def stored_weights(model: nn.Module) -> StoredWeights:
    """Return the quantized weights of a model's checkpoint; empty if it isn't quantized."""
    stored: StoredWeights = vars(model).get(_ATTRIBUTE) or StoredWeights({}, {}, {})
    return stored


def hold_as_stored(model: nn.Module, settings: Settings, tensors: Mapping[str, TensorInfo]) -> None:
    """Replace the weights that a checkpoint has quantized by weights of the same numbers."""
    parts = {n: names for n, names in group_parts(tensors).items() if names.keys() != {"weight"}}
    sketches = _sketch_weights(model, settings, parts, tensors)
    for kind in {rows.kind for rows in sketches.values()} & _SCHEMES.keys():
        require(_SCHEMES[kind])
    shapes = {name: rows.weight_shape for name, rows in sketches.items()}
    stored = StoredWeights(settings, parts, shapes)
    recipe = plan_tensors(model, stored.shapes_in(tensors))
    pieces_of: dict[str, list[TensorCopy]] = {}
    for piece in recipe.pieces:
        pieces_of.setdefault(piece.target, []).append(piece)
    for target, pieces in pieces_of.items():
        if any(piece.source in sketches for piece in pieces):
            _hold(model, target, pieces, sketches)
    permuted = {name for custom in recipe.customs for name in custom.sources} & parts.keys()
    if permuted:
        raise _refusal(min(permuted), "the model permutes its rows")
    for name, module in model.named_modules():
        stacks = [part for part in module.parameters(recurse=False) if part.ndim > 2]
        if len({isinstance(stack, ExpertStack) for stack in stacks}) > 1:
            raise _refusal(name, "only some of its stacks are quantized")
    vars(model)[_ATTRIBUTE] = stored


def _sketch_weights(
    model: nn.Module,
    settings: Settings,
    parts: Mapping[str, Mapping[str, str]],
    tensors: Mapping[str, TensorInfo],
) -> dict[str, StoredRows]:
    """Decode the weights without data; those of equal shapes and dtypes are one object."""
    # The shape of bitsandbytes' weights isn't in the headers.
    published = published_tensors(model) if settings["quant_method"] == "bitsandbytes" else {}
    sketches: dict[str, StoredRows] = {}
    decoded: dict[Any, StoredRows] = {}
    for weight, names in parts.items():
        shape = published[weight].shape if weight in published else ()
        sketch = {part: _sketch(tensors[name]) for part, name in names.items()}
        form = shape, *((part, tensor.dtype, tensor.shape) for part, tensor in sketch.items())
        if form not in decoded:
            decoded[form] = _decode(weight, sketch, settings, shape)
        sketches[weight] = decoded[form]
    return sketches


def _hold(
    model: nn.Module, target: str, pieces: Sequence[TensorCopy], sketches: Mapping[str, StoredRows]
) -> None:
    """Replace a parameter by a weight without data in the form of the stored weights."""
    owner, _, leaf = target.rpartition(".")
    module: Any = model.get_submodule(owner)
    parameter, is_stack = model.get_parameter(target), has_interface(module)
    if not is_stack and type(module).forward is not nn.Linear.forward:
        raise _refusal(target, f"{type(module).__name__} has a forward pass of its own")
    forms = {sketches[piece.source].form if piece.source in sketches else () for piece in pieces}
    if len(forms) > 1:
        raise _refusal(target, "its parts are quantized in different ways")
    is_transposed = is_stack and module.is_transposed
    tensor = empty_stored(sketches[pieces[0].source], parameter, is_transposed=is_transposed)
    matrix = tensor.expert(0) if isinstance(tensor, ExpertStack) else tensor
    for piece in pieces:
        rows = piece.target_box[-1 if is_transposed else -2]
        if not (_has_whole_rows(piece) and takes_rows(matrix, *rows)):
            raise _refusal(target, f"the model splits it at rows {rows[0]} and {rows[1]}")
    weight = nn.Parameter(tensor, requires_grad=False)
    let_compute_in(weight, parameter.dtype)
    module.register_parameter(leaf, weight)
    if is_stack:
        use_implementation(module)


def _has_whole_rows(piece: TensorCopy) -> bool:
    """Return True if a piece has whole rows of its source, or a whole stack."""
    box, whole = piece.source_box, whole_box(piece.source_shape)
    return box[-1] == whole[-1] if len(box) == 2 else box == whole


def _sketch(info: TensorInfo) -> Tensor:
    """Return a tensor without data as declared in a header."""
    assert info.shape is not None
    return torch.empty(info.shape, dtype=getattr(torch, str(info.dtype)), device="meta")


def _refusal(weight: str, reason: str) -> ModelError:
    """Return the error for a weight that can't be loaded as stored."""
    return ModelError(f"{weight} can't be loaded as quantized: {reason}", hint=_HINT)


def _decode(weight: str, parts: Parts, settings: Settings, shape: Shape) -> StoredRows:
    """Decode the stored tensors of one weight; refuse what can't be kept exactly."""
    decode = next((function for part, function in _DECODERS.items() if part in parts), _scaled)
    try:
        return decode(parts, settings, shape)
    except KeyError as error:
        part = str(error.args[0])
        name = weight + part if part.startswith("_") else weight.removesuffix("weight") + part
        raise ModelError(
            f"the checkpoint has no {name}, which is a part of a quantized weight",
            hint="download the complete weights of the model",
        ) from None
    except (ValueError, RuntimeError, IndexError) as error:
        raise _refusal(weight, str(error)) from None


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Return the numbers in the words of each row, the lowest bits first, as uint8."""
    if bits not in (4, 8):
        raise ValueError(f"its numbers have {bits} bits (supported: 4, 8)")
    packed = words.contiguous().view(torch.uint8)
    return packed if bits == 8 else torch.stack([packed & 0xF, packed >> 4], -1).flatten(-2)


def _integers(numbers: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> StoredRows:
    """Return rows of unsigned numbers; a zero point of None is half their range.

    `numbers` is [rows, columns], `scale` and `zero` are [rows, groups].
    """
    (rows, columns), groups = numbers.shape, scale.shape[-1]
    if len(scale) != rows or columns % groups:
        raise ValueError(f"it has scales {list(scale.shape)} for numbers {list(numbers.shape)}")
    if bits == 8 and zero is not None:
        raise ValueError("its 8-bit numbers have zero points")
    if bits == 8:
        return StoredRows(ScaledWeight, columns, ((numbers ^ 0x80).view(torch.int8), scale.float()))
    group = columns // groups
    if (group not in GROUPS and group % GROUPS[0]) or rows % ROWS:
        raise ValueError(
            f"it has {rows} rows in groups of {group} (supported: rows in {ROWS}s, groups of "
            f"{', '.join(map(str, GROUPS))})"
        )
    zero = torch.full_like(scale, 8) if zero is None else zero
    scales, zeros = (
        part.float().repeat_interleave(max(group // GROUPS[0], 1), 1) for part in (scale, zero)
    )
    return StoredRows(Int4Tiles, columns, (numbers, scales, zeros))


def _gptq(parts: Parts, settings: Settings, _: Shape) -> StoredRows:
    """Decode GPTQ: words along the columns; its first version stores zero points less 1."""
    words, zeros, scale = parts["qweight"], parts["qzeros"], parts["scales"].t()
    bits, groups = 32 * zeros.shape[1] // words.shape[1], scale.shape[1]
    version = str(settings.get("checkpoint_format") or settings.get("format") or "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise ValueError(f"its format is {version[:40]!r} (supported: gptq, gptq_v2)")
    numbers, index = _unpack(words.t(), bits), parts.get("g_idx")
    order = (torch.arange(numbers.shape[1]) * groups // numbers.shape[1]).int()
    is_permuted = index is not None and not index.is_meta and not index.equal(order)
    if groups > 1 and (settings.get("desc_act") or is_permuted):
        raise ValueError("its groups are in the order of activations (desc_act)")
    zero = _unpack(zeros, bits).t() + (version == "gptq") & 2**bits - 1
    is_symmetric = bits == 8 and settings.get("sym", True)
    if is_symmetric and not zero.is_meta and (zero != 0x80).any():
        raise ValueError("its 8-bit numbers have zero points")
    return _integers(numbers, scale, None if is_symmetric else zero, bits)


def _awq(parts: Parts, settings: Settings, shape: Shape) -> StoredRows:
    """Decode AWQ's layout "gemm": words along the rows, in an order of their own."""
    if settings["quant_method"] != "awq":
        return _gptq(parts, settings, shape)
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if version != "gemm":
        raise ValueError(f"its layout is {version[:40]!r} (supported: gemm)")
    numbers, zero = (
        _unpack(parts[part], 4).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1).t()
        for part in ("qweight", "qzeros")
    )
    return _integers(numbers, parts["scales"].t(), zero, 4)


def _packed(parts: Parts, settings: Settings, _: Shape) -> StoredRows:
    """Decode compressed-tensors' pack-quantized: words along the columns."""
    bits, *other_bits = {int(entry["num_bits"]) for entry in _weight_settings(settings)}
    if "weight_g_idx" in parts or other_bits:
        raise ValueError("its groups are in the order of activations, or layers differ in bits")
    numbers, zero = _unpack(parts["weight_packed"], bits), parts.get("weight_zero_point")
    zero = None if zero is None else _unpack(zero.t(), bits).t()
    return _integers(numbers, parts["weight_scale"], zero, bits)


def _weight_settings(settings: Settings) -> list[Mapping[str, Any]]:
    """Return the settings of weights in compressed-tensors' groups of layers."""
    groups = (settings.get("config_groups") or {}).values()
    formats = {str(entry.get("format") or settings.get("format")) for entry in groups}
    if unknown := formats.difference(_FORMATS):
        raise ValueError(f"its format is {unknown.pop()[:40]} (supported: {', '.join(_FORMATS)})")
    return [entry.get("weights") or {} for entry in groups]


def _scaled(parts: Parts, settings: Settings, _: Shape) -> StoredRows:
    """Decode 8-bit numbers with scales by block, group, row or tensor."""
    is_symmetric = all(entry.get("symmetric", True) for entry in _weight_settings(settings))
    if not is_symmetric or not parts.keys().isdisjoint({"weight_scale_2", "weight_global_scale"}):
        raise ValueError("it has zero points, or scales of scales")
    numbers = parts["weight"]
    scale = parts["weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"].float()
    if numbers.dtype not in (torch.int8, torch.float8_e4m3fn) or numbers.ndim != 2:
        raise ValueError(f"it is stored as {numbers.dtype} {list(numbers.shape)}")
    rows, columns = numbers.shape
    scale = scale.reshape(-1, 1) if scale.ndim < 2 else scale
    side, width = settings.get("weight_block_size") or (128, 128)
    height = {1: rows, rows: 1}.get(len(scale), side)
    groups = scale.shape[1]
    group = width if groups > 1 and height > 1 else columns // groups
    if -(-rows // height) != len(scale) or group * groups != columns:
        raise ValueError(f"it has scales {list(scale.shape)} for numbers {[rows, columns]}")
    return StoredRows(ScaledWeight, columns, (numbers, scale.repeat_interleave(height, 0)[:rows]))


def _llm_int8(parts: Parts, _: Settings, __: Shape) -> StoredRows:
    """Decode bitsandbytes' int8: the largest value of each row is 127."""
    return _scaled({"weight": parts["weight"], "weight_scale": parts["SCB"].float() / 127}, {}, ())


def _nf4(parts: Parts, _: Settings, shape: Shape) -> StoredRows:
    """Decode bitsandbytes' NF4, whose scales may be quantized in blocks themselves."""
    if _NF4_STATE.replace("nf4", "fp4") in parts:
        raise ValueError("its numbers are in bitsandbytes' FP4")
    (rows, columns), absmax, state = shape or (0, 0), parts["weight.absmax"], parts[_NF4_STATE]
    if columns % BLOCK or absmax.numel() * BLOCK != rows * columns:
        raise ValueError(f"its NF4 blocks aren't of {BLOCK} in a row")
    if absmax.dtype == torch.uint8:
        scales, steps = parts["weight.nested_absmax"], parts["weight.nested_quant_map"]
        facts = {} if state.is_meta else json.loads(bytes(state.tolist()))
        blocks = scales.repeat_interleave(facts.get("nested_blocksize", 256))[: absmax.numel()]
        absmax = steps[absmax.int()] * blocks + facts.get("nested_offset", 0)
    packed = parts["weight"].flatten().view(torch.uint8).view(rows, -1)
    return StoredRows(Nf4Weight, columns, (packed, absmax.view(rows, -1)))


def _mxfp4(parts: Parts, _: Settings, __: Shape) -> StoredRows:
    """Decode gpt-oss' stacks of experts in MXFP4: [experts, rows, groups, 16] bytes."""
    numbers, scale = parts["_blocks"].flatten(-2), parts["_scales"]
    return StoredRows(Mxfp4Weight, 2 * numbers.shape[-1], (numbers, scale))


_DECODERS = {
    "qweight": _awq,
    "weight_packed": _packed,
    "weight.absmax": _nf4,
    "SCB": _llm_int8,
    "_blocks": _mxfp4,
    "_scales": _mxfp4,
}
"""The function that decodes the weights with a part."""
