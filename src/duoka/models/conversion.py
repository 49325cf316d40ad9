"""Where every tensor of a model comes from, in the names and the layout of its checkpoint.

transformers knows how published checkpoints become its models: keys are renamed, fused tensors
split, experts stacked. `plan_tensors` runs those conversions on descriptions instead of tensors.
What comes out says which box of which tensor in the file belongs into which box of which
parameter, so that a loader copies straight into its place and never holds a second copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from duoka.errors import LoadError

from .boxes import Sketch, TensorCopy

Shape = Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom:
    """A conversion that moves single elements about, so that boxes can't describe it.

    `convert` makes all `targets` by name from all `sources`, whole, by name.
    """

    targets: tuple[str, ...]
    sources: tuple[str, ...]
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Where every parameter and persistent buffer of a model comes from.

    `pieces` are in the order of the model's parameters, tied ones named once as by
    ``named_parameters``; `customs` are what no piece can describe. `duplicates` are second copies
    of tied parameters: not to be loaded, perhaps compared. `derived` are parameters that
    checkpoints of this architecture leave out and its code computes (`initialize_derived`),
    `ignored` are checkpoint tensors that the model computes for itself. Nothing fills what is
    `missing`; what is `unexpected` has no place in the model. `mismatched`: target, its shape from
    the checkpoint, and in the model.
    """

    pieces: tuple[TensorCopy, ...] = ()
    customs: tuple[Custom, ...] = ()
    duplicates: tuple[TensorCopy, ...] = ()
    derived: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()

    def limited(self, names: Collection[str]) -> Recipe:
        """What of it fills some tensors of the model alone."""
        return replace(
            self,
            pieces=tuple(piece for piece in self.pieces if piece.target in names),
            customs=tuple(c for c in self.customs if not set(c.targets).isdisjoint(names)),
            derived=tuple(name for name in self.derived if name in names),
        )


def published_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state in the names and layout in which ``save_pretrained`` writes it.

    For a model on meta this costs nothing but names; tied tensors appear once.
    """
    canonical = set(_canonical_names(model).values())
    state = {name: value for name, value in model.state_dict().items() if name in canonical}
    if not isinstance(model, PreTrainedModel):
        return state
    ignored = model._keys_to_ignore_on_save or ()
    wanted = {name: value for name, value in state.items() if name not in ignored}
    saved: dict[str, Tensor] = revert_weight_conversion(model, wanted)
    return saved


def plan_tensors(model: nn.Module, tensors: Mapping[str, Shape | None] | Collection[str]) -> Recipe:
    """Find out which checkpoint tensors fill which parameters and persistent buffers."""
    given_shapes = dict(tensors) if isinstance(tensors, Mapping) else dict.fromkeys(tensors)
    shapes = _complete(model, given_shapes)
    state = model.state_dict()
    groups, unplaced = _group(model, state, shapes)
    sketches: dict[str, Sketch] = {}
    customs: list[Custom] = []
    for target, group in groups.items():
        if group.converter is None:
            name = group.members[0][1]
            shape = shapes[name]
            sketches[target] = Sketch.of(name, state[target].shape if shape is None else shape)
            continue
        described = _describe(model, target, group, shapes)
        if isinstance(described, Custom):
            customs.append(described)
        else:
            sketches.update(described)
    return _recipe(model, sketches, customs, unplaced)


@dataclass(frozen=True, slots=True)
class _Group:
    """Checkpoint tensors that are converted together, or one that is renamed only."""

    converter: WeightConverter | None
    members: list[tuple[str, str]]  # source pattern, tensor name


def _complete(
    model: nn.Module, given_shapes: Mapping[str, Shape | None]
) -> dict[str, tuple[int, ...] | None]:
    """Fill in the shapes that the model's published form tells."""
    published = published_tensors(model) if None in given_shapes.values() else {}
    shapes: dict[str, tuple[int, ...] | None] = {}
    for name, shape in given_shapes.items():
        if shape is None and name in published:
            shape = published[name].shape
        shapes[name] = None if shape is None else tuple(shape)
    return shapes


def _group(
    model: nn.Module, state: dict[str, Tensor], names: Iterable[str]
) -> tuple[dict[str, _Group], dict[str, str]]:
    """Sort tensors by what they become; return those without a place too, with their new names."""
    if not isinstance(model, PreTrainedModel):
        groups = {name: _Group(None, [(name, name)]) for name in names if name in state}
        return groups, {name: name for name in names if name not in state}
    transforms = get_model_conversion_mapping(model)
    renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
    converters = [item for item in transforms if isinstance(item, WeightConverter)]
    by_pattern = {pattern: item for item in converters for pattern in item.source_patterns}
    prefix = model.base_model_prefix
    groups = {}
    unplaced: dict[str, str] = {}
    # In transformers' own order, which decides an expert's position in its stack.
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            unplaced[name] = target
        elif pattern is None:
            groups[target] = _Group(None, [(name, name)])
        else:
            group = groups.setdefault(target, _Group(by_pattern[pattern], []))
            group.members.append((pattern, name))
    return groups, unplaced


