"""From a model to its profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from .. import virtual
from ..dispatch import place
from ..errors import ModelError
from ..placement import Placement
from ..profile import ALIGNED_TOKENS, Block, Kind, Phase, Profile, Regime, Tape
from .fitting import Sample, Unlike, fit
from .grouping import Group, find_groups
from .recording import Recorder
from .stepping import Stepper

_ENDLESS = 2**40
_LONGEST_TOKENS = 2**17
_SHORTEST_TOKENS = 256
_PHASES: tuple[Phase, ...] = ("prefill", "extend", "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is traced, besides the model itself."""

    fingerprint: str
    max_context_tokens: int | None = None


def trace(model: nn.Module, subject: Subject) -> Profile:
    """Run a causal language model without data and record what it costs.

    Parameters
    ----------
    model : torch.nn.Module
        As `models.build` makes it: parameters on meta. It is taken to a virtual GPU and is of no
        use afterwards.
    subject : Subject
        The model's fingerprint, and the longest context to know.

    Raises
    ------
    ModelError
        If the model's code can't run without data.
    """
    with virtual.gpus([None], data="meta"), torch.no_grad():
        place(model, Placement(entries=(("", "vgpu:0"),)))
        device = torch.device("vgpu:0")
        groups = find_groups(model, lambda: Stepper(model, 1, device).step(8))
        tracer = _Tracer(model, groups, device, subject.max_context_tokens or _LONGEST_TOKENS)
        regimes, tapes = tracer.regimes()
        return _profile(model, groups, subject, regimes, tapes)


def trace_call(
    model: nn.Module, subject: Subject, inputs: Mapping[str, Any] | Sequence[Any]
) -> Profile:
    """Run any module once on example inputs and record what that call costs.

    Parameters
    ----------
    model : torch.nn.Module
        Parameters on meta. It is of no use afterwards.
    subject : Subject
    inputs : mapping or sequence
        Keyword or positional arguments of the call; tensors may lie anywhere.

    Returns
    -------
    Profile
        Its tapes hold for this call alone, whatever workload is asked about.
    """
    args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
    with virtual.gpus([None], data="meta"), torch.no_grad():
        place(model, Placement(entries=(("", "vgpu:0"),)))

        def call() -> None:
            model(*moved(args, "vgpu:0"), **moved(kwargs, "vgpu:0"))

        groups = find_groups(model, call)
        with Recorder(model, groups, skip=False) as recorder:
            recorded = recorder.record(call)
        sample = Sample("prefill", 1, 0, 0, recorded)
        tapes, carried = fit([sample])
        whole = (0, _ENDLESS)
        regimes = [
            Regime(phase="prefill", many=many, query=whole, past=whole, keys=whole, carried=carried)
            for many in (False, True)
        ]
        return _profile(model, groups, subject, regimes, [tapes, tapes])


def moved(tree: Any, device: str) -> Any:
    """Nested arguments with every tensor on a device."""
    if isinstance(tree, torch.Tensor):
        return tree.to(device)
    if isinstance(tree, (tuple, list)):
        return type(tree)(moved(item, device) for item in tree)
    if isinstance(tree, Mapping):
        return {key: moved(item, device) for key, item in tree.items()}
    return tree


