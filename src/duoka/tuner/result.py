"""Write results of training: an adapter in peft's format, or a merged checkpoint.

Neither needs the model in memory: trained parameters are read from the run's last training
checkpoint, all others from the published files, one output file at a time. A directory gets its
final name once its content is on the disk.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor, nn

from duoka.base.files import set_new_mode, whole_directory, write_whole
from duoka.base.progress import say
from duoka.checkpoint.checkpoint import Checkpoint
from duoka.checkpoint.quantized import method_of
from duoka.errors import LoadError, UsageError
from duoka.forecast.workload import Workload
from duoka.models.boxes import TensorCopy
from duoka.models.conversion import Recipe, plan_tensors
from duoka.models.from_checkpoint import build_model
from duoka.models.lora import LoraAdapter, published_form, put_adapter, refuse_other_model
from duoka.runtime.load.sources import Reader, Source, list_sources

from .write_errors import name_write_errors

_WRITE_HINT = "free disk space, get the permission, or use another directory"
_SHARD_BYTES = 5 * 10**9
# From vLLM's default on (vllm/config/lora.py of 0.33).
_VLLM_RANKS = (16, 32, 64, 128, 256, 320, 512)
_WEIGHTS = (".safetensors", ".bin", ".index.json")


def write_adapter(
    directory: Path,
    adapter: LoraAdapter,
    base: Checkpoint,
    *,
    names: Literal["original", "native"] = "native",
) -> None:
    """Write an adapter, given in native form, in peft's format into a new directory.

    With the names "native", modules are called as in transformers' class; with "original", as in
    the published code, which vLLM uses too. The two differ for the ChatGLM family only. After a
    MachineError no files are left.
    """
    ends_suffice = _ends_are_unique(adapter, base)
    if names == "original":
        adapter = published_form(adapter, base.config)
    tensors = {
        f"base_model.model.{name}.{key}": value.contiguous().clone()
        for name, layer in adapter.layers.items()
        for key, value in layer.tensors.items()
    }
    with name_write_errors(directory, _WRITE_HINT), whole_directory(directory) as place:
        _peft_config(adapter, base, ends_suffice=ends_suffice).save_pretrained(place)
        _save(tensors, place / "adapter_model.safetensors")


def _ends_are_unique(adapter: LoraAdapter, base: Checkpoint) -> bool:
    """Return True if the last parts of names identify the adapted modules.

    Then peft's ``target_modules`` can list parts such as ``q_proj``: no other modules have them.
    """
    ends = {name.rpartition(".")[2] for name in adapter.layers}
    modules = build_model(base, Workload(dtype="float32")).named_modules()
    namesakes = {name for name, _ in modules if name.rpartition(".")[2] in ends}
    # In published names, modules of a vision tower have the same last names as text modules.
    return namesakes <= adapter.layers.keys() and not base.config.get("vision_config")


def _peft_config(adapter: LoraAdapter, base: Checkpoint, *, ends_suffice: bool) -> Any:
    """Create peft's configuration of an adapter.

    With `ends_suffice` modules are listed by the last parts of their names. The rank is the largest
    one, which vLLM must allow (``--max-lora-rank``); every version of it reads this setting. Other
    ranks and scalings go into patterns, by the last part of a name if it has one rank everywhere.
    """
    from peft import LoraConfig

    largest = max(adapter.layers.values(), key=lambda layer: layer.rank)
    rank, scaling = largest.rank, largest.scaling
    targets = {adapter.target(name): layer for name, layer in adapter.layers.items()}
    pairs: dict[str, set[tuple[int, float]]] = {}
    for name, layer in targets.items():
        pairs.setdefault(name.rpartition(".")[2], set()).add((layer.rank, layer.scaling))
    deviating = {
        end if len(pairs[end := name.rpartition(".")[2]]) == 1 else name: layer
        for name, layer in targets.items()
        if (layer.rank, layer.scaling) != (rank, scaling)
    }
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
        rank_pattern={name: layer.rank for name, layer in deviating.items()},
        alpha_pattern={name: _to_integer(x.rank * x.scaling) for name, x in deviating.items()},
    )


def _to_integer(number: float) -> Any:
    """Convert a number to int, the type declared by peft, if integral up to rounding errors."""
    nearest = round(number)
    return nearest if abs(number - nearest) < 1e-9 * abs(number) else number


def describe_for_vllm(directory: Path) -> str | None:
    """Describe the option that vLLM needs for an adapter; None if its default suffices."""
    path = directory / "adapter_config.json"
    rank = json.loads(path.read_text(encoding="utf-8"))["r"] if path.exists() else 0
    if rank <= _VLLM_RANKS[0]:
        return None
    limit = next((limit for limit in _VLLM_RANKS if limit >= rank), None)
    if limit is None:
        return f"vLLM can't serve it: its rank is {rank}, and at most {_VLLM_RANKS[-1]} are allowed"
    return f"its rank is {rank}: serve it with vllm serve --enable-lora --max-lora-rank {limit}"


# ── merged ──


class _Output(NamedTuple):
    """A tensor of the merged checkpoint: its size, and a function to compute the tensor."""

    num_bytes: int
    compute: Callable[[], Tensor]


def write_merged(
    directory: Path,
    base: Checkpoint,
    *,
    adapter: LoraAdapter | None = None,
    parameters: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a copy of the published checkpoint with trained parameters into a new directory.

    The adapter, in native form, is added to the weights in float32, and the sum is rounded to their
    dtype; `parameters`, by their names in the model, replace the published values. Tensors are
    named as published, and every other file is copied.

    Raises UsageError for an unsuitable checkpoint, LoadError for parameters of another model, and
    MachineError if the directory can't be written. After an error no files are left.
    """
    if method_of(base.config) is not None:
        raise UsageError(
            f"{base.name} was published quantized; adapters can't be merged into such weights",
            hint="load it with the adapter, or merge into the 16-bit model",
        )
    model = build_model(base, Workload(dtype="float32"))
    sources = list_sources(base)
    recipe = plan_tensors(model, {name: source.shape for name, source in sources.items()})
    if adapter is not None:
        refuse_other_model(model, adapter)
    changes = _Changes(model, adapter, parameters or {})
    changes.refuse_unplaced(recipe)
    with (
        name_write_errors(directory, _WRITE_HINT),
        whole_directory(directory) as place,
        Reader() as reader,
        torch.no_grad(),
    ):
        _copy_other_files(place, base)
        _write_shards(place, _published_outputs(recipe, sources, changes, reader))


