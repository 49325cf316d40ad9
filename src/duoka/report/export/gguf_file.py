"""GGUF files: the weights of a file on each device of a plan under llama.cpp.

Sources: the package gguf 0.19.0 (``gguf/gguf_reader.py``); the parts of a split file
(llama.cpp's src/llama.cpp, `llama_split_path`; src/llama-model-loader.cpp: the first part is given,
and every part has its number); the architecture of a class (conversion/*.py, collected in
`gguf_architectures.json`); all of llama.cpp as in llama-cpp-python 0.3.36.

``block_count`` includes ``nextn_predict_layers`` layers for multi-token prediction at the end,
whose weights llama.cpp doesn't load without ``--spec-type draft-mtp`` (src/models, ``TENSOR_SKIP``;
common/common.cpp, ``load_mtp``).
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from duoka.base.files import open_regular, reading
from duoka.base.requirements import require_package
from duoka.base.units import format_bytes
from duoka.errors import FormatError
from duoka.planner.plan import Plan

from . import common
from .host_experts import format_layers, host_layers
from .stages import LayerPipeline
from .text import export_error

T = TypeVar("T")
LLAMA_CPP = "llama.cpp"
HOST = "host"
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""llama.cpp's pattern of tensors of experts (common/common.h, ``LLM_FFN_EXPS_REGEX``)."""

_MAGIC = b"GGUF"
_FURTHER = "nextn_predict_layers"
_ARRAY = struct.Struct("<IQ")  # type and number of items
_LENGTH = struct.Struct("<Q")
_LAYER = re.compile(r"(?:\w+\.)?blk\.(\d+)\.")
_EXPERTS = re.compile(r"blk\.(\d+)" + EXPERTS)
_AGAIN = "download or convert the file again"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """The model in a GGUF file, with the bytes of each tensor.

    `num_layers` excludes layers for multi-token prediction.
    """

    path: Path
    architecture: str
    num_layers: int
    tensors: dict[str, int]

    @property
    def expert_layers(self) -> list[int]:
        """The layers with experts, in ascending order, without multi-token prediction."""
        numbers = {int(match[1]) for name in self.tensors if (match := _EXPERTS.match(name))}
        return sorted(number for number in numbers if number < self.num_layers)


def read_gguf(path: Path) -> GgufFile:
    """Read the names and sizes of all tensors; FormatError if the file isn't whole."""
    first_part = _open(path)
    count = _value(path, first_part, "split.count", int, 1)
    ending = f"-00001-of-{count:05}.gguf"
    if count > 1 and not path.name.endswith(ending):
        hint = f"give the first part, whose name ends with {ending}"
        raise FormatError(f"{path} is not the first of the {count} parts of its file", hint=hint)
    prefix = path.name.removesuffix(ending)
    names = [f"{prefix}-{number:05}-of-{count:05}.gguf" for number in range(2, count + 1)]
    parts = [first_part, *(_open(path.with_name(name)) for name in names)]
    architecture = _value(path, first_part, "general.architecture", str)
    blocks = _value(path, first_part, f"{architecture}.block_count", int)
    return GgufFile(
        path=path,
        architecture=architecture,
        num_layers=blocks - _value(path, first_part, f"{architecture}.{_FURTHER}", int, 0),
        tensors={tensor.name: int(tensor.n_bytes) for part in parts for tensor in part.tensors},
    )


def refuse_other_model(file: GgufFile, plan: Plan, pipeline: LayerPipeline) -> None:
    """Raise FormatError if the file has another architecture, other layers or other experts."""
    expected = architecture_of(plan)
    missing = set(host_layers(plan)) - set(file.expert_layers)
    if expected not in (None, file.architecture):
        why = f"its architecture is {file.architecture}; that of {plan.model} is {expected}"
    elif pipeline.layers and file.num_layers != pipeline.num_layers:
        why = f"it has {file.num_layers} layers; the plan has {pipeline.num_layers}"
    elif missing:
        why = f"it has no experts in layer {format_layers(sorted(missing))}"
    else:
        return
    hint = "use a GGUF file of the plan's model, or plan the model of the file"
    raise FormatError(f"{file.path} has another model: {why}", hint=hint)


def architecture_of(plan: Plan) -> str | None:
    """Return the name of the architecture in GGUF files of the plan's class; None if unknown."""
    table = Path(__file__).with_name("gguf_architectures.json").read_text(encoding="utf-8")
    architecture: str | None = json.loads(table)["architectures"].get(common.published_class(plan))
    return architecture


