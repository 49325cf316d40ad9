"""Blocks by experiment: which modules must stay whole on one device.

Every module that owns parameters or buffers gets a tag, and so does every module that contains
some: a tensor computed from a parameter carries its owner's tag, and an argument takes the tag of
the module that it enters, because there dispatch would move it. Where one operation mixes two
tags, no cut may pass between their owners. Nor may one where code around the modules computes on
the device of an earlier one: it would do so in the turn of a later one. Nor may one between what
fills one layer of a cache, which has one device. A block is the closure of such a group in the
order of execution; nothing is assumed about names, class lists or registration
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import Cache

from duoka import virtual
from duoka.base.text import containing, prefixes
from duoka.models.kv_cache import layer_tensors
from duoka.models.quantization import parts
from duoka.runtime.dispatch.arguments import bring, caches_of, mapped_call, tensors_in

from .boundaries import observe_calls

_TAG = "_duoka_owner"
# Ends the tag of a module's arguments: they lie elsewhere than parameters of its own may.
_ENTERED = " entered"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGroup:
    """The modules and parameters of one block: disjoint names that cover all its owners.

    `streams` says whether all of its tensors are used within calls of the modules named. One
    without names `returns_to` an earlier block: it is what model code does on that block's device
    with what later ones have made and it has moved there.
    """

    names: tuple[str, ...]
    owners: tuple[str, ...]
    streams: bool = False
    returns_to: int | None = None


def find_groups(
    model: nn.Module, run: Callable[[], Any], *, hears_moves: bool = False, joins_work: bool = True
) -> list[ModuleGroup]:
    """Run a model once and derive its blocks, in execution order.

    With `hears_moves` a tensor that model code moves may lie apart from its source. Without
    `joins_work` code around the modules may compute on the device of an earlier block.
    """
    experiment = _Experiment(model, joins_work=joins_work)
    moved = experiment.moved if hears_moves else lambda result, source, place: result
    moves = Moves(experiment.place_of, moved, experiment.created)
    with experiment.hooks(), virtual.observe(experiment), moves:
        run()
    spans = _joined(experiment, _merge(experiment.spans()))
    order = {owner: index for index, span in enumerate(spans) for owner in span}
    for owner in experiment.owners:
        if owner not in order:
            order[owner] = _nearest(owner, spans)
    blocks: list[list[str]] = [[] for _ in spans] or [[]]
    for owner in experiment.owners:
        blocks[order.get(owner, 0)].append(owner)
    returns = _returns(experiment, blocks)
    blocks = _without_empty(model, blocks, returns)
    inside = _blocks_inside(blocks)
    groups = [
        ModuleGroup(names=_names(model, number, block, inside), owners=tuple(block))
        for number, block in enumerate(blocks)
    ]
    groups = [replace(group, streams=experiment.streams(group)) for group in groups]
    return _with_returns(groups, returns)


def find_containers(model: nn.Module, groups: Sequence[ModuleGroup]) -> list[tuple[int, ...]]:
    """For each block the first blocks of what contains it and others, and is called itself.

    The outermost first; what begins with the model's first block is left out, since nothing was
    made before it.
    """
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        for container in {c for name in group.names for c in containing(name)}:
            members.setdefault(container, []).append(index)
    inside: list[list[int]] = [[] for _ in groups]
    for name in sorted(members, key=lambda name: name.count(".")):
        first, *rest = members[name]
        is_called = type(model.get_submodule(name)).forward is not nn.Module.forward
        if first > 0 and rest and is_called:
            for index in members[name]:
                inside[index].append(first)
    return [tuple(firsts) for firsts in inside]


class _Experiment:
    """A run with tags: who executes when, and which owners an operation mixes."""

    def __init__(self, model: nn.Module, *, joins_work: bool) -> None:
        self.model = model
        self.joins_work = joins_work
        self.owners = [name for name, module in model.named_modules() if _owns(module)]
        self.containers = {container for owner in self.owners for container in prefixes(owner)}
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self.parent: dict[str, str] = {}
        # The owners of each group, by its root; once `spans` has put them together.
        self.members: dict[str, set[str]] = {}
        self.stack: list[str] = []
        self.count = 0
        self.tensors, self.holders = _holders(model)
        self.caches: dict[int, Cache] = {}
        # Moves by model code: of whose tensor, to whose device, and who began last before.
        self.moves: list[tuple[str, str, str]] = []
        # For each owner the modules that were running whenever a tensor of its was used.
        self.around: dict[str, set[str]] = {}
        # Whose tensor was used last; whether something was made since the last operation; and of
        # all that was made: with whose tensors, in whose turn.
        self.running = ""
        self.has_made = False
        self.work: set[tuple[str, str]] = set()

    def hooks(self) -> AbstractContextManager[None]:
        """Hear of every call of a module that holds owners."""
        enter = {
            name: partial(self._enter, name, caches_of(module))
            for name, module in self.model.named_modules()
            if name in self.containers
        }
        return observe_calls(self.model, enter, dict.fromkeys(enter, self._leave))

    def allocated(self, gpu: object, storage_id: int, num_bytes: int) -> None:
        """Sizes don't matter here."""
        self.has_made = True

    def freed(self, gpu: object, storage_id: int) -> None:
        """Nor does lifetime."""

    def operation(self, func: object, args: Any, kwargs: Any, result: Any) -> None:
        self.count += 1
        has_made, self.has_made = self.has_made, False
        tags = {tag for tensor in tensors_in((args, kwargs)) for tag in self._tags(tensor)}
        if not tags:
            return
        representative = min(tags)
        # A tower's features are put together when all of it has run, before they are moved. What
        # its layers worked with is free by then, and this is less.
        if has_made and self.joins_work:
            self.work.add((representative, self.running))
        for tag in tags:
            self._union(representative, tag)
        for tensor in tensors_in(result):
            setattr(tensor, _TAG, representative)

    def _tags(self, tensor: torch.Tensor) -> Iterator[str]:
        holders = self.holders.get(id(tensor))
        if holders is None:
            tag = getattr(tensor, _TAG, None)
            if tag is not None:
                yield tag
            return
        owner = self._holder(holders)
        self.around[owner] = self.around.get(owner, set(self.stack)).intersection(self.stack)
        self.first.setdefault(owner, self.count)
        self.last[owner] = self.count
        self.running = owner
        if len(holders) == 1:
            yield owner

    def _holder(self, holders: list[str]) -> str:
        """Of a tied parameter's owners the one that runs now."""
        for name in reversed(self.stack):
            if name in holders:
                return name
        return holders[0]

    def place_of(self, tensor: torch.Tensor) -> str | None:
        """The tag of a tensor whose device is read."""
        holders = self.holders.get(id(tensor))
        tag = getattr(tensor, _TAG, None) if holders is None else self._holder(holders)
        return tag if isinstance(tag, str) else None

    def moved(self, result: torch.Tensor, source: torch.Tensor, place: str) -> torch.Tensor:
        """What model code moves lies where it says."""
        origin = self.place_of(source)
        alias = result.view_as(result)
        setattr(alias, _TAG, place)
        if origin is not None and self.last:
            self.work.discard((origin, self.running))  # as labels, which are shifted before
            running = max(self.first, key=self.first.__getitem__)
            self.moves.append((origin, place, running))
        return alias

    def created(self, result: Any, place: str) -> None:
        """What model code makes on a device lies there."""
        for tensor in tensors_in(result):
            setattr(tensor, _TAG, place)
        self.work.add((place, self.running))

    def owners_of(self, tag: str) -> set[str]:
        """The owners that a tag stands for; it may be that of what enters a module."""
        return self.members.get(self._find(tag), set())

    def _enter(
        self, name: str, caches: frozenset[int | str], _: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        self.stack.append(name)
        self.count += 1
        caches_given = (it for it in (*args, *kwargs.values()) if isinstance(it, Cache))
        self.caches |= {id(cache): cache for cache in caches_given}

        def retag(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, nn.Parameter):
                return tensor
            # As it is where a mover has brought it, with another tag.
            alias = bring(tensor, virtual.virtual_device(0)).view_as(tensor)
            setattr(alias, _TAG, name + _ENTERED)
            return alias

        return mapped_call(args, kwargs, retag, caches)

    def _leave(self, *_: Any) -> None:
        self.stack.pop()

    def streams(self, group: ModuleGroup) -> bool:
        """Whether all that uses a group's tensors happens within calls of its modules."""
        for name in group.names:
            used = [
                self.around[owner]
                for owner in group.owners
                if owner in self.around and (owner == name or owner.startswith(f"{name}."))
            ]
            if not used or not all(name in running for running in used):
                return False
        return True

    def _find(self, name: str) -> str:
        while (above := self.parent.get(name, name)) != name:
            name = above
        return name

    def _union(self, a: str, b: str) -> None:
        a, b = self._find(a), self._find(b)
        if a != b:
            self.parent[b] = a

    def spans(self) -> list[tuple[int, int, set[str]]]:
        """Groups of owners with the stretch of execution that they cover."""
        entries: dict[str, str] = {}
        for owner in sorted(self.first, key=self.first.__getitem__):
            for container in prefixes(owner):
                entries.setdefault(container, owner)
        for container, owner in entries.items():
            # What enters a module is moved to where it begins. Where it meets something that
            # was made later, all between the two stays whole.
            self._union(owner, container + _ENTERED)
        for layer in (layer for cache in self.caches.values() for layer in layer_tensors(cache)):
            # A hybrid layer keeps keys and a state, which one module may not make alone.
            tags = [tag for it in tensors_in(layer) if (tag := getattr(it, _TAG, None))]
            for tag in tags:
                self._union(tags[0], tag)
        for owner in self.first:
            self.members.setdefault(self._find(owner), set()).add(owner)
        return [
            (min(self.first[o] for o in group), max(self.last[o] for o in group), group)
            for group in self.members.values()
        ]


def _merge(spans: list[tuple[int, int, set[str]]]) -> list[set[str]]:
    """Join groups whose stretches overlap: a stage is contiguous."""
    merged: list[tuple[int, set[str]]] = []
    for start, stop, owners in sorted(spans, key=lambda span: span[:2]):
        if merged and start <= merged[-1][0]:
            last, together = merged[-1]
            merged[-1] = (max(last, stop), together | owners)
        else:
            merged.append((stop, set(owners)))
    return [owners for _, owners in merged]


def _joined(experiment: _Experiment, spans: list[set[str]]) -> list[set[str]]:
    """Join what code around the modules works for in a later one's turn, with all between.

    Where it has moved something back before, a block of its own stands for that.
    """
    number = {owner: index for index, span in enumerate(spans) for owner in span}
    back = {
        (number[running], number[place])
        for running, place in _returns(experiment, [list(span) for span in spans])
    }
    joints: set[int] = set()
    for tag, running in experiment.work:
        places = {number[owner] for owner in experiment.owners_of(tag)}
        if not running or not places:
            continue
        place, turn = max(places), number[running]
        if place < turn and (turn, place) not in back:
            joints.update(range(place, turn))
    joined: list[set[str]] = []
    for index, span in enumerate(spans):
        if index - 1 in joints:
            joined[-1] |= span
        else:
            joined.append(set(span))
    return joined


def _returns(experiment: _Experiment, blocks: list[list[str]]) -> list[tuple[str, str]]:
    """Moves back to an earlier block: owners of the block that ran, and of the earlier one."""
    block_of = {owner: index for index, block in enumerate(blocks) for owner in block}
    returns: dict[tuple[str, str], None] = {}
    for origin, place, running in experiment.moves:
        makers = {block_of[owner] for owner in experiment.owners_of(origin)}
        targets = {block_of[owner] for owner in experiment.owners_of(place)}
        if not makers or not targets:
            continue
        target = max(targets)
        if target < min(makers) and target < block_of[running]:
            returns[blocks[block_of[running]][0], blocks[target][0]] = None
    return list(returns)


def _with_returns(groups: list[ModuleGroup], returns: list[tuple[str, str]]) -> list[ModuleGroup]:
    """The blocks, with one that has no modules behind each move back."""
    all_groups: list[ModuleGroup] = []
    for group in groups:
        all_groups.append(group)
        for running, place in returns:
            if running in group.owners:
                target = next(i for i, other in enumerate(all_groups) if place in other.owners)
                all_groups.append(ModuleGroup(names=(), owners=(), returns_to=target))
    return all_groups


def _without_empty(
    model: nn.Module, blocks: list[list[str]], returns: list[tuple[str, str]]
) -> list[list[str]]:
    """Blocks with parameters; one that has only buffers joins its neighbour.

    That is the one before it, unless a move back lies between the two.
    """
    last = {running for running, _ in returns}
    merged: list[list[str]] = []
    waiting: list[str] = []
    for block in blocks:
        modules = map(model.get_submodule, block)
        if any(next(module.parameters(recurse=False), None) is not None for module in modules):
            merged.append([*waiting, *block])
            waiting = []
        elif not merged or waiting or last.intersection(merged[-1]):
            waiting.extend(block)
        else:
            merged[-1].extend(block)
    if waiting:
        merged.append(waiting)
    return merged


def _blocks_inside(blocks: list[list[str]]) -> dict[str, set[int]]:
    """For each module the blocks that own something in it."""
    inside: dict[str, set[int]] = {}
    for number, block in enumerate(blocks):
        for owner in block:
            for container in prefixes(owner):
                inside.setdefault(container, set()).add(number)
    return inside


def _names(
    model: nn.Module, number: int, block: list[str], inside: dict[str, set[int]]
) -> tuple[str, ...]:
    """The smallest set of modules (or parameters) that holds a block's owners and no others'."""
    names: dict[str, None] = {}
    for owner in block:
        if inside[owner] != {number}:
            module = model.get_submodule(owner)
            prefix = f"{owner}." if owner else ""
            tensors = (
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            )
            names.update(dict.fromkeys(prefix + name for name, _ in tensors))
            continue
        name = owner
        while name and inside[name.rpartition(".")[0]] == {number}:
            name = name.rpartition(".")[0]
        names[name] = None
    return tuple(name for name in names if not _covered(name, names))


def _covered(name: str, names: dict[str, None]) -> bool:
    return any(name != other and (not other or name.startswith(other + ".")) for other in names)


def _nearest(owner: str, spans: list[set[str]]) -> int:
    """The block of the closest relative, for a module that the run didn't reach."""

    def common(other: str) -> int:
        pairs = zip(owner.split("."), other.split("."), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), owner.count("."))

    scores = [max(common(other) for other in span) for span in spans]
    return scores.index(max(scores)) if scores else 0