class _Changes:
    """The changes of training, by the name of the model's parameter: new values, or an adapter."""

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
        """Raise LoadError for trained parameters that no tensor of the checkpoint fills."""
        targets = {piece.target for piece in recipe.pieces}
        unplaced = sorted({*self._parameters, *self._modules} - targets)
        if unplaced:
            raise LoadError(
                f"{len(unplaced)} of the trained parameters aren't in the checkpoint: "
                f"{', '.join(unplaced[:4])}"
            )

    def apply(self, piece: TensorCopy, values: Tensor) -> None:
        """Replace the published values of a piece by the trained values, in place."""
        if piece.target in self._parameters:
            values.copy_(piece.place(self._parameters[piece.target]))
        else:
            values.copy_(values.float() + piece.place(self._delta(piece.target)))

    def _delta(self, name: str) -> Tensor:
        """Return the adapter's update of a weight; the last update is cached for further pieces."""
        if self._last is None or self._last[0] != name:
            self._last = name, _compute_delta(self._modules[name]).float()
        return self._last[1]


def _compute_delta(module: Any) -> Tensor:
    """Compute the update that a peft layer adds to its weight, or to another adapted parameter."""
    if not hasattr(module, "parameter_name"):
        delta: Tensor = module.get_delta_weight("default")
        return delta
    # peft computes the update on the parameter's device, which is meta here. So the parameter is
    # replaced for this call by a parameter with data; its uninitialized values are not read.
    owner, parameter = module.get_base_layer(), module.get_param()
    place = nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32))
    setattr(owner, module.parameter_name, place)
    delta = module.get_delta_weight("default")
    setattr(owner, module.parameter_name, parameter)
    return delta


def _refuse_tied(model: nn.Module, adapter: LoraAdapter) -> None:
    """Raise UsageError for an adapter on a tied weight."""
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
    """Return the tensors of the published files, by name, with the changes of training."""
    # A published tensor may hold several parameters: query_key_value has pieces for q_proj, k_proj
    # and v_proj. Each changed piece is a view of a copy of the tensor, and is changed in place.
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

    # Pieces of one parameter follow one another, so the update of a stack of experts is computed
    # once, and cached for all of its pieces.
    names = dict.fromkeys([*(piece.source for piece in recipe.pieces), *sources])
    return {name: _Output(sources[name].num_bytes, partial(compute, name)) for name in names}


# ── files ──


def _copy_other_files(directory: Path, base: Checkpoint) -> None:
    """Copy every file of a checkpoint except its weights."""
    assert base.folder is not None, "it has weights"
    for name in base.folder.names():
        if not name.endswith(_WEIGHTS):
            target = directory / name
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(base.folder.fetch(name), target)


def _write_shards(directory: Path, outputs: Mapping[str, _Output]) -> None:
    """Write tensors into safetensors files of limited size, and an index for several files."""
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
    """Write a safetensors file with the usual permissions; safetensors' own is private."""
    save_file(dict(tensors), path, {"format": "pt"})
    set_new_mode(path)
