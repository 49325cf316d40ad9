"""Blocks by experiment: which modules must stay whole on one device.

Every module that owns parameters or buffers gets a tag, and so does every module that contains
some: a tensor computed from a parameter carries its owner's tag, and an argument takes the tag of
the module that it enters, because there dispatch would move it. Where one operation mixes two
tags, no cut may pass between their owners. Nor may one where code around the modules computes on
the device of an earlier one: it would do so in the turn of a later one. A block is the closure of
such a group in the order of execution; nothing is assumed about names, class lists or registration
order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from duoka import virtual
from duoka.models.quantization import parts

from .device_moves import Moves

_TAG = "_duoka_owner"
# Ends the tag of a module's arguments: they lie elsewhere than parameters of its own may.
_ENTERED = " entered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
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
    model: nn.Module, run: Callable[[], None], *, hears_moves: bool = False
) -> list[Group]:
    """Run a model once and derive its blocks, in execution order."""
    experiment = _Experiment(model, hears_moves=hears_moves)
    moved = experiment.moved if hears_moves else lambda result, source, place: result
    moves = Moves(experiment.place_of, moved, experiment.made)
    with experiment.watching(), virtual.observe(experiment), moves:
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
    groups = [Group(names=_names(model, block, blocks), owners=tuple(block)) for block in blocks]
    groups = [replace(group, streams=experiment.streams(group)) for group in groups]
    return _with_returns(groups, returns)


def find_containers(model: nn.Module, groups: Sequence[Group]) -> list[tuple[int, ...]]:
    """For each block the first blocks of what contains it and others, and is called itself.

    The outermost first; what begins with the model's first block is left out, since nothing was
    made before it.
    """
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        for container in {c for name in group.names for c in _containing(name)}:
            members.setdefault(container, []).append(index)
    inside: list[list[int]] = [[] for _ in groups]
    for name in sorted(members, key=lambda name: name.count(".")):
        first, *others = members[name]
        is_called = type(model.get_submodule(name)).forward is not nn.Module.forward
        if first > 0 and others and is_called:
            for index in members[name]:
                inside[index].append(first)
    return [tuple(firsts) for firsts in inside]


def _containing(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


class _Experiment:
    """A run with tags: who executes when, and which owners an operation mixes."""

    def __init__(self, model: nn.Module, *, hears_moves: bool) -> None:
        self.model = model
        self.hears_moves = hears_moves
        self.owners = [name for name, module in model.named_modules() if _owns(module)]
        self.containers = {
            name
            for name, _ in model.named_modules()
            if any(
                owner == name or owner.startswith(f"{name}." if name else "")
                for owner in self.owners
            )
        }
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        self.parent: dict[str, str] = {}
        self.stack: list[str] = []
        self.count = 0
        self.holders = _holders(model)
        # Moves by model code: of whose tensor, to whose device, and who began last before.
        self.moves: list[tuple[str, str, str]] = []
        # For each owner the modules that were running whenever a tensor of its was used.
        self.around: dict[str, set[str]] = {}
        # Whose tensor was used last; whether something was made since the last operation; and of
        # all that was made: with whose tensors, in whose turn.
        self.running = ""
        self.has_made = False
        self.work: set[tuple[str, str]] = set()

    def watching(self) -> _Hooks:
        return _Hooks(self)

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
        if has_made and not self.hears_moves:
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
            running = max(self.first, key=self.first.__getitem__)
            self.moves.append((origin, place, running))
        return alias

    def made(self, result: Any, place: str) -> None:
        """What model code makes on a device lies there."""
        for tensor in tensors_in(result):
            setattr(tensor, _TAG, place)
        self.work.add((place, self.running))

    def owners_of(self, tag: str) -> set[str]:
        """The owners that a tag stands for; it may be that of what enters a module."""
        root = self._find(tag)
        return {owner for owner in self.first if self._find(owner) == root}

    def enter(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.stack.append(name)
        self.count += 1
        return _retag(args, name + _ENTERED), _retag(kwargs, name + _ENTERED)

    def leave(self) -> None:
        self.stack.pop()

    def streams(self, group: Group) -> bool:
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
        for name in self.containers:
            inside = self._inside(name)
            if inside:
                # What enters a module is moved to where it begins. Where it meets something that
                # was made later, all between the two stays whole.
                self._union(min(inside, key=self.first.__getitem__), name + _ENTERED)
        groups: dict[str, set[str]] = {}
        for name in self.first:
            groups.setdefault(self._find(name), set()).add(name)
        return [
            (min(self.first[o] for o in group), max(self.last[o] for o in group), group)
            for group in groups.values()
        ]

    def _inside(self, name: str) -> list[str]:
        """The owners that ran inside a module."""
        return [o for o in self.first if not name or o == name or o.startswith(name + ".")]


class _Hooks:
    """Hooks on every module that holds owners, for one run."""

    def __init__(self, experiment: _Experiment) -> None:
        self.experiment = experiment
        self.handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> None:
        experiment = self.experiment
        for name, module in experiment.model.named_modules():
            if name not in experiment.containers:
                continue

            def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> tuple[Any, Any]:
                return experiment.enter(name, args, kwargs)

            def after(_: nn.Module, args: Any, output: Any) -> None:
                experiment.leave()

            self.handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self.handles.append(module.register_forward_hook(after, always_call=True))

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


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
    found: dict[tuple[str, str], None] = {}
    for origin, place, running in experiment.moves:
        made = {block_of[owner] for owner in experiment.owners_of(origin)}
        target = {block_of[owner] for owner in experiment.owners_of(place)}
        if made and target and max(target) < min(made) and max(target) < block_of[running]:
            found[blocks[block_of[running]][0], blocks[max(target)][0]] = None
    return list(found)


def _with_returns(groups: list[Group], returns: list[tuple[str, str]]) -> list[Group]:
    """The blocks, with one that has no modules behind each move back."""
    made: list[Group] = []
    for group in groups:
        made.append(group)
        for running, place in returns:
            if running in group.owners:
                target = next(i for i, other in enumerate(made) if place in other.owners)
                made.append(Group(names=(), owners=(), returns_to=target))
    return made


def _without_empty(
    model: nn.Module, blocks: list[list[str]], returns: list[tuple[str, str]]
) -> list[list[str]]:
    """Blocks with parameters; one that has only buffers joins its neighbour.

    That is the one before it, unless a move back lies between the two.
    """
    last = {running for running, _ in returns}
    kept: list[list[str]] = []
    waiting: list[str] = []
    for block in blocks:
        has_parameters = any(
            next(model.get_submodule(owner).parameters(recurse=False), None) is not None
            for owner in block
        )
        if has_parameters or kept:
            if has_parameters:
                kept.append([*waiting, *block])
                waiting = []
            elif waiting or last.intersection(kept[-1]):
                waiting.extend(block)
            else:
                kept[-1].extend(block)
        else:
            waiting.extend(block)
    if waiting:
        kept.append(waiting)
    return kept


def _names(model: nn.Module, block: list[str], blocks: list[list[str]]) -> tuple[str, ...]:
    """The smallest set of modules (or parameters) that holds a block's owners and no others'."""
    others = {owner for other in blocks if other is not block for owner in other}
    names: dict[str, None] = {}
    for owner in block:
        if _covers_any(owner, others):
            module = model.get_submodule(owner)
            prefix = f"{owner}." if owner else ""
            held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            names.update(dict.fromkeys(prefix + name for name, _ in held))
            continue
        name = owner
        while name and not _covers_any(name.rpartition(".")[0], others):
            name = name.rpartition(".")[0]
        names[name] = None
    return tuple(name for name in names if not _covered(name, names))


def _covers_any(name: str, owners: set[str]) -> bool:
    return any(not name or owner == name or owner.startswith(name + ".") for owner in owners)


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


def _holders(model: nn.Module) -> dict[int, list[str]]:
    """Parameter or buffer (by identity) → the modules that hold it."""
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            for part in parts(tensor).values():  # operations see these, not what they make up
                holders.setdefault(id(part), []).append(name)
    return holders


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dictionaries, in order."""
    found: list[torch.Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[torch.Tensor]) -> None:
    # Asked for every argument of every operation that is traced: no generators here.
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            _collect(item, found)
    elif isinstance(tree, dict):
        for item in tree.values():
            _collect(item, found)


def _retag(tree: Any, name: str) -> Any:
    """The same arguments as new tensor objects with another tag; storage is shared."""
    if isinstance(tree, torch.Tensor) and not isinstance(tree, nn.Parameter):
        alias = tree.view_as(tree)
        setattr(alias, _TAG, name)
        return alias
    if type(tree) in (tuple, list):
        return type(tree)(_retag(item, name) for item in tree)
    if type(tree) is dict:
        return {key: _retag(item, name) for key, item in tree.items()}
    return tree
