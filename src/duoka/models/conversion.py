"""Map the tensors of a checkpoint to the parameters of a model.

transformers defines how published checkpoints become its models: tensors are renamed, fused tensors
split, experts stacked. `plan_tensors` runs these conversions on tensors without data
(`boxes.CopyTracer`). The result lists copies: a box of a checkpoint tensor, and the box of the
parameter to fill with it. So a loader copies each tensor straight into the parameters, and never
holds it twice.

transformers' own loader isn't used: it builds stacks of experts while it holds all of the experts'
tensors, and passes whole 16-bit tensors to a quantizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

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

from .boxes import CopyTracer, IndescribableError, TensorCopy, whole_box

Shape = Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Custom:
    """A conversion of single elements, impossible to describe by boxes.

    `convert` takes all `sources`, as whole tensors by name, and returns all `targets` by name.
    """

    targets: tuple[str, ...]
    sources: tuple[str, ...]
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The origin of every parameter and persistent buffer of a model.

    Parameters
    ----------
    pieces : tuple of TensorCopy
        Copies in the order of the model's parameters; tied parameters have their first name.
    customs : tuple of Custom
        Conversions that boxes can't describe.
    duplicates : tuple of TensorCopy
        Copies from further checkpoint tensors of tied parameters. They aren't loaded, but may be
        compared with the loaded values.
    derived : tuple of str
        Parameters that checkpoints of this architecture leave out, because its code computes them
        (`initialize_derived`).
    missing, unexpected : tuple of str
        Parameters without a checkpoint tensor, and checkpoint tensors without a parameter.
    ignored : tuple of str
        Checkpoint tensors that the model doesn't need, because it computes their values.
    mismatched : tuple
        Name of a parameter, its shape from the checkpoint, and its shape in the model.
    """

    pieces: tuple[TensorCopy, ...] = ()
    customs: tuple[Custom, ...] = ()
    duplicates: tuple[TensorCopy, ...] = ()
    derived: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()

    @property
    def targets(self) -> set[str]:
        """Names of the parameters and buffers that pieces and customs fill."""
        customs = {name for custom in self.customs for name in custom.targets}
        return customs | {piece.target for piece in self.pieces}

    def limited(self, names: Collection[str]) -> Recipe:
        """Return the recipe restricted to the parameters and buffers in `names`."""
        return replace(
            self,
            pieces=tuple(piece for piece in self.pieces if piece.target in names),
            customs=tuple(c for c in self.customs if not set(c.targets).isdisjoint(names)),
            derived=tuple(name for name in self.derived if name in names),
        )