def weight_bytes(file: GgufFile, plan: Plan, pipeline: LayerPipeline) -> dict[str, int]:
    """Return the bytes of the file's weights on the device of each stage, then on the host.

    The input embedding stays on the host. A file without an output tensor has a tied head, which
    llama.cpp copies to the last device.
    """
    places = [stage.device.name for stage in pipeline.stages for _ in range(stage.num_layers)]
    hosted = set(host_layers(plan))
    sizes = dict.fromkeys([*places, HOST], 0)
    for name, num_bytes in file.tensors.items():
        place = _place(name, file, places, hosted)
        if place is not None:
            sizes[place] += num_bytes
    if "output.weight" not in file.tensors:
        sizes[places[-1]] += file.tensors.get("token_embd.weight", 0)
    return sizes


def weight_notes(file: GgufFile, plan: Plan, pipeline: LayerPipeline) -> Iterator[str]:
    """Yield the bytes of the file's weights; UsageError if they exceed the budget of a GPU."""
    sizes = weight_bytes(file, plan, pipeline)
    for number, stage in enumerate(pipeline.stages):
        name, budget = stage.device.name, stage.device.budget_bytes
        size, forecast = format_bytes(sizes[name]), stage.forecast
        if sizes[name] > budget:
            why = f"{file.path} has {size} of weights for {name}, whose budget is"
            hint = "use a file with fewer bits per weight, or plan with more or larger GPUs"
            raise export_error(LLAMA_CPP, f"{why} {format_bytes(budget)}", hint)
        rest = format_bytes(forecast.kv_cache_bytes + forecast.activation_bytes)
        yield (
            f"CUDA{number} ({name}): {size} of weights in the file; "
            f"{format_bytes(budget - sizes[name])} of the budget are left for KV cache and "
            f"activations, for which the plan forecasts {rest}."
        )
    yield f"Host: {format_bytes(sizes[HOST])} of weights in the file."
    if architecture_of(plan) is None:
        yield f"NOTE: {plan.model} is not compared with the file's model, {file.architecture}."


def _place(name: str, file: GgufFile, places: Sequence[str], hosted: set[int]) -> str | None:
    """Return the device of a tensor; None for a tensor that llama.cpp doesn't load."""
    match = _LAYER.match(name)
    if match is None:
        return places[-1] if name.startswith("output") else HOST
    layer = int(match[1])
    if layer >= file.num_layers:
        return None
    return HOST if layer in hosted and _EXPERTS.match(name) else places[min(layer, len(places) - 1)]


def check_gguf(path: Path) -> None:
    """Raise FormatError for another file than GGUF, UsageError if the package gguf is missing."""
    hint = "give the path of a GGUF file"
    with reading(f"the GGUF file {path}", hint, FormatError), open_regular(path) as file:
        start = file.read(len(_MAGIC))
    if start != _MAGIC:
        why = f"it begins with {start!r}; expected {_MAGIC!r}"
        raise FormatError(f"{path} is not a GGUF file: {why}", hint=hint)
    require_package("gguf", "GGUF files need")


def _open(path: Path) -> Any:
    """Open one part; FormatError if it is missing, damaged or not a GGUF file."""
    check_gguf(path)
    with _parsing(path):
        return _header_reader()(path)


def _header_reader() -> Any:
    """Return gguf's class of readers without items of arrays: a vocabulary takes it 20 seconds."""
    from gguf import GGUFReader, GGUFValueType

    base: Any = GGUFReader

    def field_parts(reader: Any, start: int, value_type: int) -> Any:
        is_array = value_type == GGUFValueType.ARRAY and reader.byte_order == "I"
        item_type, count = _ARRAY.unpack_from(reader.data, start) if is_array else (None, 0)
        stop = start + _ARRAY.size
        if item_type == GGUFValueType.STRING:
            for _ in range(count):
                stop += _LENGTH.size + _LENGTH.unpack_from(reader.data, stop)[0]
        elif item_type in base.gguf_scalar_to_np:
            stop += count * base.gguf_scalar_to_np[item_type]().itemsize
        else:
            return base._get_field_parts(reader, start, value_type)
        return stop - start, [], [], [GGUFValueType.ARRAY]

    return type("HeaderReader", (base,), {"_get_field_parts": field_parts})


@contextmanager
def _parsing(path: Path) -> Iterator[None]:
    """Raise FormatError for the errors of the package gguf on a file that isn't whole."""
    try:
        yield
    except (ValueError, LookupError, OverflowError, MemoryError, struct.error) as error:
        raise FormatError(f"{path} is truncated or damaged: {error}", hint=_AGAIN) from error


def _value(path: Path, part: Any, key: str, kind: type[T], default: T | None = None) -> T:
    """Return a value of a file's metadata; FormatError if it is missing or of another type."""
    field = part.get_field(key)
    with _parsing(path):
        value = default if field is None else field.contents()
    if not isinstance(value, kind):
        raise FormatError(f"{path} has {key} = {value!r}; expected {kind.__name__}", hint=_AGAIN)
    return value
