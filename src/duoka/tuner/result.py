"""Results of training: an adapter in peft's format, or a checkpoint as models are published.

Neither needs the model in memory: trained parameters are read from the run's last training
checkpoint, all others from the published files, a file's tensors at a time. A directory gets its
name when its content is on the disk.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GlmConfig

from duoka.base.files import set_new_mode, whole_directory, write_whole
from duoka.base.progress import say
from duoka.checkpoint.architecture import CHATGLM
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.checkpoint.quantized import method_of
from duoka.errors import LoadError, UsageError
from duoka.forecast.workload import Workload
from duoka.models.boxes import TensorCopy
from duoka.models.build import resolve
from duoka.models.conversion import Recipe, plan_tensors
from duoka.models.from_checkpoint import build_model, tokenizer_of
from duoka.models.lora import LoraAdapter, published_form, put_adapter
from duoka.models.text.prompts import ChatGLM3Format, GLM4Format, chat_format
from duoka.runtime.load.sources import Reader, Source, list_sources

from .settings import KeyNames
from .write_errors import name_write_errors

_ROOM = "free disk space, get the permission, or use another directory"
_SHARD_BYTES = 5 * 10**9
_WEIGHTS = (".safetensors", ".bin", ".index.json")

# A chat without tools, as in `prompts`: its beginning, and the text after a role.
_TEMPLATE = (
    "BEGIN{% for message in messages %}<|{{ message['role'] }}|>ROLE{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_AROUND_ROLES: dict[type, tuple[str, str]] = {
    ChatGLM3Format: ("[gMASK]sop", "\n "),
    GLM4Format: ("[gMASK]<sop>", "\n"),
}


def write_adapter(
    directory: Path, adapter: LoraAdapter, base: Checkpoint, *, names: KeyNames = "native"
) -> None:
    """Write an adapter, in native form, in peft's format into a new directory.

    Modules have the names of transformers' class, or the original ones of the ChatGLM family's
    published code, used by vLLM too; the two differ for this family only. After a MachineError
    nothing is left.
    """
    ends_suffice = _is_on_all(adapter, base)
    if names == "original":
        adapter = published_form(adapter, base.config)
    tensors = {
        f"base_model.model.{name}.{key}": value.contiguous().clone()
        for name, layer in adapter.layers.items()
        for key, value in layer.tensors.items()
    }
    with name_write_errors(directory, _ROOM), whole_directory(directory) as place:
        _peft_config(adapter, base, ends_suffice=ends_suffice).save_pretrained(place)
        _save(tensors, place / "adapter_model.safetensors")


def _is_on_all(adapter: LoraAdapter, base: Checkpoint) -> bool:
    """Return True if the adapter is on all modules with the last names of its modules."""
    ends = {name.rpartition(".")[2] for name in adapter.layers}
    modules = build_model(base, Workload(dtype="float32")).named_modules()
    namesakes = {name for name, _ in modules if name.rpartition(".")[2] in ends}
    # In the published names a tower's modules have the same last names as those of text.
    return namesakes <= adapter.layers.keys() and not base.config.get("vision_config")


def _peft_config(adapter: LoraAdapter, base: Checkpoint, *, ends_suffice: bool) -> Any:
    """Make peft's configuration of an adapter."""
    from peft import LoraConfig

    rank, scaling = adapter.common
    targets = {adapter.target(name): layer for name, layer in adapter.layers.items()}
    rare = {n: x for n, x in targets.items() if (x.rank, x.scaling) != (rank, scaling)}
    modules = {name for name, layer in targets.items() if layer.parameter is None}
    parts = targets.keys() - modules
    if ends_suffice:
        modules = {name.rpartition(".")[2] for name in modules}
    return LoraConfig(
        task_type="SEQ_2_SEQ_LM" if base.config.get("is_encoder_decoder") else "CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=adapter.base or base.name,
        r=rank,
        lora_alpha=_to_integer(rank * scaling),
        lora_dropout=adapter.dropout,
        target_modules=sorted(modules),
        target_parameters=sorted(parts) or None,
        rank_pattern={name: layer.rank for name, layer in rare.items()},
        alpha_pattern={name: _to_integer(x.rank * x.scaling) for name, x in rare.items()},
    )


def _to_integer(number: float) -> Any:
    """Convert a number to an integer if equal but for rounding: the type declared by peft."""
    nearest = round(number)
    return nearest if abs(number - nearest) < 1e-9 * abs(number) else number