class _Tracer:
    """Records runs and fits regimes, over smaller and smaller ranges where one doesn't do."""

    def __init__(
        self, model: nn.Module, groups: list[Group], device: torch.device, longest: int
    ) -> None:
        self.model = model
        self.groups = groups
        self.device = device
        self.longest = max(longest, 4 * _SHORTEST_TOKENS)
        self.skip = True

    def regimes(self) -> tuple[list[Regime], list[list[Tape]]]:
        """All regimes, each with a tape per block."""
        try:
            found = [
                pair
                for many in (False, True)
                for start, stop in self._ranges()
                for pair in self._cell(many, start, stop)
            ]
        except Unlike as unlike:
            raise ModelError(f"{type(self.model).__name__} can't be traced: {unlike}") from None
        return [regime for regime, _ in found], [tapes for _, tapes in found]

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges of tokens between which the model's code may change its ways."""
        config = getattr(self.model, "config", None)
        parts = [part for part in (config, getattr(config, "text_config", None)) if part]
        windows = {
            value
            for part in parts
            for name, value in vars(part).items()
            if ("window" in name or "chunk" in name)
            and type(value) is int
            and _SHORTEST_TOKENS <= value <= self.longest - _SHORTEST_TOKENS
        }
        yield from pairwise([0, *sorted(windows), self.longest + 1])

    def _cell(self, many: bool, start: int, stop: int) -> Iterator[tuple[Regime, list[Tape]]]:
        """The regimes of one range, for one sequence or several."""
        runs = list(_runs(many, start, stop))
        samples = self._record(runs)
        aligned = self._record([run.aligned() for run in runs[:1]])
        for phase in _PHASES:
            whole = (0, _ENDLESS)
            regime = Regime(phase=phase, many=many, query=whole, past=whole, keys=(start, stop))
            try:
                yield _fitted(regime, [*samples, *aligned])
            except Unlike:
                yield _fitted(replace(regime, aligned=False), samples)
                if len(aligned) < len(samples):
                    aligned += self._record([run.aligned() for run in runs[1:]])
                yield _fitted(replace(regime, aligned=True), aligned)

    def _record(self, runs: Sequence[_Run]) -> list[Sample]:
        samples = []
        with Recorder(self.model, self.groups, skip=self.skip) as recorder:
            for run in runs:
                stepper = Stepper(self.model, run.batch, self.device)
                recorder.forget()
                for phase, tokens in run.steps:
                    recorded = recorder.record(partial(stepper.step, tokens))
                    samples.append(Sample(phase, run.batch, tokens, stepper.past, recorded))
        return samples


def _fitted(regime: Regime, samples: Sequence[Sample]) -> tuple[Regime, list[Tape]]:
    tapes, carried = fit([sample for sample in samples if sample.phase == regime.phase])
    return replace(regime, carried=carried), tapes


class _Run(NamedTuple):
    """Steps over one cache: phases with their query tokens."""

    batch: int
    steps: tuple[tuple[Phase, int], ...]

    def aligned(self) -> _Run:
        """The same run at multiples of `ALIGNED_TOKENS`."""
        (phase, tokens), *rest = self.steps
        return _Run(self.batch, ((phase, tokens + ALIGNED_TOKENS - 1), *rest))


def _runs(many: bool, start: int, stop: int) -> Iterator[_Run]:
    """The runs to record: for each phase more samples than its rules have coefficients.

    No length is a multiple of `ALIGNED_TOKENS`.
    """
    unit = ALIGNED_TOKENS
    low = start + unit - start % unit + 1
    step = max((stop - low) // 20 // unit, 1) * unit
    for batch in (2, 3) if many else (1,):
        for past, queries in ((0, (1, 3)), (2, (2,)), (5, (3,)), (7, (1,))):
            steps: list[tuple[Phase, int]] = [("prefill", low + past * step)]
            steps += [("extend", tokens * step) for tokens in queries]
            yield _Run(batch, (*steps, ("decode", 1)))


def _profile(
    model: nn.Module,
    groups: Sequence[Group],
    subject: Subject,
    regimes: list[Regime],
    tapes: list[list[Tape]],
) -> Profile:
    weights, ties = _weights(model, groups)
    kinds: dict[Kind, int] = {}
    blocks = []
    for index, group in enumerate(groups):
        kind = Kind(
            weight_bytes=weights[index], tapes=tuple(by_block[index] for by_block in tapes)
        )
        number = kinds.setdefault(kind, len(kinds))
        blocks.append(Block(modules=group.names, kind=number, tied_to=ties.get(index)))
    return Profile(
        fingerprint=subject.fingerprint,
        model=type(model).__name__,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        blocks=tuple(blocks),
        kinds=tuple(kinds),
        regimes=tuple(regimes),
        max_context_tokens=subject.max_context_tokens,
    )


def _weights(
    model: nn.Module, groups: Sequence[Group]
) -> tuple[list[tuple[int, ...]], dict[int, int]]:
    """Bytes of each block's tensors, and for each tied block the one that it shares with."""
    block_of = {owner: index for index, group in enumerate(groups) for owner in group.owners}
    sizes: list[list[int]] = [[] for _ in groups]
    ties: dict[int, int] = {}
    met: dict[int, int] = {}
    for name, module in model.named_modules():
        for tensor in _held(module):
            block = block_of[name]
            if id(tensor) not in met:
                met[id(tensor)] = block
                sizes[block].append(tensor.nbytes)
            elif met[id(tensor)] != block:
                ties[max(met[id(tensor)], block)] = min(met[id(tensor)], block)
    return [tuple(item) for item in sizes], ties


def _held(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