def _owns(module: nn.Module) -> bool:
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return bool(tensors)


def _holders(model: nn.Module) -> tuple[list[torch.Tensor], dict[int, list[str]]]:
    """All parameters and buffers, and for each (by identity) the modules that hold it.

    Whoever keeps the second keeps the first: a buffer that code replaces leaves its identity to
    what is made next.
    """
    tensors: list[torch.Tensor] = []
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            for part in parts(tensor).values():  # operations see these, not what they make up
                tensors.append(part)
                holders.setdefault(id(part), []).append(name)
    return tensors, holders


Place = TypeVar("Place")


class Moves(TorchFunctionMode, Generic[Place]):
    """Tells of explicit moves, and of what is made where a tensor lies, for the time of a ``with``.

    That is ``x.to(y.device)``, and ``arange(n, device=y.device)``. On one device such a move does
    nothing, so that no listener hears of it, and what is made lies with all the rest. On several it
    lies where `y` lies. Devices that were read from a tensor say which one.

    `place_of` says where a tensor belongs, as the listener tells places apart, or None. `moved`
    is given what ``x.to(…)`` made, `x` itself and the place that was named; what it returns is
    what the model gets. `created` is given what was made from no tensor, and the place.
    """

    def __init__(
        self,
        place_of: Callable[[torch.Tensor], Place | None],
        moved: Callable[[torch.Tensor, torch.Tensor, Place], torch.Tensor],
        created: Callable[[Any, Place], None] = lambda result, place: None,
    ) -> None:
        super().__init__()
        self._place_of = place_of
        self._moved = moved
        self._created = created
        # Every read makes a new object. It is kept, so that no other one gets its identity.
        self._read: dict[int, tuple[torch.device, Place]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(func, "__self__", None) is torch.Tensor.device:
            place = self._place_of(args[0])
            if place is not None:
                self._read[id(result)] = (result, place)
        elif func is torch.Tensor.to:
            place = self._named((*args[1:], *kwargs.values()))
            if place is not None:
                return self._moved(result, args[0], place)
        elif id(kwargs.get("device")) in self._read:
            self._created(result, self._read[id(kwargs["device"])][1])
        return result

    def _named(self, values: tuple[Any, ...]) -> Place | None:
        for value in values:
            if isinstance(value, torch.Tensor):
                return self._place_of(value)
            if id(value) in self._read:
                return self._read[id(value)][1]
        return None