# ── merged ──


class _Output(NamedTuple):
    """A tensor of a new checkpoint: its size, and a function to compute the tensor."""

    num_bytes: int
    compute: Callable[[], Tensor]


def write_merged(
    directory: Path,
    base: Checkpoint,
    *,
    adapter: LoraAdapter | None = None,
    parameters: Mapping[str, Tensor] | None = None,
    names: KeyNames = "original",
) -> None:
    """Write a copy of the published checkpoint with trained parameters into a new directory.

    The adapter, in native form, is added to the weights in float32, and the sum rounded to their
    type; `parameters`, by their names in the model, replace others. The names of tensors and
    settings are as published, with every other file of the checkpoint; or, for the ChatGLM family,
    those of transformers' own `GlmForCausalLM`, which needs no code.

    UsageError is raised for an unsuitable checkpoint, LoadError for parameters of another model,
    MachineError if the directory can't be written; nothing is left then.
    """
    if method_of(base.config) is not None:
        raise UsageError(
            f"{base.name} was published quantized; adapters can't be merged into such weights",
            hint="load it with the adapter, or merge into the 16-bit model",
        )
    is_native = names == "native" and base.config.get("model_type") == CHATGLM
    model = build_model(base, Workload(dtype="float32"))
    sources = list_sources(base)
    recipe = plan_tensors(model, {name: source.shape for name, source in sources.items()})
    changes = _Changes(model, adapter, parameters or {})
    changes.refuse_unplaced(recipe)
    with (
        name_write_errors(directory, _ROOM),
        whole_directory(directory) as place,
        Reader() as reader,
        torch.no_grad(),
    ):
        (_write_native_frame if is_native else _copy_frame)(place, base)
        outputs = _native_outputs if is_native else _published_outputs
        _write_shards(place, outputs(recipe, sources, changes, reader))


class _Changes:
    """Changes of a model's parameters by training, by their names."""

    def __init__(
        self, model: nn.Module, adapter: LoraAdapter | None, parameters: Mapping[str, Tensor]
    ) -> None:
        self._parameters = parameters
        self._modules: dict[str, Any] = {}
        self._last: tuple[str, Tensor] | None = None
        if adapter is not None:
            _refuse_tied(model, adapter)
            put_adapter(model, adapter)
            for name, layer in adapter.layers.items():
                weight = ".weight" if layer.parameter is None else ""
                self._modules[f"{adapter.target(name)}{weight}"] = model.get_submodule(name)

    def __contains__(self, name: str) -> bool:
        return name in self._parameters or name in self._modules

    def refuse_unplaced(self, recipe: Recipe) -> None:
        """Refuse trained parameters that aren't tensors of the files, or parts of tensors."""
        targets = {piece.target for piece in recipe.pieces}
        unplaced = sorted({*self._parameters, *self._modules} - targets)
        if unplaced:
            raise LoadError(
                f"{len(unplaced)} of the trained parameters aren't in the checkpoint: "
                f"{', '.join(unplaced[:4])}"
            )

    def apply(self, piece: TensorCopy, values: Tensor) -> None:
        """Apply the change to a piece of a tensor, in place."""
        if piece.target in self._parameters:
            values.copy_(piece.place(self._parameters[piece.target]))
        else:
            values.copy_(values.float() + piece.place(self._delta(piece.target)))

    def _delta(self, name: str) -> Tensor:
        """Return the addition to a weight; the last result is cached for the other pieces."""
        if self._last is None or self._last[0] != name:
            self._last = name, _compute_delta(self._modules[name]).float()
        return self._last[1]


def _compute_delta(module: Any) -> Tensor:
    """Compute the addition of peft's layer to its weight, or to another parameter."""
    if not hasattr(module, "parameter_name"):
        delta: Tensor = module.get_delta_weight("default")
        return delta
    # The result is on the parameter's device, meta: so the parameter is replaced for this call by
    # one with data, in untouched memory.
    owner, parameter = module.get_base_layer(), module.get_param()
    place = nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32))
    setattr(owner, module.parameter_name, place)
    delta = module.get_delta_weight("default")
    setattr(owner, module.parameter_name, parameter)
    return delta


def _refuse_tied(model: nn.Module, adapter: LoraAdapter) -> None:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, tied in ((name, group) for group in names.values() for name in group):
        if len(tied) > 1 and name.removesuffix(".weight") in adapter.layers:
            raise UsageError(
                f"the adapter on {name} can't be merged: {' and '.join(tied)} are one tensor, and "
                "the adapter is on one of them only",
                hint="keep the adapter separate, or train without that module",
            )