def published_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's state in the names and layout of ``save_pretrained``.

    Tied tensors appear once. For a model on the meta device no data is computed.
    """
    canonical = set(_canonical_names(model).values())
    state = {name: value for name, value in model.state_dict().items() if name in canonical}
    if not isinstance(model, PreTrainedModel):
        return state
    ignored = model._keys_to_ignore_on_save or ()
    wanted = {name: value for name, value in state.items() if name not in ignored}
    saved: dict[str, Tensor] = revert_weight_conversion(model, wanted)
    return saved


# Four steps, without reading a weight. For two experts of a Mixtral layer:
#
#   rename   experts.0.w1, experts.1.w1, experts.0.w3, …   → target mlp.experts.gate_up_proj
#   group    all keys with this target, in natural order   → one `WeightConverter` of transformers
#   trace    the converter runs on meta tensors            → experts.1.w1 fills [1:2, 0:24, :]
#   compare  targets with the model's state                → pieces, missing, unexpected, mismatched
#
# A converter that permutes single elements isn't made of boxes; it becomes a `Custom`, which needs
# all of its source tensors at once. Tied parameters are one target, filled from the first of their
# names that the checkpoint has.
def plan_tensors(model: nn.Module, tensors: Mapping[str, Shape | None] | Collection[str]) -> Recipe:
    """Match checkpoint tensors with the parameters and persistent buffers of a model.

    `tensors` has the shapes by name; None, or a collection of names, if shapes are unknown.
    """
    given_shapes = dict(tensors) if isinstance(tensors, Mapping) else dict.fromkeys(tensors)
    shapes = _complete_shapes(model, given_shapes)
    state = model.state_dict()
    groups, unplaced = _group_tensors(model, state, shapes)
    layouts: dict[str, _Layout] = {}
    customs: list[Custom] = []
    for target, group in groups.items():
        if group.converter is None:
            name = group.members[0][1]
            shape = shapes[name]
            layouts[target] = _Layout.of(name, state[target].shape if shape is None else shape)
        elif isinstance(described := _describe_group(model, target, group, shapes), Custom):
            customs.append(described)
        else:
            layouts.update(described)
    return _build_recipe(model, layouts, customs, unplaced)


class _Layout(NamedTuple):
    """The shape of a target, and its copies from checkpoint tensors."""

    shape: tuple[int, ...]
    copies: tuple[TensorCopy, ...]

    @classmethod
    def of(cls, name: str, shape: Shape) -> _Layout:
        """Return the layout of a target filled by a whole checkpoint tensor."""
        box, shape = whole_box(shape), tuple(shape)
        return cls(shape, (TensorCopy(name, shape, box, box, tuple(range(len(box)))),))

    def pieces(self, target: str) -> Iterable[TensorCopy]:
        """Return the copies with the name of their target filled in."""
        return (copy._replace(target=target) for copy in self.copies)


@dataclass(frozen=True, slots=True)
class _Group:
    """The checkpoint tensors of a conversion; a single, renamed tensor has no converter."""

    converter: WeightConverter | None
    members: list[tuple[str, str]]  # source pattern, tensor name


def _complete_shapes(
    model: nn.Module, given_shapes: Mapping[str, Shape | None]
) -> dict[str, tuple[int, ...] | None]:
    """Replace unknown shapes by the shapes of the model's published tensors of the same name.

    A shape stays None if the model has no published tensor of the name.
    """
    published = published_tensors(model) if None in given_shapes.values() else {}
    unknown = (name for name, shape in given_shapes.items() if shape is None)
    known = {name: published[name].shape for name in unknown if name in published}
    shapes = {**given_shapes, **known}
    return {name: None if shape is None else tuple(shape) for name, shape in shapes.items()}


def _group_tensors(
    model: nn.Module, state: dict[str, Tensor], names: Iterable[str]
) -> tuple[dict[str, _Group], dict[str, str]]:
    """Group tensors by target; also return the tensors without a target, with their new names."""
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
    # Sorted as in transformers: the order decides the index of an expert in its stack.
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


def _describe_group(
    model: nn.Module, target: str, group: _Group, shapes: Mapping[str, tuple[int, ...] | None]
) -> dict[str, _Layout] | Custom:
    """Trace the conversion of a group; return layouts by target, or a `Custom` without boxes."""
    sources = {name: shape for _, name in group.members if (shape := shapes[name]) is not None}
    if len(sources) < len(group.members):
        unknown = ", ".join(name for _, name in group.members if name not in sources)
        raise LoadError(f"the shapes of {unknown} are needed for their conversion, and unknown")

    def convert(tensors: Mapping[str, Any]) -> dict[str, Any]:
        converter = deepcopy(group.converter)
        assert converter is not None
        for pattern, name in group.members:
            converter.add_tensor(target, name, pattern, tensors[name])
        converted = converter.convert(target, model=model, config=model.config).items()
        return {name: value[0] if isinstance(value, list) else value for name, value in converted}

    # The conversion runs once on tensors without data. An error means that the checkpoint's tensors
    # don't fit together. If boxes can't describe the result, the conversion runs again on loading.
    tracer = CopyTracer(sources)
    try:
        with tracer:
            converted = convert(tracer.tensors)
    except Exception as error:  # transformers' operations can raise anything
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in sources.items())
        raise LoadError(f"checkpoint tensors are inconsistent: {listed}: {error}") from error
    try:
        return {
            name: _Layout(tuple(value.shape), tuple(tracer.copies(value)))
            for name, value in converted.items()
        }
    except IndescribableError:
        return Custom(targets=tuple(converted), sources=tuple(sources), convert=convert)


def _build_recipe(
    model: nn.Module,
    layouts: Mapping[str, _Layout],
    customs: Sequence[Custom],
    unplaced: Mapping[str, str],
) -> Recipe:
    """Compare the traced tensors with the model's state, and sort them into a recipe."""
    state = model.state_dict()
    canonical = _canonical_names(model)
    # By canonical name: the name under which a tensor is loaded, the first that the checkpoint has.
    sources: dict[str, str] = {}
    for name, target in canonical.items():
        if name in layouts:
            sources.setdefault(target, name)
    pieces: list[TensorCopy] = []
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    for target, source in sources.items():
        layout, shape = layouts[source], tuple(state[target].shape)
        if layout.shape == shape:
            pieces += layout.pieces(target)
        else:
            mismatched.append((target, layout.shape, shape))
    spare = [(canonical[n], layout) for n, layout in layouts.items() if sources[canonical[n]] != n]
    filled = {*sources, *(canonical[name] for custom in customs for name in custom.targets)}
    absent = [n for n in dict.fromkeys(canonical.values()) if n not in filled]
    is_computed = _make_matcher(getattr(model, "_keys_to_ignore_on_load_missing", None))
    parameters = {name for name, _ in model.named_parameters()}
    is_ignored = _make_ignored_matcher(model)
    ignored = tuple(n for n, renamed in unplaced.items() if is_ignored(n) or is_ignored(renamed))
    return Recipe(
        pieces=tuple(pieces),
        customs=tuple(customs),
        duplicates=tuple(p for target, layout in spare for p in layout.pieces(target)),
        # Buffers have their values from the constructor already.
        derived=tuple(n for n in absent if is_computed(n) and n in parameters),
        missing=tuple(n for n in absent if not is_computed(n)),
        unexpected=tuple(n for n in unplaced if n not in ignored),
        ignored=ignored,
        mismatched=tuple(mismatched),
    )


def _canonical_names(model: nn.Module) -> dict[str, str]:
    """Map each name in the state dict to the first name of the same tensor."""
    canonical: dict[int, str] = {}
    names = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            names[name] = canonical.setdefault(id(value), name)
    return names


def _make_ignored_matcher(model: nn.Module) -> Callable[[str], bool]:
    """Return a predicate for the names of unneeded checkpoint tensors."""
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    leaves = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    # Older files have these buffers for each layer; today the model computes them.
    patterns |= {rf"(^|\.){leaf}$" for leaf in ("inv_freq", "position_ids") if leaf in leaves}
    return _make_matcher(patterns)


def _make_matcher(patterns: Iterable[str] | None) -> Callable[[str], bool]:
    """Return a predicate for names with a match of any of the patterns."""
    compiled = [re.compile(pattern) for pattern in patterns or ()]
    return lambda name: any(pattern.search(name) for pattern in compiled)


def initialize_derived(model: nn.Module, recipe: Recipe) -> None:
    """Compute the values of derived parameters, which must be allocated."""
    for name in recipe.derived:
        owner = model.get_submodule(name.rpartition(".")[0])
        parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
        nearest = [part for part in parts if any(child is owner for child in part.modules())][-1]
        with torch.no_grad():
            nearest._init_weights(owner)
