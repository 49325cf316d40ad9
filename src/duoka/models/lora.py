"""LoRA adapters: low-rank updates of modules, in native form or in published form.

The native form has the names of the class that duoka builds. For the ChatGLM family that class has
a query, a key and a value projection, where the published code has one fused matrix,
`query_key_value`; other modules have other names, too. Both forms of an adapter are equivalent. A
fused adapter becomes three adapters, each with some rows of its B, and with the rows of its A that
those use. Three separate adapters become a fused one with the sum of their ranks:

    A = [A_q; A_k; A_v]      B = diag(B_q, B_k, B_v)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from duoka.checkpoint.architecture import CHATGLM
from duoka.errors import LoadError

from .build import resolve
from .chatglm import RENAMED
from .quantization import ExpertStack
from .trainable import adapted_layers, base_name, inject

_FUSED = "self_attention.query_key_value"
_PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_PUBLISHED = {native: published for published, native in RENAMED.items()}
_KEYS = ("lora_A.weight", "lora_B.weight")
_EMBEDDING_KEYS = ("lora_embedding_A", "lora_embedding_B")
_ADAPTER = "default"
# Merging computes the update of a weight in slices of about this number of elements.
_MERGED_ELEMENTS = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """A low-rank update of a module's weight: `scaling` times `up` @ `down`.

    Parameters
    ----------
    down, up : Tensor
        peft's A, [rank, inputs], and B, [outputs, rank].
    scaling : float
    is_embedding : bool
        True if the module is an embedding; its weight, [tokens, size], gets the transposed product.
    parameter : str or None
        Name of the adapted parameter if the module isn't a layer with a weight, such as a stack of
        experts; None for layers.
    num_experts : int
        Number of experts in the stack; `down` and `up` hold the ranks of all experts.
    """

    down: Tensor
    up: Tensor
    scaling: float
    is_embedding: bool = False
    parameter: str | None = None
    num_experts: int = 1

    @property
    def rank(self) -> int:
        """The rank of the update; in a stack, of each expert."""
        return len(self.down) // self.num_experts

    @property
    def tensors(self) -> dict[str, Tensor]:
        """`down` and `up`, by the suffixes of their names in peft's files."""
        keys = _EMBEDDING_KEYS if self.is_embedding else _KEYS
        return dict(zip(keys, (self.down, self.up), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    """A LoRA adapter.

    Parameters
    ----------
    layers : mapping of str to LowRank
        Updates by peft's name of the module. If two parameters of a module are adapted, the second
        one has the name of the module's `base_layer`.
    base : str
        Name of the base model, as in peft's configuration.
    dropout : float
        Dropout of the adapters' inputs in training.
    """

    layers: Mapping[str, LowRank]
    base: str = ""
    dropout: float = 0.0

    def target(self, name: str) -> str:
        """Return the name of the adapted module or parameter; `name` is peft's of the module."""
        parameter = self.layers[name].parameter
        return name if parameter is None else f"{base_name(name)}.{parameter}"

    @property
    def common(self) -> tuple[int, float]:
        """The most common rank and scaling of the layers."""
        pairs = Counter((layer.rank, layer.scaling) for layer in self.layers.values())
        return pairs.most_common(1)[0][0]

    @property
    def training_settings(self) -> dict[str, Any]:
        """Arguments of `Training` for a run that starts from this adapter."""
        rank, scaling = self.common
        return {
            "lora_rank": rank,
            "lora_alpha": max(1, round(rank * scaling)),
            "lora_targets": tuple(sorted({name.rpartition(".")[2] for name in self.layers})),
        }


# ── names and layouts ──


def native_form(adapter: LoraAdapter, config: Mapping[str, Any]) -> LoraAdapter:
    """Convert an adapter to native form: the names of the class that duoka builds for a config."""
    if config.get("model_type") != CHATGLM:
        return adapter
    layers: dict[str, LowRank] = {}
    for name, layer in adapter.layers.items():
        if name.endswith(_FUSED):
            rows = _count_rows(config)
            if len(layer.up) != sum(rows):
                raise LoadError(
                    f"the adapter doesn't match this model: {name} has {len(layer.up)} rows, and "
                    f"{sum(rows)} are needed"
                )
            prefix = _rename_parts(name.removesuffix(_FUSED), RENAMED)
            for part, up in zip(_PARTS, layer.up.split(rows), strict=True):
                # Of a block diagonal B only the columns of the part, which was trained with them;
                # a part of zeros wasn't trained. Before the first step all of B is zero.
                used = up.any(dim=0)
                down = layer.down
                if layer.up.any() and not used.all():
                    down, up = down[used], up[:, used]
                if len(down):
                    layers[f"{prefix}{part}"] = replace(layer, down=down, up=up)
        else:
            layers[_rename_parts(name, RENAMED)] = layer
    return replace(adapter, layers=layers)


def published_form(adapter: LoraAdapter, config: Mapping[str, Any]) -> LoraAdapter:
    """Convert an adapter to published form: the names of the code published with a config."""
    if config.get("model_type") != CHATGLM:
        return adapter
    layers: dict[str, LowRank] = {}
    for name, layer in adapter.layers.items():
        part = next((part for part in _PARTS if name.endswith(f".{part}")), None)
        if part is None:
            layers[_rename_parts(name, _PUBLISHED)] = layer
            continue
        prefix = name.removesuffix(part)
        fused = f"{_rename_parts(prefix, _PUBLISHED)}{_FUSED}"
        if fused not in layers:
            parts = [adapter.layers.get(f"{prefix}{end}") for end in _PARTS]
            layers[fused] = _fuse(parts, _count_rows(config))
    return replace(adapter, layers=layers)


def _rename_parts(name: str, replacements: Mapping[str, str]) -> str:
    """Apply all replacements to the parts of a module's name."""
    for part, replacement in replacements.items():
        name = name.replace(part, replacement)
    return name


def _count_rows(config: Mapping[str, Any]) -> list[int]:
    """Return the numbers of rows of query, key and value in `query_key_value`."""
    parsed = cast(Any, resolve(config)[0])
    heads, groups = parsed.num_attention_heads, parsed.num_key_value_heads
    return [count * parsed.head_dim for count in (heads, groups, groups)]


# With adapters of query (rank 2) and value (rank 3), but none of key, A is [A_q; A_v] with 5 rows.
# B has rows for query, key and value: B_q fills columns 0:2 of the query's rows, B_v columns 2:5 of
# the value's rows, and all else is zero. The fused adapter has one scaling, so the B of a part with
# another scaling is multiplied by their ratio.
def _fuse(parts: list[LowRank | None], rows: list[int]) -> LowRank:
    """Fuse the adapters of query, key and value; None gets rows of zeros.

    `rows` are the numbers of rows of query, key and value.
    """
    present = [part for part in parts if part is not None]
    scaling = present[0].scaling
    down = torch.cat([part.down for part in present])
    up = present[0].up.new_zeros(sum(rows), len(down))
    row = column = 0
    for part, num_rows in zip(parts, rows, strict=True):
        if part is not None:
            block = up[row : row + num_rows, column : column + part.rank]
            block.copy_(part.up * (part.scaling / scaling))
            column += part.rank
        row += num_rows
    return LowRank(down=down, up=up, scaling=scaling)


# ── adapters in a model ──


def put_adapter(model: nn.Module, adapter: LoraAdapter) -> None:
    """Put an adapter in native form into a model, frozen, on the devices of the weights.

    Raises
    ------
    LoadError
        If the adapter doesn't match the model, which is then unchanged.
    """
    refuse_other_model(model, adapter)
    layers, (rank, _) = adapter.layers, adapter.common
    parts = {name for name, layer in layers.items() if layer.parameter is not None}
    inject(
        model,
        r=rank,
        target_modules=[name for name in layers if name not in parts],
        target_parameters=[adapter.target(name) for name in sorted(parts)],
        rank_pattern={adapter.target(n): lay.rank for n, lay in layers.items() if lay.rank != rank},
    )
    for name, layer in adapter.layers.items():
        module = cast(Any, model.get_submodule(name))
        module.scaling[_ADAPTER] = layer.scaling
        weight = next(iter(module.get_base_layer().parameters()))
        device = "cpu" if weight.is_meta else weight.device
        for key, value in layer.tensors.items():
            owner, _, leaf = _in_model(key).rpartition(".")
            parameter = nn.Parameter(value.to(device), requires_grad=False)
            setattr(module.get_submodule(owner), leaf, parameter)


def merge_adapter(model: nn.Module, adapter: LoraAdapter) -> None:
    """Add an adapter in native form to a model's weights in place, a few rows at a time.

    Raises
    ------
    LoadError
        If the adapter doesn't match the model, or changes tied weights or parameters other than
        the weights of layers; the model is then unchanged.
    """
    refuse_other_model(model, adapter)
    for name, layer in adapter.layers.items():
        weight = getattr(model.get_submodule(name), "weight", None)
        users = [n for n, p in model.named_parameters(remove_duplicate=False) if p is weight]
        if len(users) > 1 or layer.parameter is not None:
            raise LoadError(
                f"the adapter changes {', '.join(users) or name}, which can't be merged in place",
                hint="merge it into a checkpoint with the tool that trained it",
            )
    # W += scaling · B A, some rows of B at a time, so that the full product in float32 never
    # exists: for a W [4096, 4096], 64 rows take 1 MiB instead of 64 MiB. Weights of embeddings and
    # of Conv1D are stored as [inputs, outputs], so their transposed views are changed.
    for name, layer in adapter.layers.items():
        module = model.get_submodule(name)
        values = cast(nn.Parameter, module.weight).data
        is_transposed = layer.is_embedding or isinstance(module, Conv1D)
        target = values.t() if is_transposed else values
        down, up = (part.to(values.device, torch.float32) for part in (layer.down, layer.up))
        rows = max(1, _MERGED_ELEMENTS // target.shape[1])
        for weight_rows, up_rows in zip(target.split(rows), up.split(rows), strict=True):
            weight_rows += (layer.scaling * (up_rows @ down)).to(weight_rows.dtype)


def fill_adapter(model: nn.Module, adapter: LoraAdapter) -> None:
    """Copy an adapter in native form into a model's adapters; skip adapters on the meta device.

    Raises
    ------
    LoadError
        If the model has adapters on other modules, or of other ranks.
    """
    adapted = dict(adapted_layers(model))
    differing = sorted(adapted.keys() ^ adapter.layers.keys())
    if differing:
        raise LoadError(
            f"the run has adapters on {len(adapted)} modules, and the adapter to start from on "
            f"{len(adapter.layers)}; the difference includes {differing[0]}",
            hint="a run trains every module of its targets that text input reaches; start a new "
            "adapter with these targets: " + ", ".join(adapter.training_settings["lora_targets"]),
        )
    for name, module in adapted.items():
        if module.r[_ADAPTER] != adapter.layers[name].rank:
            raise LoadError(
                f"the run has an adapter of rank {module.r[_ADAPTER]} on {name}, and the one to "
                f"start from has rank {adapter.layers[name].rank}",
                hint="use the same rank for the run",
            )
    for name, module in adapted.items():
        module.scaling[_ADAPTER] = adapter.layers[name].scaling
        for key, value in adapter.layers[name].tensors.items():
            parameter = module.get_parameter(_in_model(key))
            if not parameter.is_meta:
                with torch.no_grad():
                    parameter.copy_(value)


def adapter_of(model: nn.Module, tensors: Mapping[str, Tensor], *, base: str = "") -> LoraAdapter:
    """Return the adapter in a model, with values from `tensors`, by their names in the model.

    Raises
    ------
    LoadError
        If tensors are missing.
    """
    layers: dict[str, LowRank] = {}
    dropout = 0.0
    for name, module in adapted_layers(model):
        is_embedding = _ADAPTER in module.lora_embedding_A
        keys = _EMBEDDING_KEYS if is_embedding else _KEYS
        names = [f"{name}.{_in_model(key)}" for key in keys]
        missing = [tensor for tensor in names if tensor not in tensors]
        if missing:
            raise LoadError(f"the adapter has no {missing[0]}: it was saved incompletely")
        layers[name] = LowRank(
            down=tensors[names[0]],
            up=tensors[names[1]],
            scaling=module.scaling[_ADAPTER],
            is_embedding=is_embedding,
            parameter=getattr(module, "parameter_name", None),
            num_experts=getattr(module, "num_experts", 1),
        )
        dropout = getattr(module.lora_dropout[_ADAPTER], "p", 0.0)
    return LoraAdapter(layers=layers, base=base, dropout=dropout)


def _in_model(key: str) -> str:
    """Convert a tensor's name in peft's files into its name in an adapted module.

    For example lora_A.weight → lora_A.default.weight.
    """
    kind, dot, weight = key.partition(".")
    return f"{kind}.{_ADAPTER}{dot}{weight}"


def refuse_other_model(model: nn.Module, adapter: LoraAdapter, title: str = "the adapter") -> None:
    """Raise LoadError if an adapter in native form doesn't match a model without adapters."""
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for name, layer in adapter.layers.items():
        if layer.parameter is None:
            sizes = sizes_of(modules.get(name))
        else:
            stack = parameters.get(adapter.target(name))
            sizes = None if stack is None else tuple(stack.shape[-2:])
            if isinstance(stack, ExpertStack):
                raise LoadError(
                    f"quantized experts can't have adapters, and this one adapts {name}",
                    hint="load the model without --quantize",
                )
        ends = (layer.down.shape[1], len(layer.up))
        # Stacks of experts store inputs and outputs in either order.
        if ends == sizes or (sizes and layer.parameter is not None and ends == sizes[::-1]):
            continue
        difference = f"no module called {adapter.target(name)} can have an adapter"
        if sizes:
            difference = f"it goes from {ends[0]} to {ends[1]} at {name}, and the model from "
            difference += f"{sizes[0]} to {sizes[1]}"
        hint = f"it was made for {adapter.base or 'an unnamed model'}"
        raise LoadError(f"{title} doesn't match this model: {difference}", hint=hint)


def sizes_of(module: Any) -> tuple[int, ...] | None:
    """Return the numbers of inputs and outputs; None if the module can't have an adapter."""
    match module:
        case nn.Linear():
            return module.in_features, module.out_features
        case nn.Embedding():
            return module.num_embeddings, module.embedding_dim
        case nn.Conv1d() | nn.Conv2d():
            return module.in_channels, module.out_channels
        case Conv1D():
            return module.nx, module.nf
    return None