def _published_outputs(
    recipe: Recipe, sources: Mapping[str, Source], changes: _Changes, reader: Reader
) -> dict[str, _Output]:
    """Return the tensors of the published files, with the changes of training."""
    # A published tensor may consist of several parameters: query_key_value of the pieces of
    # q_proj, k_proj and v_proj. A piece is a view of a copy of the tensor, and changed in place.
    pieces: dict[str, list[TensorCopy]] = {}
    for piece in (*recipe.pieces, *recipe.duplicates):
        if piece.target in changes:
            pieces.setdefault(piece.source, []).append(piece)

    def compute(name: str) -> Tensor:
        tensor = reader.read(sources[name])
        if name in pieces:
            tensor = tensor.clone()
        for piece in pieces.get(name, ()):
            changes.apply(piece, piece.orient(tensor[piece.source_slices]))
        return tensor

    # All pieces of a parameter in a row: the addition to a stack of experts is computed once.
    names = dict.fromkeys([*(piece.source for piece in recipe.pieces), *sources])
    return {name: _Output(sources[name].num_bytes, partial(compute, name)) for name in names}


def _native_outputs(
    recipe: Recipe, sources: Mapping[str, Source], changes: _Changes, reader: Reader
) -> dict[str, _Output]:
    """Return the parameters of a ChatGLM model, each a part of a tensor in the files."""

    def compute(piece: TensorCopy) -> Tensor:
        tensor = piece.orient(reader.read(sources[piece.source])[piece.source_slices]).clone()
        if piece.target in changes:
            changes.apply(piece, tensor)
        return tensor

    outputs = {}
    for piece in recipe.pieces:
        size = prod(stop - start for start, stop in piece.target_box)
        num_bytes = size * sources[piece.source].dtype.itemsize
        outputs[piece.target] = _Output(num_bytes, partial(compute, piece))
    return outputs


# ── files ──


def _copy_frame(directory: Path, base: Checkpoint) -> None:
    """Copy every file of a checkpoint but its weights."""
    assert base.folder is not None, "it has weights"
    for name in base.folder.names():
        if not name.endswith(_WEIGHTS):
            target = directory / name
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(base.folder.fetch(name), target)


def _write_native_frame(directory: Path, base: Checkpoint) -> None:
    """Write a ChatGLM's settings and tokenizer as transformers has them for `GlmForCausalLM`."""
    assert base.folder is not None, "it has weights"
    parsed: Any = resolve(base.config)[0]
    if getattr(parsed, "vision_config", None) or parsed.query_length_scaling:
        raise UsageError(
            f"{base.name} has no native form: transformers' GlmForCausalLM lacks its "
            + ("vision tower" if getattr(parsed, "vision_config", None) else "query scaling"),
            hint="use its original names",
        )
    settings = {field.name: getattr(parsed, field.name) for field in fields(GlmConfig)}
    GlmConfig(**settings | {"architectures": ["GlmForCausalLM"]}).save_pretrained(directory)
    if base.generation_config is not None:
        name = "generation_config.json"
        shutil.copyfile(base.folder.fetch(name), directory / name)
    if any(name.startswith("tokenizer") for name in base.folder.names()):
        tokenizer: Any = tokenizer_of(base)
        affixes = _AROUND_ROLES.get(type(chat_format(tokenizer, base.config)))
        if affixes is not None:
            begin, after_role = affixes
            template = _TEMPLATE.replace("BEGIN", begin).replace("ROLE", after_role)
            tokenizer.chat_template = template
            tokenizer.split_special_tokens = False  # the template's roles are text to become tokens
        tokenizer.save_pretrained(directory)


def _write_shards(directory: Path, outputs: Mapping[str, _Output]) -> None:
    """Write tensors into files of limited size, and an index if there are several."""
    split = split_state_dict_into_shards_factory(
        dict(outputs),
        get_storage_size=lambda output: output.num_bytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=_SHARD_BYTES,
    )
    for file, names in split.filename_to_tensors.items():
        say(f"writing {file}")
        tensors = {name: outputs[name].compute() for name in names}
        _save(tensors, directory / file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_whole(directory / "model.safetensors.index.json", json.dumps(index, indent=2))


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write tensors, readable for others too, unlike safetensors' own files."""
    save_file(dict(tensors), path, {"format": "pt"})
    set_new_mode(path)