def _describe(
    model: nn.Module, target: str, group: _Group, shapes: Mapping[str, tuple[int, ...] | None]
) -> dict[str, Sketch] | Custom:
    """Say what a group becomes: boxes by target, or a conversion of whole tensors."""
    known = {name: shape for _, name in group.members if (shape := shapes[name]) is not None}
    if len(known) < len(group.members):
        unknown = ", ".join(name for _, name in group.members if name not in known)
        raise LoadError(f"the shapes of {unknown} are needed to convert them, and not known")

    def convert(tensors: Mapping[str, Any]) -> dict[str, Any]:
        converter = deepcopy(group.converter)
        assert converter is not None
        for pattern, name in group.members:
            converter.add_tensor(target, name, pattern, tensors[name])
        converted = converter.convert(target, model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value
            for name, value in converted.items()
        }

    try:
        return convert({name: Sketch.of(name, shape) for name, shape in known.items()})
    except Exception:
        # Not describable, or wrong: tensors without data tell which, and name the targets.
        return _custom(known, convert)


def _custom(
    shapes: Mapping[str, tuple[int, ...]],
    convert: Callable[[Mapping[str, Any]], dict[str, Any]],
) -> Custom:
    try:
        trial = convert({n: torch.empty(shape, device="meta") for n, shape in shapes.items()})
    except Exception as error:
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise LoadError(f"checkpoint tensors don't fit together: {listed}: {error}") from error
    return Custom(targets=tuple(trial), sources=tuple(shapes), convert=convert)


def _recipe(
    model: nn.Module,
    sketches: Mapping[str, Sketch],
    customs: Sequence[Custom],
    unplaced: Mapping[str, str],
) -> Recipe:
    """Compare what the checkpoint gives with what the model has."""
    state = model.state_dict()
    canonical = _canonical_names(model)
    sources = _one_of_each_tie(canonical, sketches)
    fitting = {
        target: sketches[source]
        for target, source in sources.items()
        if sketches[source].shape == state[target].shape
    }
    spare = {
        canonical[name]: sketch
        for name, sketch in sketches.items()
        if sources[canonical[name]] != name
    }
    filled = {*sources, *(canonical[name] for custom in customs for name in custom.targets)}
    absent = [n for n in dict.fromkeys(canonical.values()) if n not in filled]
    derived, missing = _sort_absent(model, absent)
    ignores = _ignores(model)
    return Recipe(
        pieces=tuple(piece for item in fitting.items() for piece in _pieces(*item)),
        customs=tuple(customs),
        duplicates=tuple(piece for item in spare.items() for piece in _pieces(*item)),
        derived=tuple(derived),
        missing=tuple(missing),
        unexpected=tuple(n for n, renamed in unplaced.items() if not ignores(n, renamed)),
        ignored=tuple(n for n, renamed in unplaced.items() if ignores(n, renamed)),
        mismatched=tuple(
            (target, tuple(sketches[source].shape), tuple(state[target].shape))
            for target, source in sources.items()
            if target not in fitting
        ),
    )


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Map each name in the state to the first name of the same tensor."""
    first: dict[int, str] = {}
    names = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            names[name] = first.setdefault(id(value), name)
    return names


def _one_of_each_tie(canonical: Mapping[str, str], available: Collection[str]) -> dict[str, str]:
    """Choose under which of its names each tensor is loaded: the first that the checkpoint has."""
    chosen: dict[str, str] = {}
    for name, first in canonical.items():
        if name in available:
            chosen.setdefault(first, name)
    return chosen


def _pieces(target: str, sketch: Sketch) -> Iterator[TensorCopy]:
    return (replace(part, target=target) for part in sketch.parts)


def _sort_absent(model: nn.Module, names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Tell what the model's code computes (derived) from what is missing."""
    expected = _matcher(getattr(model, "_keys_to_ignore_on_load_missing", None))
    parameters = {name for name, _ in model.named_parameters()}
    derived, missing = [], []
    for name in names:
        if not expected(name):
            missing.append(name)
        elif name in parameters:
            derived.append(name)  # a buffer has its value from the constructor already
    return derived, missing


def _ignores(model: nn.Module) -> Callable[[str, str], bool]:
    """Return whether a tensor without a place is one that the model has no need of."""
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    leaves = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    # Older files hold what is now computed, under the name of each layer.
    patterns |= {rf"(^|\.){leaf}$" for leaf in ("inv_freq", "position_ids") if leaf in leaves}
    matches = _matcher(patterns)
    return lambda name, renamed: matches(name) or matches(renamed)


def _matcher(patterns: Iterable[str] | None) -> Callable[[str], bool]:
    compiled = [re.compile(pattern) for pattern in patterns or ()]
    return lambda name: any(pattern.search(name) for pattern in compiled)


def initialize_derived(model: nn.Module, recipe: Recipe) -> None:
    """Compute the parameters that checkpoints leave out, once they have storage."""
    for name in recipe.derived:
        owner = model.get_submodule(name.rpartition(".")[0])
        ancestors = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
        nearest = [m for m in ancestors if any(child is owner for child in m.modules())]
        if not nearest:
            raise LoadError(f"{name} is not in the checkpoint, and nothing computes it")
        with torch.no_grad():
            nearest[-1]._init_weights(owner)
