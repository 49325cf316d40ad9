"""Blocks by experiment: modules that must stay whole on a device.

Taint tags: every module that owns parameters or buffers has a tag. In one run of the model, tensors
computed from a parameter carry the tag of its owner; an argument takes the tag of the module that
it enters, because dispatch moves arguments to the device of that module. An operation needs all
operands on one device, so union-find joins the tags of the operands::

    h = embed(ids)               tag embed
    h enters layer.0             tag "layer.0 entered"
      n = norm(h)                the first use in layer.0: joins "layer.0 entered" and layer.0.norm
      a = attention(n)           tag layer.0.attention, as n enters it
      return h + a               joins "layer.0 entered" and layer.0.attention
    logits = head(h)             tag head, as h enters it

The residual addition makes layer 0 one set of owners; the embedding and the head are two other
sets. No module names, class lists or registration order are assumed.

Intervals: a set covers the execution from the first to the last use of its owners. A stage is
contiguous, so sets whose intervals overlap become one block::

    time       0    1    2    3    4    5
    set A      |---------|
    set B           |---------|               one block with A
    set C                          |----|     a block of its own

Glue code is model code between module calls. Where glue code allocates on the device of an earlier
block while a later block is current, the two blocks and all between them are fused, since the
recorder attributes allocations to the current block. Where model code has moved a tensor back to
the earlier block's device, a block without modules stands for that work instead. The tensors of one
KV cache layer share a device, so their owners are one set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import Cache

from duoka import virtual
from duoka.base.text import containing, is_within, prefixes
from duoka.models.kv_cache import layer_tensors
from duoka.models.quantization import parts
from duoka.runtime.dispatch.arguments import bring, caches_of, mapped_call, tensors_in

from .boundaries import Moves, observe_calls

_TAG = "_duoka_owner"
# Suffix of the tag of a module's arguments, which may lie on another device than its parameters.
_ENTERED = " entered"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGroup:
    """The modules and parameters of a block: disjoint names that cover all its owners.

    `owners` are modules with parameters or buffers of their own. A group `streams` if its tensors
    are used only within calls of the named modules. A group without names is the caller, or
    `returns_to` an earlier block: it stands for work of model code on that block's device, with
    tensors of later blocks that model code has moved back there.
    """

    names: tuple[str, ...]
    owners: tuple[str, ...]
    streams: bool = False
    returns_to: int | None = None


def find_groups(
    model: nn.Module, run: Callable[[], Any], *, hears_moves: bool = False, fuses_glue: bool = True
) -> list[ModuleGroup]:
    """Run a model once and derive its blocks, in execution order.

    With `hears_moves`, the result of an explicit move (``x.to(y.device)``) takes the tag of `y`;
    otherwise it keeps the tag of `x`. Without `fuses_glue`, glue code that allocates on the device
    of an earlier block fuses no blocks.
    """
    experiment = _Experiment(model, fuses_glue=fuses_glue)
    note_move = experiment.note_move if hears_moves else lambda result, source, place: result
    moves = Moves(experiment.place_of, note_move, experiment.note_creation)
    with experiment.hooks(), virtual.observe(experiment), moves:
        run()
    # From tags to blocks: sets of owners in execution order, fused where no cut is possible.
    spans = _fuse_glue_work(experiment, _merge_overlaps(experiment.intervals()))
    # Modules that the run didn't reach (an expert without tokens) go with their closest relative.
    order = {owner: index for index, span in enumerate(spans) for owner in span}
    for owner in experiment.owners:
        if owner not in order:
            order[owner] = _find_nearest(owner, spans)
    blocks: list[list[str]] = [[] for _ in spans] or [[]]
    for owner in experiment.owners:
        blocks[order.get(owner, 0)].append(owner)
    returns = _find_returns(experiment, blocks)
    blocks = _merge_buffers(model, blocks, returns)
    blocks_in = find_blocks_in(blocks)
    groups = [
        ModuleGroup(names=name_modules(model, number, block, blocks_in), owners=tuple(block))
        for number, block in enumerate(blocks)
    ]
    groups = [replace(group, streams=experiment.streams(group)) for group in groups]
    return _insert_return_blocks(groups, returns)


def find_containers(model: nn.Module, groups: Sequence[ModuleGroup]) -> list[tuple[int, ...]]:
    """Return for each block the first block of each of its containers, outermost first.

    A container is a module that is called and holds several blocks. Containers that begin with the
    model's first block are left out: no earlier block has made arguments for them.
    """
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        for container in {c for name in group.names for c in containing(name)}:
            members.setdefault(container, []).append(index)
    blocks_in: list[list[int]] = [[] for _ in groups]
    for name in sorted(members, key=lambda name: name.count(".")):
        first, *rest = members[name]
        is_called = type(model.get_submodule(name)).forward is not nn.Module.forward
        if first > 0 and rest and is_called:
            for index in members[name]:
                blocks_in[index].append(first)
    return [tuple(firsts) for firsts in blocks_in]


class _Experiment:
    """Listener of one run with taint tags: notes uses of owners, and joins the tags of operands."""

    def __init__(self, model: nn.Module, *, fuses_glue: bool) -> None:
        self.model = model
        self.fuses_glue = fuses_glue
        self.owners = [name for name, module in model.named_modules() if _is_owner(module)]
        self.containers = {container for owner in self.owners for container in prefixes(owner)}
        self.first_use: dict[str, int] = {}
        self.last_use: dict[str, int] = {}
        self.parent: dict[str, str] = {}
        # The owners of each set, by the root of the set in `parent`; filled by `intervals`.
        self.members: dict[str, set[str]] = {}
        self.call_stack: list[str] = []
        self.clock = 0
        self.tensors, self.holders = _find_holders(model)
        self.caches: dict[int, Cache] = {}
        # Moves in model code: tag of the tensor, tag of its new place, owner that was met last.
        self.moves: list[tuple[str, str, str]] = []
        # For each owner, the modules in whose calls all uses of its tensors fall.
        self.enclosing: dict[str, set[str]] = {}
        # The owner used last, and whether the running operation has allocated. `glue_work` has for
        # each allocation the tag of its operands and the owner used last before it.
        self.current_owner = ""
        self.has_made = False
        self.glue_work: set[tuple[str, str]] = set()

    def hooks(self) -> AbstractContextManager[None]:
        """Observe the calls of all modules with owners inside."""
        enter = {
            name: partial(self._enter, name, caches_of(module))
            for name, module in self.model.named_modules()
            if name in self.containers
        }
        return observe_calls(self.model, enter, dict.fromkeys(enter, self._leave))

    def allocated(self, gpu: object, storage_id: int, num_bytes: int) -> None:
        """Note that the running operation allocates."""
        self.has_made = True

    def freed(self, gpu: object, storage_id: int) -> None:
        """Ignore frees: lifetimes don't matter here."""

    def operation(self, func: object, args: Any, kwargs: Any, result: Any) -> None:
        """Join the tags of an operation's operands, and tag its result."""
        self.clock += 1
        has_made, self.has_made = self.has_made, False
        tags = {tag for tensor in tensors_in((args, kwargs)) for tag in self._tags(tensor)}
        if not tags:
            return
        # The result gets one of the operands' tags. Any will do, since `_union` joins all of them:
        # `h + a` joins the tags "layer.0 entered" and layer.0.attention.
        representative = min(tags)
        # Not for a vision tower (`fuses_glue` is False): glue code concatenates its features when
        # all its layers have run, which takes less than the layers' temporaries, free by then.
        if has_made and self.fuses_glue:
            self.glue_work.add((representative, self.current_owner))
        for tag in tags:
            self._union(representative, tag)
        for tensor in tensors_in(result):
            setattr(tensor, _TAG, representative)

    def _tags(self, tensor: torch.Tensor) -> Iterator[str]:
        """Yield a tensor's tag, if any; for a parameter or buffer, note the use of its owner."""
        holders = self.holders.get(id(tensor))
        if holders is None:
            tag = getattr(tensor, _TAG, None)
            if tag is not None:
                yield tag
            return
        owner = self._holder(holders)
        self.enclosing[owner] = self.enclosing.get(owner, set(self.call_stack)).intersection(
            self.call_stack
        )
        self.first_use.setdefault(owner, self.clock)
        self.last_use[owner] = self.clock
        self.current_owner = owner
        # A tied parameter yields no tag: the head's product with the embedding's weight would join
        # the two and all layers between. `ProfileBlock.tied_to` requires one device for embedding
        # and head, and leaves the layers between them free.
        if len(holders) == 1:
            yield owner

    def _holder(self, holders: list[str]) -> str:
        """Return the innermost called module that holds a tied parameter, else the first holder."""
        for name in reversed(self.call_stack):
            if name in holders:
                return name
        return holders[0]

    def place_of(self, tensor: torch.Tensor) -> str | None:
        """Return the tag of a tensor whose device is read; None for a tensor without a tag."""
        holders = self.holders.get(id(tensor))
        tag = getattr(tensor, _TAG, None) if holders is None else self._holder(holders)
        return tag if isinstance(tag, str) else None

    def note_move(self, result: torch.Tensor, source: torch.Tensor, place: str) -> torch.Tensor:
        """Tag the result of a move in model code with its new place, and return the result."""
        origin = self.place_of(source)
        alias = result.view_as(result)
        setattr(alias, _TAG, place)
        if origin is not None and self.last_use:
            # The source was computed before the move, such as shifted labels: no work over there.
            self.glue_work.discard((origin, self.current_owner))
            latest = max(self.first_use, key=self.first_use.__getitem__)
            self.moves.append((origin, place, latest))
        return alias

    def note_creation(self, result: Any, place: str) -> None:
        """Tag tensors created on the device of another tensor with its place."""
        for tensor in tensors_in(result):
            setattr(tensor, _TAG, place)
        self.glue_work.add((place, self.current_owner))

    def owners_of(self, tag: str) -> set[str]:
        """Return the owners in the set of a tag (an owner's or a module's "entered" tag)."""
        return self.members.get(self._find_root(tag), set())

    def _enter(
        self, name: str, caches: frozenset[int | str], _: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Note a module call, and retag its tensor arguments."""
        self.call_stack.append(name)
        self.clock += 1
        caches_given = (it for it in (*args, *kwargs.values()) if isinstance(it, Cache))
        self.caches |= {id(cache): cache for cache in caches_given}

        def retag(tensor: torch.Tensor) -> torch.Tensor:
            if isinstance(tensor, nn.Parameter):
                return tensor
            # Dispatch would copy the argument to the module's device, while code outside of the
            # module keeps the original. Here an alias with the new tag stands for the copy.
            alias = bring(tensor, virtual.virtual_device(0)).view_as(tensor)
            setattr(alias, _TAG, name + _ENTERED)
            return alias

        return mapped_call(args, kwargs, retag, caches)

    def _leave(self, *_: Any) -> None:
        self.call_stack.pop()

    def streams(self, group: ModuleGroup) -> bool:
        """Return True if all uses of a group's tensors are within calls of its modules."""
        for name in group.names:
            used = [
                self.enclosing[owner]
                for owner in group.owners
                if owner in self.enclosing and (owner == name or owner.startswith(f"{name}."))
            ]
            if not used or not all(name in modules for modules in used):
                return False
        return True

    def _find_root(self, name: str) -> str:
        """Return the root of a tag's set (union-find)."""
        while (above := self.parent.get(name, name)) != name:
            name = above
        return name

    def _union(self, a: str, b: str) -> None:
        """Join the sets of two tags."""
        a, b = self._find_root(a), self._find_root(b)
        if a != b:
            self.parent[b] = a

    def intervals(self) -> list[tuple[int, int, set[str]]]:
        """Return the sets of owners as (first use, last use, owners)."""
        # The run in the module's docstring, with a clock that counts operations only:
        #
        #   1  embed(ids)          uses embed
        #   2  norm(h)             uses norm, the first owner in layer.0
        #   3  attention(n)        uses attention
        #   4  h + a               joins "layer.0 entered" and attention
        #   5  head(h)             uses head
        #
        # The loop below joins norm and "layer.0 entered". Intervals are those of uses: {embed}
        # [1, 1], {norm, attention} [2, 3], {head} [5, 5].
        entries: dict[str, str] = {}
        for owner in sorted(self.first_use, key=self.first_use.__getitem__):
            for container in prefixes(owner):
                entries.setdefault(container, owner)
        for container, owner in entries.items():
            # Dispatch moves arguments to the device of the owner that the module uses first. Where
            # arguments meet a tensor of a later owner, the two and all between become one block.
            self._union(owner, container + _ENTERED)
        for layer in (layer for cache in self.caches.values() for layer in layer_tensors(cache)):
            # The tensors of a hybrid cache layer (keys and a state) may come from several modules.
            tags = [tag for it in tensors_in(layer) if (tag := getattr(it, _TAG, None))]
            for tag in tags:
                self._union(tags[0], tag)
        for owner in self.first_use:
            self.members.setdefault(self._find_root(owner), set()).add(owner)
        return [
            (min(self.first_use[o] for o in group), max(self.last_use[o] for o in group), group)
            for group in self.members.values()
        ]


# From sets of owners to blocks in execution order, such that every cut between blocks is possible.


def _merge_overlaps(spans: list[tuple[int, int, set[str]]]) -> list[set[str]]:
    """Join sets whose intervals overlap, because a stage is contiguous."""
    # A sweep in order of the starts; the last entry has the interval's end so far. Of A [0, 2],
    # B [1, 3] and C [4, 5]: A; B begins before 2, so {A, B} to 3; C begins behind 3, alone.
    merged: list[tuple[int, set[str]]] = []
    for start, stop, owners in sorted(spans, key=lambda span: span[:2]):
        if merged and start <= merged[-1][0]:
            last, merged_owners = merged[-1]
            merged[-1] = (max(last, stop), merged_owners | owners)
        else:
            merged.append((stop, set(owners)))
    return [owners for _, owners in merged]


def _fuse_glue_work(experiment: _Experiment, spans: list[set[str]]) -> list[set[str]]:
    """Fuse an earlier block with all later blocks up to glue code that allocates on its device.

    Where model code has moved a tensor back to the earlier block, `_insert_return_blocks` inserts a
    block for that work instead.
    """
    # Example: the blocks are words (0), norm (1) and layer (2), and model code makes a mask:
    #
    #   hidden = norm(words)          block 1 is the current one
    #   mask = words.mean(-1)         lies where words do, on the device of block 0
    #   layer(hidden, mask)
    #
    # The recorder attributes allocations to the current block: the mask would be in the trace of
    # block 1, and count on block 1's device. So blocks 0 and 1 are fused. A view such as
    # words[..., :1] allocates nothing, and fuses nothing.
    block_of = {owner: index for index, span in enumerate(spans) for owner in span}
    returns = {
        (block_of[current], block_of[target])
        for current, target in _find_returns(experiment, [list(span) for span in spans])
    }
    fused: set[int] = set()  # each is fused with the next block
    for tag, owner in experiment.glue_work:
        blocks = {block_of[it] for it in experiment.owners_of(tag)}
        if not owner or not blocks:
            continue
        earlier, current = max(blocks), block_of[owner]
        if earlier < current and (current, earlier) not in returns:
            fused.update(range(earlier, current))
    merged: list[set[str]] = []
    for index, span in enumerate(spans):
        if index - 1 in fused:
            merged[-1] |= span
        else:
            merged.append(set(span))
    return merged


def _find_returns(experiment: _Experiment, blocks: list[list[str]]) -> list[tuple[str, str]]:
    """Return the moves back to an earlier block as (owner of current, owner of earlier block)."""
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


def _insert_return_blocks(
    groups: list[ModuleGroup], returns: list[tuple[str, str]]
) -> list[ModuleGroup]:
    """Insert a group without modules after the block during which a tensor was moved back."""
    all_groups: list[ModuleGroup] = []
    for group in groups:
        all_groups.append(group)
        for running, place in returns:
            if running in group.owners:
                target = next(i for i, another in enumerate(all_groups) if place in another.owners)
                all_groups.append(ModuleGroup(names=(), owners=(), returns_to=target))
    return all_groups


def _merge_buffers(
    model: nn.Module, blocks: list[list[str]], returns: list[tuple[str, str]]
) -> list[list[str]]:
    """Join a block without parameters to the block before it, or after a move back to the next."""
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


def find_blocks_in(blocks: list[list[str]]) -> dict[str, set[int]]:
    """Return for each module the numbers of the blocks with owners inside the module."""
    blocks_in: dict[str, set[int]] = {}
    for number, block in enumerate(blocks):
        for owner in block:
            for container in prefixes(owner):
                blocks_in.setdefault(container, set()).add(number)
    return blocks_in


def name_modules(
    model: nn.Module, number: int, block: list[str], blocks_in: dict[str, set[int]]
) -> tuple[str, ...]:
    """Return the fewest modules (or parameters) that cover a block's owners and no others."""
    names: dict[str, None] = {}
    for owner in block:
        if blocks_in[owner] != {number}:
            module = model.get_submodule(owner)
            prefix = f"{owner}." if owner else ""
            tensors = (
                *module.named_parameters(recurse=False),
                *module.named_buffers(recurse=False),
            )
            names.update(dict.fromkeys(prefix + name for name, _ in tensors))
            continue
        name = owner
        while name and blocks_in[name.rpartition(".")[0]] == {number}:
            name = name.rpartition(".")[0]
        names[name] = None
    # A name below another one is left out: its container has its tensors, too.
    outer = (name for name in names if not any(is_within(name, at) for at in names if at != name))
    return tuple(outer)


def _find_nearest(owner: str, spans: list[set[str]]) -> int:
    """Return the block with the most similar name, for an owner that the run didn't reach."""

    def count_common(another: str) -> int:
        pairs = zip(owner.split("."), another.split("."), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), owner.count("."))

    scores = [max(count_common(another) for another in span) for span in spans]
    return scores.index(max(scores)) if scores else 0


def _is_owner(module: nn.Module) -> bool:
    """Return True for a module with parameters or buffers of its own."""
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return bool(tensors)


def _find_holders(model: nn.Module) -> tuple[list[torch.Tensor], dict[int, list[str]]]:
    """Return all parameters and buffers, and the names of the modules that hold each, by its id.

    The caller must keep the tensors as long as their ids, which Python reuses.
    """
    tensors: list[torch.Tensor] = []
    holders: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            for part in parts(tensor).values():  # operations see a quantized tensor's parts
                tensors.append(part)
                holders.setdefault(id(part), []).append(name)
    return tensors, holders
